"""Accounts of time and tokens: the parts add up, and each second and token is in its part."""

from __future__ import annotations

import dataclasses

import pytest

from decoupled_diloco.protocol.messages import Asking, Participant, RoundFinished, Version
from decoupled_diloco.run_model import RunModel, read_run
from decoupled_diloco.run_model.accounts import (
    NANO,
    TIME_PARTS,
    TOKEN_PARTS,
    LearnerAccount,
    RunAccount,
    account_for,
)
from decoupled_diloco.run_model.facts import LearnerLog, ProcessLife, RoundLog, ShardLog
from decoupled_diloco.run_model.ledger import MAY_BE_MERGED, TOOK_PART, Ledger
from unit.show.models import model_of


def assert_whole(account: RunAccount) -> None:
    for part in (account, *account.learners.values()):
        time, tokens = part.time, part.tokens
        assert time.allocated == sum(getattr(time, name) for name in TIME_PARTS)
        assert tokens.trained == sum(getattr(tokens, name) for name in TOKEN_PARTS)
        assert min(dataclasses.astuple(time)) >= 0 <= min(dataclasses.astuple(tokens))


def run_of(*lives: ProcessLife, fragments: int = 1, **others: list[ProcessLife]) -> RunModel:
    """Return a run in which learner ``a`` had these incarnations."""
    history = model_of(fragments)
    for name, own in {"a": list(lives), **others}.items():
        history.learners[name] = LearnerLog(name, lives=own)
    return history


def steps(begin: float, end: float, seconds: float = 1.0, **fields: object) -> ProcessLife:
    """Return an incarnation that joins 0.5 s before its first step starts and never pauses."""
    count = round((end - begin) / seconds)
    at = [begin + seconds * number for number in range(1, count + 1)]
    life = ProcessLife(begin - 0.5, end, at, ready_at=begin, **fields)  # type: ignore[arg-type]
    for _ in at:
        life.ledger.stepped(10)
    return life


def only(history: RunModel) -> LearnerAccount:
    account = account_for(history)
    assert_whole(account)
    return account.learners["a"]


def seconds_of(account: LearnerAccount) -> dict[str, float]:
    parts = {name: account.time.seconds(name) for name in TIME_PARTS}
    return {name: seconds for name, seconds in parts.items() if seconds}


def test_a_made_up_run(run_folder):
    account = account_for(read_run(run_folder))
    assert_whole(account)
    assert account.span == pytest.approx((4.5, 64.0))
    assert account.uptime == pytest.approx(1.0)
    assert account.time.allocated == pytest.approx(4 * 59.5 * NANO)
    killed = account.learners["learner-1"]
    assert killed.time.seconds("down") == pytest.approx(1.0)
    assert killed.time.seconds("joining") == pytest.approx(36.0 - 31.2)
    assert killed.time.seconds("other") == pytest.approx(0.2)
    assert account.time.seconds("joining") == pytest.approx(36.0 - 31.2)
    stepping = 4 * 59.5 - 1.0 - 4.8 - 0.2
    assert account.time.stepping == pytest.approx(stepping / (4 * 59.5))
    assert account.time.goodput < account.time.stepping
    assert account.tokens.tokens("trained") == 428 * 512


def test_no_time_is_allocated_before_a_learner_starts_or_after_it_leaves():
    history = run_of(
        steps(0, 20),
        b=[steps(8, 20)],
        c=[steps(0, 12, ended_at=12.25)],
    )
    account = account_for(history)
    assert_whole(account)
    assert account.learners["a"].time.seconds("allocated") == 19.0
    assert account.learners["b"].time.seconds("allocated") == 12.5
    assert seconds_of(account.learners["b"]) == {"useful": 12.0, "joining": 0.5}
    assert account.learners["c"].time.seconds("allocated") == 11.25
    # None of its tokens were merged, and it has ended.
    assert seconds_of(account.learners["c"]) == {"discarded": 11.0, "other": 0.25}


def test_an_outage_is_down_until_the_process_starts_and_then_joining():
    first = steps(0, 10, ended_at=10.5, crashed=True)
    second = steps(15, 20, spawned_at=12.0)
    account = only(run_of(first, second))
    # The tokens of the first incarnation, 100 of 150, were lost with it.
    lost = pytest.approx(14.0 * 100 / 150, abs=1e-8)
    useful = pytest.approx(14.0 * 50 / 150, abs=1e-8)
    rest = {"other": 0.5, "down": 1.5, "joining": 3.0}
    assert seconds_of(account) == {"useful": useful, "discarded": lost} | rest
    assert (account.tokens.crashed, account.tokens.unsent) == (100, 50)


