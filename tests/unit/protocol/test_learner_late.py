"""One learner whose contributions take longer than their rounds (rules 4, 6 and 7)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.copies import UNDER_WAY
from decoupled_diloco.protocol.leaving import drained
from decoupled_diloco.protocol.messages import (
    Apply,
    Asking,
    BodyEncoded,
    Connected,
    CopyDeclined,
    CopyWanted,
    Decline,
    Ending,
    EndTraining,
    Failed,
    Finished,
    GivenUp,
    Hello,
    Hold,
    Lost,
    Note,
    Outcome,
    Paused,
    Pull,
    Release,
    RunOver,
    SendBody,
    SendCopy,
    Snapshot,
    SumStep,
    TakeStep,
    Upload,
    Welcome,
    shard_peer,
)
from unit.protocol.conftest import send_of

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
    """Return a learner that holds version 1.0 and has taken steps of ten tokens."""
    bench = learner_bench(**options)
    bench.handle(Paused())
    for _ in range(steps):
        bench.step()
    return bench


def take(bench: Any, version: Version, base: Version) -> Any:
    """A newer copy is announced, fetched, and applied after one more step."""
    bench.publish(version, base)
    bench.fetched(version)
    bench.step()
    (applied,) = bench.orders(Apply)
    return applied


def late(learner_bench: Any, *, alignment: str = "overwrite", **options: Any) -> Any:
    """Its snapshot of step 4 is in progress while it applies 1.1, without it, in step 7."""
    bench = started(learner_bench, **options)
    bench.receive(pull(alignment=alignment))
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
def test_rule_7_a_contribution_in_progress_counts_as_participation(
    learner_bench: Any, alignment: str, discarded: int, left: int
) -> None:
    """Rule 4: what was sent is neither kept nor discarded, so nothing is merged twice."""
    bench = late(learner_bench, alignment=alignment, missed="rebase")
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == (alignment, discarded)
    assert applied.why == UNDER_WAY
    assert bench.machine.state.tokens_of(view(bench)) == left
    assert bench.machine.state.discarded_tokens == discarded
    assert list(view(bench).late) == [FIRST]
    assert view(bench).sent is None


def test_rule_7_a_second_contribution_is_sent_while_the_first_is_in_progress(
    learner_bench: Any,
) -> None:
    """Rule 4: it counts only the training since the first one's snapshot."""
    bench = late(learner_bench, alignment="carry")
    bench.receive(pull(SECOND, V1, 8))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.ask, body.steps, body.tokens) == (SECOND, 4, 40)
    take(bench, V2, V1)
    assert list(view(bench).late) == [FIRST, SECOND]


def test_rule_4_an_accepted_late_contribution_is_merged(learner_bench: Any) -> None:
    """Rule 4: its outcome names the version that contains it; nothing was lost."""
    bench = late(learner_bench)
    before = bench.machine.state.discarded_tokens
    bench.receive(outcome("accepted", version=V2))
    assert not view(bench).late
    assert view(bench).merged_step == 4
    assert bench.machine.state.discarded_tokens == before
    applied = take(bench, V2, V1)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 10), "1.1 does not contain it"


@pytest.mark.parametrize("verdict", ["refused", "behind", "abandoned"])
def test_rule_7_a_late_contribution_that_is_not_merged_counts_as_discarded(
    learner_bench: Any, verdict: str
) -> None:
    """Rule 7: discarded training is counted; it is in no parameters any more."""
    bench = late(learner_bench, alignment="carry")
    assert bench.machine.state.discarded_tokens == 0
    bench.receive(outcome(verdict))
    assert not view(bench).late
    assert bench.machine.state.discarded_tokens == 40
    assert view(bench).merged_step == 0


def test_rule_4_a_refused_contribution_stays_in_the_parameters(
    learner_bench: Any,
) -> None:
    """Rule 4: it goes out with the next contribution."""
    bench = started(learner_bench, missed="rebase")
    bench.receive(pull())
    bench.receive(outcome("refused"))
    applied = take(bench, V1, V0)
    assert (applied.mode, applied.discarded_tokens) == ("rebase", 0)
    assert bench.machine.state.tokens_of(view(bench)) == 50
    assert not view(bench).late


