"""What the package imports is what it declares; what its users are told to install exists."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_transformers_is_new_enough_for_the_layouts_of_an_export() -> None:
    """Arcee, which an exported GPT is written as, came with 4.53."""
    dev = [text for text in PYPROJECT["dependency-groups"]["dev"] if isinstance(text, str)]
    for requirements in (EXTRAS["transformers"], dev):
        (wanted,) = [r for r in map(Requirement, requirements) if r.name == "transformers"]
        assert "4.53" in wanted.specifier
        assert "4.52.4" not in wanted.specifier
