"""One learner: snapshots, requests, applying, waiting (rules 4 to 7)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import (
    Ahead,
    Apply,
    Asking,
    Connected,
    CopyDeclined,
    CopyWanted,
    Decline,
    Ending,
    EndTraining,
    Expelled,
    Failed,
    Fetch,
    Finished,
    GivenUp,
    Hello,
    Hold,
    Holding,
    Lost,
    Outcome,
    Paused,
    Pull,
    Ready,
    Refusal,
    Relabel,
    Release,
    RunOver,
    Send,
    SendBody,
    SendCopy,
    Shifted,
    Snapshot,
    StepReport,
    Tick,
    Welcome,
)
from unit.protocol.conftest import fetch_of, send_of

V0, V1, V2, V3 = (Version(1, counter) for counter in range(4))


def name(number: int = 1) -> Asking:
    """Return the name of the request with this number."""
    return Asking(1, 10 + number)


def pull(
    base: Version = V0,
    number: int = 1,
    tick: int = 4,
    *,
    final: bool = False,
    codec: str = "bf16",
    alignment: Any = "overwrite",
    coming: tuple[int, ...] = (),
) -> Pull:
    path = f"/up/{number}"
    return Pull(0, name(number), base, tick, codec, alignment, path, final, coming)


def outcome(verdict: Any, number: int = 1, version: Version | None = None) -> Outcome:
    return Outcome(0, name(number), verdict, "because", version)


def started(learner_bench: Any, steps: int = 4, **options: Any) -> Any:
    """Return a learner that has applied version 1.0 and taken steps of ten tokens."""
    bench = learner_bench(**options)
    bench.handle(Paused())
    for _ in range(steps):
        bench.step()
    return bench


def contributed(
    learner_bench: Any, more_steps: int = 2, *, alignment: str = "overwrite", **options: Any
) -> Any:
    """It sent its snapshot of step 4 to round 1, was accepted into 1.1, and stepped on."""
    bench = started(learner_bench, **options)
    bench.receive(pull(alignment=alignment))
    assert bench.orders(SendBody), "answered at once"
    for _ in range(more_steps):
        bench.step()
    bench.receive(outcome("accepted", version=V1))
    bench.publish(V1, V0)
    bench.fetched(V1)
    return bench


def test_training_may_start_when_every_fragment_has_arrived(learner_bench: Any) -> None:
    bench = learner_bench(begin=False, fragments=2)
    bench.publish(V0, None, 0)
    bench.fetched(V0, 0)
    assert not bench.orders(Ready)
    bench.publish(V0, None, 1)
    bench.fetched(V0, 1)
    assert bench.orders(Ready)
    bench.handle(Paused())
    assert [order.mode for order in bench.orders(Apply)] == ["overwrite", "overwrite"]


def test_a_greeting_lists_held_versions_and_the_step(learner_bench: Any) -> None:
    bench = started(learner_bench, steps=3)
    bench.handle(Lost("shard-0"))
    bench.step()
    bench.handle(Connected("shard-0"))
    (hello,) = bench.messages(Hello)
    assert (hello.step, hello.run_step) == (4, 4)
    assert hello.held == (Holding(0, V0, "digest-1.0", "seal-1.0"),), "as announced"


def test_a_welcome_counts_from_the_step_it_names(learner_bench: Any) -> None:
    """Steps that were taken while the welcome was in transit count as well."""
    bench = started(learner_bench, steps=3)
    bench.receive(Welcome(0, 1, 100, 1, 100))
    assert bench.machine.global_step == 102
    bench.receive(Shifted(5))
    assert bench.machine.global_step == 107


def test_a_final_refusal_expels(learner_bench: Any) -> None:
    bench = learner_bench()
    bench.receive(Refusal("busy", False))
    assert not bench.orders(Expelled)
    bench.receive(Refusal("an old incarnation", True))
    assert [order.reason for order in bench.orders(Expelled)] == ["an old incarnation"]


def test_a_learner_with_the_base_fetches_the_difference(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    (fetch,) = bench.orders(Fetch)
    assert (fetch.path, fetch.whole) == ("/d", False)


def test_a_learner_without_the_base_fetches_the_whole_copy_and_rebases(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.publish(V2, V1)
    (fetch,) = bench.orders(Fetch)
    assert (fetch.path, fetch.whole) == ("/w", True)
    bench.fetched(V2)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == ("rebase", 0)


def test_an_older_copy_is_ignored(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.publish(V2, V1)
    assert bench.publish(V1, V0) == []


def test_a_copy_of_an_older_term_is_ignored_however_high_its_counter(learner_bench: Any) -> None:
    """A replaced process of the shard may still send messages before it receives that."""
    bench = started(learner_bench)
    bench.publish(Version(2, 1), V0)
    bench.fetched(Version(2, 1))
    bench.step()
    assert bench.publish(Version(1, 99), Version(1, 98)) == []


def test_a_newer_copy_waits_until_the_fetch_is_over(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    assert not bench.publish(V2, V1)
    bench.fetched(V1)
    (fetch,) = bench.orders(Fetch)
    assert (fetch.version, fetch.whole) == (V2, False), "it follows the staged copy"


def test_a_failed_difference_is_fetched_whole_and_then_retried(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.handle(Failed(fetch_of(0, V1), "another digest"))
    assert [order.whole for order in bench.orders(Fetch)] == [True]
    bench.handle(Failed(fetch_of(0, V1), "gone"))
    assert not bench.orders(Fetch)
    bench.handle(Tick(), bench.machine.deadline())
    assert [order.whole for order in bench.orders(Fetch)] == [True]


def test_a_renamed_copy_is_relabelled_and_the_steps_are_kept(learner_bench: Any) -> None:
    bench = started(learner_bench)
    renamed = Version(2, 0)
    bench.publish(renamed, V0, difference="")
    assert [order.staged for order in bench.orders(Relabel)] == [False]
    assert not bench.orders(Fetch)
    bench.receive(pull(base=renamed))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.steps, body.base) == (5, renamed)


def test_a_staged_copy_that_is_renamed_still_contains_what_was_sent(learner_bench: Any) -> None:
    bench = contributed(learner_bench, alignment="carry")
    renamed = Version(2, 1)
    bench.publish(renamed, V1, difference="")
    assert [order.staged for order in bench.orders(Relabel)] == [True]
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.version, applied.mode) == (renamed, "carry")
    assert bench.machine.state.tokens_of(bench.machine.state.fragments[0]) == 30


def test_the_report_of_a_step_carries_counters(learner_bench: Any) -> None:
    bench = started(learner_bench, steps=1)
    bench.step()
    assert bench.messages(StepReport) == [StepReport(2, 20, 1.0)]


def test_the_snapshot_exists_when_the_request_arrives(learner_bench: Any) -> None:
    bench = started(learner_bench)
    assert bench.orders(Snapshot)
    bench.receive(pull())
    (body,) = bench.orders(SendBody)
    assert (body.steps, body.tokens, body.base) == (4, 40, V0)


def test_rule_4_the_request_names_codec_and_alignment(learner_bench: Any) -> None:
    """Rule 4: both are used, even if the answer has to wait for a snapshot."""
    bench = started(learner_bench, steps=1, alignment="overwrite")
    bench.receive(pull(tick=9, codec="fp32", alignment="carry"))
    bench.step()
    (body,) = bench.orders(SendBody)
    assert body.codec == "fp32"
    bench.step()
    bench.receive(outcome("accepted", version=V1))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == ("carry", 0)


def test_without_a_snapshot_it_is_taken_at_the_next_boundary(learner_bench: Any) -> None:
    bench = started(learner_bench, steps=1)
    bench.receive(pull(tick=9))
    bench.machine.state.fragments[0].snapshot = None
    bench.receive(pull(tick=9))
    assert not bench.orders(SendBody)
    bench.step()
    assert bench.orders(Snapshot)
    assert bench.orders(SendBody)


def test_rule_4_a_request_that_overtakes_the_broadcast_waits_for_it(learner_bench: Any) -> None:
    """Rule 4: it is answered against the version that it names, once that is held."""
    bench = started(learner_bench)
    bench.receive(pull(base=V1))
    assert not bench.effects
    bench.step()
    assert not bench.orders(SendBody)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    assert bench.orders(Apply)
    assert not bench.orders(SendBody), "no step since"
    bench.step()
    (body,) = bench.orders(SendBody)
    assert (body.base, body.steps) == (V1, 1)


def test_a_request_for_an_older_base_is_declined(learner_bench: Any) -> None:
    bench = contributed(learner_bench)
    bench.step()
    bench.receive(pull(base=V0, number=2))
    (declined,) = bench.messages(Decline)
    assert "behind" in declined.reason


def test_no_snapshot_replaces_one_that_was_sent(learner_bench: Any) -> None:
    """`carry` subtracts the merged snapshot, so it must still exist."""
    bench = started(learner_bench, period=1)
    bench.receive(pull())
    for _ in range(3):
        bench.step()
        assert not bench.orders(Snapshot)
    bench.receive(outcome("abandoned"))
    bench.step()
    assert bench.orders(Snapshot)


@pytest.mark.parametrize(
    ("alignment", "discarded", "left"),
    [("overwrite", 30, 0), ("carry", 0, 30), ("blend", 0, 30)],
)
def test_rule_7_a_contributor_applies_by_alignment(
    learner_bench: Any, alignment: str, discarded: int, left: int
) -> None:
    """Rule 7: overwrite, carry or blend; discarded tokens are counted."""
    bench = contributed(learner_bench, alignment=alignment)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == (alignment, discarded)
    assert bench.machine.state.tokens_of(bench.machine.state.fragments[0]) == left
    assert bench.machine.state.discarded_tokens == discarded
    assert bench.messages(Holding) == [Holding(0, V1, "digest-1.1", "seal-1.1")]
    assert not bench.machine.state.fragments[0].late, "it has its outcome"


@pytest.mark.parametrize(
    ("missed", "mode", "discarded", "left"),
    [("overwrite", "overwrite", 50, 0), ("rebase", "rebase", 0, 50)],
)
def test_rule_7_a_learner_that_took_no_part_applies_by_missed(
    learner_bench: Any, missed: str, mode: str, discarded: int, left: int
) -> None:
    """Rule 7: overwrite (paper), or rebase with the counters kept."""
    bench = started(learner_bench, missed=missed)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert (applied.mode, applied.discarded_tokens) == (mode, discarded)
    assert bench.machine.state.tokens_of(bench.machine.state.fragments[0]) == left


def test_rule_6_a_learner_that_is_behind_rebases(learner_bench: Any) -> None:
    """Rule 6: stale work never undoes newer work; it contributes next time."""
    bench = started(learner_bench)
    bench.receive(pull())
    bench.receive(outcome("behind"))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    assert [order.mode for order in bench.orders(Apply)] == ["rebase"]


@pytest.mark.parametrize(("missed", "mode"), [("overwrite", "overwrite"), ("rebase", "carry")])
def test_a_contribution_to_an_earlier_version_is_not_also_kept(
    learner_bench: Any, missed: str, mode: str
) -> None:
    bench = contributed(learner_bench, missed=missed)
    bench.publish(V2, V1)
    bench.fetched(V2)
    bench.step()
    assert [order.mode for order in bench.orders(Apply)] == [mode]


def test_a_repeated_request_for_the_held_version_voids_the_earlier_contribution(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench)
    bench.receive(pull())
    bench.handle(Lost("shard-0"))
    bench.handle(Connected("shard-0"))
    bench.receive(Welcome(0, 1, 4, 4, 4))
    bench.receive(pull(number=2))
    (body,) = bench.orders(SendBody)
    assert (body.ask, body.steps) == (name(2), 4)


def test_an_upload_that_failed_may_have_arrived(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.receive(pull())
    bench.handle(Failed(send_of(0, name()), "reset"))
    assert [message.ask for message in bench.messages(Decline)] == [name()]
    bench.receive(outcome("accepted", version=V1))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    (applied,) = bench.orders(Apply)
    assert applied.why == "its contribution is in this version"


def test_at_tau_applies_the_copy_tau_steps_after_the_snapshot(learner_bench: Any) -> None:
    bench = contributed(learner_bench, more_steps=0, apply="at_tau", overlap=3)
    for step in (5, 6):
        bench.step()
        assert not bench.orders(Apply), step
    bench.step()
    assert bench.orders(Apply)


def waiting(learner_bench: Any, **options: Any) -> Any:
    values = {"wait": "at_overlap", "period": 2, "overlap": 1, **options}
    return started(learner_bench, steps=2, **values)


def test_no_step_waits_by_default(learner_bench: Any) -> None:
    bench = started(learner_bench, steps=0, period=1, overlap=0)
    for _ in range(5):
        bench.step()
        assert not bench.orders(Hold)


def test_a_synchronous_learner_waits_for_what_is_due(learner_bench: Any) -> None:
    bench = waiting(learner_bench)
    bench.receive(pull(tick=2))
    assert [order.steps for order in bench.orders(SendBody)] == [2], "of exactly the step due"
    bench.step()
    assert bench.orders(Hold)
    bench.receive(outcome("accepted", version=V1))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(Paused())
    assert bench.orders(Apply)
    assert bench.orders(Release)


@pytest.mark.parametrize(("quorum", "reported"), [(2, [("shard-0", 9)]), (1, [])])
def test_rule_1_who_waits_for_others_is_as_far_at_every_shard_as_at_the_furthest(
    learner_bench: Any, quorum: int, reported: list[tuple[str, int]]
) -> None:
    """Otherwise two learners could wait for each other, each ahead at a different shard."""
    bench = waiting(learner_bench, fragments=2, shards=2, quorum=quorum)
    bench.receive(Welcome(1, 2, clock=8, step=2, run_step=9), shard=1)
    sent = bench.orders(Send)
    assert [(s.peer, s.message.run_step) for s in sent if isinstance(s.message, Ahead)] == reported
    bench.handle(Lost("shard-0"))
    bench.handle(Connected("shard-0"))
    assert bench.messages(Hello)[0].run_step == (9 if reported else 2)


def test_rule_1_a_shift_by_one_shard_is_reported_to_all(learner_bench: Any) -> None:
    """Also to that one: it may have shifted its learners before an earlier `Ahead` arrived."""
    bench = waiting(learner_bench, fragments=2, shards=2, quorum=2)
    bench.receive(Welcome(1, 1, clock=0, step=0, run_step=0), shard=1)
    bench.receive(Shifted(3), shard=1)
    sent = [(s.peer, s.message.run_step) for s in bench.orders(Send)]
    assert sent == [("shard-0", 5), ("shard-1", 5)]


def test_a_learner_that_moves_up_stops_waiting_for_earlier_fragments(learner_bench: Any) -> None:
    bench = waiting(learner_bench, fragments=2, shards=2, quorum=2)
    bench.step()
    assert bench.machine.state.holding
    bench.receive(Welcome(1, 2, clock=8, step=3, run_step=9), shard=1)
    assert bench.orders(Release)


def test_the_snapshot_of_the_step_that_was_due_is_kept(learner_bench: Any) -> None:
    bench = waiting(learner_bench)
    bench.step()
    bench.receive(pull(tick=2))
    assert [order.steps for order in bench.orders(SendBody)] == [2]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(Lost("shard-0"), id="the link is lost"),
        pytest.param(GivenUp(0, "because"), id="the round is abandoned"),
        pytest.param(Welcome(0, 2, 0, 3, 0), id="the shard assigns another run step"),
    ],
)
def test_a_waiting_learner_is_released_when(learner_bench: Any, event: Any) -> None:
    bench = waiting(learner_bench)
    bench.receive(pull(tick=2))
    bench.step()
    assert bench.orders(Hold)
    if isinstance(event, Lost):
        bench.handle(event)
    else:
        bench.receive(event)
    assert bench.orders(Release)


def test_the_end_finds_a_waiting_learner_at_its_last_boundary(learner_bench: Any) -> None:
    """Another step would cause another outer step: one step's gradient, all the momentum."""
    bench = waiting(learner_bench)
    bench.receive(pull(tick=2))
    bench.step()
    assert bench.orders(Hold)
    bench.receive(Ending())
    assert not bench.orders(Release)
    bench.handle(Paused())
    assert bench.orders(EndTraining)
    assert bench.orders(Release)