def test_rule_7_a_missed_version_overwrites_a_learner_without_training(learner_bench: Any) -> None:
    """`rebase` would keep what `blend` has left of merged training, also at the run's end."""
    bench = started(learner_bench, steps=0, missed="rebase", alignment="blend")
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(Paused())
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 0)


def test_rule_4_a_contribution_whose_values_are_unfit_is_not_kept_to_be_refused_again(
    learner_bench: Any,
) -> None:
    """Every fragment must eventually receive contributions from every learner."""
    bench = started(learner_bench, missed="rebase")
    bench.receive(pull())
    bench.receive(outcome("unfit"))
    applied = take(bench, V1, V0)
    assert (applied.mode, applied.discarded_tokens) == ("overwrite", 50)
    assert take(bench, V2, V1).mode == "rebase"


@pytest.mark.parametrize("alignment", ["carry", "blend"])
def test_rule_7_what_is_not_finite_is_not_carried_on_while_the_next_contribution_is_under_way(
    learner_bench: Any, alignment: str
) -> None:
    """Subtracting from NaN gives NaN, so what was sent is still in the parameters."""
    bench = late(learner_bench, alignment=alignment)
    bench.receive(pull(SECOND, V1, 8, alignment=alignment))
    bench.step()
    bench.receive(outcome("unfit"))
    assert view(bench).sent is not None
    applied = take(bench, V2, V1)
    assert (applied.mode, list(view(bench).late)) == ("overwrite", [SECOND])
    assert bench.machine.state.tokens_of(view(bench)) == 0


def test_rule_12_a_step_that_ends_when_all_is_over_waits_for_no_copy(learner_bench: Any) -> None:
    """The learner started in the last moment: the last copy's shard ends before it sends it."""
    bench = started(learner_bench, steps=0)
    bench.publish(V1, V0)
    bench.receive(Finished())
    bench.handle(Lost("shard-0"))
    assert bench.orders(RunOver)
    assert view(bench).fetching == V1
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode, applied.discarded_tokens) == (V0, "overwrite", 10)


def test_rule_4_a_contribution_to_an_abandoned_round_is_neither_repeated_nor_lost(
    learner_bench: Any,
) -> None:
    """Rule 4: the round was abandoned; the contribution stays the fragment's."""
    bench = started(learner_bench, period=1)
    bench.receive(pull())
    bench.receive(GivenUp(0, "because"))
    bench.step()
    assert not bench.orders(Snapshot), "the snapshot that was sent is still needed"
    bench.receive(outcome("accepted", version=V1))
    applied = take(bench, V1, V0)
    assert applied.why == "its contribution is in this version"
    assert applied.discarded_tokens == 20


def test_rule_4_no_step_waits_for_an_abandoned_round(learner_bench: Any) -> None:
    """Rule 4: a synchronous learner steps on, and sends nothing new."""
    bench = started(learner_bench, steps=2, wait="at_overlap", period=2, overlap=1)
    bench.receive(pull(tick=2))
    bench.step()
    assert bench.orders(Hold)
    bench.receive(GivenUp(0, "because"))
    assert bench.orders(Release)
    assert view(bench).sent is not None


def test_rule_4_a_request_outlives_its_abandoned_round(
    learner_bench: Any,
) -> None:
    """Rule 4: its loop was stalled while the round was abandoned; the request remains open."""
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9))
    bench.receive(GivenUp(0, "because"))
    bench.step()
    assert [body.ask for body in bench.orders(SendBody)] == [FIRST]


def test_rule_4_a_request_that_the_shard_closed_is_not_answered(learner_bench: Any) -> None:
    """Rule 4: after its outcome, the learner sends nothing for it."""
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9))
    bench.receive(outcome("refused"))
    bench.step()
    assert not bench.orders(SendBody)


def test_rule_4_a_request_is_answered_before_the_next_copy_is_applied(learner_bench: Any) -> None:
    """Rule 4: otherwise a learner with steps longer than the delivery window never takes part."""
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9))
    assert not bench.orders(SendBody)
    applied = take(bench, V1, V0)
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps, body.tokens) == (V0, 2, 20)
    assert bench.effects.index(body) < bench.effects.index(applied)
    assert (applied.mode, applied.discarded_tokens, applied.why) == ("overwrite", 0, UNDER_WAY)
    assert not bench.messages(Decline)


