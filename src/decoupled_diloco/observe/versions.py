"""The versions that a run's numbers depend on, for the headers of its tape."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata


@cache
def versions() -> dict[str, str]:
    """Python, and the libraries that compute; a start record names decoupled-diloco by itself.

    >>> sorted(versions())
    ['numpy', 'python', 'torch']
    """
    libraries = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {"python": platform.python_version(), **libraries}


def versions_of_bits() -> dict[str, str]:
    """The versions that bits depend on: without Python's patch release, which changes none."""
    major_minor = ".".join(platform.python_version_tuple()[:2])
    return versions() | {"python": major_minor}
