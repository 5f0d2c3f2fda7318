"""The report in a real browser: it fits, is correct, and needs no mouse and no network."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from browser.chromium import Browser
from decoupled_diloco.show.report import write_comparison
from decoupled_diloco.tape.segments import lines_of, tapes_in

WIDTHS = (320, 400, 768, 1200)


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict[str, Any]]:
    """The run's tape, read by plain code."""
    tapes = tapes_in(run / "tape")
    every = [json.loads(line.text) for tape in tapes for line in lines_of(tape, [])]
    return sorted(every, key=lambda line: line["at"])


@pytest.fixture(scope="module")
def pages(run: Path) -> list[Path]:
    """The report, and the run compared with itself."""
    write_comparison(run, run / "tape" / "learner-0.jsonl", run / "comparison.html")
    return [run / "report.html", run / "comparison.html"]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(browser: Browser, pages: list[Path], width: int) -> None:
    for page in pages:
        browser.open(page, width)
        browser.run("document.querySelectorAll('details').forEach(it => it.open = true)")
        assert browser.run("innerWidth") == width
        assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_one_drawing_of_each_chart_is_shown_and_its_letters_are_legible(
    browser: Browser, run: Path, width: int
) -> None:
    browser.open(run / "report.html", width)
    shown = browser.run(
        "[...document.querySelectorAll('svg.chart')].filter(it => it.checkVisibility())"
        ".map(it => [it.classList[1], it.getBoundingClientRect().width / it.viewBox.baseVal.width])"
    )
    assert Counter(name for name, _ in shown) == {"narrow" if width < 700 else "wide": 5}
    assert min(scale for _, scale in shown) >= 0.65


