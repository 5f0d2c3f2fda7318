"""A learner recovers from its checkpoint, from another learner, or from the run's weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco import Checkpointing, Learner, StateSharing
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.learner.learner_checkpoint import CheckpointFolder
from decoupled_diloco.protocol.messages import CheckpointHeard
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.explain import explain_learner
from decoupled_diloco.tape import TapeReader
from integration.loops_that_keep import ALONE, Loop, Make, Position, recovered
from integration.real_system import (
    Model,
    System,
    Trainer,
    equal,
    parameters,
    training,
    until,
)
from replay_check import assert_replays


@pytest.mark.parametrize("place", ["a folder", "an object store"])
def test_a_learner_continues_exactly_from_its_checkpoint(
    make: Make, tmp_path: Path, place: str
) -> None:
    if place == "an object store":
        pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[store]'")
    kept = tmp_path / "kept" if place == "a folder" else f"file://{tmp_path}/kept"
    system = make(**ALONE)
    system.start()
    first = Loop(system, kept)
    first.steps(5)
    first.keep()
    at_checkpoint = parameters(first.model)
    first.steps(3)
    expected = parameters(first.model)
    first.die()
    second = Loop(system, kept, seed=1)
    assert second.learner.incarnation == 2
    assert second.position.batches == 5
    assert second.learner.steps == 5
    assert second.learner.tokens == 40
    assert second.model.seen.tolist() == [5, 5]
    assert equal(parameters(second.model), at_checkpoint)
    steps = [
        view.steps_before
        for view in second.learner._party.membership.shared.machine.state.fragments
    ]
    assert steps == [-5] * 4, "its unmerged steps still count"
    second.steps(3)
    assert equal(parameters(second.model), expected), "parameters and optimizer are the same bits"
    second.learner.close()
    ways = [(each["way"], each["kept"], each["overwritten"]) for each in recovered(system)]
    assert ways == [("published", 0, 4), ("checkpoint", 4, 0)]
    assert "of step 5, incarnation 1" in recovered(system)[1]["why"]
    system.stop()
    assert_replays(system.folder)


def test_a_learner_continues_from_the_rest_of_its_checkpoint_and_the_runs_weights(
    make: Make, tmp_path: Path
) -> None:
    """After a run, its learners' checkpoints omit what its weights have."""
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path / "kept")
    begun = parameters(first.model)
    first.steps(5)
    first.keep()
    moments = copy.deepcopy(first.optimizer.state_dict())
    first.die()
    folder = CheckpointFolder(tmp_path / "kept" / "learner-0", keep=1)
    whole = folder.newest()
    assert whole is not None
    folder.save(whole.rest([*begun, "seen"]))
    second = Loop(system, tmp_path / "kept", seed=1)
    assert (second.position.batches, second.learner.steps, second.learner.tokens) == (5, 5, 40)
    assert equal(parameters(second.model), begun), "nothing was ever merged"
    assert torch.equal(second.model.frozen, first.model.frozen), (
        "the weights of a run do not have it"
    )
    found = second.optimizer.state_dict()["state"]
    assert found.keys() == moments["state"].keys()
    assert all(
        torch.equal(tensor, moments["state"][index][name])
        for index, state in found.items()
        for name, tensor in state.items()
    )
    second.steps(1)
    second.learner.close()
    [_, again] = recovered(system)
    assert (again["way"], again["kept"], again["overwritten"]) == ("published", 0, 4)
    assert "its own checkpoint of step 5" in again["why"]
    system.stop()
    assert_replays(system.folder)


@pytest.mark.parametrize("missed", ["overwrite", "rebase"])
def test_fragments_that_the_run_has_changed_are_overwritten(
    make: Make, tmp_path: Path, missed: str
) -> None:
    system = make(run={"max_steps": 100_000}, sync={"apply": {"missed": missed}})
    system.start()
    first = Loop(system, tmp_path / "kept")
    with training(Trainer(system, "learner-1")):
        first.steps(4)
        first.keep()
        first.die()
        before = system.rounds()
        until(lambda: system.rounds() > before + 8, "the run continues without it")
        second = Loop(system, tmp_path / "kept", seed=1)
        assert second.position.batches == 4
        second.learner.close()
    assert recovered(system)[1]["way"] == "checkpoint"
    assert recovered(system)[1]["overwritten"] == 4
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    modes = [r.data["mode"] for r in tape if r.life == 1 and r.type == "Apply"]
    assert modes[:4] == ["overwrite"] * 4, (
        "not rebased, because the first incarnation's training may be merged"
    )
    system.stop()
    assert_replays(system.folder)


