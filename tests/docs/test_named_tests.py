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


def _rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of the tables in a text, without their heads."""
    tables = re.findall(r"^\|[ :|-]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_a_test_plays_each_attacker_of_the_security_page() -> None:
    """Each row of its tables is one of the page of tests, with a test that exists."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    played = {cells[0]: NAMED.findall(cells[-1]) for cells in _rows(text) if len(cells) == 2}
    rows = _rows((ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    assert len(rows) >= 13
    assert [cells[0] for cells in rows if not played.get(cells[0])] == []


def test_every_break_that_a_page_names_exists() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`break: ([a-z-]+)`", text)
    assert len(named) >= 5
    assert set(named) <= marks().keys()
