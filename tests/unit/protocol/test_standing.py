"""A stalled loop blocks no other: the clock advances without it (rules 1 and 4)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.messages import Broadcast, ClockAdvanced, Heard, Send, Shifted, Tick
from decoupled_diloco.protocol.syncer_state import STANDS_STEPS


def until(bench: Any, instant: float, paces: dict[str, float]) -> list[tuple[str, int]]:
    """Let each step at its pace, with ticks when due; return the shifted learners."""
    shifted = []
    due = {name: bench.now + pace for name, pace in paces.items()}
    while True:
        deadline = bench.machine.deadline() or instant
        name = min(due, key=lambda n: due[n], default="")
        at = min(due.get(name, instant), max(deadline, bench.now), instant)
        if at >= instant:
            bench.now = instant
            return shifted
        bench.handle(Heard(tuple(bench.machine.state.members)), at)
        if at == due.get(name):
            bench.step(name, at, seconds=paces[name])
            due[name] = at + paces[name]
        else:
            bench.handle(Tick())
        for order in bench.effects:
            if isinstance(order, Send | Broadcast) and isinstance(order.message, Shifted):
                shifted.append((getattr(order, "peer", "all"), order.message.by))


def led(shard_bench: Any, **options: Any) -> Any:
    """a has taken 100 steps, b and c half as many; then a's loop stalls."""
    values = {"fragments": 1, "period": 10, "overlap": 2, **options}
    bench = shard_bench("a", "b", "c", **values)
    until(bench, 100.5, {"a": 1.0, "b": 2.0, "c": 2.0})
    assert bench.machine.state.clock == 100
    return bench


def test_rule_1_the_clock_advances_without_a_stalled_loop(shard_bench: Any) -> None:
    """Otherwise nothing would merge until the others have taken as many steps."""
    bench = led(shard_bench)
    shifted = until(bench, 140.0, {"b": 2.0, "c": 2.0})
    assert [name for name, _ in shifted] == ["b", "c"], "and not a, which would be ahead again"
    assert bench.machine.state.members["a"].run_step == 100
    waited = STANDS_STEPS + 2.0
    assert bench.machine.state.clock >= 100 + (40.0 - waited) / 2 - 1


def test_rule_1_a_loop_that_steps_again_starts_at_the_clock(shard_bench: Any) -> None:
    """It leads again at once, if it is the fastest."""
    bench = led(shard_bench)
    until(bench, 200.0, {"b": 2.0, "c": 2.0})
    clock = bench.machine.state.clock
    bench.step("a")
    (shifted,) = [o.message for o in bench.orders(Send) if isinstance(o.message, Shifted)]
    assert bench.machine.state.members["a"].run_step == clock == 101 + shifted.by
    until(bench, 210.5, {"a": 1.0, "b": 2.0, "c": 2.0})
    assert bench.machine.state.clock == clock + 10


def test_rule_1_a_pause_shorter_than_ten_steps_shifts_no_learner(shard_bench: Any) -> None:
    bench = led(shard_bench)
    assert until(bench, 100.5 + STANDS_STEPS - 1.5, {"b": 2.0, "c": 2.0}) == []


def test_rule_1_a_slow_learner_is_not_stalled(shard_bench: Any) -> None:
    """A learner whose steps take sixteen times as long as the fastest one's still steps."""
    bench = shard_bench("a", "b", fragments=1, period=10)
    until(bench, 100.5, {"a": 1.0, "b": 16.0})
    until(bench, 111.5, {})
    members = bench.machine.state.members
    assert (members["a"].stalled, members["b"].stalled) == (True, False)


@pytest.mark.parametrize(
    "options", [{"quorum": 3}, {"wait": "at_overlap"}], ids=["K = M", "learners wait"]
)
def test_rule_1_with_k_equal_m_a_stalled_loop_stops_the_clock(
    shard_bench: Any, options: dict[str, Any]
) -> None:
    bench = (
        led(shard_bench, **options) if "wait" in options else shard_bench("a", "b", "c", **options)
    )
    assert until(bench, bench.now + 60.0, {"b": 2.0, "c": 2.0}) == []


def test_rule_13_after_a_pause_of_the_shard_no_loop_counts_as_stalled(shard_bench: Any) -> None:
    """A late tick: the steps that were taken meanwhile have not arrived yet."""
    bench = led(shard_bench)
    bench.step("a")
    bench.handle(Tick(), bench.now + 40.0)
    assert not any(member.stalled for member in bench.machine.state.members.values())
    bench.step("a")
    assert [order.clock for order in bench.orders(ClockAdvanced)] == [102]
