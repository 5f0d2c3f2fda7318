"""One learner whose contributions take longer than their rounds (rules 4, 6 and 7)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.draining import drained
from decoupled_diloco.protocol.effects import (
    Apply,
    EndTraining,
    Hold,
    Release,
    RunOver,
    SendBody,
    Snapshot,
)
from decoupled_diloco.protocol.events import BodyEncoded, Connected, Lost, Paused, UploadFailed
from decoupled_diloco.protocol.learner_fragments import UNDER_WAY
from decoupled_diloco.protocol.messages import (
    Decline,
    Ending,
    Finished,
    GivenUp,
    Hello,
    Outcome,
    Pull,
    Upload,
    Welcome,
)
from decoupled_diloco.protocol.versions import Asking

V0, V1, V2 = (Version(1, counter) for counter in range(3))
FIRST, SECOND = Asking(1, 11), Asking(1, 12)


def pull(
    ask: Asking = FIRST,
    base: Version = V0,
    tick: int = 4,
    *,
    fragment: int = 0,
    final: bool = False,
    alignment: Any = "overwrite",
    coming: tuple[int, ...] = (),
) -> Pull:
    return Pull(fragment, ask, base, tick, "bf16", alignment, "/up", final, coming)


def outcome(verdict: Any, ask: Asking = FIRST, version: Version | None = None) -> Outcome:
    return Outcome(0, ask, verdict, "because", version)


def started(learner_bench: Any, steps: int = 4, **options: Any) -> Any:
    """A learner that holds version 1.0 and has made some steps of ten tokens."""
    bench = learner_bench(**options)
    bench.told(Paused())
    for _ in range(steps):
        bench.step()
    return bench


def take(bench: Any, version: Version, base: Version) -> Any:
    """A newer copy is told of, fetched, and applied after one more step."""
    bench.publish(version, base)
    bench.fetched(version)
    bench.step()
    (applied,) = bench.orders(Apply)
    return applied


def late(learner_bench: Any, *, alignment: str = "overwrite", **options: Any) -> Any:
    """Its snapshot of step 4 is under way while it applies 1.1, which is without it, in step 7."""
    bench = started(learner_bench, **options)
    bench.hear(pull(alignment=alignment))
    assert bench.orders(SendBody), "answered at once"
    bench.step()
    bench.step()
    take(bench, V1, V0)
    return bench


def view(bench: Any) -> Any:
    return bench.machine.state.fragments[0]


@pytest.mark.parametrize(
    ("alignment", "discarded", "left"),
    [("overwrite", 30, 0), ("carry", 0, 30), ("blend", 0, 30)],
)
def test_rule_7_what_is_under_way_counts_as_part_taken(
    learner_bench: Any, alignment: str, discarded: int, left: int
) -> None:
    """Rule 4: so that nothing is merged twice: what was sent is neither kept nor thrown away."""
    bench = late(learner_bench, alignment=alignment, missed="rebase")
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == (alignment, discarded)
    assert applied.why == UNDER_WAY
    assert bench.machine.state.tokens_of(view(bench)) == left
    assert bench.machine.state.discarded_tokens == discarded
    assert list(view(bench).late) == [FIRST]
    assert view(bench).sent is None


def test_rule_7_a_second_contribution_is_sent_while_the_first_is_under_way(
    learner_bench: Any,
) -> None:
    """Rule 4: it counts what was trained since the first one's snapshot, and no more."""
    bench = late(learner_bench, alignment="carry")
    bench.hear(pull(SECOND, V1, 8))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.ask, body.steps, body.tokens) == (SECOND, 4, 40)
    take(bench, V2, V1)
    assert list(view(bench).late) == [FIRST, SECOND]


def test_rule_4_a_late_contribution_that_is_accepted_is_merged(learner_bench: Any) -> None:
    """Rule 4: its outcome names the version that it went into; nothing was lost."""
    bench = late(learner_bench)
    before = bench.machine.state.discarded_tokens
    bench.hear(outcome("accepted", version=V2))
    assert not view(bench).late
    assert view(bench).merged_step == 4
    assert bench.machine.state.discarded_tokens == before
    applied = take(bench, V2, V1)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 10), "it is no part of 1.1"


@pytest.mark.parametrize("verdict", ["refused", "behind", "abandoned"])
def test_rule_7_a_late_contribution_that_is_not_merged_counts_as_discarded(
    learner_bench: Any, verdict: str
) -> None:
    """Rule 7: what is thrown away is counted: it is in no parameters any more."""
    bench = late(learner_bench, alignment="carry")
    assert bench.machine.state.discarded_tokens == 0
    bench.hear(outcome(verdict))
    assert not view(bench).late
    assert bench.machine.state.discarded_tokens == 40
    assert view(bench).merged_step == 0


