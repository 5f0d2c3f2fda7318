"""Many small things in order, a slice in each turn of the event loop.

What concerns everybody is thousands of messages with thousands of learners. Done in one go they
would keep the loop from pings and reports for half a second; so they are done some hundreds at a
time, and what comes meanwhile is heard in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

SLICE = 256
"""Things in one turn: some 20 microseconds each, and as much again where a socket takes them."""

_T = TypeVar("_T")


class Slices(Generic[_T]):
    """Does things in the order in which they were put in.

    What is put in while nothing waits is done at once, up to a slice in each turn of the loop.

    Args:
        do: Does one thing; what is many things itself is an iterator that does one at each step.
        fail: Told of an error; nothing more is done then.
    """

    def __init__(
        self, do: Callable[[_T], Iterator[object] | None], fail: Callable[[BaseException], None]
    ) -> None:
        self._do = do
        self._fail = fail
        self._waiting: deque[_T] = deque()
        self._under_way: Iterator[object] = iter(())
        self._left = SLICE
        self._is_doing = False
        self._next: asyncio.Handle | None = None

    def put(self, thing: _T) -> None:
        """Appends a thing; `go_on` does it."""
        self._waiting.append(thing)  # break: orders-reordered

    def go_on(self) -> None:
        """Does what this turn of the loop has room for; the rest is done in the next ones."""
        if self._is_doing:
            return  # what a thing leads to comes after it
        self._is_doing = True
        try:
            while self._left and self._step():
                self._left -= 1
        except Exception as error:
            self._waiting.clear()
            self._under_way = iter(())
            self._fail(error)
        self._is_doing = False
        if self._left < SLICE and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._next_turn)

    def _step(self) -> bool:
        """Does one thing, or one step of the one that is under way; false: there is none."""
        for _ in self._under_way:
            return True
        if not self._waiting:
            return False
        self._under_way = self._do(self._waiting.popleft()) or iter(())
        return True

    def _next_turn(self) -> None:
        self._next, self._left = None, SLICE
        self.go_on()
