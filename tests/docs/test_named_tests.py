"""Every test that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deliberate_breaks import marks
from docs.snippets import ROOT

TOP = ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "tests/README.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in TOP)]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), file
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{file} has no {name}"


def test_every_break_that_a_page_names_exists() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`break: ([a-z-]+)`", text)
    assert len(named) >= 5
    assert set(named) <= marks().keys()
