"""Rounds with secure sums at a shard: the cohort, dropouts at each stage, and the end (rule 24)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Asking,
    Decline,
    Done,
    EndOrdered,
    Failed,
    Fold,
    ForgetFolded,
    ForgetSum,
    Holding,
    Leave,
    Lost,
    Made,
    Merge,
    Outcome,
    PassOn,
    Pull,
    Received,
    RoundFinished,
    Send,
    SumClaim,
    SumOpening,
    SumShares,
    Unexpect,
    relay_peer,
)
from decoupled_diloco.protocol.rounds import ANSWER_SECONDS
from unit.protocol.shard_rounds import DELIVERY_SECONDS, Site, opened, outcomes, states, tick_at

SECURE = {"threshold": 2, "quorum": 2, "late": "drop"}


class Sum:
    """An open round with a secure sum."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.asks: dict[str, Asking] = {
            learner: ask.name for learner, ask in bench.machine.state.fragments[0].asks.items()
        }

    def claim(self, *learners: str, **fields: Any) -> None:
        for learner in learners:
            counters = {"steps": 2, "tokens": 20, **fields}
            self.bench.handle(Received(learner, SumClaim(0, self.asks[learner], **counters)))

    def share(self, *learners: str) -> None:
        for learner in learners:
            self.bench.handle(Received(learner, SumShares(0, self.asks[learner])))

    def deliver(self, *learners: str) -> None:
        for learner in learners:
            self.bench.body(learner, ask=self.asks[learner])

    def answer(self, *learners: str) -> None:
        for learner in learners:
            self.bench.handle(Received(learner, SumOpening(0, self.asks[learner])))

    def complete(self, *learners: str) -> Merge:
        """Take all steps with the same learners, and return the order to merge."""
        for step in (self.claim, self.share, self.deliver, self.answer):
            step(*learners)
        (merge,) = self.bench.orders(Merge)
        return merge

    @property
    def step(self) -> tuple[str, list[str]] | None:
        """The step that the last event passed on, and the members that received it."""
        orders = self.bench.orders(PassOn)
        if not orders:
            return None
        (order,) = orders
        assert [name for name, _ in order.members] == sorted(name for name, _ in order.members)
        return order.step, [name for name, _ in order.members]


@pytest.fixture
def begin(shard_bench: Any) -> Any:
    def begin(*learners: str, **options: Any) -> Sum:
        return Sum(opened(shard_bench, *learners, **{**SECURE, **options}))

    return begin


