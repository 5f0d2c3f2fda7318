"""Tables are what the folders say, and every number has its folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = (BENCHMARKS / "README.md").read_text()
    assert page == load("tables").page(), "run: python benchmarks/tables.py"


def test_every_folder_holds_its_evidence() -> None:
    folders = [path for path in (BENCHMARKS / "results").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        for name in ("command", "config.json", "raw.json", "result.json"):
            assert (folder / name).stat().st_size > 2, f"{folder.name}/{name}"
