"""A restarted shard counts its rounds from the start: incarnations are not mixed up."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.messages import (
    Accept,
    Ahead,
    Connected,
    Evict,
    Hello,
    Leave,
    Note,
    Received,
    Reject,
    Send,
    Shifted,
    StepReport,
)
from decoupled_diloco.run_model import FollowedRun, RunModel, run_of
from decoupled_diloco.run_model import shards as shard_fold
from decoupled_diloco.show import status
from decoupled_diloco.show.explain import explain_learner, explain_round, explain_step
from decoupled_diloco.show.status import status_of
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import Record
from unit.show.show_worlds import SHARD_BACK_AT, SHARD_CRASH, A, B, lines_of, write_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = tmp_path_factory.mktemp("lives")
    write_world(run, faults=[SHARD_CRASH], overlap_steps=1, quorum=3)
    return run


@pytest.fixture(scope="module")
def records(folder):
    return list(TapeReader(folder))


@pytest.fixture(scope="module")
def chronicle(records):
    return run_of(records)


@pytest.fixture(scope="module")
def lives(folder):
    """Return the raw tape of the shard by incarnation."""
    tape = lines_of(folder / "tape" / "shard-1.jsonl")
    starts = [number for number, record in enumerate(tape) if record["kind"] == "start"]
    return [tape[a:b] for a, b in itertools.pairwise([*starts, len(tape)])]


def text_about(lines, life):
    """Return the part of an explanation about one incarnation of the shard."""
    parts = re.split(r"\n\n(?=Round |shard-1)", "\n".join(lines))
    return next(part for part in parts if f"shard-1 (incarnation {life} of 2)" in part)


def of_type(life, kind):
    return [record for record in life if record["type"] == kind]


def test_rounds_of_one_number_are_distinguished_by_incarnation(chronicle, lives):
    assert len(lives) == 2
    first = [of_type(life, "RoundOpened")[0]["data"] for life in lives]
    assert [data["round"] for data in first] == [1, 1]
    titles = [line for line in explain_round(chronicle, 1, 1) if line.startswith("Round")]
    for life, (title, data) in enumerate(zip(titles, first, strict=True), start=1):
        assert title.startswith(f"Round 1 of shard-1 (incarnation {life} of 2): ")
        assert f"fragment {data['fragment']}, step {data['tick']}," in title
    other = [line for line in explain_round(chronicle, 1, 0) if line.startswith("Round")]
    assert [title.split(":")[0] for title in other] == ["Round 1 of shard-0"]


def test_a_round_waits_since_a_tick_of_its_own_incarnation(chronicle, lives):
    waited = 0
    for number, life in enumerate(lives, start=1):
        ticks = [(r["at"], r["data"]["clock"]) for r in of_type(life, "ClockAdvanced")]
        for opened in of_type(life, "RoundOpened"):
            tick = opened["data"]["tick"]
            due_at = next((at for at, clock in ticks if clock >= tick), opened["at"])
            text = text_about(explain_round(chronicle, opened["data"]["round"], 1), number)
            queued = not opened["data"]["closing"] and opened["at"] - due_at > 1e-3
            assert ("it was queued for" in text) is queued, text
            waited += queued
    assert waited, "the world has no queue"


def test_a_fragments_next_round_is_in_the_same_incarnation(chronicle, lives):
    checked = 0
    for number, life in enumerate(lives, start=1):
        ends = [record["data"] for record in of_type(life, "RoundFinished")]
        for data in (data for data in ends if data["verdict"] == "abandoned"):
            text = text_about(explain_round(chronicle, data["round"], 1), number)
            later = [
                other["round"]
                for other in ends
                if other["fragment"] == data["fragment"] and other["round"] > data["round"]
            ]
            found = re.search(r"its next round was round (\d+)", text)
            assert (int(found[1]) if found else None) == (min(later) if later else None)
            checked += 1
    assert checked, "the world abandons no round"


def test_a_step_belongs_to_one_incarnation(chronicle, lives):
    for number, life in enumerate(lives, start=1):
        for tick in of_type(life, "ClockAdvanced")[1::7]:
            step = tick["data"]["clock"]
            text = text_about(explain_step(chronicle, step, 1), number)
            cause = next(r for r in life if r["kind"] == "event" and r["seq"] == tick["cause"])
            if cause["type"] == "Received":
                assert f"by the report of {cause['data']['peer']}" in text
                assert f"{cause['data']['peer']} reported it and set the clock" in text
            due = {r["data"]["round"] for r in of_type(life, "RoundOpened")}
            due = {r for r in due if opened_at_step(life, r) == step}
            assert {int(n) for n in re.findall(r"- round (\d+) ", text)} == due


def opened_at_step(life, number):
    return next(
        r["data"]["tick"] for r in of_type(life, "RoundOpened") if r["data"]["round"] == number
    )


def test_an_incarnation_that_starts_at_a_later_step_did_not_jump(chronicle, lives):
    first = of_type(lives[1], "ClockAdvanced")[0]["data"]["clock"]
    assert first > 3, "the shard has not taken its clock from its learners"
    before = of_type(lives[0], "ClockAdvanced")[-1]["data"]["clock"]
    assert "jump" not in text_about(explain_step(chronicle, first, 1), 2)
    lines = "\n".join(explain_step(chronicle, min(first, before) - 1, 1))
    assert "incarnation 1 of 2" in lines
    assert "incarnation 2 of 2" not in lines


def test_reports_of_another_incarnation_are_not_late(chronicle):
    shard = chronicle.shards["shard-1"]
    back = SHARD_BACK_AT
    for round in shard.rounds:
        reports = [at for name in (A, B) for _, at in shard.reports_of(round.life, name)]
        assert reports
        times = [*reports, *round.late_bodies.values()]
        assert all((at >= back) is (round.life == 2) for at in times)


def test_a_missing_shard_is_reported(chronicle):
    with pytest.raises(
        ConfigError, match="--shard 9 is not a shard on this tape: there is shard-0"
    ):
        explain_step(chronicle, 3, 9)


def line(seq, at, kind, name, data, process="shard-1"):
    return Record(at, process, seq, kind, name, data, None, 1e9 + at, 0)


def a_clock_that_goes_back():
    """A shard ticks each second up to 57, is restarted, and continues from 3."""
    settings = {"run": {"name": "back", "max_steps": 60}}
    yield line(0, 0.0, "start", "start", {"header": {"settings": settings}})
    for step in range(1, 58):
        data = {"clock": step, "live": 2, "why": "2 learners have reached it"}
        yield line(step, float(step), "effect", "ClockAdvanced", data)
    yield line(0, 58.0, "start", "start", {"header": {"settings": settings}})
    for step in range(3, 8):
        data = {"clock": step, "live": 2, "why": "2 learners have reached it"}
        yield line(step, 56.0 + step, "effect", "ClockAdvanced", data)


def test_the_budget_is_compared_with_the_furthest_clock():
    chronicle = run_of(a_clock_that_goes_back())
    status = status_of(chronicle, 1e9 + 63.0)
    assert (status.step, status.shards[0].clock) == (57, 7)
    assert (status.seconds_left, status.left_by) == (None, "")
    assert status.steps_per_second == 0.0
    with pytest.raises(ConfigError, match="shard-1 at 57"):
        explain_step(chronicle, 58)


def test_a_clock_that_goes_back_does_not_end_the_run():
    before = run_of(list(a_clock_that_goes_back())[:40])
    assert status_of(before, 1e9 + 39.0).seconds_left == pytest.approx(21.0)
    for count in range(2, 64):
        chronicle = run_of(list(a_clock_that_goes_back())[:count])
        status = status_of(chronicle, chronicle.latest)
        assert status.steps_per_second is None or status.steps_per_second >= 0.0
        assert status.seconds_left is None or status.seconds_left >= 3.0


def test_the_progress_of_a_run_does_not_go_back():
    progress = RunModel()
    progress.take_all(a_clock_that_goes_back())
    assert progress.step == 57
    rate = progress.clock_rate.per_second()
    assert rate == 0.0


class Shard:
    """Write the records of a shard whose clock shows ``at`` and whose wall clock is far ahead."""

    def __init__(self):
        self.records = [line(0, 0.0, "start", "start", {"header": {}})]
        self.offset = 1_780_000_000.0

    def write(self, at, kind, value):
        fields = wire.encode(value)
        name = fields.pop("type")
        seq = len(self.records)
        record = line(seq, at, kind, name, fields)
        self.records.append(replace(record, wall=at + self.offset))

    def join(self, at, connection, name, epoch=1):
        self.write(
            at,
            "event",
            Connected(name, Hello(name, epoch, "nonce", "learner", 0, 0, 0, ()), connection),
        )
        self.write(at, "effect", Accept(connection, name, epoch, "joined"))


def test_a_learner_that_closes_a_window_by_leaving_was_not_live(chronicle):
    """Regardless of rounding: the wall clock has fewer digits than the shard's own clock."""
    template = next(r.result for r in chronicle.shards["shard-0"].rounds if r.result.version)
    opening = next(r.opened for r in chronicle.shards["shard-0"].rounds)
    choose = random.Random(3)
    for _ in range(200):
        shard = Shard()
        for connection, name in enumerate(("stays", "gone", "later")):
            shard.join(0.1, connection, name)
        opened_at = choose.uniform(1.0, 5000.0)
        closed_at = opened_at + choose.uniform(0.0, 3.0)
        shard.write(opened_at, "effect", replace(opening, round=1))
        shard.write(closed_at, "effect", Evict("gone", "it left", "it left"))
        shard.write(closed_at + 1e-4, "effect", Evict("later", "it left", "it left"))
        finished_at = closed_at + choose.uniform(0.1, 1.0)
        result = replace(
            template,
            round=1,
            participants=(),
            closed_seconds=closed_at - opened_at,
            finished_seconds=finished_at - opened_at,
        )
        shard.write(finished_at, "effect", result)
        (round,) = run_of(shard.records).shards["shard-1"].rounds
        assert set(round.live) == {"stays", "later"}


