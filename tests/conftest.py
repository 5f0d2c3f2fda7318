"""What all tests need."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

# Whoever starts the tests in the background may have interrupts ignored, and so would every process
# that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def learners() -> set[threading.Thread]:
    """The threads of learners in this process."""
    return {thread for thread in threading.enumerate() if thread.name == "ddiloco"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test interrupts do what they did before it, and no learner of its is at work."""
    handler, before = signal.getsignal(signal.SIGINT), learners()
    yield
    signal.signal(signal.SIGINT, handler)
    until = time.monotonic() + 5
    while (left := learners() - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, "the test leaves a learner at work"
