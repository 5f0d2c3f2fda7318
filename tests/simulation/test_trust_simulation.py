"""Learners that train badly, in virtual time: they are scored, excluded, or on probation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch import roles
from decoupled_diloco.learner.option_groups import StateSharing
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import Fold, Outcome, Received, Scored
from decoupled_diloco.run_model.fold_records import read_run
from decoupled_diloco.show.status import status_of
from decoupled_diloco.tape import TapeReader
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation
from decoupled_diloco_lab.simulate.training import virtual_run

PERIOD, PROBATION, JOINS_AT = 8, 2, 20.5

SCENARIO = """
[run]
max_steps = 64
evaluate_interval_seconds = 4

[sync]
fragments = 4
sync_every = 8
overlap_steps = 2

[syncer]
shards = 2

[trust]
act = "exclude"
score_every = 2

[workload]
name = "paced"

[workload.options]
layers = 1
width = 32
heads = 2
context = 16
batch_size = 2
corpus_bytes_max = 200_000
warmup_steps = 0
learning_rate = 0.01

[[learners]]
count = 4
variance = 0.1

[[events]]
at_step = 44
kind = "kill"
target = "shard-1"
for_seconds = 3.0
"""


class Flipped:
    """A merge plan that flips the sign of contributions."""

    def __init__(self, plan: MergePlan) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def encode(self, d: Tensor, *others: Any) -> Any:
        return self._plan.encode(-d, *others)


def test_a_harmful_learner_is_excluded_also_by_a_restarted_shard(tmp_path: Path) -> None:
    (tmp_path / "story.toml").write_text(SCENARIO)
    simulation = Simulation(load_scenario(tmp_path / "story.toml"), tmp_path)

    def flip(host: Any, order: Any, capture: Any) -> None:
        if host.name == "learner-3":
            object.__setattr__(capture, "plan", Flipped(capture.plan))  # it is frozen

    simulation.system.on_capture = flip
    while simulation.advance():
        pass
    assert simulation.finished, simulation.reason
    simulation.finish()
    simulation.close()
    scored, reasons, folded_after = set[str](), set[str](), list[Fold]()
    excluded_at = 0.0
    for record in TapeReader(tmp_path):
        match record.value() if record.kind in ("event", "effect") else None:
            case Scored(learner, weight=weight):
                scored.add(f"{record.process} {record.life}")
                assert weight == 1.0 or learner == "learner-3"
                excluded_at = excluded_at or (record.wall if weight == 0.0 else 0.0)
            case Fold(learner="learner-3") as fold:
                if excluded_at and record.wall > excluded_at + 1.0:
                    folded_after.append(fold)
            case Received(_, Outcome(verdict="discarded", reason=reason)):
                reasons.add(f"{record.process}: {reason}")
    assert {each.partition(" ")[0] for each in scored} == {"shard-0", "shard-1"}
    assert len(scored) == 3, "both incarnations of the killed shard were sent gains"
    assert excluded_at
    assert not folded_after
    assert all(each.startswith("learner-3: weight 0: excluded until") for each in reasons)
    assert reasons
    run = read_run(tmp_path)
    learners = {each.name: each for each in status_of(run, run.latest).learners}
    assert learners["learner-3"].weight == 0.0
    assert learners["learner-0"].weight == 1.0


def config_of(seed: int, periods: int) -> RunConfig:
    return RunConfig(
        run={"learners": 3, "max_steps": 64, "seed": seed, "evaluator": False},
        sync={"fragments": 4, "sync_every": PERIOD, "overlap_steps": 2},
        trust={"probation_periods": periods},
        data={"elastic": False},
        workload={
            "name": "gpt",
            "options": {
                "layers": 1,
                "width": 32,
                "heads": 2,
                "context": 32,
                "batch_size": 2,
                "corpus_bytes_max": 200_000,
                "warmup_steps": 0,
                "learning_rate": 0.02,
                "eval_batches": 8,
            },
        },
    )


def losses_with_joiner(seed: int, periods: int) -> tuple[float, float, list[int]]:
    """Return the loss before and after a fresh learner's first periods, and its counted steps."""
    config = config_of(seed, periods)
    first = [LearnerSpec(name, variance=0.05) for name in config.learner_ids]
    first[-1] = replace(first[-1], joins_at=JOINS_AT)
    counted: list[int] = []

    def watch(process: str, now: float, event: Any, effects: Any) -> None:
        member = run.system.shards[0].machine and run.system.shards[0].machine.state.members
        for effect in effects:
            if isinstance(effect, Fold) and effect.learner == first[-1].name:
                counted.append(member[effect.learner].step)

    with virtual_run(config, first, recorder=watch) as run:
        run.system.run(until=JOINS_AT)
        before = run.evaluate()["loss"]
        run.system.run(until=JOINS_AT + (PROBATION + 1) * PERIOD)
        after = run.evaluate()["loss"]
    return before, after, counted


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_first_contributions_of_a_fresh_learner_never_raise_the_loss(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the learner would start with the optimizer of another one.
    monkeypatch.setattr(roles, "StateSharing", lambda objects: StateSharing(()))
    before, after, counted = losses_with_joiner(seed, PROBATION)
    assert after < before
    assert not [step for step in counted if step < PROBATION * PERIOD]
    _, at_once, early = losses_with_joiner(seed, 0)
    assert [step for step in early if step < PROBATION * PERIOD], "without probation they count"
    assert after < at_once * 1.02, "the learner's absence costs little"
