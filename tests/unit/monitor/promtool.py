"""Prometheus' own tools, from Debian's package `prometheus`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="no Prometheus here: apt-get install prometheus",
)


def promtool(*arguments: str, given: str = "") -> str:
    """Return the output of a command that succeeds."""
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
