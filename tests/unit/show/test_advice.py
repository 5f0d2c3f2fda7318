"""Advice for users is in the status and the report, with the same words."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.messages import Note, RoundFinished, Tick, Version
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.facts import LearnerLog, ProcessLife, RoundLog, ShardLog
from decoupled_diloco.show.report import problems_of
from decoupled_diloco.show.status import advice_of, status_of
from decoupled_diloco.tape import TapeWriter


def run_that_discards(share: float, *, step: float, trip: float, overlap: int) -> RunModel:
    """A run in which a round takes ``trip`` seconds, in three equal parts."""
    told: dict[str, Any] = {"quorum": trip / 3, "merge": trip / 3, "broadcast": trip / 3}
    result = RoundFinished(
        round=1,
        fragment=0,
        tick=1,
        version=Version(1, 1),
        verdict="merged",
        reason="",
        participants=(),
        quorum_seconds=0.0,
        grace_seconds=0.0,
        closed_seconds=0.0,
        uploaded_seconds=0.0,
        finished_seconds=trip,
        step_seconds=step,
        slack_seconds=overlap * step - trip,
        why="",
        **{f"{name}_average_seconds": seconds for name, seconds in told.items()},
    )
    shard = ShardLog("shard-0", merged=40)
    shard.rounds = [RoundLog("shard-0", n, 0, float(n), result=result) for n in range(40)]
    learner = LearnerLog("a", lives=[ProcessLife(0.0, 60.0, tokens=1000, steps=100)])
    learner.discarded_of = {1: round(2000 * share)}
    run = RunModel()
    run.settings = {"sync": {"fragments": 2, "overlap_steps": overlap}}
    run.shards, run.learners, run.tokens = {"shard-0": shard}, {"a": learner}, 1000
    return run


def test_an_overlap_that_is_too_small_is_named_with_one_that_fits() -> None:
    run = run_that_discards(0.2, step=0.014, trip=0.066, overlap=2)
    (sentence,) = advice_of(run)
    assert sentence.startswith(
        "20 % of the tokens are discarded, because overlap_steps=2 is too small: a round "
        "takes 66 ms"
    )
    assert "set sync.overlap_steps to 5," in sentence
    assert sentence in status_of(run, 0.0).problems
    assert sentence in problems_of(run)


@pytest.mark.parametrize(
    ("share", "step", "trip"),
    [(0.04, 0.014, 0.066), (0.2, 0.04, 0.066), (0.2, 0.0, 0.066)],
    ids=["few are discarded", "the overlap fits", "steps are not measured"],
)
def test_there_is_no_advice_without_a_reason(share: float, step: float, trip: float) -> None:
    assert advice_of(run_that_discards(share, step=step, trip=trip, overlap=2)) == []


def test_a_process_warning_remains_and_appears_once(tmp_path: Any) -> None:
    for process in ("coordinator", "a", "b"):
        tape = TapeWriter(tmp_path, process, {}, clock=lambda: 0.0, wall=lambda: 100.0)
        for text, warns in (("a and b seem to train alike", True), ("a is seed", False)):
            seq = tape.event(1.0, Tick())
            tape.effects(1.0, seq, [Note(text, "why", warns)])
        tape.close()
    from decoupled_diloco.run_model import read_run

    run = read_run(tmp_path)
    assert advice_of(run) == ["a and b seem to train alike: why."]
