"""What a learner knows of its leased parts of the data: functions on `DataView`.

Theory of operation. The loop trains the leases in the order in which they were given, and one at
least lies ready, so that it never waits for the coordinator. Each step notes which batches it
trained; a fragment whose contribution was accepted holds all steps up to that snapshot; batches of
steps that every fragment holds are durable. While the coordinator is away the loop goes on with
what it holds; when that is used up it trains its last part once more, counts that as a repeat, and
says so as soon as there is somebody to hear it.
"""

from __future__ import annotations

from typing import assert_never

from decoupled_diloco.protocol.data_leases.events import (
    DataClosed,
    DataEvent,
    DataOpened,
    PartWanted,
)
from decoupled_diloco.protocol.data_leases.messages import (
    DataRefused,
    DataReport,
    LeasesGiven,
    LeaseState,
)
from decoupled_diloco.protocol.data_leases.state import DataView, LeasedPart, TrainedRun
from decoupled_diloco.protocol.effects import LearnerEffect, Note, Send
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.peers import COORDINATOR


def handle(state: LearnerState, event: DataEvent) -> list[LearnerEffect]:
    """The training loop said something of its data."""
    if isinstance(event, DataOpened):
        step = durable_step(state)
        held = 1 + event.ahead
        state.data = DataView(event.parts, held, state.coordinated, durable_step=step)
    data = state.data
    if data is None:
        return []
    match event:
        case DataOpened():
            return tell(data, state.step, "the loop wants data")
        case PartWanted(batches, taken):
            return part_wanted(data, state.step, batches, taken)
        case DataClosed():
            return close(data, state.step)
        case _:
            assert_never(event)


def durable_step(state: LearnerState) -> int:
    """The newest own step up to which every fragment has an accepted contribution."""
    return min(view.merged_step for view in state.fragments)


def part_wanted(data: DataView, step: int, batches: int | None, taken: int) -> list[LearnerEffect]:
    """The loop needs a part; what it had has ended if ``batches`` says with how many."""
    if taken:
        data.pending.append((data.current, taken, data.repeating))
    last = data.leases.get(data.current)
    if last is not None and batches is not None:
        last.length = batches
    data.leave = data.repeating = False
    part = next((p for p in data.leases.values() if p.length is None), None)
    effects: list[LearnerEffect] = []
    if part is None:
        finished = [p for p in data.leases.values() if p.length]
        part = finished[-1] if finished else None
        data.repeating = part is not None
        if part is not None:
            name = f"part {part.lease.part} of pass {part.lease.turn}"
            effects.append(Note(f"{name} is trained once more", "there is no lease left"))
    data.current = 0 if part is None else part.lease.number
    return effects + tell(data, step, "a part has ended") if batches is not None else effects


def stepped(data: DataView, step: int, batches: int, period: int) -> list[LearnerEffect]:
    """A step is finished that trained so many batches of the part that the loop has now."""
    ended = False
    for number, count, repeating in [*data.pending, (data.current, batches, data.repeating)]:
        part = data.leases.get(number)
        if part is None or not count:
            continue  # what was taken back meanwhile is others', and trained again
        if repeating:
            part.repeated += count
        else:
            _note(part, step, count)
            part.trained += count
            ended |= part.trained == part.length
    data.pending.clear()
    if ended:
        return tell(data, step, "a part has ended")
    if data.stale and step - data.reported_step >= period:
        return tell(data, step, "what is durable, once a period")
    return []


def _note(part: LeasedPart, step: int, batches: int) -> None:
    last = part.runs[-1] if part.runs else None
    if last is not None and last.stride == batches and last.step + last.steps == step:
        last.steps += 1
    else:
        part.runs.append(TrainedRun(step, 1, part.trained, batches))


def merged(data: DataView, step: int, durable_step: int) -> list[LearnerEffect]:
    """Every fragment has an accepted contribution of ``durable_step`` or later."""
    if durable_step <= data.durable_step:
        return []
    data.durable_step = durable_step
    settled = False
    for part in data.leases.values():
        before = part.settled
        _settle(part, durable_step)
        settled |= part.settled and not before
    data.stale = True
    return tell(data, step, "a part is durable") if settled else []


def _settle(part: LeasedPart, durable_step: int) -> None:
    while part.runs and part.runs[0].step <= durable_step:
        run = part.runs[0]
        part.durable = run.trained_by(durable_step)
        if run.step + run.steps - 1 > durable_step:
            return
        part.runs.popleft()


def tell(data: DataView, step: int, why: str) -> list[LearnerEffect]:
    """Reports all leases, if the coordinator is there."""
    if not data.linked or data.refused:
        return []
    data.reported_step, data.stale = step, False
    # A part that is being repeated is not over: what is repeated until then must be told, too.
    busy = {number for number, _, _ in data.pending} | {data.current}
    states = tuple(
        LeaseState(
            lease=number,
            trained=part.trained,
            durable=part.durable,
            ended=part.trained == part.length and number not in busy,
            repeated=part.repeated,
        )
        for number, part in data.leases.items()
    )
    return [Send(COORDINATOR, DataReport(data.parts, data.want, states), why)]


def link(data: DataView, step: int, *, linked: bool) -> list[LearnerEffect]:
    """The coordinator is there, or not."""
    data.linked = linked
    return tell(data, step, "the coordinator is there") if linked else []


def close(data: DataView, step: int) -> list[LearnerEffect]:
    """The loop has ended: what is not durable goes to others."""
    data.want = 0
    return tell(data, step, "the loop has ended")


def told(data: DataView, message: LeasesGiven | DataRefused) -> list[LearnerEffect]:
    """The coordinator has answered a report."""
    if isinstance(message, DataRefused):
        data.refused, data.leave = message.reason, True
        return [Note("there are no leases for these data", message.reason)]
    for number in message.dropped:
        if data.leases.pop(number, None) is not None and number == data.current:
            data.current, data.leave = 0, True
    for lease in message.leases:
        if lease.number not in data.leases:  # else it answers a report that crossed another answer
            data.leases[lease.number] = LeasedPart(lease, lease.start, lease.start)
            data.leave |= data.repeating
    return []
