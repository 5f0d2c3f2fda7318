"""The synchronous baselines, whose learners wait."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from decoupled_diloco.tape import TapeReader
from integration.real_system import Model, System, Trainer, equal, parameters, training, until

Make = Callable[..., System]
DILOCO = {
    "fragments": 1,
    "sync_every": 5,
    "overlap_steps": 0,
    "quorum": 2,
    "participation": "all",
    "merge": {"rule": "mean"},
    "wait": "at_overlap",
    "grace_margin": 0.0,
}


def test_diloco_merges_all_learners_in_every_round_and_discards_nothing(make: Make) -> None:
    system = make(sync=DILOCO, run={"max_steps": 40})
    system.start()
    trainers = [
        Trainer(system, "learner-0", Model(seed=1), pause=0.001),
        Trainer(system, "learner-1", Model(seed=2), pause=0.02),
    ]
    with training(*trainers):
        learners = [trainer.end() for trainer in trainers]
        system.wait_finished()
    assert equal(*(parameters(trainer.model) for trainer in trainers))
    assert abs(learners[0].steps - learners[1].steps) <= DILOCO["sync_every"]
    rounds = [
        r
        for r in TapeReader(system.folder / "tape" / "shard-0.jsonl")
        if r.type == "RoundFinished" and r.data["verdict"] == "merged"
    ]
    full = [r for r in rounds if len(r.data["participants"]) == 2]
    assert len(full) >= 7
    *before, last = ([p["state"] for p in r.data["participants"]] for r in full)
    assert all(states == ["folded", "folded"] for states in before)
    assert set(last) <= {"folded", "declined"}, "at the end a waiting learner may have nothing new"
    ticks = [r.data["tick"] for r in full]
    assert all(b - a >= 4 for a, b in pairwise(ticks[:-1])), "one round per period"


def test_the_others_wait_for_a_crashed_learner_and_continue_when_it_is_back(make: Make) -> None:
    system = make(sync=DILOCO, run={"max_steps": 60})
    system.start()
    steady = Trainer(system, "learner-0", Model(seed=1))
    leaving = Trainer(system, "learner-1", Model(seed=2), steps_max=12)
    with training(steady, leaving):
        leaving.end()
        learner = steady.learner
        assert learner is not None
        members = system.shards[0].machine.state.members
        until(lambda: list(members) == ["learner-0"], "it has left")
        state = learner._party.membership.shared.machine.state
        until(lambda: state.holding, "a quorum of two waits for the second")
        held = learner.steps
        again = Trainer(system, "learner-1", Model(seed=3))
        with training(again):
            until(lambda: learner.steps > held + 10, "it continues")
            steady.end()
            again.end()
            system.wait_finished()
    assert equal(parameters(steady.model), parameters(again.model))


def test_a_waiting_learner_can_be_asked_to_stop(make: Make) -> None:
    system = make(sync=DILOCO, run={"max_steps": 60})
    system.start()
    alone = Trainer(system, "learner-0")
    with training(alone):
        learner = alone.learner
        assert learner is not None
        state = learner._party.membership.shared.machine.state
        until(lambda: state.holding, "a quorum of two waits for the second")
        alone.enough.set()
        learner.request_stop()
        alone.end()
