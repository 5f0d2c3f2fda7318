"""The pages stay short enough to read in a few minutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.snippets import ROOT

TUTORIAL_WORDS_MAX = 2500
HOW_TO_WORDS_MAX = 600
"""Maximum words of prose. Code does not count: a complete example is better than a short one."""

LONGER = {"resume.md": 700}
"""Pages with a higher limit: this one ends with a table of what is exact after a resume."""

README_LINES_MAX = 48
"""Before the line that divides the README: what it is, for which users, its state, pictures, the
commands, five lines of code, a comparison."""


def words_of(page: Path) -> int:
    """Return the number of words of a page, without code blocks and comments."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", text))


def test_the_tutorial_is_short() -> None:
    pages = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
    assert len(pages) >= 5
    assert sum(map(words_of, pages)) <= TUTORIAL_WORDS_MAX


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda page: page.name
)
def test_a_how_to_page_is_short(page: Path) -> None:
    assert words_of(page) <= LONGER.get(page.name, HOW_TO_WORDS_MAX)


@pytest.mark.parametrize(
    ("page", "most"), [("costs", 1000), ("comparison", 700), ("planning", 1100)]
)
def test_a_page_with_results_stays_short(page: str, most: int) -> None:
    """The details are next to the results, in benchmarks/README.md."""
    assert words_of(ROOT / "docs" / f"{page}.md") <= most


def test_the_readme_starts_with_one_screen() -> None:
    begin, divider, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n---\n")
    assert divider
    assert len(begin.splitlines()) <= README_LINES_MAX
    for needed in (
        "docs/pictures/kill.svg",
        "alpha",
        "git clone",
        "torchft",
        "make train",
        "make test",
        "# added",
    ):
        assert needed in begin
