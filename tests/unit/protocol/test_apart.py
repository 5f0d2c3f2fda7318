"""Who trains on alone while its link is down, for more steps than count, drops that (ours).

H is 4, and steps of two periods count: nine are too many.
"""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.draining import drained
from decoupled_diloco.protocol.effects import Apply, SendBody, Snapshot
from decoupled_diloco.protocol.events import BodyEncoded, Connected, DrainAsked, Lost, Paused
from decoupled_diloco.protocol.messages import Decline, Draining, Ending, Outcome, Pull, Welcome
from decoupled_diloco.protocol.peers import shard_peer
from decoupled_diloco.protocol.versions import Asking

HELD, NEXT, BEFORE, NEWEST = Version(1, 0), Version(1, 1), Version(1, 2), Version(1, 3)
ASK, LATER = Asking(1, 1), Asking(1, 2)


def alone(learner_bench: Any, steps: int, **options: Any) -> Any:
    """It has trained for so many steps while its link was down, and that is here again."""
    bench = learner_bench(counter_cap_periods=2, **options)
    bench.told(Paused())
    return cut(bench, steps)


def cut(bench: Any, steps: int) -> Any:
    bench.told(Lost(shard_peer(0)))
    for _ in range(steps):
        bench.step()
    bench.told(Connected(shard_peer(0)))
    step = bench.machine.state.step
    bench.hear(Welcome(0, 1, step, step, step, news=1))
    return bench


def pulled(bench: Any, base: Version, *, ask: Asking = ASK, final: bool = False) -> Any:
    """It is asked for a contribution, and steps."""
    tick = bench.machine.state.step
    pull = Pull(0, ask, base, tick, "bf16", bench.machine.options.alignment, "/up", final=final)
    answers = bench.hear(pull)
    answers += bench.told(Paused()) if final else bench.step()
    bench.effects = answers
    return bench


@pytest.mark.parametrize(
    ("missed", "steps", "mode"),
    [("overwrite", 8, "rebase"), ("overwrite", 9, "overwrite"), ("rebase", 9, "rebase")],
)
def test_it_drops_what_it_trained_alone(
    learner_bench: Any, missed: str, steps: int, mode: str
) -> None:
    """It has become another model: its change would throw the run far back."""
    bench = alone(learner_bench, steps, missed=missed)
    bench.publish(NEWEST, BEFORE)
    bench.fetched(NEWEST)
    bench.told(Paused())
    (applied,) = bench.orders(Apply)
    tokens = 10 * steps if mode == "overwrite" else 0
    assert (applied.mode, applied.discarded_tokens) == (mode, tokens)
    pulled(bench, NEWEST)
    (body,) = bench.orders(SendBody)
    assert body.steps in ((1,) if mode == "overwrite" else (steps, steps + 1))


def test_it_contributes_nothing_before_the_copy_is_here(learner_bench: Any) -> None:
    """Its shard takes what was made from an older version as well, up to 32 versions late."""
    bench = alone(learner_bench, 9)
    bench.publish(NEWEST, BEFORE)
    pulled(bench, HELD)
    assert bench.messages(Decline)
    assert not bench.orders(SendBody)
    bench.fetched(NEWEST)
    pulled(bench, HELD, ask=LATER)
    assert bench.messages(Decline)
    assert not bench.orders(SendBody)
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 110)


def test_a_pull_that_waits_is_not_answered_before_the_copy_is_applied(learner_bench: Any) -> None:
    bench = alone(learner_bench, 9)
    bench.hear(Pull(0, ASK, HELD, 100, "bf16", "overwrite", "/up", final=False))
    bench.publish(NEWEST, BEFORE)
    bench.fetched(NEWEST)
    bench.step()
    assert not bench.orders(SendBody)
    assert bench.orders(Apply)[0].mode == "overwrite"


def test_nor_is_one_before_the_next_boundary_at_which_the_model_has_gone_on(
    learner_bench: Any,
) -> None:
    bench = alone(learner_bench, 9)
    bench.hear(Pull(0, ASK, HELD, 100, "bf16", "overwrite", "/up", final=False))
    bench.publish(NEWEST, BEFORE)
    bench.step()
    assert bench.messages(Decline)
    assert not bench.orders(SendBody)