def test_a_learner_that_never_returns_is_down_to_the_end():
    history = run_of(steps(0, 4, ended_at=4.0, crashed=True), b=[steps(0, 10)])
    assert only(history).time.seconds("down") == 6.0


def test_holds_count_as_waiting_and_not_as_steps():
    life = steps(0, 12, 3.0)
    life.holds = [(3.0, 5.0), (6.0, 8.0), (9.0, 11.0)]
    assert seconds_of(only(run_of(life))) == {"useful": 3.0, "waiting": 6.0}


def test_a_stall_is_waiting_except_for_the_step_that_ends_it():
    life = steps(0, 20)
    del life.steps_at[9:15]
    assert seconds_of(only(run_of(life))) == {"useful": 13.0, "waiting": 6.0}


def test_the_wait_before_the_first_step_is_joining():
    late = steps(10, 20)
    late.started_at, late.ready_at = 3.0, 4.0
    account = account_for(run_of(steps(0, 20), b=[late])).learners["b"]
    assert seconds_of(account) == {"useful": 10.0, "joining": 7.0}


def test_an_interrupted_step_at_the_end():
    lives = {"b": [steps(0, 8)], "c": [steps(0, 8, over=True)], "d": [steps(0, 8.0 + 1)]}
    account = account_for(run_of(steps(0, 10), **lives))
    assert_whole(account)
    rest = {name: account.learners[name].time for name in "bcd"}
    assert [time.seconds("other") for time in rest.values()] == [2.0, 2.0, 1.0]
    stalled = account_for(run_of(steps(0, 10), b=[steps(0, 4)])).learners["b"]
    assert stalled.time.seconds("waiting") == 6.0


def test_a_short_rest_does_not_count_as_waiting():
    late = steps(0.25, 9.25, ended_at=30.0)
    account = account_for(run_of(steps(0, 9.5, 0.5), b=[late])).learners["b"]
    assert seconds_of(account)["other"] == 0.25
    assert account.time.waiting == 0


def test_uptime_excludes_times_without_steps():
    history = run_of(steps(0, 4, ended_at=4.0, crashed=True), steps(6, 11))
    assert account_for(history).uptime == pytest.approx(8 / 10)


def test_no_steps_and_one_step():
    account = account_for(model_of())
    assert_whole(account)
    assert (account.span, account.uptime, account.time.goodput) == (None, None, None)
    account = account_for(run_of(steps(0, 1)))
    assert_whole(account)
    assert (account.uptime, account.time.goodput, account.tokens.unsent) == (None, None, 10)


def life_with(ledger: Ledger, **fields: object) -> ProcessLife:
    return ProcessLife(0.0, 9.0, ledger=ledger, **fields)  # type: ignore[arg-type]


def merged_round(fragment: int, version: tuple[int, int], tokens: int, state: str = "folded"):
    part = Participant("a", state, 1, tokens, 0.0, 0.1, "", Asking(1, 1))
    result = RoundFinished(
        round=3,
        fragment=fragment,
        tick=4,
        version=Version(*version),
        verdict="merged",
        reason="",
        participants=(part,),
        quorum_seconds=0.0,
        grace_seconds=0.0,
        closed_seconds=0.0,
        uploaded_seconds=0.1,
        finished_seconds=0.2,
        step_seconds=1.0,
        slack_seconds=0.0,
        why="",
    )
    return RoundLog("shard-0", 3, fragment, 0.0, finished_at=0.2, result=result)


def with_rounds(history: RunModel, *rounds: RoundLog) -> RunModel:
    history.shards["shard-0"] = ShardLog("shard-0", rounds=list(rounds))
    return history