def test_rule_24_the_four_steps_of_a_sum(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b")
    assert sums.step is None, "the cohort is fixed when all requested learners have claimed"
    sums.claim("c")
    assert sums.step == ("share", ["a", "b", "c"])
    sums.share("a", "b", "c")
    assert sums.step == ("mask", ["a", "b", "c"])
    sums.deliver("a", "b", "c")
    assert sums.step == ("open", ["a", "b", "c"])
    assert not sums.bench.orders(Merge)
    sums.answer("a")
    assert not sums.bench.orders(Merge), "two of three are needed"
    sums.answer("c")
    (merge,) = sums.bench.orders(Merge)
    sums.bench.handle(Done(merge, Made("digest")))
    assert outcomes(sums.bench) == [("a", "accepted"), ("b", "accepted"), ("c", "accepted")]


def test_rule_24_a_learner_that_does_not_claim_in_time_contributes_next_time(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b")
    tick_at(sums.bench, sums.bench.now + DELIVERY_SECONDS)
    assert sums.step == ("share", ["a", "b"])
    assert outcomes(sums.bench) == [("c", "abandoned")]
    assert [order.why for order in sums.bench.orders(Unexpect)] == [
        "the cohort of its round is fixed"
    ]
    sums.claim("c")
    assert sums.step is None, "a late claim is ignored"


def test_rule_24_a_learner_that_was_left_out_is_waited_for(begin: Any) -> None:
    sums = begin("a", "b", "c", overlap=1)
    sums.bench.machine.state.fragments[0].missed = {"c"}
    sums.claim("a", "b")
    tick_at(sums.bench, sums.bench.now + 1.0)
    assert sums.step is None
    sums.claim("c")
    assert sums.step == ("share", ["a", "b", "c"])


def test_rule_24_it_is_not_waited_for_forever(begin: Any) -> None:
    sums = begin("a", "b", "c", overlap=1)
    sums.bench.machine.state.fragments[0].missed = {"c"}
    sums.claim("a", "b")
    began = sums.bench.now
    tick_at(sums.bench, began + 1.0)
    assert sums.step is None
    tick_at(sums.bench, began + ANSWER_SECONDS)
    assert sums.step == ("share", ["a", "b"])


@pytest.mark.parametrize("learner", ["a", "c"])
def test_rule_24_a_dropout_before_the_shares(begin: Any, learner: str) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b", "c")
    others = sorted({"a", "b", "c"} - {learner})
    sums.share(*others)
    assert sums.step is None
    sums.bench.handle(Received(learner, Leave("it leaves")))
    assert sums.step == ("mask", others)


def test_rule_24_a_silent_member_is_not_waited_for_beyond_the_time_to_answer(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b", "c")
    sums.share("a", "b")
    tick_at(sums.bench, sums.bench.now + ANSWER_SECONDS + 0.1)
    assert sums.step == ("mask", ["a", "b"])
    assert outcomes(sums.bench) == [("c", "abandoned")]


def test_rule_24_a_dropout_before_its_payload(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b", "c")
    sums.share("a", "b", "c")
    sums.deliver("a", "b")
    tick_at(sums.bench, sums.bench.now + DELIVERY_SECONDS + 0.1)
    assert sums.step == ("open", ["a", "b"])
    assert outcomes(sums.bench) == [("c", "abandoned")]
    sums.deliver("c")
    assert not sums.bench.orders(Fold), "its payload is of no use any more"


def test_rule_24_a_survivor_may_leave_before_the_sum_is_opened(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b", "c")
    sums.share("a", "b", "c")
    sums.deliver("a", "b", "c")
    sums.bench.handle(Received("c", Leave("it leaves")))
    sums.answer("a", "b")
    (merge,) = sums.bench.orders(Merge)
    sums.bench.handle(Done(merge, Made("digest")))
    (finished,) = sums.bench.orders(RoundFinished)
    assert states(finished) == dict.fromkeys("abc", "folded")


@pytest.mark.parametrize("stage", ["shares", "masks", "opening"])
def test_rule_24_with_too_few_members_the_round_is_abandoned(begin: Any, stage: str) -> None:
    sums = begin("a", "b", "c", threshold=3, quorum=3)
    sums.claim("a", "b", "c")
    if stage != "shares":
        sums.share("a", "b", "c")
    if stage == "opening":
        sums.deliver("a", "b", "c")
        sums.answer("a", "b")
    sums.bench.handle(Received("c", Leave("it leaves")))
    (finished,) = sums.bench.orders(RoundFinished)
    assert (finished.verdict, finished.reason) == (
        "abandoned",
        "too few learners remain for the sum",
    )
    assert {("a", "abandoned"), ("b", "abandoned")} <= set(outcomes(sums.bench))
    assert sums.bench.orders(ForgetSum)
    assert not sums.bench.machine.state.fragments[0].made, "their training may be requested again"
    assert not sums.bench.machine.state.fragments[0].present


def test_rule_24_the_cohort_has_at_least_the_threshold(begin: Any) -> None:
    sums = begin("a", "b", "c", threshold=3, quorum=3)
    sums.claim("a", "b")
    tick_at(sums.bench, sums.bench.now + DELIVERY_SECONDS)
    assert sums.step is None
    sums.bench.handle(Received("c", Decline(0, sums.asks["c"], True, "nothing new")))
    assert not sums.bench.orders(PassOn)


def test_rule_24_a_sum_needs_more_than_half_of_its_cohort(begin: Any) -> None:
    """Otherwise two halves could open a learner's two secrets."""
    sums = begin("a", "b", "c", "d")
    sums.claim("a", "b", "c", "d")
    sums.share("a", "b", "c", "d")
    sums.deliver("a", "b")
    tick_at(sums.bench, sums.bench.now + DELIVERY_SECONDS + 0.1)
    assert sums.step is None
    sums.deliver("c")
    assert sums.step == ("open", ["a", "b", "c"])


def test_rule_24_no_member_is_asked_outside_of_the_round(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b", "c")
    for _ in range(2):
        sums.bench.step("a")
        assert not [o for o in sums.bench.orders(Send) if isinstance(o.message, Pull)]


def test_rule_24_a_merge_that_fails_is_repeated_from_the_start(begin: Any) -> None:
    sums = begin("a", "b")
    merge = sums.complete("a", "b")
    sums.bench.handle(Failed(merge, "a mask is left in it"))
    assert outcomes(sums.bench) == [("a", "abandoned"), ("b", "abandoned")]
    tick_at(sums.bench, sums.bench.now + 1.1)
    again = Sum(sums.bench)
    assert again.asks.keys() == {"a", "b"}
    assert all(again.asks[name] > sums.asks[name] for name in again.asks)


def test_rule_24_the_closing_sweep_is_a_sum_too(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a")
    sums.bench.handle(Received(COORDINATOR, EndOrdered()))
    final = Sum(sums.bench)
    assert final.asks.keys() == {"a", "b", "c"}
    final.claim("a", "b", "c")
    assert final.step == ("share", ["a", "b", "c"])


def test_rule_24_a_claim_without_training_is_refused(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", tokens=0)
    assert outcomes(sums.bench) == [("a", "refused")]
    sums.claim("b", "c")
    assert sums.step == ("share", ["b", "c"])


def test_rule_24_a_sum_that_cannot_be_opened_is_abandoned(begin: Any) -> None:
    sums = begin("a", "b", "c")
    sums.claim("a", "b", "c")
    sums.share("a", "b", "c")
    sums.deliver("a", "b", "c")
    sums.bench.handle(Lost("a"))
    sums.bench.handle(Lost("b"))
    sums.answer("c")
    (finished,) = sums.bench.orders(RoundFinished)
    assert finished.verdict == "abandoned", "one of three cannot open the sum"


def test_rule_24_a_relay_forgets_the_contributions_to_an_abandoned_sum(shard_bench: Any) -> None:
    site = Site(shard_bench, "a1", "a2", **SECURE | {"quorum": 3, "threshold": 3})
    sums = Sum(site.bench)
    sums.claim("direct", "a1", "a2")
    sums.share("direct", "a1", "a2")
    site.body("a1")
    site.bench.handle(Received("direct", Leave("it leaves")))
    assert site.to_relays(ForgetFolded).keys() == {relay_peer("site-a")}
    assert {("a1", "abandoned"), ("a2", "abandoned")} <= set(outcomes(site.bench))


def test_outcomes_are_sent_for_each_ask(begin: Any) -> None:
    sums = begin("a", "b")
    merge = sums.complete("a", "b")
    sums.bench.handle(Done(merge, Made("digest")))
    assert {m.ask for m in sums.bench.messages(Outcome)} == set(sums.asks.values())


def test_rule_24_a_claim_counts_for_its_own_request_only(shard_bench: Any) -> None:
    """The learner has reconnected, and its second request may not have reached it."""
    bench = shard_bench("a", "b", "c", "slow", **{**SECURE, "fragments": 1, "period": 2})
    for learner in ("a", "b", "c", "slow", "a", "b", "c"):
        bench.step(learner)
    first = Sum(bench)
    first.claim("a", "b", "c")
    version = bench.machine.state.fragments[0].version
    bench.greet("a", run_step=2, held=(Holding(0, version, "digest"),))
    second = Sum(bench)
    assert second.asks["a"] > first.asks["a"]
    tick_at(bench, bench.now + 2 * DELIVERY_SECONDS)
    assert second.step == ("share", ["b", "c"])


def test_rule_24_a_round_without_a_cohort_is_abandoned_and_due_again(begin: Any) -> None:
    """It would keep the learners that have claimed from other rounds."""
    sums = begin("a", "b", "c", threshold=3, quorum=3)
    sums.claim("a", "b")
    tick_at(sums.bench, sums.bench.now + ANSWER_SECONDS + 0.1)
    (finished,) = sums.bench.orders(RoundFinished)
    assert finished.reason == "too few learners remain for the sum"
    for learner in "abc":
        sums.bench.step(learner)
    assert Sum(sums.bench).asks.keys() == {"a", "b", "c"}


def test_rule_26_a_learner_on_probation_is_in_no_cohort(begin: Any) -> None:
    sums = begin("a", "b", "c", probation_periods=100)
    sums.bench.machine.state.members["a"].is_fresh = True
    sums.claim("a", "b", "c")
    assert sums.step == ("share", ["b", "c"])
