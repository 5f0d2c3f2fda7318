"""The live page in a real browser, for real runs and for four hundred virtual learners."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys

from browser.chromium import Browser
from browser.page_crowd import write_crowd
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.show.page.feed import Feed
from decoupled_diloco.show.page.site import Access, Site
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tokens import Tokens
from process.process_runs import config_of, health, local_run, play, send, until, wait, when

LANES = 40
"""Number of learners with a lane before the user requests more."""


def text(browser: Browser, id: str) -> str:
    return str(browser.run(f"document.getElementById('{id}')?.innerText"))


def shows(browser: Browser, id: str, words: str) -> Callable[[], bool]:
    return lambda: words in text(browser, id)


def sign_in(browser: Browser, run: LocalRun) -> None:
    """Sign in with the keyboard alone: the field has the focus."""
    browser.open(f"{run.addresses[0]}/", 1200)
    secret = run.secret_file.read_text().strip()
    browser.driver.switch_to.active_element.send_keys(secret + Keys.ENTER)


def press(browser: Browser, *keys: str) -> str:
    """Press keys at the focus; return the id of the element that then has the focus."""
    for key in keys:
        browser.driver.switch_to.active_element.send_keys(key)
    return str(browser.run("document.activeElement.id"))


def test_the_page_follows_a_run_through_a_killed_learner_and_a_killed_syncer(
    browser: Browser, tmp_path: Path
) -> None:
    config = config_of(
        tmp_path / "run",
        run={"learners": 4, "max_steps": 1_000_000, "evaluator": True},
        syncer={"shards": 2},
        sites=[{"name": "site-a", "learners": [0]}],
    )

    def script(run: LocalRun) -> Iterator[None]:
        yield from when(lambda: health(run.addresses[0]).get("clock", 0) > 4)
        sign_in(browser, run)
        yield from when(shows(browser, "headline", "running"))
        first = text(browser, "position")
        yield from when(lambda: text(browser, "position") not in ("", first))
        yield from when(shows(browser, "sites", "site-a\tconnected\tlearner-0\t–"))
        yield from when(lambda: browser.run("document.querySelectorAll('#loss polyline').length"))
        send(run, "learner-1", signal.SIGKILL)
        yield from when(shows(browser, "log", "learner-1 was killed (SIGKILL)"))
        yield from when(shows(browser, "log", "learner-1 is back"))
        assert browser.run("document.querySelectorAll('#lane-list li').length") == 6
        assert browser.run("document.querySelectorAll('#recent tbody tr').length") > 0
        send(run, "shard-0", signal.SIGKILL)
        yield from when(lambda: browser.run("document.getElementById('link').innerText") == "away")
        assert "continues when it is back" in text(browser, "notice")
        yield from when(lambda: browser.run("document.getElementById('link').innerText") == "live")
        yield from when(shows(browser, "log", "shard-0 was killed"))
        gone_on = text(browser, "position")
        yield from when(lambda: text(browser, "position") != gone_on)

    with local_run(config) as run:
        run.start()
        play(run, script(run))
    asked, refused = browser.network()
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(run.addresses[0]).netloc}
    assert not any(refused)
    errors = [
        line for line in browser.complaints() if "Content Security" in line or "Error:" in line
    ]
    assert not errors


def test_the_page_shows_how_the_run_ended_and_where_its_report_is(
    browser: Browser, tmp_path: Path
) -> None:
    seen = threading.Event()

    def script() -> Iterator[None]:
        yield from when(lambda: health(run.addresses[0]).get("clock", 0) > 1)
        sign_in(browser, run)
        yield from when(shows(browser, "headline", "running"))
        seen.set()

    with local_run(config_of(tmp_path / "run", run={"max_steps": 400})) as run:
        run.start()
        assert wait(run, script()).finished
    assert seen.is_set(), "the run ended before the page was open"
    until(shows(browser, "notice", "finished at step 400"), "the page shows the end")
    assert f"{run.path}/report.html" in text(browser, "notice")
    assert text(browser, "link") == "finished"


@pytest.fixture(scope="module")
def address_of_crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of four hundred learners."""
    folder = tmp_path_factory.mktemp("crowd") / "run"
    write_crowd(folder)
    ready, over = threading.Event(), threading.Event()
    address = ""

    async def serve() -> None:
        nonlocal address
        arguments = {
            "folder": str(folder),
            "tapes": [["shard-0"], ["shard-1"]],
            "shards": ["http://127.0.0.1:1"],
            "token": None,
        }
        feed = Feed(arguments)
        site = Site(Access(Tokens()), lambda names: feed, "http://127.0.0.1:1", dict)
        server = HttpServer(on_channel=lambda channel: asyncio.sleep(0), website=site)
        await server.start()
        address = server.address
        ready.set()
        await asyncio.to_thread(over.wait)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="page")
    thread.start()
    ready.wait()
    yield f"{address}/"
    over.set()
    thread.join()