def test_checkpoints_are_taken_at_intervals_and_at_the_end(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()
    loop = Loop(system, tmp_path, interval_seconds=1e-9)
    loop.steps(1)
    folder = CheckpointFolder(tmp_path / "learner-0")
    until(lambda: folder.newest() is not None, "the first one is written")
    loop.steps(2)
    loop.learner.close()
    newest = folder.newest()
    assert newest is not None
    assert newest.steps == 3
    assert newest.state["data"] == {"batches": 3}
    assert folder.problems == []
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    written = [r.data for r in tape if r.type == "CheckpointWritten"]
    assert [written[0]["step"], written[-1]["step"]] == [1, 3]
    assert all(w["problem"] == "" and w["nbytes"] > 0 for w in written)


@pytest.mark.parametrize("inside", ["the batch", "the optimizer"])
def test_an_interrupted_loop_loses_no_step(make: Make, tmp_path: Path, inside: str) -> None:
    """Ctrl-C may occur anywhere; only parameters inside a change are not saved."""
    system = make(**ALONE)
    system.start()
    loop = Loop(system, tmp_path, interval_seconds=0.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def train() -> None:
        with loop.learner:
            loop.steps(3)
            if inside == "the optimizer":
                loop.optimizer.register_step_pre_hook(interrupt)
                loop.steps(1)
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        train()
    newest = CheckpointFolder(tmp_path / "learner-0").newest()
    assert (newest is None) == (inside == "the optimizer")
    assert newest is None or newest.steps == 3


def test_a_corrupt_checkpoint_is_named_and_the_previous_one_is_used(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path)
    for _ in range(2):
        first.steps(2)
        first.keep()
    first.die()
    newest = max((tmp_path / "learner-0").iterdir())
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    second = Loop(system, tmp_path, seed=1)
    assert second.position.batches == 2
    second.learner.close()
    assert f"{newest} is corrupt" in caplog.text


def test_a_checkpoint_of_another_run_is_not_used(make: Make, tmp_path: Path) -> None:
    first_system = make(**ALONE)
    first_system.start()
    first = Loop(first_system, tmp_path / "kept")
    first.steps(3)
    first.learner.close()
    first_system.stop()
    other = System(tmp_path / "other run", **ALONE)
    try:
        other.start()
        second = Loop(other, tmp_path / "kept", seed=1)
        assert second.position.batches == 0
        assert second.learner.steps == 0
        second.learner.close()
        (how,) = recovered(other)
        assert how["way"] == "published"
        assert how["why"] == "its checkpoint is of another run: the run has only begun"
    finally:
        other.close()


def test_a_full_disk_costs_only_the_checkpoint(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(**ALONE)
    system.start()
    loop = Loop(system, tmp_path / "kept", interval_seconds=1e-9)
    (tmp_path / "kept" / "learner-0").rmdir()
    (tmp_path / "kept" / "learner-0").write_text("a file where the folder would be")
    loop.steps(5)
    loop.learner.close()
    assert "learner-0 lost a checkpoint and continues training" in caplog.text
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    problems = [r.data["problem"] for r in tape if r.type == "CheckpointWritten"]
    assert problems
    assert all("learner-0" in problem for problem in problems)


def test_a_state_that_cannot_be_saved_is_rejected_at_once(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()

    class Odd(Position):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    def join(**options: Any) -> Learner:
        return system.learner(nn.Linear(2, 2), "learner-0", **options)

    with pytest.raises(ConfigError, match=r"\['data'\]: state\['seen'\] is a set"):
        join(checkpoint=Checkpointing(tmp_path, state={"data": Odd()}))
    with pytest.raises(ConfigError, match=r"\['data'\] is an int without state_dict"):
        join(checkpoint=Checkpointing(tmp_path, state={"data": 3}))
    with pytest.raises(ConfigError, match="pass the inner optimizer as optimizer="):
        join(checkpoint=Checkpointing(state={"optimizer": Position()}))
    with pytest.raises(ConfigError, match=r"state=…\) is a list without names"):
        join(checkpoint=Checkpointing(tmp_path, state=[Position()]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="optimizer is an int without param_groups"):
        join(optimizer=3)
    with pytest.raises(ConfigError, match=r"\('data',\)\): 'data' is not one of optimizer: add it"):
        join(state_sharing=StateSharing(("data",)))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot create .* or leave checkpoint= out"):
        join(checkpoint=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"checkpoint=.* needs name=: pass a name"):
        Learner(nn.Linear(2, 2), system.addresses[0], checkpoint=tmp_path)


def test_a_checkpoint_that_does_not_fit_the_objects_is_rejected(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path)
    first.steps(1)
    first.learner.close()
    with pytest.raises(
        ConfigError, match=r"has the state of \['data', 'optimizer'\], this learner"
    ):
        system.learner(Model(), "learner-0", checkpoint=tmp_path)


def test_a_leaving_learner_flushes_and_the_others_take_part(make: Make, tmp_path: Path) -> None:
    # With an overlap of many short steps, all learners can deliver in every round.
    sync = {"sync_every": 50_000, "overlap_steps": 5_000}
    system = make(run={"max_steps": 100_000}, sync=sync, syncer={"shards": 2})
    system.start()
    leaver = Loop(system, tmp_path / "kept")
    with training(Trainer(system, "learner-1")):
        leaver.steps(6)
        until(lambda: _stepping(system) == 2, "both have reported")
        assert leaver.learner.flush(20.0)
        leaver.learner.close()
        until(lambda: len(_merged(system)) == 4, "the rounds are over")
    system.stop()
    rounds = _merged(system)
    assert {each["fragment"] for each in rounds} == {0, 1, 2, 3}
    for each in rounds:
        folded = {p["learner"]: p["tokens"] for p in each["participants"] if p["state"] == "folded"}
        assert folded.keys() == {"learner-0", "learner-1"}, (
            "no training is overwritten without a merge"
        )
        assert folded["learner-0"] == 48, "all of its training is merged"
    newest = CheckpointFolder(tmp_path / "kept" / "learner-0").newest()
    assert newest is not None
    assert newest.steps == 6


def _merged(system: System) -> list[dict[str, Any]]:
    tapes = [TapeReader(system.folder / "tape" / f"shard-{shard}.jsonl") for shard in range(2)]
    found = [r.data for tape in tapes for r in tape if r.type == "RoundFinished"]
    return [each for each in found if each["verdict"] == "merged"]


def _stepping(system: System) -> int:
    return min(shard.machine.state.members_stepping for shard in system.shards.values())


def test_a_flush_returns_at_once_if_nothing_can_be_merged(make: Make) -> None:
    system = make(**ALONE)
    system.start()
    learner = system.learner(Model(), "learner-0")
    learner.step(tokens=8)
    until(lambda: system.shards[0].machine.state.members_stepping == 1, "the step is reported")
    assert not learner.flush(600.0), "it does not wait for a second learner"
    assert not learner.step(tokens=8), "a learner that has flushed is done"
    learner.close()


def test_a_flushing_learner_takes_part_in_a_checkpoint(make: Make) -> None:
    """Otherwise the checkpoint would wait for its part until it has left."""
    system = make(**ALONE)
    system.start()
    learner = system.learner(Model(), "learner-0")
    learner.step(tokens=8)
    until(lambda: system.shards[0].machine.state.members_stepping == 1, "the step is reported")
    learner._party.membership.background.submit(CheckpointHeard(1))
    learner.flush(600.0)
    learner.close()
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    (part,) = [r.data for r in tape if r.type == "Failed"]
    assert (part["order"]["number"], part["reason"]) == (1, "it keeps no checkpoints")


def test_the_recovery_of_a_learner_is_explained(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path)
    first.steps(2)
    first.keep()
    first.die()
    Loop(system, tmp_path, seed=1).learner.close()
    system.stop()
    text = "\n".join(explain_learner(read_run(system.folder, "details"), "learner-0"))
    assert "with the published copies and a fresh optimizer (it has no checkpoint of its" in text
    assert (
        "from its own checkpoint of step 2, incarnation 1: its progress continued in 4, and 0"
        in text
    )