def test_wide_tables_scroll_by_themselves_and_by_keyboard(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", 400)
    wide = browser.run(
        "[...document.querySelectorAll('table')]"
        ".filter(it => it.checkVisibility() && it.scrollWidth > innerWidth).map(it => it.id)"
    )
    assert "time" in wide
    region = "document.querySelector('#time').closest('.scroll')"
    assert browser.run(f"{region}.tabIndex") == 0
    browser.run(f"{region}.focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    browser.driver.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.run(f"{region}.scrollLeft") > 0


def numbers(browser: Browser, table: str) -> dict[str, list[float]]:
    """Return the exact numbers of a table, by the name of the row."""
    rows = browser.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map(row => [row.cells[0].innerText,"
        " [...row.querySelectorAll('data')].map(it => Number(it.value))])"
    )
    return dict(rows)


def test_numbers_match_the_tape(browser: Browser, run: Path, lines: list[dict[str, Any]]) -> None:
    steps: dict[str, list[int]] = defaultdict(list)
    moved: dict[str, dict[int, list[int]]] = defaultdict(dict)
    rounds, life, folded, evaluations = [], Counter[str](), Counter[str](), []
    for line in lines:
        process, data = line["process"], line["data"]
        match line["type"]:
            case "start":
                life[process] += 1
            case "StepFinished":
                steps[process].append(data["tokens"])
            case "BytesMoved":
                moved[process][life[process]] = [
                    data[f"{plane}_{way}"]
                    for plane in ("data", "control")
                    for way in ("sent", "received")
                ]
            case "RoundFinished":
                rounds.append(data["verdict"])
                for participant in data["participants"]:
                    both = (participant["state"], data["verdict"])
                    folded[participant["learner"]] += both == ("folded", "merged")
            case "Evaluated":
                evaluations.append(data["loss"])
    browser.open(run / "report.html", 1200)
    cards = dict(
        browser.run(
            "[...document.querySelectorAll('.card')].map(it => [it.querySelector('dt').innerText,"
            " Number((it.querySelector('data') || {}).value)])"
        )
    )
    assert len(steps) == 3
    untold = cards["tokens"] - sum(map(sum, steps.values()))
    assert untold in (0, 32), "a killed process has not recorded its last half second"
    assert cards["rounds merged"] == rounds.count("merged")
    assert cards["evaluation loss"] == evaluations[-1]
    assert cards["duration"] == pytest.approx(lines[-1]["at"], abs=1e-3)
    sums = {
        process: [sum(column) for column in zip(*lives.values(), strict=True)]
        for process, lives in moved.items()
    }
    shown = numbers(browser, "bytes")
    assert {process: shown[process] for process in sums} == sums
    learners = [own for process, own in sums.items() if process.startswith("learner")]
    assert cards["learners sent"] == sum(own[0] for own in learners)
    taken = numbers(browser, "participation")
    assert {process: row[1] for process, row in taken.items()} == folded
    assert browser.run(
        "[...document.querySelectorAll('#learners tbody tr')].map(row => row.cells[1].innerText)"
    ) == [
        str(len(steps[f"learner-{number}"]) + (number == 1) * (untold // 32)) for number in range(3)
    ]


def test_time_and_tokens_add_up(browser: Browser, run: Path, lines: list[dict[str, Any]]) -> None:
    ends = [line["at"] for line in lines if line["type"] == "StepFinished"]
    killed = next(line["at"] for line in lines if line["type"] == "FaultInjected")
    again = next(
        line["at"]
        for line in lines
        if line["type"] == "ProcessStarted"
        and line["data"]["name"] == "learner-1"
        and line["at"] > killed
    )
    browser.open(run / "report.html", 1200)
    time = numbers(browser, "time")
    for row in (*time.values(), *numbers(browser, "tokens").values()):
        assert sum(row[1:]) == pytest.approx(row[0], abs=1e-6)
    assert time["all learners"][0] == pytest.approx(3 * (max(ends) - min(ends)), abs=1e-5)
    assert time["learner-1"][4] == pytest.approx(again - killed, abs=1e-5)
    goodput = browser.run(
        "[...document.querySelectorAll('.card')].find(it => it.innerText.startsWith('goodput'))"
        ".querySelector('data').value"
    )
    assert float(goodput) == pytest.approx(time["all learners"][1] / time["all learners"][0])


def press(browser: Browser, *keys: str) -> Any:
    """Press keys at the focus; return the element that then has the focus."""
    for key in keys:
        browser.driver.switch_to.active_element.send_keys(key)
    return browser.driver.switch_to.active_element


def test_keyboard(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", 1200)
    assert press(browser, Keys.TAB).text == "Skip to the numbers"
    assert browser.run("document.activeElement.checkVisibility()")
    press(browser, Keys.ENTER)
    assert browser.run("location.hash") == "#summary"
    assert (
        press(browser, Keys.TAB).get_attribute("name") == "over"
    )  # the first control after the summary
    outline = browser.run(
        "getComputedStyle(document.activeElement.nextElementSibling).outlineStyle"
    )
    assert outline == "solid"
    seen = "[...document.querySelectorAll('.panel')].find(it => it.checkVisibility()).classList[1]"
    assert browser.run(seen) == "over-time"
    press(browser, Keys.ARROW_RIGHT)
    assert browser.run(seen) == "over-step"
    press(browser, Keys.ARROW_RIGHT)
    assert browser.run(seen) == "over-tokens"
    order = [press(browser, Keys.TAB).get_attribute("aria-label") for _ in range(3)]
    assert order == ["Learner-time by use", "Tokens by outcome", "Learners"]


def test_details_open_by_keyboard(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", 400)
    for index, key in enumerate((Keys.ENTER, Keys.SPACE)):
        browser.run(f"document.querySelectorAll('summary')[{index}].focus()")
        opened = f"document.querySelectorAll('details')[{index}].open"
        assert not browser.run(opened)
        press(browser, key)
        assert browser.run(opened)
        press(browser, key)
        assert not browser.run(opened)


def test_headings_captions_and_pictures_have_text(browser: Browser, pages: list[Path]) -> None:
    for page in pages:
        browser.open(page, 1200)
        levels = browser.run("[...document.querySelectorAll('h1,h2,h3')].map(it => it.tagName[1])")
        assert levels[0] == "1"
        assert levels.count("1") == 1
        assert all(int(b) - int(a) <= 1 for a, b in pairwise(levels))
        for selector, words in (
            ("table", "it.caption.textContent"),
            ("svg:not([aria-hidden])", "it.getAttribute('aria-label')"),
            ("section", "document.getElementById(it.getAttribute('aria-labelledby')).textContent"),
        ):
            texts = browser.run(f"[...document.querySelectorAll('{selector}')].map(it => {words})")
            assert texts
            assert all(texts)


def look(browser: Browser, selector: str) -> float:
    """Return the lightness of an element's pixels, from 0 to 1."""
    box = browser.run(
        f"(it => [it.left + scrollX, it.top + scrollY, it.width, it.height])"
        f"([...document.querySelectorAll('{selector}')].find(it => it.checkVisibility())"
        ".getBoundingClientRect())"
    )
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
    taken = browser.driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
    )
    pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(taken["data"])))
    return float(np.median(pixels[..., :3]))


COLORS = {
    "body": "backgroundColor",
    "h1": "color",
    "svg.chart text": "fill",
    "svg.chart .line.c0": "stroke",
    "svg.chart .line.ink": "stroke",
    "svg.chart .steps.c1": "fill",
    "svg.bar .useful": "fill",
}


def colors(browser: Browser) -> list[str]:
    return [
        browser.run(f"getComputedStyle(document.querySelector('{selector}')).{name}")
        for selector, name in COLORS.items()
    ]


@pytest.mark.parametrize("width", [400, 1200])
def test_dark_is_dark_and_so_are_the_charts(browser: Browser, run: Path, width: int) -> None:
    browser.open(run / "report.html", width, "light")
    light = colors(browser)
    assert min(look(browser, it) for it in ("h1", "#loss svg.chart", "#timeline svg.chart")) > 0.9
    browser.paint("dark")
    assert all(a != b for a, b in zip(light, colors(browser), strict=True))
    assert max(look(browser, it) for it in ("h1", "#loss svg.chart", "#timeline svg.chart")) < 0.15


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_colors_can_be_chosen(browser: Browser, run: Path, system: str) -> None:
    browser.open(run / "report.html", 400, system)
    own = colors(browser)
    browser.run("document.querySelector('#colors-auto').focus()")
    press(browser, Keys.ARROW_RIGHT)
    light = colors(browser)
    press(browser, Keys.ARROW_RIGHT)
    dark = colors(browser)
    assert own == (light if system == "light" else dark)
    assert all(a != b for a, b in zip(light, dark, strict=True))


def test_nothing_is_fetched_and_the_console_is_empty(browser: Browser, pages: list[Path]) -> None:
    for page in pages:
        browser.open(page, 1200)
        assert browser.network() == ([page.as_uri()], [])
        assert browser.complaints() == []


def test_the_policy_blocks_injected_markup(browser: Browser, run: Path) -> None:
    browser.open(run / "report.html", 1200)
    browser.run(
        "document.body.insertAdjacentHTML('beforeend',"
        ' \'<img src="https://example.org/x.png" onerror="document.title = 1">\')'
    )
    browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())
    assert browser.network()[1] == ["csp"]
    assert browser.run("document.title") == "Decoupled DiLoCo: seen"