def test_rule_4_a_contribution_that_is_refused_before_the_next_version_is_kept_here(
    learner_bench: Any,
) -> None:
    """Rule 4: it is in the parameters, and goes with what is trained on."""
    bench = started(learner_bench, missed="rebase")
    bench.hear(pull())
    bench.hear(outcome("refused"))
    applied = take(bench, V1, V0)
    assert (applied.mode, applied.discarded_tokens) == ("rebase", 0)
    assert bench.machine.state.tokens_of(view(bench)) == 50
    assert not view(bench).late


def test_rule_4_a_contribution_whose_values_are_unfit_is_not_kept_to_be_refused_again(
    learner_bench: Any,
) -> None:
    """Every fragment must come to hear every learner."""
    bench = started(learner_bench, missed="rebase")
    bench.hear(pull())
    bench.hear(outcome("unfit"))
    applied = take(bench, V1, V0)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 50)
    assert take(bench, V2, V1).mode == "rebase"


@pytest.mark.parametrize("alignment", ["carry", "blend"])
def test_rule_7_what_is_not_finite_is_not_carried_on_while_the_next_contribution_is_under_way(
    learner_bench: Any, alignment: str
) -> None:
    """Nothing can be subtracted from NaN, so what was sent is in the parameters still."""
    bench = late(learner_bench, alignment=alignment)
    bench.hear(pull(SECOND, V1, 8, alignment=alignment))
    bench.step()
    bench.hear(outcome("unfit"))
    assert view(bench).sent is not None
    applied = take(bench, V2, V1)
    assert (applied.mode, list(view(bench).late)) == ("overwrite", [SECOND])
    assert bench.machine.state.tokens_of(view(bench)) == 0


def test_rule_12_a_step_that_ends_when_all_is_over_waits_for_no_copy(learner_bench: Any) -> None:
    """A learner that began in the last moment: the last copy's shard is gone before it comes."""
    bench = started(learner_bench, steps=0)
    bench.publish(V1, V0)
    bench.hear(Finished())
    bench.told(Lost("shard-0"))
    assert bench.orders(RunOver)
    assert view(bench).fetching == V1
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode, applied.discarded_tokens) == (V0, "overwrite", 10)


def test_rule_4_what_was_sent_to_a_round_that_was_given_up_is_neither_sent_again_nor_lost(
    learner_bench: Any,
) -> None:
    """Rule 4: the round was given up; the contribution stays the fragment's."""
    bench = started(learner_bench, period=1)
    bench.hear(pull())
    bench.hear(GivenUp(0, "because"))
    bench.step()
    assert not bench.orders(Snapshot), "the one that was sent is still needed"
    bench.hear(outcome("accepted", version=V1))
    applied = take(bench, V1, V0)
    assert applied.why == "its contribution is in this version"
    assert applied.discarded_tokens == 20


def test_rule_4_nobody_waits_for_a_round_that_was_given_up(learner_bench: Any) -> None:
    """Rule 4: the contribution follows; a synchronous learner steps on, and sends nothing new."""
    bench = started(learner_bench, steps=2, wait="at_overlap", period=2, overlap=1)
    bench.hear(pull(tick=2))
    bench.step()
    assert bench.orders(Hold)
    bench.hear(GivenUp(0, "because"))
    assert bench.orders(Release)
    assert view(bench).sent is not None


def test_rule_4_a_pull_is_still_to_be_answered_after_its_round_is_given_up(
    learner_bench: Any,
) -> None:
    """Rule 4: its loop stood still while the round was given up; the asking goes on."""
    bench = started(learner_bench, steps=1)
    bench.hear(pull(tick=9))
    bench.hear(GivenUp(0, "because"))
    bench.step()
    assert [body.ask for body in bench.orders(SendBody)] == [FIRST]


def test_rule_4_a_pull_that_the_shard_gave_up_is_not_answered(learner_bench: Any) -> None:
    """Rule 4: told at last why, it sends nothing to nobody."""
    bench = started(learner_bench, steps=1)
    bench.hear(pull(tick=9))
    bench.hear(outcome("refused"))
    bench.step()
    assert not bench.orders(SendBody)


