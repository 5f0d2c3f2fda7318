"""Learners that train badly: probation and scores (rule 26)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import LearnerMachine
from decoupled_diloco.protocol.messages import (
    Apply,
    Asking,
    Began,
    Broadcast,
    Connected,
    Drop,
    Fold,
    Gains,
    GainsMeasured,
    GivenUp,
    Merge,
    Note,
    Outcome,
    Pull,
    Received,
    RoundFinished,
    Scored,
    ShardMemory,
    StepReport,
    Version,
    Welcome,
    shard_peer,
)
from decoupled_diloco.protocol.syncer_state import recall, remembered
from decoupled_diloco.protocol.weighing import WEIGHT_MIN
from decoupled_diloco.protocol.wire import decode, encode

PERIOD = 4


def report(bench: Any, learner: str, step: int, *, fresh: bool = False) -> list[Any]:
    """A learner that holds all copies reports a step."""
    bench.holds(learner)
    return bench.handle(Received(learner, StepReport(step, 10 * step, 1.0, fresh=fresh)))


def with_joiner(shard_bench: Any, quorum: int = 1, **options: Any) -> Any:
    """Two learners in step 8, and a third one that has joined with a fresh optimizer."""
    options = {"probation_periods": 2, "grace_margin": 0.0, **options}
    bench = shard_bench("a", "b", fragments=1, period=PERIOD, overlap=2, quorum=quorum, **options)
    for step in range(1, 9):
        for learner in ("a", "b"):
            report(bench, learner, step)
        for learner in list(bench.machine.state.fragments[0].asks):
            bench.body(learner)
        if bench.machine.state.rounds:
            bench.merged()
    assert not bench.machine.state.rounds
    bench.greet("new", fresh=True)
    return bench


def test_a_contribution_on_probation_is_discarded_with_a_reason(shard_bench: Any) -> None:
    bench = with_joiner(shard_bench, participants="all")
    report(bench, "new", 1, fresh=True)
    for learner in ("a", "b"):
        for step in range(9, 13):
            report(bench, learner, step)
    number = bench.machine.state.rounds[0].number
    (drop,) = (e for e in bench.body("new") if isinstance(e, Drop))
    why = "weight 0: on probation for 7 more steps, because its optimizer started fresh"
    assert drop.why == why
    (outcome,) = bench.messages(Outcome)
    assert (outcome.verdict, outcome.reason) == ("discarded", why)
    for learner in ("a", "b"):
        bench.body(learner)
    bench.merged()
    (finished,) = bench.orders(RoundFinished)
    states = {each.learner: (each.state, each.reason) for each in finished.participants}
    assert states.pop("new") == ("discarded", why)
    assert {state for state, _ in states.values()} == {"folded"}
    assert finished.round == number


def test_after_its_probation_a_learner_counts(shard_bench: Any) -> None:
    bench = with_joiner(shard_bench, participants="all")
    orders: dict[int, list[Any]] = {}
    for step in range(1, 13):
        report(bench, "new", step, fresh=True)
        if "new" in bench.machine.state.fragments[0].asks:
            orders[step] = [e for e in bench.body("new") if isinstance(e, Drop | Fold)]
    kinds = {step: type(found[0]) for step, found in orders.items()}
    assert {kind for step, kind in kinds.items() if step < 8} == {Drop}
    assert kinds[max(kinds)] is Fold


def test_a_learner_on_probation_counts_for_no_quorum(shard_bench: Any) -> None:
    bench = with_joiner(shard_bench, quorum=2, participants="all")
    report(bench, "new", 1, fresh=True)
    for step in range(9, 13):
        report(bench, "a", step)
        report(bench, "b", step)
    round = bench.machine.state.rounds[0]
    for learner in ("new", "a"):
        bench.body(learner)
        assert not bench.orders(Merge)
    assert round.settled_at is None
    bench.body("b")
    assert bench.orders(Merge)


def test_the_window_closes_only_with_a_quorum_of_learners_with_weight(shard_bench: Any) -> None:
    """A request to a learner on probation does not complete the quorum either."""
    bench = with_joiner(shard_bench, quorum=2, participants="reported", grace_margin=0.8)
    report(bench, "new", 1, fresh=True)
    for step in range(9, 13):
        report(bench, "a", step)
        report(bench, "new", step - 7, fresh=True)
    round = bench.machine.state.rounds[0]
    assert {"a", "new"} <= bench.machine.state.fragments[0].asks.keys()
    assert round.quorum_at is None
    report(bench, "b", 12)
    assert round.quorum_at is not None


def test_a_round_that_lacks_learners_with_weight_waits(shard_bench: Any) -> None:
    """It is not abandoned at each tick, which would request everything again."""
    bench = shard_bench(
        "a", fragments=1, period=2, overlap=0, quorum=2, probation_periods=3, participants="all"
    )
    for step in range(1, 5):
        report(bench, "a", step)
    bench.greet("new", fresh=True, run_step=4)
    orders = []
    for step in range(1, 5):
        report(bench, "a", 4 + step)
        orders += report(bench, "new", step, fresh=True)
        for learner in ("a", "new"):
            if learner in bench.machine.state.fragments[0].asks:
                orders += bench.body(learner)
    given_up = [e for e in orders if isinstance(e, Broadcast) and isinstance(e.message, GivenUp)]
    assert not given_up
    assert not any(isinstance(each, Merge) for each in orders)
    for step in range(5, 12):
        report(bench, "a", 4 + step)
        orders += report(bench, "new", step, fresh=True)
        for learner in ("a", "new"):
            if learner in bench.machine.state.fragments[0].asks:
                orders += bench.body(learner)
    assert any(isinstance(each, Merge) for each in orders), "its probation is over"


def test_a_restarted_shard_continues_the_probation(shard_bench: Any) -> None:
    """The greeting says how the learner started, and how many steps it has made since."""
    bench = with_joiner(shard_bench)
    bench.greet("later", epoch=1, step=7, run_step=8, fresh=True)
    assert bench.machine.state.members["later"].is_fresh


def pull_of(number: int, base: Version) -> Pull:
    return Pull(0, Asking(1, number), base, 4, "bf16", "overwrite", f"/up/{number}", final=False)


@pytest.mark.parametrize("missed", ["overwrite", "rebase"])
def test_a_discarded_contribution_is_dropped_with_the_next_copy(
    learner_bench: Any, missed: str
) -> None:
    """With missed="rebase" it would otherwise be in every later contribution."""
    bench = learner_bench(missed=missed)
    bench.step()
    bench.receive(pull_of(1, Version(1, 0)))
    bench.step()
    bench.receive(Outcome(0, Asking(1, 1), "discarded", "weight 0", None))
    bench.publish(Version(1, 1), Version(1, 0))
    bench.fetched(Version(1, 1))
    (apply,) = (each for each in bench.step() if isinstance(each, Apply))
    assert (apply.mode, apply.why) == ("overwrite", "its contribution had weight 0")


@pytest.mark.parametrize(("clock", "fresh"), [(3, False), (4, True), (400, True)])
def test_a_learner_is_fresh_if_it_joins_a_run_in_progress(
    learner_bench: Any, clock: int, fresh: bool
) -> None:
    """In the first period, the optimizers of all learners are fresh."""
    bench = learner_bench(begin=False, probation_periods=1)
    bench.machine = LearnerMachine(bench.machine.options, "me", 1, "nonce")
    bench.handle(Began(why="it has no checkpoint"))
    bench.handle(Connected(shard_peer(0)))
    bench.receive(Welcome(0, 1, clock, 0, clock))
    bench.publish(Version(1, 0), None)
    bench.fetched(Version(1, 0))
    bench.step()
    assert [each.fresh for each in bench.messages(StepReport)] == [fresh]


NAMES = ("a", "b", "c", "bad")
HARMFUL = {"a": 1.0, "b": 0.8, "c": 1.2, "bad": -0.5}


def with_scores(shard_bench: Any, act: str = "exclude", **options: Any) -> Any:
    """Four learners, and an evaluator that has scored them once."""
    bench = shard_bench(*NAMES, fragments=1, period=1, overlap=0, trust=act, **options)
    bench.greet("evaluator", role="observer")
    return bench


def measured(bench: Any, gains: dict[str, float], sender: str = "evaluator") -> dict[str, Scored]:
    bench.handle(Received(sender, Gains(4, tuple(gains.items()))))
    return {each.learner: each for each in bench.orders(Scored)}


def outcome_of(bench: Any, learner: str) -> Any:
    """The next contribution of a learner: how it is folded, or why it is dropped."""
    while bench.ask(learner) == Asking(0, 0):
        bench.step(learner)
    orders = bench.body(learner)
    if bench.machine.state.rounds and any(isinstance(each, Merge) for each in orders):
        bench.merged()
    return next(each for each in orders if isinstance(each, Drop | Fold))


def test_a_learner_with_a_low_score_is_excluded_and_returns(shard_bench: Any) -> None:
    bench = with_scores(shard_bench)
    assert {each.weight for each in measured(bench, HARMFUL).values()} == {1.0}, "one is too few"
    assert isinstance(outcome_of(bench, "bad"), Fold)
    found = measured(bench, HARMFUL)
    assert {name for name, each in found.items() if each.weight == 0.0} == {"bad"}
    assert found["bad"].score == pytest.approx(-0.5 / 0.9)
    assert [note.text for note in bench.orders(Note)] == ["bad is excluded"]
    dropped = outcome_of(bench, "bad")
    assert isinstance(dropped, Drop)
    assert dropped.why == "weight 0: excluded until its score exceeds 0.5; it is -0.56"
    assert isinstance(outcome_of(bench, "a"), Fold)
    good = {**HARMFUL, "bad": 1.0}
    assert measured(bench, good)["bad"].weight == 0.0
    assert not bench.orders(Note)
    assert measured(bench, good)["bad"].weight == 1.0
    assert [note.text for note in bench.orders(Note)] == ["bad counts again"]
    assert isinstance(outcome_of(bench, "bad"), Fold)


def test_a_low_score_lowers_the_weight(shard_bench: Any) -> None:
    bench = with_scores(shard_bench, "weigh")
    measured(bench, HARMFUL)
    measured(bench, HARMFUL)
    assert outcome_of(bench, "bad").discount == WEIGHT_MIN
    assert outcome_of(bench, "c").discount == 1.0
    for _ in range(4):
        measured(bench, {**HARMFUL, "bad": 0.25})
    fold = outcome_of(bench, "bad")
    assert fold.discount == pytest.approx(0.25 / 0.9 / 0.5)
    assert "its weight is 0.56 of the usual, because its score is 0.28" in fold.why


def test_scores_are_only_shown(shard_bench: Any) -> None:
    bench = with_scores(shard_bench, "show")
    measured(bench, HARMFUL)
    assert measured(bench, HARMFUL)["bad"].weight == 1.0
    assert outcome_of(bench, "bad").discount == 1.0


def test_fewer_than_half_of_the_learners_are_excluded(shard_bench: Any) -> None:
    """Otherwise the median could be that of a bad learner."""
    bench = with_scores(shard_bench)
    measured(bench, HARMFUL)
    measured(bench, HARMFUL)
    weights = []
    for _ in range(4):
        found = measured(bench, {"a": 1.0, "b": -1.0, "c": 1.0, "bad": 1.0})
        weights.append([name for name in NAMES if found[name].weight == 0.0])
    assert weights == [["bad"], [], ["b"], ["b"]]


@pytest.mark.parametrize(
    "gains",
    [
        {"a": 1.0, "bad": -1.0},
        {**HARMFUL, "bad": float("nan")},
        {"a": -1.0, "b": -0.1, "c": -2.0, "bad": 1.0},
        {"a": 1.0, "b": 0.2, "c": 3.0, "bad": -1.0},
        {"a": 1.0, "b": 1.0, "stranger": 1.0},
    ],
    ids=["two learners", "not finite", "the median does not help", "chance", "an unknown learner"],
)
def test_gains_that_say_nothing_change_nothing(shard_bench: Any, gains: dict[str, float]) -> None:
    bench = with_scores(shard_bench)
    for _ in range(3):
        assert not measured(bench, gains)
    assert not bench.machine.state.scores


def test_only_an_observer_scores(shard_bench: Any) -> None:
    bench = with_scores(shard_bench)
    for _ in range(3):
        assert not measured(bench, HARMFUL, sender="a")
    assert not bench.machine.state.scores


def test_a_restarted_shard_has_the_scores(shard_bench: Any) -> None:
    bench = with_scores(shard_bench)
    measured(bench, HARMFUL)
    measured(bench, HARMFUL)
    memory = remembered(bench.machine.state)
    fresh = with_scores(shard_bench)
    recall(fresh.machine.state, decode(encode(memory), [ShardMemory]))
    assert fresh.machine.state.scores == bench.machine.state.scores
    assert isinstance(outcome_of(fresh, "bad"), Drop)


def test_the_evaluator_sends_gains_to_every_shard(learner_bench: Any) -> None:
    bench = learner_bench("observer", fragments=2, shards=2)
    orders = bench.handle(GainsMeasured(4, (("a", 1.0),)))
    assert [each.message for each in orders] == [Gains(4, (("a", 1.0),))] * 2
    assert len({each.peer for each in orders}) == 2