def test_a_waiting_learner_still_waits_for_other_due_fragments(learner_bench: Any) -> None:
    bench = waiting(learner_bench, fragments=4)
    assert [order.why for order in bench.orders(Hold)] == ["fragments [2, 3] have not arrived yet"]
    bench.receive(GivenUp(2, "because"))
    assert not bench.orders(Release), "fragment 3 is owed"
    bench.receive(GivenUp(3, "because"))
    assert [order.why for order in bench.orders(Release)] == ["the round of fragment 3: because"]
    assert [view.owed_at for view in bench.machine.state.fragments] == [2, 2, None, None]


def test_a_late_snapshot_does_not_make_at_tau_wait_for_itself(learner_bench: Any) -> None:
    bench = waiting(learner_bench, apply="at_tau")
    bench.machine.state.fragments[0].snapshot = None
    bench.step()
    assert bench.orders(Hold)
    bench.receive(pull(tick=2))
    bench.handle(Paused())
    assert bench.orders(SendBody), "a snapshot of one step later"
    bench.receive(outcome("accepted", version=V1))
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(Paused())
    assert bench.orders(Apply)
    assert bench.orders(Release)


def test_a_shard_receives_its_lost_copy(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.receive(CopyWanted(0, 3, V0, "/copy"))
    assert bench.orders(SendCopy)
    bench.receive(CopyWanted(0, 4, V1, "/copy"))
    assert bench.messages(CopyDeclined) == [CopyDeclined(0, 4, "it holds 1.0, not 1.1")]
    bench.handle(Failed(SendCopy(0, 0, 3, None, "", ""), "reset"))
    assert bench.messages(CopyDeclined) == [CopyDeclined(0, 3, "reset")]


def test_the_last_contribution_waits_for_the_last_step(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.receive(Ending())
    bench.receive(pull(final=True))
    assert not bench.orders(SendBody)
    bench.step()
    assert bench.orders(EndTraining)
    (body,) = bench.orders(SendBody)
    assert body.steps == 5


def test_without_new_training_the_closing_request_is_declined(learner_bench: Any) -> None:
    bench = learner_bench()
    bench.handle(Paused())
    bench.receive(Ending())
    bench.receive(pull(final=True))
    bench.handle(Paused())
    assert bench.orders(EndTraining), "a learner that joins while the run ends does not start"
    assert [message.reason for message in bench.messages(Decline)] == ["nothing new"]


def test_rule_12_who_cannot_begin_any_more_keeps_nobody_waiting(learner_bench: Any) -> None:
    """The other shard has ended already: this learner never receives the whole model."""
    bench = learner_bench(begin=False, fragments=2, shards=2)
    bench.publish(V0, None)
    bench.receive(Ending())
    bench.receive(pull(final=True))
    assert [message.nothing_new for message in bench.messages(Decline)] == [True]
    assert not bench.machine.state.ready


def test_overwritten_steps_are_in_no_version_at_the_end(
    learner_bench: Any,
) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.step()
    (thrown_away,) = bench.orders(Apply)
    assert thrown_away.mode == "overwrite"
    assert thrown_away.discarded_tokens > 0
    bench.receive(Ending())
    bench.handle(Paused())
    bench.receive(pull(base=V1, final=True))
    bench.handle(Paused())
    view = bench.machine.state.fragments[0]
    assert view.merged_step < bench.machine.state.step


def test_the_run_is_over_when_the_last_copies_are_held(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.receive(Ending())
    bench.step()
    bench.publish(V1, V0)
    bench.receive(Finished())
    assert not bench.orders(RunOver)
    bench.fetched(V1)
    bench.handle(Paused())
    assert bench.orders(RunOver)


def test_the_run_also_ends_when_the_shard_has_left(learner_bench: Any) -> None:
    bench = started(learner_bench)
    bench.publish(V1, V0)
    bench.receive(Finished())
    bench.handle(Lost("shard-0"))
    for _ in range(2):  # the difference, then the whole
        bench.handle(Failed(fetch_of(0, V1), "its shard is unreachable"))
    bench.handle(Paused())
    assert [order.mode for order in bench.orders(Apply)] == ["overwrite"], (
        "no unmerged training is kept"
    )
    assert bench.orders(RunOver)


def test_rule_15_an_observer_only_follows(learner_bench: Any) -> None:
    """Rule 15: observers read the published copy and are not counted."""
    bench = learner_bench("observer")
    bench.handle(Paused())
    bench.publish(V1, V0)
    bench.fetched(V1)
    bench.handle(Paused())
    assert [order.mode for order in bench.orders(Apply)] == ["overwrite"]
    assert not bench.messages(StepReport)
    assert not bench.orders(Snapshot)