def staged_beyond(learner_bench: Any, versions: int, **options: Any) -> Any:
    """A request waits while a copy that is this many versions newer is staged; then a step ends."""
    bench = started(learner_bench, steps=1, **options)
    bench.receive(pull(tick=9))
    for counter in range(versions):
        bench.publish(Version(1, counter + 1), Version(1, counter))
        bench.fetched(Version(1, counter + 1))
    bench.step()
    assert [order.version for order in bench.orders(Apply)] == [Version(1, versions)]
    return bench


def test_rule_3_a_learner_with_steps_of_several_periods_takes_part(learner_bench: Any) -> None:
    """Rule 3: every fragment must receive contributions from every learner, however late."""
    bench = staged_beyond(learner_bench, 3, late_rounds_max=3)
    assert [body.base for body in bench.orders(SendBody)] == [V0]
    assert not bench.messages(Decline)


@pytest.mark.parametrize("options", [{"late": "drop"}, {"late_rounds_max": 2}])
def test_rule_4_a_contribution_that_would_be_too_late_is_not_sent(
    learner_bench: Any, options: dict[str, Any]
) -> None:
    """Rule 4: it is declined as behind, and uses no bandwidth."""
    bench = staged_beyond(learner_bench, 3, **options)
    assert not bench.orders(SendBody)
    assert [message.reason for message in bench.messages(Decline)] == ["behind: it holds 1.3"]


def test_rule_10_a_copy_of_another_term_is_applied_before_the_answer(learner_bench: Any) -> None:
    """Rule 10: an earlier process sent the request; the present one waits for nothing."""
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9))
    take(bench, Version(2, 1), V0)
    assert not bench.orders(SendBody)


def test_rule_4_a_closing_request_is_not_answered_before_the_end(learner_bench: Any) -> None:
    """Rule 12: the last contribution waits for the last step."""
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9, final=True))
    take(bench, V1, V0)
    assert not bench.orders(SendBody)


def test_rule_4_a_request_from_before_the_end_is_answered_at_the_end(learner_bench: Any) -> None:
    """Rule 12: its loop has taken no step since; the shard waits for it."""
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9))
    bench.receive(Ending())
    bench.step()
    assert bench.orders(EndTraining)
    assert [body.ask for body in bench.orders(SendBody)] == [FIRST]


def test_rule_4_announced_fragments_are_snapshotted_ahead(learner_bench: Any) -> None:
    """Rule 4: a learner with a backlog keeps its link busy until the next boundary."""
    bench = started(learner_bench, fragments=4, period=100, steps=1)
    bench.receive(pull(tick=2, coming=(2, 3)))
    bench.step()
    assert [order.fragment for order in bench.orders(Snapshot)] == [0, 2, 3]
    bench.receive(pull(SECOND, tick=3, fragment=2))
    assert [body.fragment for body in bench.orders(SendBody)] == [2], "at once"


