"""Which fragments a learner copies at a boundary because they will be asked for (rule 4)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.foresight import ticks_ahead


@pytest.mark.parametrize(
    ("quorum", "clock", "step_seconds", "last"),
    [
        pytest.param(1, 10.0, 1.0, 10, id="it makes the next tick itself"),
        pytest.param(1, 10.15, 1.0, 10, id="another is faster by a moment"),
        pytest.param(1, 10.4, 1.0, 11, id="another makes the next tick before"),
        pytest.param(1, 9.0, 1.0, 10, id="its report moves the clock"),
        pytest.param(1, 10.0, 3.0, 13, id="another makes three steps meanwhile"),
        pytest.param(2, 10.0, 1.0, 11, id="others move the clock, too"),
    ],
)
def test_rule_4_what_the_next_boundary_answers_as_soon_is_not_copied_at_this_one(
    learner_bench: Any, quorum: int, clock: float, step_seconds: float, last: int
) -> None:
    bench = learner_bench(quorum=quorum, period=24)
    state = bench.machine.state
    state.step = 10
    (link,) = state.shards
    link.offset, link.clock, link.clock_at = 0, 9, 0.0
    link.tick_seconds.update(1.0)
    state.step_seconds.update(step_seconds)
    first, found = ticks_ahead(state, bench.machine.options, clock - 9.0, 0)
    assert found == last
    assert first == 9