def test_a_late_report_is_described_any_number_of_rounds_later(chronicle):
    template = next(r.result for r in chronicle.shards["shard-0"].rounds if r.result.version)
    shard = Shard()
    shard.join(0.1, 0, "slow")
    times = {"closed_seconds": 0.5, "finished_seconds": 0.5}
    for number in range(1, 21):
        result = replace(template, round=number, participants=(), **times)
        shard.write(float(number), "effect", result)
    shard.write(30.0, "event", Received("slow", StepReport(1, 8, 1.0)))
    texts = explain_round(run_of(shard.records), 1)
    assert any(text.endswith("its next report came 29 s too late.") for text in texts)


def test_learners_that_left_during_a_round_were_live_before(chronicle):
    template = next(r.result for r in chronicle.shards["shard-0"].rounds if r.result.version)
    opening = next(r.opened for r in chronicle.shards["shard-0"].rounds)
    shard, names = Shard(), [f"learner-{n}" for n in range(200)]
    for connection, name in enumerate(names):
        shard.join(0.1, connection, name)
    shard.write(1.0, "effect", replace(opening, round=1))
    for name in names:
        shard.write(2.0, "effect", Evict(name, "power cut", "power cut"))
    result = replace(template, round=1, participants=(), closed_seconds=0.5, finished_seconds=2.0)
    shard.write(3.0, "effect", result)
    (round,) = run_of(shard.records).shards["shard-1"].rounds
    assert set(round.live) == set(names)