def test_rule_4_a_pull_is_answered_before_the_next_copy_is_taken(learner_bench: Any) -> None:
    """Rule 4: who needs longer for a step than the delivery window would never be heard."""
    bench = started(learner_bench, steps=1)
    bench.hear(pull(tick=9))
    assert not bench.orders(SendBody)
    applied = take(bench, V1, V0)
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps, body.tokens) == (V0, 2, 20)
    assert bench.effects.index(body) < bench.effects.index(applied)
    assert (applied.mode, applied.discarded_tokens, applied.why) == ("overwrite", 0, UNDER_WAY)
    assert not bench.messages(Decline)


def staged_beyond(learner_bench: Any, versions: int, **options: Any) -> Any:
    """A pull waits while a copy is staged that is so many versions newer; then a step ends."""
    bench = started(learner_bench, steps=1, **options)
    bench.hear(pull(tick=9))
    for counter in range(versions):
        bench.publish(Version(1, counter + 1), Version(1, counter))
        bench.fetched(Version(1, counter + 1))
    bench.step()
    assert [order.version for order in bench.orders(Apply)] == [Version(1, versions)]
    return bench


def test_rule_3_who_needs_several_periods_for_a_step_is_heard_as_well(learner_bench: Any) -> None:
    """Rule 3: every fragment must come to hear every learner; its answer is as late as that."""
    bench = staged_beyond(learner_bench, 3, late_rounds_max=3)
    assert [body.base for body in bench.orders(SendBody)] == [V0]
    assert not bench.messages(Decline)


@pytest.mark.parametrize("options", [{"late": "drop"}, {"late_rounds_max": 2}])
def test_rule_4_what_would_be_refused_as_late_is_not_sent(
    learner_bench: Any, options: dict[str, Any]
) -> None:
    """Rule 4: it is declined as behind, and costs no link."""
    bench = staged_beyond(learner_bench, 3, **options)
    assert not bench.orders(SendBody)
    assert [message.reason for message in bench.messages(Decline)] == ["behind: I hold 1.3"]


def test_rule_10_a_copy_of_another_term_is_no_reason_to_answer_first(learner_bench: Any) -> None:
    """Rule 10: the shard's earlier life has asked; the present one waits for nothing."""
    bench = started(learner_bench, steps=1)
    bench.hear(pull(tick=9))
    take(bench, Version(2, 1), V0)
    assert not bench.orders(SendBody)


def test_rule_4_a_closing_pull_is_not_answered_before_the_end(learner_bench: Any) -> None:
    """Rule 12: the last contribution waits for the last step."""
    bench = started(learner_bench, steps=1)
    bench.hear(pull(tick=9, final=True))
    take(bench, V1, V0)
    assert not bench.orders(SendBody)


def test_rule_4_a_pull_from_before_the_end_is_answered_at_the_end(learner_bench: Any) -> None:
    """Rule 12: its loop has made no step since; the shard waits for it."""
    bench = started(learner_bench, steps=1)
    bench.hear(pull(tick=9))
    bench.hear(Ending())
    bench.step()
    assert bench.orders(EndTraining)
    assert [body.ask for body in bench.orders(SendBody)] == [FIRST]


def test_rule_4_what_comes_next_is_snapshotted_ahead(learner_bench: Any) -> None:
    """Rule 4: a learner in arrears is told; its link does not stand idle until a boundary."""
    bench = started(learner_bench, fragments=4, period=100, steps=1)
    bench.hear(pull(tick=2, coming=(2, 3)))
    bench.step()
    assert [order.fragment for order in bench.orders(Snapshot)] == [0, 2, 3]
    bench.hear(pull(SECOND, tick=3, fragment=2))
    assert [body.fragment for body in bench.orders(SendBody)] == [2], "at once"


