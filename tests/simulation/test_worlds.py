"""Random worlds of real processes keep all rules and repeat exactly."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

from cases import long_after
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import CheckpointHeard, Received, ShardReady
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from worlds import worlds
from worlds.scene import config_of
from worlds.shrink import Changes

SEEDS = sorted(range(80), key=lambda seed: seed == 7)  # the slowest world comes last


@pytest.mark.parametrize("seed", long_after(16, SEEDS))
def test_a_world_keeps_all_rules(seed: int) -> None:
    try:
        report = worlds.run(seed)
    except AssertionError as error:
        command = worlds.COMMAND.format(seed=seed)
        raise AssertionError(f"{error}\nrepeat it with: {command}") from error
    assert report.events > 0


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", long_after(2, range(40, 45)))
def test_a_world_with_multi_rank_learners_keeps_all_rules(seed: int, staged: bool) -> None:
    learners = {"ranks": 3, "sync_ranks": 2, "staged": staged}
    assert worlds.run(seed, changes=Changes(learners=learners)).events > 0


@pytest.mark.parametrize("seed", long_after(10, range(60)))
def test_a_world_with_relays_keeps_all_rules(seed: int) -> None:
    assert worlds.run(seed, changes=Changes(relays=True)).events > 0


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("seed", long_after(4, range(60)))
def test_a_world_with_secure_sums_keeps_all_rules(seed: int, relays: bool) -> None:
    assert worlds.run(seed, changes=Changes(secure=True, relays=relays)).events > 0


@pytest.mark.parametrize("seed", long_after(2, [9, 14]))
def test_a_world_with_limited_parties_keeps_all_rules(seed: int) -> None:
    assert worlds.run(seed, changes=Changes(quotas=True)).events > 0


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("seed", long_after(6, range(30)))
def test_a_world_with_merged_moments_keeps_all_rules(seed: int, relays: bool) -> None:
    assert worlds.run(seed, changes=Changes(moments=True, relays=relays)).events > 0


def test_a_world_repeats_exactly() -> None:
    def digest(seed: int) -> str:
        seen = sha256()

        def on_event(*event: object) -> None:
            seen.update(re.sub(r"/\S*?/run/", "RUN/", repr(event)).encode())

        worlds.run(seed, on_event)
        return seen.hexdigest()

    assert [digest(seed) for seed in range(3)] == [digest(seed) for seed in range(3)]


def test_a_learner_handles_a_checkpoint_before_the_message_that_announces_it() -> None:
    """The message would change the learner's part of the checkpoint."""
    seen: list[tuple[str, float, object]] = []
    changes = Changes(options={"checkpoint_every_seconds": 3.0})
    worlds.run(0, lambda process, now, event, effects: seen.append((process, now, event)), changes)
    handled = [at for at, (_, _, event) in enumerate(seen) if isinstance(event, CheckpointHeard)]
    handled = [at for at in handled if seen[at][0].startswith("learner")]
    assert handled
    for at in handled:
        process, now, _ = seen[at]
        after = next(event for event in seen[at + 1 :] if event[0] == process)
        assert after[1] == now
        assert isinstance(after[2], Received)


def test_a_shard_is_ready_once_its_disk_has_its_first_versions(tmp_path: Path) -> None:
    options = Options(fragments=4, period=4, overlap=1, shards=2, max_steps=20)
    learners = [LearnerSpec(f"learner-{number}") for number in range(2)]
    config = config_of(options, tmp_path, learners=2)
    system, ready = System(config, learners, tmp_path, seed=1), list[int]()

    def on_event(process: str, now: float, event: object, effects: object) -> None:
        if isinstance(event, Received) and isinstance(event.message, ShardReady):
            shard = event.peer.removeprefix("shard-")
            assert list(tmp_path.glob(f"durable/shard-{shard}/*.safetensors"))
            ready.append(int(shard))

    system.recorders.append(on_event)
    system.run(until=20.0)
    system.close()
    assert sorted(ready) == [0, 1]
