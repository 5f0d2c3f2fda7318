"""The clock of a virtual process, which may jump ahead."""

from __future__ import annotations

import asyncio

import pytest

from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.clockwork import Clockwork
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualLoop, VirtualProcess


@pytest.fixture
def loop() -> VirtualLoop:
    """The loop of an idle process."""
    process = VirtualProcess("shard-0", Clockwork(), Choices(0))
    process.boot(lambda: asyncio.sleep(0), Disk())
    assert process.loop is not None
    return process.loop


def run_all(loop: VirtualLoop) -> None:
    while loop.clockwork.next is not None:
        loop.clockwork.step()


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1000.0, 1e6 / 3, 7e9 / 11])
def test_a_timer_never_runs_before_its_deadline(loop: VirtualLoop, seconds: float) -> None:
    """Otherwise its callback would set it again for the same instant, forever."""
    loop.process.leap(seconds)
    woken: list[tuple[float, float, float]] = []

    def wake(number: int) -> None:
        woken.append((number / 7, loop.time(), loop.clockwork.now))

    for number in range(10_000):
        loop.call_at(seconds + number / 7, wake, number)
    run_all(loop)
    assert len(woken) == 10_000
    for delay, shown, world in woken:
        assert shown >= seconds + delay
        assert world == pytest.approx(delay, abs=1e-6)


def test_a_clock_jump_advances_timers_but_none_runs_early(loop: VirtualLoop) -> None:
    woken: list[tuple[float, float]] = []
    for deadline in (5.0, 50.0, 500.0):
        loop.call_at(deadline, lambda: woken.append((loop.time(), loop.clockwork.now)))
    loop.clockwork.at(1.0, loop.process.leap, 100.0)
    run_all(loop)
    assert woken == [(101.0, 1.0), (101.0, 1.0), (500.0, 400.0)]
