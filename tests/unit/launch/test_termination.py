"""What a signal does to a learner's process."""

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


def test_the_first_asks_and_ends_a_wait_and_the_second_interrupts(
    termination: SignalledTermination,
) -> None:
    told: list[bool] = []
    termination.at_boundary(lambda: told.append(termination.asked))
    assert not termination.asked
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [True], "who is woken sees that it is asked"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_is_the_first_one_passed_on_unless_it_comes_later(
    termination: SignalledTermination, monkeypatch: pytest.MonkeyPatch
) -> None:
    termination.at_boundary()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr("decoupled_diloco.launch.termination.SAME_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
