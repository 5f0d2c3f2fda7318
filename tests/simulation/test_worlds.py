"""Random worlds of real processes hold, and repeat exactly."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard
from decoupled_diloco.protocol.events import Received
from decoupled_diloco.protocol.messages import ShardReady
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate import worlds
from decoupled_diloco.simulate.scene import config_of
from decoupled_diloco.simulate.shrink import Changes
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.system import System

SEEDS = range(80)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_holds(seed: int) -> None:
    try:
        report = worlds.run(seed)
    except AssertionError as error:
        command = worlds.COMMAND.format(seed=seed)
        raise AssertionError(f"{error}\nrepeat it with: {command}") from error
    assert report.events > 0


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", range(40, 45))
def test_a_world_of_several_ranks_holds(seed: int, staged: bool) -> None:
    learners = {"ranks": 3, "carriers": 2, "staged": staged}
    assert worlds.run(seed, changes=Changes(learners=learners)).events > 0


def test_a_world_repeats_exactly() -> None:
    def digest(seed: int) -> str:
        seen = sha256()

        def see(*event: object) -> None:
            seen.update(re.sub(r"/\S*?/run/", "RUN/", repr(event)).encode())

        worlds.run(seed, see)
        return seen.hexdigest()

    assert [digest(seed) for seed in range(3)] == [digest(seed) for seed in range(3)]


def test_a_learner_takes_its_part_of_a_checkpoint_before_the_message_that_brings_it() -> None:
    """The message would change what is in the part."""
    seen: list[tuple[str, float, object]] = []
    changes = Changes(options={"checkpoint_every_seconds": 3.0})
    worlds.run(0, lambda who, now, event, effects: seen.append((who, now, event)), changes)
    heard = [at for at, (_, _, event) in enumerate(seen) if isinstance(event, CheckpointHeard)]
    heard = [at for at in heard if seen[at][0].startswith("learner")]
    assert heard
    for at in heard:
        who, now, _ = seen[at]
        after = next(event for event in seen[at + 1 :] if event[0] == who)
        assert after[1] == now
        assert isinstance(after[2], Received)


def test_a_shard_is_ready_once_its_disk_has_its_first_versions(tmp_path: Path) -> None:
    options = Options(fragments=4, period=4, overlap=1, shards=2, budget_steps=20)
    learners = [LearnerSpec(f"learner-{number}") for number in range(2)]
    config = config_of(options, tmp_path, learners=2)
    system, ready = System(config, learners, tmp_path, seed=1), list[int]()

    def see(who: str, now: float, event: object, effects: object) -> None:
        if isinstance(event, Received) and isinstance(event.message, ShardReady):
            shard = event.peer.removeprefix("shard-")
            assert list(tmp_path.glob(f"durable/shard-{shard}/*.safetensors"))
            ready.append(int(shard))

    system.recorders.append(see)
    system.run(until=20.0)
    system.close()
    assert sorted(ready) == [0, 1]