def test_an_announcement_follows_the_digest(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.receive(pull())
    assert not bench.messages(Upload)
    bench.handle(BodyEncoded(0, FIRST, "digest"))
    assert bench.messages(Upload) == [Upload(0, FIRST, V0, 4, 40, "digest")]
    bench.handle(BodyEncoded(0, SECOND, "digest"))
    assert not bench.messages(Upload), "of nothing that was sent"


def test_a_late_payload_is_also_announced(learner_bench: Any) -> None:
    bench = late(learner_bench)
    bench.handle(BodyEncoded(0, FIRST, "digest"))
    assert [message.ask for message in bench.messages(Upload)] == [FIRST]


def reconnected(bench: Any, *asks: Asking) -> tuple[Asking, ...]:
    """Break the connection; the welcome lists these requests. Return those of the hello."""
    bench.handle(Lost("shard-0"))
    bench.handle(Connected("shard-0"))
    (hello,) = bench.messages(Hello)
    bench.receive(Welcome(0, 1, 4, 4, 4, asks=asks))
    return hello.asks


def both_under_way(learner_bench: Any) -> Any:
    """Return a learner with a late contribution and one made from the held version."""
    bench = late(learner_bench, alignment="carry")
    bench.handle(BodyEncoded(0, FIRST, "first"))
    bench.receive(pull(SECOND, V1, 8, alignment="carry"))
    bench.step()
    assert bench.orders(SendBody)
    bench.handle(BodyEncoded(0, SECOND, "second"))
    return bench


def test_a_greeting_lists_contributions_in_progress(learner_bench: Any) -> None:
    bench = both_under_way(learner_bench)
    assert reconnected(bench, FIRST, SECOND) == (FIRST, SECOND)


def test_a_greeting_omits_failed_and_merged_contributions(learner_bench: Any) -> None:
    bench = both_under_way(learner_bench)
    bench.handle(Failed(send_of(0, FIRST), "reset"))
    bench.receive(outcome("accepted", SECOND, V2))
    assert reconnected(bench) == ()


def test_what_the_shard_waits_for_is_announced_again(learner_bench: Any) -> None:
    """The announcement may have been lost with the connection, and the payload needs it."""
    bench = both_under_way(learner_bench)
    reconnected(bench, FIRST, SECOND)
    assert [(m.ask, m.digest) for m in bench.messages(Upload)] == [
        (FIRST, "first"),
        (SECOND, "second"),
    ]
    assert list(view(bench).late) == [FIRST]
    assert not view(bench).sent.lost
    assert bench.machine.state.discarded_tokens == 0


def test_a_contribution_is_announced_once_it_is_encoded(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.receive(pull())
    reconnected(bench, FIRST)
    assert not bench.messages(Upload)
    bench.handle(BodyEncoded(0, FIRST, "digest"))
    assert bench.messages(Upload)


def test_a_late_contribution_unknown_to_the_shard_is_lost(learner_bench: Any) -> None:
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
def test_a_contribution_unknown_to_the_shard_may_be_merged(
    learner_bench: Any, alignment: str, discarded: int, left: int
) -> None:
    """Its outcome may be lost with the link: it is dropped, and never merged twice."""
    bench = started(learner_bench, missed="rebase")
    bench.receive(pull(alignment=alignment))
    reconnected(bench)
    assert bench.machine.state.discarded_tokens == 0, "it is still in the parameters"
    applied = take(bench, V1, V0)
    assert (applied.mode, applied.discarded_tokens) == (alignment, discarded)
    assert applied.why == f"its contribution may be in this version ({FIRST})"
    assert bench.machine.state.tokens_of(view(bench)) == left
    assert not view(bench).late, "no outcome of it will come"


def test_a_leaving_learner_waits_for_the_outcome_of_a_late_contribution(learner_bench: Any) -> None:
    bench = late(learner_bench)
    state, options = bench.machine.state, bench.machine.options
    assert state.steps_of(view(bench)) == 0
    assert not drained(state, options)
    bench.receive(outcome("accepted", version=V2))
    assert drained(state, options)


def test_rule_4_an_outcome_of_the_shards_next_life_is_not_that_of_the_one_before(
    learner_bench: Any,
) -> None:
    """Each process of a shard numbers its requests from 1: their names contain the term.

    What was sent to the first process may be in the version from which the second one starts.
    """
    bench = started(learner_bench, missed="rebase")
    bench.receive(pull(FIRST))
    bench.handle(Lost("shard-0"))
    bench.handle(Connected("shard-0"))
    bench.receive(Welcome(0, 2, 4, 4, 4, 1))
    later = Version(2, 1)
    bench.publish(later, V1)
    again = Asking(2, FIRST.number)
    bench.receive(pull(again, later))
    bench.receive(outcome("refused", again))
    bench.fetched(later)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert applied.mode == "overwrite"
    assert applied.why == f"its contribution may be in this version ({FIRST})"


SECURE = {"threshold": 2, "quorum": 2, "late": "drop"}


def test_rule_24_each_step_of_a_sum_is_taken(learner_bench: Any) -> None:
    bench = started(learner_bench, **SECURE)
    bench.receive(pull())
    assert bench.orders(SendBody)
    for step in ("share", "mask", "open"):
        bench.receive(SumStep(0, FIRST, step))
        (taken,) = bench.orders(TakeStep)
        assert (taken.fragment, taken.ask, taken.step) == (0, FIRST, step)
    bench.receive(SumStep(0, SECOND, "share"))
    assert not bench.orders(TakeStep), "it takes no part in that sum"


def test_rule_24_training_that_was_masked_in_vain_is_kept(learner_bench: Any) -> None:
    bench = started(learner_bench, **SECURE)
    bench.receive(pull())
    bench.receive(outcome("abandoned"))
    assert take(bench, V1, V0).mode == "rebase"
    assert bench.machine.state.discarded_tokens == 0
    assert bench.machine.state.steps_of(bench.machine.state.fragments[0]) == 5


def test_rule_24_training_that_was_not_sent_survives_a_lost_connection(learner_bench: Any) -> None:
    """Only a claim was sent, so no version can contain it."""
    bench = started(learner_bench, **SECURE)
    bench.receive(pull())
    bench.handle(Lost(shard_peer(0)))
    bench.handle(Connected(shard_peer(0)))
    bench.receive(Welcome(0, 1, 4, 4, 4, 0, ()))
    assert take(bench, V1, V0).mode == "rebase"
    assert bench.machine.state.discarded_tokens == 0


def test_rule_24_a_step_that_fails_declines_the_request(learner_bench: Any) -> None:
    bench = started(learner_bench, **SECURE)
    bench.receive(pull())
    bench.receive(SumStep(0, FIRST, "share"))
    (taken,) = bench.orders(TakeStep)
    bench.handle(Failed(taken, "its key was swapped"))
    (note,) = bench.orders(Note)
    assert (note.why, note.warns) == ("its key was swapped", True)
    (declined,) = bench.messages(Decline)
    assert declined.reason == "its key was swapped"
    bench.receive(SumStep(0, FIRST, "mask"))
    assert not bench.orders(TakeStep)


def test_rule_24_a_learner_shares_no_parameters_once_the_run_has_weights(
    learner_bench: Any,
) -> None:
    """A shard could compute its contribution from them, even before its first step."""
    bench = started(learner_bench, steps=0, **SECURE)
    bench.receive(CopyWanted(0, 1, None, "/copy"))
    assert not bench.orders(SendCopy)
    (declined,) = bench.messages(CopyDeclined)
    assert declined.reason == "it shares only published copies in a run with secure sums"
    bench.receive(CopyWanted(0, 2, V0, "/copy"))
    assert bench.orders(SendCopy), "the published copy is known anyway"
    fresh = learner_bench(**SECURE)
    fresh.machine.state.fragments[0].held = None
    fresh.receive(CopyWanted(0, 1, None, "/copy"))
    assert fresh.orders(SendCopy), "the run begins with it"


def opened(learner_bench: Any) -> Any:
    """Return a learner that has sent its shares for the sum with its first four steps."""
    bench = started(learner_bench, **SECURE)
    bench.receive(pull())
    for step in ("share", "mask", "open"):
        bench.receive(SumStep(0, FIRST, step))
    return bench


@pytest.mark.parametrize("second_pull", [False, True])
def test_rule_24_training_of_an_opened_sum_is_in_no_other_one(
    learner_bench: Any, second_pull: bool
) -> None:
    """The difference of two sums with the same training could be one contribution."""
    bench = opened(learner_bench)
    if not second_pull:
        bench.receive(outcome("abandoned"))
    bench.receive(pull(SECOND))
    assert not bench.orders(SendBody)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode, applied.discarded_tokens) == (V0, "carry", 40)
    (sent,) = bench.orders(SendBody)
    assert (sent.ask, sent.steps, sent.tokens) == (SECOND, 1, 10), "only the steps since"


def test_rule_24_a_restarted_shard_gets_no_training_of_an_opened_sum(learner_bench: Any) -> None:
    bench = opened(learner_bench)
    bench.publish(Version(2, 0), V0, difference="")
    bench.step()
    assert [order.mode for order in bench.orders(Apply)] == ["carry"]
    bench.receive(pull(SECOND, Version(2, 0)))
    bench.step()
    (sent,) = bench.orders(SendBody)
    assert sent.steps < 4
