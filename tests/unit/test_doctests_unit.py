"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import decoupled_diloco
import decoupled_diloco_engines
import decoupled_diloco_lab
import decoupled_diloco_plan

MODULES = sorted(
    module.name
    for package in (
        decoupled_diloco,
        decoupled_diloco_engines,
        decoupled_diloco_lab,
        decoupled_diloco_plan,
    )
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed
