"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import decoupled_diloco

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(decoupled_diloco.__path__, "decoupled_diloco.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
