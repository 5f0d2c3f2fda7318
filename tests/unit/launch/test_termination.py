"""Signals to a learner's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from decoupled_diloco.launch.termination import SignalledTermination


@pytest.fixture
def termination() -> Iterator[SignalledTermination]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield SignalledTermination()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_requests_a_stop_and_the_second_interrupts(
    termination: SignalledTermination,
) -> None:
    asked: list[bool] = []
    termination.at_boundary(lambda: asked.append(termination.asked))
    assert not termination.asked
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [True], "the request is visible when the wait ends"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_shortly_after_the_first_is_ignored(
    termination: SignalledTermination, monkeypatch: pytest.MonkeyPatch
) -> None:
    termination.at_boundary()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr("decoupled_diloco.launch.termination.SAME_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
