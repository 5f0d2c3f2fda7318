"""Messages to viewers, from a process that sends what the test specifies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from decoupled_diloco.show.page import feed as feeds
from decoupled_diloco.show.page import site as sites
from decoupled_diloco.show.page.feed import CHANGES_MAX, Feed, Message
from decoupled_diloco.transport.tokens import Tokens
from unit.show.served import browser, quiet, served


def told(feed: Feed, *lines: bytes) -> None:
    for line in lines:
        feed._take(line + b"\n")


def kinds(messages: list[Message]) -> list[tuple[str, int]]:
    return [(message.kind, message.number) for message in messages]


def command_line(process: str) -> bytes:
    """Return the command line of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def gone(process: str) -> bool:
    return not command_line(process)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)


async def read_until(answer: aiohttp.ClientResponse, mark: bytes) -> None:
    """Read events up to the one that contains a mark."""
    text = b""
    while mark not in text:
        piece = await answer.content.readany()
        assert piece, "the server ended the answer"
        text = text[-100:] + piece


async def test_a_new_viewer_receives_a_state_and_later_changes() -> None:
    feed = Feed({})
    assert await feed.after(None, 0.0) == []
    told(feed, b"F {}", b"D 1", b"D 2")
    assert kinds(await feed.after(None, 1.0)) == [("state", 1), ("change", 2), ("change", 3)]
    told(feed, b'K {"later":1}', b"D 3")
    assert kinds(await feed.after(None, 1.0)) == [("state", 3), ("change", 4)]


async def test_a_returning_viewer_continues_or_starts_again_after_a_long_absence() -> None:
    feed = Feed({})
    told(feed, b"F {}", *[b"D %d" % n for n in range(CHANGES_MAX)], b"K {}")
    number = feed.number_in(feed.event(Message(3, "change", b"")).split(b"\n")[0][4:].decode())
    assert number == 3
    assert kinds(await feed.after(number, 1.0))[0] == ("change", 4)
    told(feed, b"D x", b"D y", b"D z")
    assert kinds(await feed.after(number, 1.0))[0] == ("state", CHANGES_MAX + 1)
    assert feed.number_in("another-3") is None
    assert kinds(await feed.after(10**6, 1.0))[0][0] == "state"


async def test_a_new_state_also_reaches_viewers_that_are_up_to_date() -> None:
    feed = Feed({})
    told(feed, b"F {}", b"D 1", b"F {}")
    assert kinds(await feed.after(2, 1.0)) == [("state", 3)]
    assert await feed.after(3, 0.0) == []


async def test_no_process_runs_without_a_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "LINGER_SECONDS", 0.0)
    lives = tmp_path / "lives"
    script = f'echo "$$" >> {lives}; read line; echo "F $line"; read rest'
    feed = Feed({"token": "hidden"}, ("sh", "-c", script))
    assert not lives.exists()
    for number in (1, 2):
        with feed.viewed():
            [message] = await feed.after(None, 30.0)
            assert json.loads(message.body) == {"token": "hidden"}
            [*_, process] = lives.read_text().split()
            assert b"hidden" not in command_line(process)
        assert len(lives.read_text().split()) == number
        await until(partial(gone, process))
        assert await feed.after(None, 0.0) == []


async def test_an_ended_process_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "AGAIN_SECONDS", 0.0)
    feed = Feed({}, ("sh", "-c", "echo 'F {}'"))
    with feed.viewed():
        [first] = await feed.after(None, 30.0)
        [second] = await feed.after(first.number, 30.0)
        assert second.number > first.number
        await feed.end({})


async def test_viewers_receive_the_end_and_their_number_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites, "VIEWERS_MAX", 2)
    feed = quiet()
    async with browser() as session:
        async with served(Tokens(), feed=feed) as address:
            url = f"{address}/page/events"
            viewers = [await session.get(url) for _ in range(2)]
            assert [viewer.status for viewer in viewers] == [200, 200]
            async with session.get(url) as third:
                assert third.status == 503
                assert (
                    "2 pages" in third.headers["X-Reason"] or "limit" in third.headers["X-Reason"]
                )
            viewers.pop().close()
            await until(lambda: feed.viewers == 1)
            async with session.get(url) as again:
                assert again.status == 200
        last = (await viewers[0].text()).strip().split("\n")
        assert last[-2] == "event: end"
        assert json.loads(last[-1].removeprefix("data: "))["how"] == "stopped"


async def test_a_stalled_viewer_delays_no_other_and_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites, "STALL_SECONDS", 2.0)
    feed = quiet()
    async with served(Tokens(), feed=feed) as address:
        host, port = address.removeprefix("http://").split(":")
        _, slow = await asyncio.open_connection(host, int(port), limit=1)
        slow.write(f"GET /page/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        async with browser() as session, session.get(f"{address}/page/events") as quick:
            await until(lambda: feed.viewers == 2)
            for number in range(12):
                told(feed, b'F "%s end-%d"' % (b"x" * (1 << 20), number))
                await read_until(quick, b"end-%d" % number)
            await until(lambda: feed.viewers == 1)
            told(feed, b'F "still here"')
            await read_until(quick, b"still here")
        slow.close()
