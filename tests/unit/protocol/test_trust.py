"""Learners that train badly: probation (rule 26)."""

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
    GivenUp,
    Merge,
    Outcome,
    Pull,
    Received,
    RoundFinished,
    StepReport,
    Version,
    Welcome,
    shard_peer,
)

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