def test_tokens_by_cause():
    ledger = Ledger()
    ledger.stepped(100)
    ledger.sent(0, (1, 0), 100)
    ledger.stepped(7)
    ledger.applied(0, "overwrite", 7, f"{TOOK_PART} this version")
    ledger.applied(1, "overwrite", 107, "it took no part in this version")
    ledger.stepped(20)
    ledger.sent(0, (1, 1), 20)
    ledger.applied(0, "overwrite", 20, f"{MAY_BE_MERGED} 5 may be in it")
    tokens = only(run_of(life_with(ledger), fragments=2)).tokens
    assert dataclasses.asdict(tokens) == {
        "fragments": 2,
        "trained": 254,
        "merged": 100,
        "in_flight": 7,
        "missed": 107,
        "given_up": 20,
        "overwritten": 0,
        "crashed": 0,
        "left_behind": 0,
        "unsent": 20,
    }
    assert tokens.discarded == 134
    assert tokens.tokens("discarded") == 67.0
    assert tokens.discarded_share == pytest.approx(134 / 254)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "unsent"),
        ({"ended_at": 5.0}, "left_behind"),
        ({"over": True}, "left_behind"),
        ({"ended_at": 5.0, "crashed": True}, "crashed"),
    ],
)
def test_only_a_live_learner_can_still_deliver(fields, part):
    ledger = Ledger()
    ledger.stepped(30)
    tokens = only(run_of(life_with(ledger, **fields))).tokens
    assert getattr(tokens, part) == 30
    assert tokens.discarded == (0 if part == "unsent" else 30)


def test_abandoned_but_merged_tokens_are_merged():
    ledger = Ledger()
    ledger.stepped(30)
    ledger.sent(0, (1, 1), 20)
    ledger.applied(0, "overwrite", 30, f"{MAY_BE_MERGED} 5 may be in it")
    history = with_rounds(run_of(life_with(ledger)), merged_round(0, (1, 2), 20))
    tokens = only(history).tokens
    assert (tokens.merged, tokens.given_up) == (20, 10)


@pytest.mark.parametrize(
    ("round_", "merged"),
    [
        (merged_round(0, (1, 2), 20), 20),
        (merged_round(0, (1, 2), 40), 30),  # its last steps are not on the tape
        (merged_round(0, (1, 2), 20, "late"), 0),
        (merged_round(0, (1, 1), 20), 0),  # the version that it has: no longer open
        (merged_round(1, (1, 2), 20), 0),
    ],
)
def test_delivered_tokens_of_a_crashed_incarnation_are_merged(round_, merged):
    """Also if the record of the contribution was lost when the process was killed."""
    ledger = Ledger()
    ledger.stepped(30)
    ledger.holds(0, (1, 1))
    tokens = only(with_rounds(run_of(life_with(ledger, crashed=True)), round_)).tokens
    assert (tokens.merged, tokens.crashed) == (merged, 30 - merged)


def test_tokens_delivered_by_a_later_incarnation_count_once():
    """Both have the same version and send the same number of tokens against it."""
    lives = []
    for started_at in (0.0, 20.0):
        ledger = Ledger()
        ledger.stepped(20)
        ledger.holds(0, (1, 1))
        ledger.sent(0, (1, 1), 20)
        lives.append(ProcessLife(started_at, started_at + 9, ledger=ledger, crashed=not started_at))
    round_ = dataclasses.replace(merged_round(0, (1, 2), 20), opened_at=25.0, finished_at=25.2)
    tokens = only(with_rounds(run_of(*lives), round_)).tokens
    assert (tokens.merged, tokens.crashed, tokens.unsent) == (20, 20, 0)


def test_a_contribution_to_a_dead_shard_is_sent_again():
    ledger = Ledger()
    ledger.stepped(30)
    ledger.sent(0, (1, 1), 30)
    ledger.renamed(0)
    ledger.holds(0, (2, 1))
    history = with_rounds(run_of(life_with(ledger)), merged_round(0, (1, 2), 30))
    assert only(history).tokens.unsent == 30


@pytest.mark.parametrize(("staged", "merged"), [(True, 100), (False, 150)])
def test_a_staged_copy_keeps_its_contributions_when_renamed(staged, merged):
    ledger = Ledger()
    ledger.stepped(100)
    ledger.sent(0, (1, 1), 100)
    ledger.stepped(50)
    ledger.renamed(0, staged=staged)
    ledger.applied(0, "carry", 0, f"{TOOK_PART} this version")
    assert ledger.merged == merged


def test_carry_closes_sent_tokens_and_rebase_closes_none():
    ledger = Ledger()
    ledger.stepped(30)
    ledger.sent(0, (1, 0), 30)
    ledger.stepped(5)
    ledger.applied(0, "carry", 0, f"{TOOK_PART} this version")
    ledger.applied(0, "rebase", 0, "it took no part in this version")
    tokens = only(run_of(life_with(ledger))).tokens
    assert (tokens.merged, tokens.unsent) == (30, 5)
