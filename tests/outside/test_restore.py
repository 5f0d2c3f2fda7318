"""A shard gets the copies that it needs, whatever becomes of the connection it asked on.

A link can break such that the learner has a new connection before the shard knows that the old one
is gone: what was under way on the old one is lost, and the greeting is all that tells of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Options, SyncerMachine, Version
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.versions import Holding

HELD = (Holding(0, Version(1, 3)),)


def wanted(effects: list[Any]) -> list[msg.CopyWanted]:
    sent = [e.message for e in effects if isinstance(e, do.Send)]
    return [m for m in sent if isinstance(m, msg.CopyWanted)]


def greeted(connection: int, held: tuple[Holding, ...]) -> ev.Connected:
    step = 5 if held else 0
    return ev.Connected("a", msg.Hello("a", 1, "n", "learner", step, step, None, held), connection)


def wait(machine: SyncerMachine, now: float, seconds: int) -> tuple[float, list[msg.CopyWanted]]:
    """The learner is there all the time; until the shard asks it for a copy."""
    for _ in range(seconds):
        now += 1.0
        asked = wanted(machine.handle(now, ev.Heard(("a",))))
        if (deadline := machine.deadline()) is not None and deadline <= now:
            asked += wanted(machine.handle(now, ev.Tick()))
        if asked:
            return now, asked
    return now, []


def asked_once(fill: str) -> tuple[SyncerMachine, float, tuple[Holding, ...]]:
    """A shard that needs a copy and has asked its only learner for it."""
    machine = SyncerMachine(Options(fragments=1, period=4), 0)
    held = HELD if fill == "from a holder" else ()
    if fill == "from the seed":
        machine.handle(0.0, ev.Received(COORDINATOR, msg.ShardAdmitted(1, False)))
        machine.handle(0.0, greeted(1, held))
        first = wanted(machine.handle(0.0, ev.Received(COORDINATOR, msg.SeedNamed("a", 1, 1))))
        now = 0.0
    else:
        machine.handle(0.0, ev.Received(COORDINATOR, msg.ShardAdmitted(2, True)))
        machine.handle(0.0, ev.Received(COORDINATOR, msg.Begin(1)))
        machine.handle(0.0, greeted(1, held))
        now, first = wait(machine, 0.0, 120)
    assert len(first) == 1
    return machine, now, held


FILLS = ["from the seed", "from a holder", "from the first weights again"]


@pytest.mark.parametrize("fill", FILLS)
def test_rule_12_a_shard_asks_again_when_it_is_told_that_the_link_broke(fill: str) -> None:
    machine, now, held = asked_once(fill)
    machine.handle(now + 0.5, ev.Lost("a"))
    again = wanted(machine.handle(now + 1.0, greeted(2, held)))
    assert again or wait(machine, now + 1.0, 600)[1]


@pytest.mark.parametrize("fill", FILLS)
def test_rule_12_a_shard_asks_again_when_a_new_connection_replaces_the_old(fill: str) -> None:
    machine, now, held = asked_once(fill)
    again = wanted(machine.handle(now + 1.0, greeted(2, held)))
    assert again or wait(machine, now + 1.0, 3600)[1]