def test_an_announcement_follows_the_digest(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.hear(pull())
    assert not bench.messages(Upload)
    bench.told(BodyEncoded(0, FIRST, "digest"))
    assert bench.messages(Upload) == [Upload(0, FIRST, V0, 4, 40, "digest")]
    bench.told(BodyEncoded(0, SECOND, "digest"))
    assert not bench.messages(Upload), "of nothing that was sent"


def test_a_late_body_is_announced_as_well(learner_bench: Any) -> None:
    bench = late(learner_bench)
    bench.told(BodyEncoded(0, FIRST, "digest"))
    assert [message.ask for message in bench.messages(Upload)] == [FIRST]


def reconnected(bench: Any, *asks: Asking) -> tuple[Asking, ...]:
    """The connection breaks; the welcome names these askings. What the hello has named."""
    bench.told(Lost("shard-0"))
    bench.told(Connected("shard-0"))
    (hello,) = bench.messages(Hello)
    bench.hear(Welcome(0, 1, 4, 4, 4, asks=asks))
    return hello.asks


def both_under_way(learner_bench: Any) -> Any:
    """A late contribution and one made from the version that is held."""
    bench = late(learner_bench, alignment="carry")
    bench.told(BodyEncoded(0, FIRST, "first"))
    bench.hear(pull(SECOND, V1, 8, alignment="carry"))
    bench.step()
    assert bench.orders(SendBody)
    bench.told(BodyEncoded(0, SECOND, "second"))
    return bench


def test_a_greeting_names_what_is_under_way(learner_bench: Any) -> None:
    bench = both_under_way(learner_bench)
    assert reconnected(bench, FIRST, SECOND) == (FIRST, SECOND)


def test_a_greeting_does_not_name_what_failed_or_is_merged(learner_bench: Any) -> None:
    bench = both_under_way(learner_bench)
    bench.told(UploadFailed(0, FIRST, "reset"))
    bench.hear(outcome("accepted", SECOND, V2))
    assert reconnected(bench) == ()


def test_what_the_shard_waits_for_is_announced_again(learner_bench: Any) -> None:
    """The announcement may have gone with the connection; the body alone says too little."""
    bench = both_under_way(learner_bench)
    reconnected(bench, FIRST, SECOND)
    assert [(m.ask, m.digest) for m in bench.messages(Upload)] == [
        (FIRST, "first"),
        (SECOND, "second"),
    ]
    assert list(view(bench).late) == [FIRST]
    assert not view(bench).sent.lost
    assert bench.machine.state.discarded_tokens == 0


def test_what_is_not_encoded_yet_is_announced_when_it_is(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.hear(pull())
    reconnected(bench, FIRST)
    assert not bench.messages(Upload)
    bench.told(BodyEncoded(0, FIRST, "digest"))
    assert bench.messages(Upload)


def test_a_late_contribution_that_the_shard_does_not_know_is_lost(learner_bench: Any) -> None:
    """Rule 7: it is counted as discarded, once."""
    bench = both_under_way(learner_bench)
    reconnected(bench, SECOND)
    assert [message.ask for message in bench.messages(Upload)] == [SECOND]
    assert not view(bench).late
    assert bench.machine.state.discarded_tokens == 40
    reconnected(bench, SECOND)
    assert bench.machine.state.discarded_tokens == 40


@pytest.mark.parametrize(
    ("alignment", "discarded", "left"), [("overwrite", 50, 0), ("carry", 40, 10)]
)
def test_a_contribution_that_the_shard_does_not_know_may_be_merged(
    learner_bench: Any, alignment: str, discarded: int, left: int
) -> None:
    """Its outcome may have gone with the link: it is given up, and never merged twice."""
    bench = started(learner_bench, missed="rebase")
    bench.hear(pull(alignment=alignment))
    reconnected(bench)
    assert bench.machine.state.discarded_tokens == 0, "it is still in the parameters"
    applied = take(bench, V1, V0)
    assert (applied.mode, applied.discarded_tokens) == (alignment, discarded)
    assert applied.why == f"what it sent as {FIRST} may be in it"
    assert bench.machine.state.tokens_of(view(bench)) == left
    assert not view(bench).late, "no outcome of it will come"


def test_who_goes_waits_for_what_becomes_of_a_late_contribution(learner_bench: Any) -> None:
    bench = late(learner_bench)
    state, options = bench.machine.state, bench.machine.options
    assert state.steps_of(view(bench)) == 0
    assert not drained(state, options)
    bench.hear(outcome("accepted", version=V2))
    assert drained(state, options)


def test_rule_4_an_outcome_of_the_shards_next_life_is_not_that_of_the_one_before(
    learner_bench: Any,
) -> None:
    """Each life counts its askings from 1: names have the term in them.

    What was sent to the first life may be in the version that the second one begins with.
    """
    bench = started(learner_bench, missed="rebase")
    bench.hear(pull(FIRST))
    bench.told(Lost("shard-0"))
    bench.told(Connected("shard-0"))
    bench.hear(Welcome(0, 2, 4, 4, 4, 1))
    later = Version(2, 1)
    bench.publish(later, V1)
    again = Asking(2, FIRST.number)
    bench.hear(pull(again, later))
    bench.hear(outcome("refused", again))
    bench.fetched(later)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert applied.mode == "overwrite"
    assert applied.why == f"what it sent as {FIRST} may be in it"