def test_a_single_learner_can_be_counted_from_another_step():
    """Its loop was stalled and steps again, or it is further at another shard."""
    shard = Shard()
    for connection, name in enumerate(("stood", "ahead")):
        shard.join(0.1, connection, name)
    shard.write(1.0, "effect", Send("stood", Shifted(5), "the clock went on"))
    shard.write(2.0, "event", Received("ahead", Ahead(4)))
    members = run_of(shard.records).shards["shard-1"].members
    assert {name: member.run_step for name, member in members.items()} == {"stood": 5, "ahead": 4}


def test_a_gap_is_not_explained_by_another_learner_with_a_longer_name():
    shard = Shard()
    for connection, name in enumerate(("learner-1", "learner-11")):
        shard.join(0.1, connection, name)
    times = (*range(1, 11), *range(31, 41))  # learner-1 takes no step for twenty seconds
    for step, at in enumerate(times, start=1):
        report = StepReport(step, 8 * step, 1.0)
        shard.write(float(at), "event", Received("learner-1", report))
        if step == 10:
            why = "its connection broke and its lease ran out"
            shard.write(20.0, "effect", Evict("learner-11", why, why))
            shard.write(20.0, "effect", Note("learner-11 (incarnation 1) is no longer live", why))
            text = "the copy of fragment 3 from learner-11 failed"
            shard.write(21.0, "effect", Note(text, "its digest"))
    chronicle = run_of(shard.records)
    noted = {remark.subject for remark in chronicle.remarks if remark.kind == "Note"}
    assert noted == {"learner-11"}
    (gap,) = [g for g in explain_learner(chronicle, "learner-1") if g.startswith("- 21 s")]
    assert ", from " in gap
    assert gap.endswith("the tape has no cause")
    shard.write(41.0, "effect", Note("learner-1 (incarnation 1) is no longer live", "told"))
    assert run_of(shard.records).remarks[-1].subject == "learner-1"


def test_a_learner_that_left_and_returned_is_down_when_killed():
    def state_of(shard):
        chronicle = run_of(shard.records)
        return status_of(chronicle, chronicle.latest).learners[0].state

    shard = Shard()
    shard.join(0.1, 1, "a")
    shard.write(1.0, "event", Received("a", StepReport(1, 8, 1.0)))
    shard.write(2.0, "event", Received("a", Leave("its loop has ended")))
    shard.write(2.0, "effect", Evict("a", "left", "its loop has ended"))
    assert state_of(shard) == "left"
    shard.join(3.0, 2, "a", epoch=2)
    shard.write(4.0, "event", Received("a", StepReport(1, 8, 1.0)))
    assert state_of(shard) == "stepping"
    shard.write(9.0, "effect", Evict("a", "gone", "its connection broke and its lease ran out"))
    assert state_of(shard) == "down"


