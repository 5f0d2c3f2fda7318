"""Rule 23: devices contribute from older versions, once, and fetch differences at each visit."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.leaving import drained
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Apply,
    Asking,
    Began,
    BodyEncoded,
    Connected,
    DrainAsked,
    Fetch,
    Fold,
    Hello,
    Holding,
    KeptFragment,
    Leave,
    Merge,
    Paused,
    PlaceGiven,
    PlaceLost,
    PlaceReturned,
    PlaceWanted,
    Published,
    Pull,
    Receipt,
    Received,
    SendBody,
    Settle,
    StepReport,
    VisitEnded,
    Welcome,
    shard_peer,
)
from decoupled_diloco.protocol.wire import decode, encode

OPTIONS: dict[str, Any] = {
    "fragments": 1,
    "period": 4,
    "overlap": 0,
    "grace_margin": 0.0,
    "participants": "own",
    "missed": "rebase",
    "quorum": 2,
    "history": 2,
    "chain": 3,
    "late_discount": "polynomial",
}
LEAVE = Leave("it has contributed")
V0, V1, V2 = Version(1, 0), Version(1, 1), Version(1, 2)


def visit(bench: Any, learner: str, epoch: int, held: Version, again: int = 0) -> list[Any]:
    """A device that has trained alone for four steps comes back."""
    member = bench.machine.state.members.get(learner)
    if member is not None:
        bench.handle(Received(learner, LEAVE))
    holding = Holding(0, held, again=again)
    effects = bench.greet(learner, epoch, step=4, held=(holding,), trained=(0,))
    report = Received(learner, StepReport(4, 40, 0.0))
    asked = list(bench.effects)
    bench.handle(report)
    bench.effects = asked
    return effects


def merge_once(bench: Any, *learners: str, epoch: int) -> None:
    """Devices contribute from the newest version, and a version is merged."""
    newest = bench.machine.state.fragments[0].version
    for learner in learners:
        visit(bench, learner, epoch, newest)
        bench.body(learner, epoch=epoch, steps=4, tokens=40)
    bench.merged()


def test_a_fragment_merges_when_the_contributions_of_k_learners_have_arrived(
    shard_bench: Any,
) -> None:
    """Rule 23: the buffer of FedBuff. The learners may be gone by then."""
    bench = shard_bench("a", "b", "c", **OPTIONS)
    visit(bench, "a", 2, V0)
    bench.body("a", epoch=2, steps=4, tokens=40)
    assert bench.orders(Fold)
    assert not bench.orders(Merge)
    visit(bench, "b", 2, V0)
    bench.body("b", epoch=2, steps=4, tokens=40)
    (merge,) = bench.orders(Merge)
    assert merge.why == "contributions of 2 learners have arrived"


def test_a_shard_confirms_a_folded_contribution_to_a_device(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", **OPTIONS)
    visit(bench, "a", 2, V0)
    ask = bench.ask("a")
    bench.body("a", epoch=2, steps=4, tokens=40)
    assert bench.messages(Receipt) == [Receipt(0, ask)]


def test_what_a_device_trained_is_requested_before_anything_newer_is_announced(
    shard_bench: Any,
) -> None:
    bench = shard_bench("a", "b", "c", **OPTIONS)
    merge_once(bench, "a", "b", epoch=2)
    visit(bench, "c", 2, V0)
    kinds = [type(getattr(effect, "message", None)) for effect in bench.effects]
    assert kinds.index(Pull) < kinds.index(Published)
    assert [pull.base for pull in bench.messages(Pull)] == [V0]


@pytest.mark.parametrize(
    ("versions", "discount"), [(0, 1.0), (1, 2**-0.5), (2, 3**-0.5), (3, None)]
)
def test_an_old_base_counts_less_and_counts_nothing_beyond_the_history(
    shard_bench: Any, versions: int, discount: float | None
) -> None:
    """Rule 23: w·(1+s)^-0.5 for s versions, and nothing for more than ``history``."""
    bench = shard_bench("a", "b", "c", **OPTIONS)
    for number in range(versions):
        merge_once(bench, "a", "b", epoch=2 + number)
    visit(bench, "c", 2, V0)
    assert bench.requested() == ([] if discount is None else ["c"])
    if discount is not None:
        bench.body("c", epoch=2, steps=4, tokens=40)
        assert [fold.discount for fold in bench.orders(Fold)] == [pytest.approx(discount)]


def test_the_discount_may_shrink_the_change_instead_of_the_weight(shard_bench: Any) -> None:
    """FedBuff: the change of a contribution that is s versions late is multiplied by (1+s)^-0.5."""
    bench = shard_bench("a", "b", "c", **OPTIONS, discount_of="change")
    merge_once(bench, "a", "b", epoch=2)
    visit(bench, "c", 2, V0)
    bench.body("c", epoch=2, steps=4, tokens=40)
    folds = [(fold.scale, fold.discount) for fold in bench.orders(Fold)]
    assert folds == [(pytest.approx(2**-0.5), 1.0)]


def test_a_device_that_comes_back_with_an_older_checkpoint_is_not_merged_twice(
    shard_bench: Any,
) -> None:
    """It lost power after its upload, and its checkpoint is from before."""
    bench = shard_bench("a", "b", "c", **OPTIONS)
    visit(bench, "c", 2, V0)
    bench.body("c", epoch=2, steps=4, tokens=40)
    visit(bench, "c", 3, V0)
    assert bench.requested() == []
    merge_once(bench, "a", epoch=2)
    assert bench.machine.state.fragments[0].version == V1
    bench.machine.handle(bench.now, Received("c", LEAVE))
    merge_once(bench, "a", "b", epoch=3)
    visit(bench, "c", 4, V0)
    assert bench.requested() == [], "the shard remembers it although it left before the merge"


def test_a_device_may_contribute_again_from_the_same_version(shard_bench: Any) -> None:
    """It started from the version again, and says so; it is one learner for the quorum."""
    bench = shard_bench("a", "b", **OPTIONS)
    for again in range(3):
        visit(bench, "a", 2 + again, V0, again)
        assert bench.requested() == ["a"]
        bench.body("a", epoch=2 + again, steps=4, tokens=40)
        assert bench.orders(Fold)
        assert not bench.orders(Merge)


def test_a_visit_announces_a_chain_of_differences(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", **OPTIONS)
    for number in range(2):
        merge_once(bench, "a", "b", epoch=2 + number)
    bench.greet("c", 2, held=(Holding(0, V0),))
    found = [(each.base, each.version) for each in bench.messages(Published)]
    assert found == [(V0, V1), (V1, V2)]
    (welcome,) = bench.messages(Welcome)
    assert welcome.news == 2


def test_beyond_the_chain_a_visit_announces_the_newest_version_only(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", "c", **OPTIONS | {"chain": 1})
    for number in range(2):
        merge_once(bench, "a", "b", epoch=2 + number)
    bench.greet("c", 2, held=(Holding(0, V0),))
    assert [each.version for each in bench.messages(Published)] == [V2]


def test_steps_alone_do_not_move_the_clock_but_their_tokens_count(shard_bench: Any) -> None:
    bench = shard_bench("a", "b", **OPTIONS)
    visit(bench, "a", 2, V0)
    assert (bench.machine.state.clock, bench.machine.state.tokens) == (0, 40)


def test_steps_alone_are_limited_by_the_time_that_a_device_was_away(shard_bench: Any) -> None:
    bench = shard_bench("a", **OPTIONS)
    bench.now = 1000.0
    bench.greet("a", 2, step=10**6)
    assert bench.machine.state.members["a"].step == 100 + 10 * 1000


# The device


def returned(bench: Any, *, steps: int = 4, again: int = 0) -> None:
    """A device comes back with its checkpoint, before any shard has answered."""
    kept = KeptFragment(0, V0, steps, 10 * steps, "digest-1.0", "seal-1.0", again)
    bench.handle(Began((kept,), "its own checkpoint", steps_alone=steps, tokens_alone=10 * steps))


def device(learner_bench: Any, **options: Any) -> Any:
    """A bench without any message so far."""
    bench = learner_bench(begin=False, **OPTIONS | options)
    bench.machine = type(bench.machine)(bench.machine.options, "me", 2, "nonce-2")
    return bench


def pulled(bench: Any, base: Version = V0, number: int = 9) -> None:
    bench.receive(Pull(0, Asking(1, number), base, 0, "bf16", "overwrite", "/up", False, ()))


def test_a_device_reports_what_it_trained_and_answers_from_its_old_version(
    learner_bench: Any,
) -> None:
    bench = device(learner_bench)
    returned(bench)
    bench.handle(Connected(shard_peer(0)))
    (hello,) = bench.messages(Hello)
    assert (hello.step, hello.trained, hello.held) == (
        4,
        (0,),
        (Holding(0, V0, "digest-1.0", "seal-1.0"),),
    )
    bench.receive(Welcome(0, 1, 7, 4, 7, 1))
    assert bench.messages(StepReport) == [StepReport(4, 40, 0.0)]
    pulled(bench)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(Paused())
    assert [(each.base, each.steps, each.tokens) for each in bench.orders(SendBody)] == [
        (V0, 4, 40)
    ]
    assert [each.mode for each in bench.orders(Apply)] == ["overwrite"]


def test_training_older_than_the_history_is_dropped(learner_bench: Any) -> None:
    """Rule 23: the device starts from the newest copy."""
    bench = device(learner_bench)
    returned(bench)
    bench.handle(Connected(shard_peer(0)))
    bench.receive(Welcome(0, 1, 7, 4, 7, 1))
    bench.publish(Version(1, 3), V2)
    bench.fetched(Version(1, 3))
    bench.handle(Paused())
    assert [(each.mode, each.discarded_tokens) for each in bench.orders(Apply)] == [
        ("overwrite", 40)
    ]
    assert not bench.orders(SendBody)


def test_a_device_that_trains_fetches_nothing_newer_until_it_has_contributed(
    learner_bench: Any,
) -> None:
    bench = learner_bench(**OPTIONS)
    bench.handle(Paused())
    bench.step()
    bench.publish(V1, V0)
    assert not bench.orders(Fetch)
    pulled(bench)
    bench.step()
    assert bench.orders(SendBody)
    assert [each.version for each in bench.orders(Fetch)] == [V1]


def test_training_online_beyond_the_history_is_dropped(learner_bench: Any) -> None:
    bench = learner_bench(**OPTIONS)
    bench.handle(Paused())
    bench.step()
    for counter in range(1, 4):
        bench.publish(Version(1, counter), Version(1, counter - 1))
    assert bench.orders(Fetch), "nothing would be merged of it, so the device starts again"
    for counter in range(1, 4):
        bench.fetched(Version(1, counter))
    bench.handle(Paused())
    assert [(each.mode, each.discarded_tokens) for each in bench.orders(Apply)] == [
        ("overwrite", 10)
    ]


def test_a_device_starts_again_when_its_contribution_is_folded(learner_bench: Any) -> None:
    bench = learner_bench(**OPTIONS | {"error_feedback": True})
    bench.handle(Paused())
    bench.step()
    pulled(bench)
    bench.step()
    bench.handle(BodyEncoded(0, Asking(1, 9), "d"))
    bench.receive(Receipt(0, Asking(1, 9)))
    bench.handle(Paused())
    assert [(each.version, each.mode, each.discarded_tokens) for each in bench.orders(Apply)] == [
        (V0, "overwrite", 0)
    ]
    assert [(each.ask, each.gone) for each in bench.orders(Settle)] == [(Asking(1, 9), True)]
    assert [each.again for each in bench.messages(Holding)] == [1]


def test_a_device_that_leaves_does_not_wait_for_the_merge(learner_bench: Any) -> None:
    bench = learner_bench(**OPTIONS)
    bench.handle(Paused())
    bench.step()
    bench.handle(DrainAsked("its visit ends"))
    pulled(bench)
    bench.handle(Paused())
    state, options = bench.machine.state, bench.machine.options
    assert not drained(state, options)
    bench.receive(Receipt(0, Asking(1, 9)))
    bench.handle(Paused())
    assert drained(state, options)
    assert state.steps_of(state.fragments[0]) == 0


def test_with_synchronous_rounds_a_device_waits_until_its_round_has_merged(
    learner_bench: Any,
) -> None:
    bench = learner_bench(**OPTIONS | {"late": "drop", "history": 0})
    bench.handle(Paused())
    bench.step()
    bench.handle(DrainAsked("its visit ends"))
    pulled(bench)
    bench.handle(Paused())
    bench.receive(Receipt(0, Asking(1, 9)))
    bench.handle(Paused())
    assert not drained(bench.machine.state, bench.machine.options)


def test_a_device_without_a_place_fetches_nothing(learner_bench: Any) -> None:
    bench = learner_bench(begin=False, **OPTIONS | {"cohort": 1})
    bench.handle(Connected(COORDINATOR))
    assert bench.messages(PlaceWanted) == [PlaceWanted(False)]
    bench.publish(V0, None)
    assert not bench.orders(Fetch)
    bench.handle(Received(COORDINATOR, PlaceGiven(3, 60.0)))
    assert [each.version for each in bench.orders(Fetch)] == [V0]


def test_a_device_returns_its_place_once_it_has_contributed(learner_bench: Any) -> None:
    bench = learner_bench(begin=False, **OPTIONS | {"cohort": 1})
    bench.handle(Received(COORDINATOR, PlaceGiven(3, 60.0)))
    bench.publish(V0, None)
    bench.fetched(V0)
    bench.handle(Paused())
    bench.handle(VisitEnded())
    assert not bench.messages(PlaceReturned), "it keeps its place while it trains alone"
    bench.step()
    pulled(bench)
    bench.step()
    bench.receive(Receipt(0, Asking(1, 9)))
    bench.handle(VisitEnded())
    assert bench.messages(PlaceReturned) == [PlaceReturned(3)]


def test_a_device_that_has_lost_its_place_ends_its_visit(learner_bench: Any) -> None:
    bench = learner_bench(begin=False, **OPTIONS | {"cohort": 1})
    bench.handle(Received(COORDINATOR, PlaceGiven(3, 60.0)))
    bench.handle(Received(COORDINATOR, PlaceLost(2)))
    assert not bench.machine.state.visit_over
    bench.handle(Received(COORDINATOR, PlaceLost(3)))
    assert bench.machine.state.visit_over


def test_what_only_devices_report_costs_other_messages_nothing() -> None:
    """Tapes and messages of other learners are as they were before there were devices."""
    assert encode(Holding(0, V0)).keys() == {"type", "fragment", "version", "digest", "seal"}
    again = Holding(0, V0, again=2)
    assert decode(encode(again), (Holding,)) == again