@pytest.fixture
def crowd(browser: Browser, address_of_crowd: str) -> Browser:
    """The page of four hundred learners, after the tape was read."""
    browser.open(address_of_crowd, 1200)
    until(lambda: "reading the tape" not in text(browser, "headline"), "the tape is read", 120)
    return browser


def lanes(browser: Browser) -> list[str]:
    names = browser.run(
        "[...document.querySelectorAll('#lane-list li')].map(it => it.firstChild.innerText)"
    )
    return [name for name in names if name.startswith("learner-")]


def test_hundreds_of_learners_are_summarized_and_can_be_searched(crowd: Browser) -> None:
    assert len(lanes(crowd)) == LANES
    assert "learner-17" in lanes(crowd), "learners with problems come first"
    assert "40 of 400" in text(crowd, "shown")
    assert "400 " not in text(crowd, "waits"), "names are few"
    assert crowd.run("document.querySelectorAll('*').length") < 3000
    assert crowd.run("document.getElementById('counts-chart').checkVisibility()")
    field = crowd.driver.find_element("id", "wanted")
    field.send_keys("learner-39")
    until(lambda: len(lanes(crowd)) == 11, "those whose names match")
    assert set(lanes(crowd)) == {"learner-39", *(f"learner-39{n}" for n in range(10))}
    field.send_keys(Keys.BACKSPACE * 10)
    until(lambda: len(lanes(crowd)) == LANES, "all again")
    crowd.driver.find_element("id", "more").send_keys(Keys.ENTER)
    until(lambda: len(lanes(crowd)) == 2 * LANES, "more of them")


@pytest.mark.parametrize("width", [320, 400, 768, 1200])
def test_nothing_overflows_the_page(crowd: Browser, address_of_crowd: str, width: int) -> None:
    crowd.open(address_of_crowd, width)
    until(lambda: len(lanes(crowd)) == LANES, "it is drawn")
    assert crowd.run("document.documentElement.scrollWidth") <= width
    letters = crowd.run(
        "[...document.querySelectorAll('svg.chart')].filter(it => it.checkVisibility())"
        ".map(it => it.getBoundingClientRect().width / it.viewBox.baseVal.width)"
    )
    assert letters
    assert min(letters) >= 0.65


def test_light_and_dark_follow_the_system_and_the_choice(crowd: Browser) -> None:
    def light() -> bool:
        color = crowd.run("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) > 384

    crowd.paint("light")
    assert light()
    crowd.paint("dark")
    assert not light()
    crowd.run("document.getElementById('colors-light').click()")
    assert light()
    crowd.run("document.getElementById('colors-auto').click()")
    crowd.paint("light")


def test_the_page_works_with_keyboard_and_screen_reader(crowd: Browser) -> None:
    crowd.run("document.body.focus()")
    assert press(crowd, Keys.TAB) == ""
    assert crowd.driver.switch_to.active_element.text == "Skip to the numbers"
    assert press(crowd, Keys.TAB) == "colors-auto"
    assert press(crowd, Keys.TAB) == "pause"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert crowd.run(outline) == "solid"
    press(crowd, Keys.SPACE)
    assert text(crowd, "link") == "paused"
    assert crowd.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    press(crowd, Keys.SPACE)
    assert text(crowd, "link") == "live"
    nameless = crowd.run(
        "[...document.querySelectorAll('svg[role=img], [role=region], section, nav')].filter(it =>"
        " it.checkVisibility() && !it.getAttribute('aria-label')"
        " && !it.getAttribute('aria-labelledby')).length"
    )
    assert nameless == 0
    label = crowd.run("document.querySelector('#counts-chart svg').getAttribute('aria-label')")
    assert re.search(r"now 39\d stepping", label)
    assert crowd.run("document.querySelectorAll('[role=status]').length") == 2
