import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["accumulate", "codec", "fragments", "outer", "plan", "rules"])
def test_the_examples_in_docstrings_hold(name):
    found = doctest.testmod(importlib.import_module(f"decoupled_diloco.merge.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
