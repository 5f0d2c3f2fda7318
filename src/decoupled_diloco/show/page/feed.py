"""One fold of the tape for all viewers, in a separate process, while there is a viewer.

Folding holds the interpreter for seconds at a time, and the shard's event loop must not wait for it
(see `syncer.tapes`). A thread would not help, so this uses a process. It writes one message per
line, and the feed passes each one on unchanged, as a server-sent event. Memory is bounded: the
latest whole state, and the changes since shortly before it. There are no queues: a slow viewer
skips to the whole state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

LINGER_SECONDS = 20.0
"""Time that the process survives its last viewer, because a page may be reloaded."""

AGAIN_SECONDS = 5.0
"""Delay before a process that ended is restarted while there are viewers."""

CHANGES_MAX = 64
"""Number of changes that are kept, about a minute of them."""

LINE_BYTES_MAX = 64 << 20

FAREWELL_SECONDS = 0.3
"""Time for viewers to receive the message that the server stops."""

COMMAND = (sys.executable, "-m", "decoupled_diloco.show.page.fold")


class Message(NamedTuple):
    """A state or a change; ``number``: the number of the resulting state."""

    number: int
    kind: str
    body: bytes


class Feed:
    """Messages for the viewers.

    Args:
        told: First input of the process. It may contain the run's secret, so it is sent through a
            pipe.
        command: The command of the process.
    """

    def __init__(self, told: Mapping[str, Any], command: tuple[str, ...] = COMMAND) -> None:
        self._input = json.dumps(told).encode() + b"\n"
        self._command = command
        self._life = uuid.uuid4().hex[:8]
        self._number = 0
        self._state: Message | None = None
        self._changes: deque[Message] = deque(maxlen=CHANGES_MAX)
        self._last: Message | None = None  # the final message, when the server stops
        self._fresh = asyncio.Event()
        self._viewers = 0
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None

    @property
    def viewers(self) -> int:
        return self._viewers

    @contextlib.contextmanager
    def viewed(self) -> Iterator[None]:
        """Count a viewer while the context is open."""
        self._viewers += 1
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers and self._last is None:
                loop = asyncio.get_running_loop()
                self._ending = loop.call_later(LINGER_SECONDS, self._end)

    def number_in(self, event_id: str) -> int | None:
        """Return the state of a returning viewer; ``None`` if it is from another incarnation."""
        life, _, number = event_id.partition("-")
        known = life == self._life and number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if known else None

    async def after(self, number: int | None, seconds: float) -> list[Message]:
        """Return the messages after a viewer's state; empty after `seconds` without any.

        The final message has the kind ``end``.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (found := self._path_from(number)):
                    await self._fresh.wait()
                return found
        return []

    def _path_from(self, number: int | None) -> list[Message]:
        last = [] if self._last is None else [self._last]
        if self._state is None or number == self._number:
            return last
        begin = self._state.number if number is None else number
        changes = [each for each in self._changes if each.number > begin]
        whole = number is not None and len(changes) == self._number - number
        since_state = [each for each in self._changes if each.number > self._state.number]
        return [
            *([] if whole else [self._state]),
            *(changes if whole else since_state),
            *last,
        ]

    def event(self, message: Message) -> bytes:
        """Return the message as a server-sent event."""
        head = f"id: {self._life}-{message.number}\nevent: {message.kind}\ndata: "
        return head.encode() + message.body + b"\n\n"

    async def end(self, outcome: Mapping[str, Any]) -> None:
        """Send the final message, with the outcome of the run, to all viewers."""
        self._last = Message(self._number, "end", json.dumps(outcome).encode())
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while self._viewers:  # noqa: ASYNC110  # each disconnects by itself
                    await asyncio.sleep(0.01)
        running = self._running
        self._end()
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)

    def _end(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        if self._running is not None:
            self._running.cancel()
        self._running = self._ending = self._state = None
        self._changes.clear()

    def _wake(self) -> None:
        # A new event for the next message, because waiting on a set event returns at once.
        self._fresh.set()
        self._fresh = asyncio.Event()

    async def _run(self) -> None:
        while True:
            code = await self._run_once()
            logger.warning("the page's fold ended with code %s; restarting it", code)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _run_once(self) -> int | None:
        """Run the process once; return its exit code."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._input)
            async for line in process.stdout:
                self._take(line)
            return await process.wait()
        except ValueError as error:
            logger.warning("the page's fold sent a message that is too long: %s", error)
            return None
        finally:
            process.stdin.close()  # the process ends when its input is closed
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Shielded: a cancelled feed would otherwise leave the process unreaped.
            await asyncio.shield(process.wait())

    def _take(self, line: bytes) -> None:
        """Process a line: ``F``: whole state; ``D``: change; ``K``: whole state after it."""
        kind, body = line[:1], line[2:].rstrip(b"\n")
        if kind == b"K":
            self._state = Message(self._number, "state", body)
            return
        self._number += 1
        if kind == b"F":
            self._changes.clear()
            self._state = Message(self._number, "state", body)
        else:
            self._changes.append(Message(self._number, "change", body))
        self._wake()
