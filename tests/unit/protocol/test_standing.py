"""A loop that stands still holds nobody up: the clock goes on without it (rules 1 and 4)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.effects import Broadcast, ClockAdvanced, Send
from decoupled_diloco.protocol.events import Heard, Tick
from decoupled_diloco.protocol.membership import STANDS_STEPS
from decoupled_diloco.protocol.messages import Shifted


def until(bench: Any, instant: float, paces: dict[str, float]) -> list[tuple[str, int]]:
    """Each steps at its pace, ticks come when they are due; gives whose steps are shifted."""
    shifted = []
    due = {name: bench.now + pace for name, pace in paces.items()}
    while True:
        deadline = bench.machine.deadline() or instant
        name = min(due, key=lambda n: due[n], default="")
        at = min(due.get(name, instant), max(deadline, bench.now), instant)
        if at >= instant:
            bench.now = instant
            return shifted
        bench.told(Heard(tuple(bench.machine.state.members)), at)
        if at == due.get(name):
            bench.step(name, at, seconds=paces[name])
            due[name] = at + paces[name]
        else:
            bench.told(Tick())
        for order in bench.effects:
            if isinstance(order, Send | Broadcast) and isinstance(order.message, Shifted):
                shifted.append((getattr(order, "peer", "all"), order.message.by))


def led(shard_bench: Any, **options: Any) -> Any:
    """a has made 100 steps, b and c half as many; then a's loop stands."""
    values = {"fragments": 1, "period": 10, "overlap": 2, **options}
    bench = shard_bench("a", "b", "c", **values)
    until(bench, 100.5, {"a": 1.0, "b": 2.0, "c": 2.0})
    assert bench.machine.state.clock == 100
    return bench


def test_rule_1_the_clock_goes_on_without_a_loop_that_stands(shard_bench: Any) -> None:
    """Else nothing would be merged until the others have made as many steps."""
    bench = led(shard_bench)
    shifted = until(bench, 140.0, {"b": 2.0, "c": 2.0})
    assert [name for name, _ in shifted] == ["b", "c"], "and not a, which would be ahead again"
    assert bench.machine.state.members["a"].run_step == 100
    waited = STANDS_STEPS + 2.0
    assert bench.machine.state.clock >= 100 + (40.0 - waited) / 2 - 1


def test_rule_1_a_loop_that_steps_again_is_where_the_clock_is(shard_bench: Any) -> None:
    """And leads again at once, if it is the fastest."""
    bench = led(shard_bench)
    until(bench, 200.0, {"b": 2.0, "c": 2.0})
    clock = bench.machine.state.clock
    bench.step("a")
    (shifted,) = [o.message for o in bench.orders(Send) if isinstance(o.message, Shifted)]
    assert bench.machine.state.members["a"].run_step == clock == 101 + shifted.by
    until(bench, 210.5, {"a": 1.0, "b": 2.0, "c": 2.0})
    assert bench.machine.state.clock == clock + 10


def test_rule_1_a_pause_shorter_than_ten_steps_shifts_nobody(shard_bench: Any) -> None:
    bench = led(shard_bench)
    assert until(bench, 100.5 + STANDS_STEPS - 1.5, {"b": 2.0, "c": 2.0}) == []


def test_rule_1_nobody_stands_of_whom_a_step_is_awaited(shard_bench: Any) -> None:
    """A learner whose steps take sixteen times as long as the fastest one's is slow, and steps."""
    bench = shard_bench("a", "b", fragments=1, period=10)
    until(bench, 100.5, {"a": 1.0, "b": 16.0})
    until(bench, 111.5, {})
    members = bench.machine.state.members
    assert (members["a"].stands, members["b"].stands) == (True, False)


@pytest.mark.parametrize(
    "options", [{"quorum": 3}, {"wait": "at_overlap"}], ids=["K = M", "learners wait"]
)
def test_rule_1_where_all_are_waited_for_the_clock_stands(
    shard_bench: Any, options: dict[str, Any]
) -> None:
    bench = (
        led(shard_bench, **options) if "wait" in options else shard_bench("a", "b", "c", **options)
    )
    assert until(bench, bench.now + 60.0, {"b": 2.0, "c": 2.0}) == []


def test_rule_13_after_a_pause_of_the_shard_nobody_stands(shard_bench: Any) -> None:
    """A tick that comes late: the steps that were made meanwhile are not heard yet."""
    bench = led(shard_bench)
    bench.step("a")
    bench.told(Tick(), bench.now + 40.0)
    assert not any(member.stands for member in bench.machine.state.members.values())
    bench.step("a")
    assert [order.clock for order in bench.orders(ClockAdvanced)] == [102]
