"""The snapshot of a state machine contains its whole state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.crowd import BareLearner, BareShard, Crowd

OPTIONS = Options(fragments=4, period=4, overlap=1, quorum=2, shards=2)
LEARNERS = [LearnerSpec(f"learner-{n}", 1.0 + 0.2 * n, variance=0.2) for n in range(3)]


def reborn(machine: SyncerMachine | LearnerMachine) -> SyncerMachine | LearnerMachine:
    """Return another machine with the same state."""
    if isinstance(machine, SyncerMachine):
        other: SyncerMachine | LearnerMachine = SyncerMachine(machine.options, machine.shard)
    else:
        other = LearnerMachine(
            machine.options, machine.learner, machine.epoch, machine.nonce, machine.role
        )
    other.restore(machine.snapshot())  # type: ignore[arg-type]
    return other


@pytest.mark.parametrize("seed", [3, 21, 25])
def test_a_machine_restored_from_its_snapshot_behaves_the_same(seed: int) -> None:
    """After every event, each machine is replaced by one restored from its snapshot."""

    def tape_of(*, swaps: bool) -> list[str]:
        crowd, tape = Crowd(OPTIONS, LEARNERS, seed), list[str]()
        machines = {host.name: host for host in crowd.hosts}

        def record(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
            tape.append(repr((process, now, event, effects)))
            host = machines.get(process)
            if swaps and isinstance(host, BareShard | BareLearner):
                host.machine = reborn(host.machine)

        crowd.recorders.append(record)
        crowd.run(until=20.0)
        crowd.crash(crowd.learners["learner-1"], silent=True)
        crowd.network.cut(crowd.learners["learner-2"], crowd.shards[0])
        crowd.run(until=40.0)
        crowd.restart(crowd.learners["learner-1"])
        crowd.network.heal(crowd.learners["learner-2"], crowd.shards[0])
        crowd.run(until=60.0)
        return tape

    whole = tape_of(swaps=False)
    assert len(whole) > 500
    assert tape_of(swaps=True) == whole
