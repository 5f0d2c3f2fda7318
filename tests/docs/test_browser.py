"""The site and its pictures in a real Chromium, opened as files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from browser.chromium import Browser
from docs.snippets import ROOT

RECORDED = "kill.svg"  # a terminal, whose texts start at its border
PICTURES = [each for each in sorted((ROOT / "docs").rglob("*.svg")) if each.name != RECORDED]
MARGIN = 6.0
"""Minimum distance of a text from the border of its box and of the picture."""

BOXES = """(() => {
  const box = each => { const b = each.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height] }
  const all = name => [...document.querySelectorAll(name)]
  return {
    texts: all("text").map(each => [each.textContent, ...box(each)]),
    frames: all("rect:not([stroke=none])").map(box),
  }
})()"""


def found(browser: Browser, words: str, seconds: float = 90.0) -> list[str]:
    """Return the links of the search results."""
    browser.driver.execute_script(
        "const box = document.querySelector('[data-md-component=search-query]');"
        "box.focus(); box.value = arguments[0]; box.dispatchEvent(new Event('keyup'))",
        words,
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"
    deadline = time.monotonic() + seconds
    while not (there := browser.run(links)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return list(there)


@pytest.mark.parametrize("page", ["index.html", "how-to/resume.html"])
def test_search_works_in_pages_that_are_opened_as_files(
    browser: Browser, site: Path, page: str
) -> None:
    browser.open(site / page, 1200)
    assert any("how-to/buffers.html" in link for link in found(browser, "BatchNorm"))
    asked, _ = browser.network()
    assert [address for address in asked if address.startswith("http")] == []


def inside(inner: list[float], outer: list[float], margin: float) -> bool:
    return (
        inner[0] >= outer[0] + margin
        and inner[1] >= outer[1]
        and inner[2] <= outer[2] - margin
        and inner[3] <= outer[3]
    )


def holds(frame: list[float], text: list[float]) -> bool:
    """Whether a text starts in a frame."""
    middle = (text[1] + text[3]) / 2
    return frame[0] <= text[0] <= frame[2] and frame[1] <= middle <= frame[3]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_no_text_touches_a_border(browser: Browser, picture: Path) -> None:
    browser.open(picture, 900)
    drawn: Any = browser.run(BOXES)
    assert drawn["texts"]
    for words, *text in drawn["texts"]:
        around = [frame for frame in drawn["frames"] if holds(frame, text)]
        assert around, f"{words!r} is outside of the picture"
        for frame in around:
            assert inside(text, frame, MARGIN), f"{words!r} touches the border of {frame}"