@pytest.mark.parametrize("counter", [0, 1])
def test_where_the_fragment_has_not_gone_on_it_is_a_long_contribution(
    learner_bench: Any, counter: int
) -> None:
    """The shard was out of reach of all: dropping that would throw away what all have trained."""
    bench = alone(learner_bench, 40)
    if counter:
        bench.publish(Version(1, counter), Version(1, counter - 1))
    pulled(bench, HELD)
    (body,) = bench.orders(SendBody)
    assert body.steps in (40, 41)


@pytest.mark.parametrize("flaps", [False, True])
def test_a_slow_link_drops_nothing(learner_bench: Any, *, flaps: bool) -> None:
    """It is not apart: it hears all that its shard says, but for an instant."""
    bench = learner_bench(counter_cap_periods=2)
    bench.told(Paused())
    for _ in range(20):
        bench.step()
    bench.publish(BEFORE, NEXT)
    if flaps:
        cut(bench, 1)
    for _ in range(20):
        bench.step()
    bench.publish(NEWEST, BEFORE)
    pulled(bench, HELD)
    assert bench.orders(SendBody)[0].steps >= 40


@pytest.mark.parametrize(("second", "apart"), [(4, False), (5, True)])
def test_several_cuts_add_up(learner_bench: Any, second: int, *, apart: bool) -> None:
    bench = cut(alone(learner_bench, 4), second)
    bench.publish(NEWEST, BEFORE)
    pulled(bench, HELD)
    assert bool(bench.messages(Decline)) is apart
    assert bool(bench.orders(SendBody)) is not apart


def test_who_leaves_does_not_tell_of_what_it_will_drop(learner_bench: Any) -> None:
    bench = alone(learner_bench, 9)
    bench.publish(NEWEST, BEFORE)
    bench.told(DrainAsked("it goes"))
    (draining,) = bench.messages(Draining)
    assert draining.fragments == ()
    assert drained(bench.machine.state, bench.machine.options)


@pytest.mark.parametrize("alignment", ["overwrite", "carry", "blend"])
@pytest.mark.parametrize("outcome", ["lost", "accepted", "still under way"])
def test_what_it_had_sent_before_is_no_reason_to_keep_the_rest(
    learner_bench: Any, alignment: str, outcome: str
) -> None:
    bench = learner_bench(counter_cap_periods=2, alignment=alignment)
    bench.step()
    pulled(bench, HELD)
    assert bench.orders(SendBody)
    bench.told(BodyEncoded(0, ASK, "digest"))
    if outcome == "accepted":
        bench.hear(Outcome(0, ASK, "accepted", "it is folded", NEXT))
    bench.told(Lost(shard_peer(0)))
    for _ in range(9):
        bench.step()
    bench.told(Connected(shard_peer(0)))
    asks = (ASK,) if outcome == "still under way" else ()
    bench.hear(Welcome(0, 1, 9, 9, 9, news=1, asks=asks))
    bench.publish(NEWEST, BEFORE)
    bench.fetched(NEWEST)
    bench.step()
    (applied,) = bench.orders(Apply)
    sent = 0 if outcome == "lost" else 10
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 110 - sent)


def test_what_was_apart_when_all_ends_is_dropped_as_well(learner_bench: Any) -> None:
    """The model that all have made is the result."""
    bench = alone(learner_bench, 9)
    bench.publish(NEWEST, BEFORE)
    bench.hear(Ending())
    pulled(bench, HELD, final=True)
    (declined,) = bench.messages(Decline)
    assert declined.nothing_new
    assert not bench.orders(Snapshot)


@pytest.mark.parametrize("verdict", ["accepted", "refused", None])
def test_what_it_sends_before_the_model_has_gone_on(
    learner_bench: Any, verdict: str | None
) -> None:
    """If that is accepted it is no longer apart; if not, it still has all that it trained alone."""
    bench = alone(learner_bench, 9, alignment="carry")
    pulled(bench, HELD)
    assert bench.orders(SendBody)
    if verdict:
        version = NEWEST if verdict == "accepted" else None
        bench.hear(Outcome(0, ASK, verdict, "the shard says so", version))
    bench.publish(NEWEST, BEFORE)
    if verdict == "refused":
        pulled(bench, HELD, ask=LATER)
        assert not bench.orders(SendBody)
    bench.fetched(NEWEST)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert applied.mode == ("carry" if verdict == "accepted" else "overwrite")
