"""One fold of the tape for all who look, in a process of its own, for as long as somebody does.

Folding takes the interpreter for seconds at a time, and a shard's event loop must not wait for it
(see `syncer.tapes`): so it is not a thread. The process writes messages, a line each; here they are
passed on as they are, as server-sent events. What is kept does not grow: the latest whole state,
and the changes since a little before it. A viewer that is slow skips to the whole state; there are
no queues.
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
"""The process stays so long when nobody looks any more: a page may be loaded again."""

AGAIN_SECONDS = 5.0
"""A process that has ended while somebody looks is started again after so long."""

CHANGES_MAX = 64
"""Changes that are kept, about a minute of them."""

LINE_BYTES_MAX = 64 << 20

FAREWELL_SECONDS = 0.3
"""How long viewers may take to hear that the server stops."""

COMMAND = (sys.executable, "-m", "decoupled_diloco.page.fold")


class Message(NamedTuple):
    """A state or a change; ``number``: that of the state which it leads to."""

    number: int
    kind: str
    body: bytes


class Feed:
    """What viewers are told.

    Args:
        told: What the process is told first; it may hold the run's secret, so it goes through a
            pipe.
        command: The process.
    """

    def __init__(self, told: Mapping[str, Any], command: tuple[str, ...] = COMMAND) -> None:
        self._told = json.dumps(told).encode() + b"\n"
        self._command = command
        self._life = uuid.uuid4().hex[:8]
        self._number = 0
        self._state: Message | None = None
        self._changes: deque[Message] = deque(maxlen=CHANGES_MAX)
        self._last: Message | None = None  # the very last one, of a server that stops
        self._fresh = asyncio.Event()
        self._viewers = 0
        self._running: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None

    @property
    def viewers(self) -> int:
        return self._viewers

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Somebody looks."""
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
        """The state that a viewer has who comes back; ``None``: it is of another life."""
        life, _, number = event_id.partition("-")
        known = life == self._life and number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if known else None

    async def after(self, number: int | None, seconds: float) -> list[Message]:
        """What leads from a viewer's state to the latest, within so many seconds; empty: nothing.

        The very last message has the kind ``end``.
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
        return [
            *([] if whole else [self._state]),
            *(changes if whole else self._since_state),
            *last,
        ]

    @property
    def _since_state(self) -> list[Message]:
        assert self._state is not None
        return [each for each in self._changes if each.number > self._state.number]

    def event(self, message: Message) -> bytes:
        """The message as a server-sent event."""
        head = f"id: {self._life}-{message.number}\nevent: {message.kind}\ndata: "
        return head.encode() + message.body + b"\n\n"

    async def end(self, told: Mapping[str, Any]) -> None:
        """Tells all viewers that this is the end, and how it came."""
        self._last = Message(self._number, "end", json.dumps(told).encode())
        self._wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while self._viewers:  # noqa: ASYNC110  # each goes by itself
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
        self._fresh.set()
        self._fresh = asyncio.Event()

    async def _run(self) -> None:
        while True:
            code = await self._run_once()
            logger.warning("the page's fold has ended with code %s: it is started again", code)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _run_once(self) -> int | None:
        """One life of the process."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(self._told)
            async for line in process.stdout:
                self._take(line)
            return await process.wait()
        except ValueError as error:
            logger.warning("the page's fold says too much at once: %s", error)
            return None
        finally:
            process.stdin.close()  # it ends by that
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())

    def _take(self, line: bytes) -> None:
        """``F``: a whole state for all; ``D``: a change; ``K``: the whole state after it."""
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