ASKED = "left: it was asked to stop"
RAN_OUT = "its connection broke and its lease ran out"


@pytest.mark.parametrize(
    ("reasons", "failed", "preempted"),
    [
        ([ASKED, ASKED], 0, 2),
        ([RAN_OUT, ASKED], 1, 1),
        (["left: RuntimeError in the training loop"], 1, 0),
        (["left: its loop has ended", "left: the run is over"], 0, 0),
        (["", ASKED], 1, 1),
    ],
    ids=["preempted", "one of each", "an exception", "neither", "replaced within its lease"],
)
def test_shards_tell_preemptions_from_failures(
    reasons: list[str], failed: int, preempted: int
) -> None:
    shard = Shard()
    for epoch, reason in enumerate(reasons, 1):
        shard.join(float(epoch), epoch, "a", epoch=epoch)
        shard.write(epoch + 0.1, "event", Received("a", StepReport(1, 8, 1.0)))
        if reason:
            shard.write(epoch + 0.5, "effect", Evict("a", reason, reason))
    shard.join(9.0, 9, "a", epoch=9)
    run = run_of(shard.records)
    (learner,) = status_of(run, run.latest).learners
    assert (learner.failures, learner.preemptions) == (failed, preempted)
    hows = [outage.how for outage in run.outages]
    assert hows.count("preempted") == preempted
    assert len(hows) == failed + preempted


def test_a_learner_that_was_only_cut_off_has_not_failed() -> None:
    shard = Shard()
    shard.join(0.1, 1, "a")
    shard.write(1.0, "event", Received("a", StepReport(1, 8, 1.0)))
    shard.write(9.0, "effect", Evict("a", RAN_OUT, RAN_OUT))
    assert run_of(shard.records).learners["a"].failures == 1
    shard.join(12.0, 2, "a", epoch=1)
    assert run_of(shard.records).learners["a"].failures == 0


def test_a_watched_run_gives_the_same_model_of_constant_size(records, monkeypatch):
    monkeypatch.setattr(shard_fold, "ROUNDS_MAX", 3)
    monkeypatch.setattr(status, "ROUNDS_LOOKED_AT", 3)
    whole, watched = run_of(records), RunModel()
    watched.take_all(records)
    assert status_of(watched, records[-1].wall) == status_of(whole, records[-1].wall)
    for name, shard in watched.shards.items():
        kept = (shard.ticks, shard.rounds, shard.lost)
        assert max(len(logs) for logs in kept) <= 3 < len(whole.shards[name].ticks)
        assert not shard.stays
        assert len(shard.departed) < len(whole.shards[name].stays)
    for learner in watched.learners.values():
        assert learner.losses == learner.evictions == []
        assert not any(life.steps_at or life.step_tokens for life in learner.lives)


def test_a_growing_tape_gives_the_same_model_as_the_whole_one(folder, records, tmp_path):
    """Read in pieces, as its processes flush them, and all at once."""
    followed = FollowedRun(tmp_path)
    (tmp_path / "tape").mkdir()
    files = {path.name: path.read_bytes() for path in sorted((folder / "tape").iterdir())}
    pieces = 40
    for number in range(pieces):
        for name, whole in files.items():
            begin, end = (200 * (n > 0) + len(whole) * n // pieces for n in (number, number + 1))
            with (tmp_path / "tape" / name).open("ab") as file:
                file.write(whole[begin:end])
        followed.poll()
    grown, whole = followed.run, run_of(records)
    now = records[-1].wall
    assert grown.records == whole.records
    assert comparable(status_of(grown, now)) == comparable(status_of(whole, now))


def comparable(status):
    """Return everything that does not depend on the order of two tapes' overlapping pieces."""
    plain = status.to_json()
    for learner in plain["learners"]:
        learner["reasons_recent"] = sum(learner["reasons_recent"].values())
        del learner["participation_recent"]
    del plain["remarks"]
    return plain


def test_rejected_connections_are_not_kept():
    shard = Shard()
    for connection in range(50):
        hello = Hello("a", 1, "another nonce", "learner", 0, 0, 0, ())
        shard.write(connection, "event", Connected(hello.learner, hello, connection))
        shard.write(connection, "effect", Reject(connection, "no", True, "it is another's"))
    shard.join(60.0, 60, "a")
    log = run_of(shard.records).shards["shard-1"]
    assert set(log.members) == {"a"}
    assert log.greeting is not None
    assert log.greeting[0] == 60
