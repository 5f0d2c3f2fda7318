"""A shard gets the copies that it needs even if the connection of its request breaks.

A learner can have a new connection before the shard notices that the old one is gone. Messages in
flight on the old one are lost, and only the new greeting shows that.
"""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Options, SyncerMachine, Version, messages
from decoupled_diloco.protocol.messages import COORDINATOR, Holding

HELD = (Holding(0, Version(1, 3)),)


def requested(effects: list[Any]) -> list[messages.CopyWanted]:
    sent = [e.message for e in effects if isinstance(e, messages.Send)]
    return [m for m in sent if isinstance(m, messages.CopyWanted)]


def greeted(connection: int, held: tuple[Holding, ...]) -> messages.Connected:
    step = 5 if held else 0
    return messages.Connected(
        "a", messages.Hello("a", 1, "n", "learner", step, step, None, held), connection
    )


def wait(
    machine: SyncerMachine, now: float, seconds: int
) -> tuple[float, list[messages.CopyWanted]]:
    """Keep the learner connected until the shard requests a copy."""
    for _ in range(seconds):
        now += 1.0
        requests = requested(machine.handle(now, messages.Heard(("a",))))
        if (deadline := machine.deadline()) is not None and deadline <= now:
            requests += requested(machine.handle(now, messages.Tick()))
        if requests:
            return now, requests
    return now, []


def requested_once(fill: str) -> tuple[SyncerMachine, float, tuple[Holding, ...]]:
    """Return a shard that has requested a copy from its only learner."""
    machine = SyncerMachine(Options(fragments=1, period=4), 0)
    held = HELD if fill == "from a holder" else ()
    if fill == "from the seed":
        machine.handle(0.0, messages.Received(COORDINATOR, messages.ShardAdmitted(1, False)))
        machine.handle(0.0, greeted(1, held))
        first = requested(
            machine.handle(0.0, messages.Received(COORDINATOR, messages.SeedNamed("a", 1, 1)))
        )
        now = 0.0
    else:
        machine.handle(0.0, messages.Received(COORDINATOR, messages.ShardAdmitted(2, True)))
        machine.handle(0.0, messages.Received(COORDINATOR, messages.Begin(1)))
        machine.handle(0.0, greeted(1, held))
        now, first = wait(machine, 0.0, 120)
    assert len(first) == 1
    return machine, now, held


FILLS = ["from the seed", "from a holder", "from the first weights again"]


@pytest.mark.parametrize("fill", FILLS)
def test_rule_12_a_shard_repeats_its_request_after_a_reported_link_failure(fill: str) -> None:
    machine, now, held = requested_once(fill)
    machine.handle(now + 0.5, messages.Lost("a"))
    again = requested(machine.handle(now + 1.0, greeted(2, held)))
    assert again or wait(machine, now + 1.0, 600)[1]


@pytest.mark.parametrize("fill", FILLS)
def test_rule_12_a_shard_repeats_its_request_when_a_new_connection_replaces_the_old(
    fill: str,
) -> None:
    machine, now, held = requested_once(fill)
    again = requested(machine.handle(now + 1.0, greeted(2, held)))
    assert again or wait(machine, now + 1.0, 3600)[1]
