"""Which fragments a learner will be asked for before its next step boundary (rule 4).

A pull is answered from a snapshot, and a snapshot is taken at a boundary: so the learner foresees
where a shard's clock will be; and who is in arrears is told with each pull what comes next, so that
its link does not stand idle until the next boundary. One snapshot too many costs a copy; one too
few delays an answer by up to a step.
"""

from __future__ import annotations

from math import floor

from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.options import Options

TICKS_MARGIN = 0.5
"""How far the shard's clock may be from where the learner thinks it is, in ticks. A fragment more
is snapshotted in vain now and then; one that is missing delays its round by up to a step."""


def due_ahead(state: LearnerState, options: Options, now: float) -> dict[int, tuple[int, int]]:
    """Fragments that will be due before the next boundary, each with the ticks ahead."""
    found: dict[int, tuple[int, int]] = {}
    due, period = options.due_by_phase, options.period
    for shard in range(len(state.shards)):
        first, last = ahead = ticks_ahead(state, options, now, shard)
        for tick in range(first, last + 1):
            for index in due[tick % period]:
                if options.owner(index) == shard:
                    found[index] = ahead
        found |= dict.fromkeys(state.shards[shard].coming, ahead)
    return found


def ticks_ahead(state: LearnerState, options: Options, now: float, shard: int) -> tuple[int, int]:
    """The ticks that the shard's clock will pass before this learner's next boundary."""
    link = state.shards[shard]
    if link.offset is None:
        return (0, -1)
    if options.participants == "own":
        return (state.step, state.step)  # its own steps say what is due
    own = link.offset + state.step
    tick_seconds = link.tick_seconds.value or 0.0
    if options.wait == "at_overlap":
        return (own, own)  # nobody is ahead of anybody: exactly the step that is due
    if link.clock_at is None or tick_seconds <= 0:
        return (own, own)
    clock = link.clock + (now - link.clock_at) / tick_seconds
    if options.quorum == 1:
        clock = clock if clock > own else float(own)  # this step's report moves it so far
    ahead = (state.step_seconds.value or 0.0) / tick_seconds
    first = floor(clock - TICKS_MARGIN)
    last = floor(clock + ahead + TICKS_MARGIN)
    return (first, min(last, first + options.period - 1))
