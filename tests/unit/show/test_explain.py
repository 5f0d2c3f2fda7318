"""Explanations of a virtual run in which every cause occurs; each number in them is on the tape."""

import re
from collections import Counter

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.run_model import RunModel, run_of
from decoupled_diloco.run_model.accounts import account_for
from decoupled_diloco.run_model.phrases import percent, wrapped
from decoupled_diloco.show.explain import (
    explain_learner,
    explain_round,
    explain_step,
    token_weights,
)
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.units import format_duration
from unit.show.show_worlds import KILLED_AT, A, B, C, D, lines_of, reports_at_once, write_world
from worlds.faults import Fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = tmp_path_factory.mktemp("explain")
    write_world(run)
    return run


@pytest.fixture(scope="module")
def records(folder):
    return list(TapeReader(folder))


@pytest.fixture(scope="module")
def chronicle(records):
    return run_of(records)


def asking(data):
    return Asking(data["term"], data["number"])


def finished(folder, shard):
    tape = folder / "tape" / f"shard-{shard}.jsonl"
    return [r["data"] for r in lines_of(tape) if r["type"] == "RoundFinished"]


def said(lines):
    return " ".join(" ".join(lines).split())


def line_about(lines, name):
    return next(line for line in lines if line.startswith(f"- {name}:"))


def line_of(lines, data, participant):
    """Return the line about one contribution; a learner may have several in a round."""
    told = lines[lines.index("Learners:") + 1 :]
    line = told[data["participants"].index(participant)]
    assert line.startswith(f"- {participant['learner']}:")
    return line


def rounds_with(folder, state):
    return [
        (shard, data, p)
        for shard in (0, 1)
        for data in finished(folder, shard)
        for p in data["participants"]
        if p["state"] == state
    ]


def test_every_round_is_explained_with_its_own_numbers(folder, chronicle):
    for shard in (0, 1):
        for data in finished(folder, shard):
            lines = explain_round(chronicle, data["round"], shard)
            text = said(lines)
            assert f"fragment {data['fragment']}" in lines[0]
            assert f"step {data['tick']}" in lines[0]
            assert format_duration(data["finished_seconds"]) in lines[0]
            assert data["why"] in text
            if data["verdict"] == "merged":
                version = data["version"]
                assert f"version {version['term']}.{version['counter']}" in lines[-1]
            else:
                assert data["reason"] in lines[-1]
            for p in data["participants"]:
                line = line_of(lines, data, p)
                if p["state"] == "folded":
                    assert f"{p['steps']} step" in line
                    assert format_duration(abs(p["delivered_seconds"])) in line
                    assert (p["delivered_seconds"] < 0) == ("before the opening: " in line)


def test_weights_match_the_folded_counters(folder, chronicle):
    for shard in (0, 1):
        tape = lines_of(folder / "tape" / f"shard-{shard}.jsonl")
        folds = {asking(r["data"]["ask"]): r["data"] for r in tape if r["type"] == "Fold"}
        rounds = {round.number: round for round in chronicle.shards[f"shard-{shard}"].rounds}
        for data in finished(folder, shard):
            if data["verdict"] != "merged":
                continue
            expected = {}
            for p in data["participants"]:
                if p["state"] == "folded":
                    fold = folds[asking(p["ask"])]
                    expected[asking(p["ask"])] = fold["tokens"] * fold["tokens"] / fold["steps"]
            assert token_weights(chronicle, rounds[data["round"]]) == pytest.approx(expected)
            lines = explain_round(chronicle, data["round"], shard)
            for p in data["participants"]:
                if p["state"] == "folded":
                    share = expected[asking(p["ask"])] / sum(expected.values())
                    assert f"weight {percent(share)}" in line_of(lines, data, p)


def test_capped_counters_are_reported(tmp_path):
    write_world(tmp_path, faults=[Fault(50.0, "cut", B, 22.0)], apply={"missed": "rebase"})
    chronicle = run_of(list(TapeReader(tmp_path)))
    capped = [each for each in rounds_with(tmp_path, "folded") if each[2]["steps"] > 16]
    assert capped, "no learner in the world was away for long"
    for shard, data, p in capped:
        lines = explain_round(chronicle, data["round"], shard)
        assert "counters capped at 16 steps" in line_of(lines, data, p)


def test_a_closing_round_waits_for_all(folder, chronicle):
    closing = [d for d in finished(folder, 0) if d["why"].startswith("the closing")]
    assert "waits for all learners" in said(explain_round(chronicle, closing[0]["round"], 0))


def test_late_payloads_and_their_delay_are_explained(folder, chronicle):
    late = rounds_with(folder, "late")
    assert late, "the world has no late contribution"
    for shard, data, p in late:
        line = line_of(explain_round(chronicle, data["round"], shard), data, p)
        assert "still in transit when the round ended" in line
    aged = [each for each in rounds_with(folder, "folded") if each[2]["age"]]
    assert D in {p["learner"] for _, _, p in aged}, "its link takes ten times as long"
    for shard, data, p in aged:
        line = line_of(explain_round(chronicle, data["round"], shard), data, p)
        versions = "version" if p["age"] == 1 else "versions"
        assert f"late by {p['age']} {versions}" in line


def test_learners_that_missed_the_window_are_explained(folder, chronicle):
    """The next report after the window's end, found on the raw tape."""
    told = 0
    for shard in (0, 1):
        tape = lines_of(folder / "tape" / f"shard-{shard}.jsonl")
        reports = [
            (r["at"], r["data"]["peer"])
            for r in tape
            if r["type"] == "Received" and r["data"]["message"]["type"] == "StepReport"
        ]
        ends = {r["data"]["round"]: r["at"] for r in tape if r["type"] == "RoundFinished"}
        for data in finished(folder, shard):
            lines = explain_round(chronicle, data["round"], shard)
            opened = ends[data["round"]] - data["finished_seconds"]
            for line in lines:
                found = re.match(
                    r"- ([\w-]+): live, without a request: .* (\S+ m?s) too late", line
                )
                if found is None:
                    continue
                closed = opened + data["closed_seconds"]
                later = min(at for at, process in reports if process == found[1] and at > closed)
                assert format_duration(later - closed) == found[2]
                told += 1
    assert told > 2


def test_a_dead_learner_is_not_live(folder, chronicle):
    dead = [
        line
        for shard in (0, 1)
        for data in finished(folder, shard)
        for line in explain_round(chronicle, data["round"], shard)
        if line.startswith(f"- {C}: not live")
    ]
    assert dead
    assert all("its connection broke and its lease ran out" in line for line in dead)


def test_the_grace_window_matches_the_tape(folder, chronicle):
    checked = 0
    for shard in (0, 1):
        for data in finished(folder, shard):
            text = said(explain_round(chronicle, data["round"], shard))
            slack = 2 * data["step_seconds"] - sum(
                data[f"{name}_average_seconds"] for name in ("quorum", "merge", "broadcast")
            )
            assert data["slack_seconds"] == pytest.approx(slack)
            if "derived" in text or data["step_seconds"] == 0 or "waits for all learners" in text:
                continue
            assert format_duration(abs(slack)) in text
            assert format_duration(data["merge_average_seconds"]) in text
            checked += 1
    assert checked > 5


def test_an_open_window_is_explained_with_its_length(tmp_path):
    write_world(tmp_path, quorum=1, overlap_steps=3)
    chronicle = run_of(TapeReader(tmp_path))
    windows = [
        (shard, data)
        for shard in (0, 1)
        for data in finished(tmp_path, shard)
        if data["grace_seconds"] > 0
    ]
    assert windows
    for shard, data in windows:
        text = said(explain_round(chronicle, data["round"], shard))
        assert f"The grace window was {format_duration(data['grace_seconds'])}: γ = 0.8" in text


def test_a_round_opened_by_a_learner(tmp_path):
    own = {"participation": "async", "grace_margin": 0.0, "apply": {"missed": "rebase"}}
    write_world(tmp_path, quorum=1, **own)
    chronicle = run_of(TapeReader(tmp_path))
    rounds = [data for data in finished(tmp_path, 0) if data["why"].startswith("a contribution")]
    assert len(rounds) > 40
    for data in rounds:
        text = said(explain_round(chronicle, data["round"], 0))
        assert "because a contribution has arrived: learners open their own rounds." in text
        assert "before the opening" in text
        for ordinary in ("the clock had reached", "grace", "window", "quorum"):
            assert ordinary not in text
    text = said(explain_learner(chronicle, A))
    assert re.search(r"- \d+: another learner's round: each learner opens its own", text)


def test_a_declined_request_has_its_reason(folder, chronicle):
    for shard, data, p in rounds_with(folder, "declined"):
        line = line_of(explain_round(chronicle, data["round"], shard), data, p)
        assert f"it declined: {p['reason']}" in line


def test_an_unfinished_round(records):
    told = []
    for seconds in range(3, 30):
        chronicle = RunModel()
        chronicle.take_all(r for r in records if r.wall <= records[0].wall + seconds)
        for number, round in chronicle.shards["shard-0"].open.items():
            text = said(explain_round(chronicle, number, 0))
            assert "not finished" in text
            assert all(name in text for name in round.asks)
            told += re.findall(r"waits for (learner-\d)", text)
    assert D in told


def test_a_round_number_of_all_shards_or_of_one(chronicle):
    both = explain_round(chronicle, 3)
    assert [line.split(":")[0] for line in both if line.startswith("Round ")] == [
        "Round 3 of shard-0",
        "Round 3 of shard-1",
    ]
    assert len(explain_round(chronicle, 3, 1)) < len(both)


def test_unknown_names_are_answered_with_existing_ones(folder, chronicle):
    rounds = len(finished(folder, 0))
    there = f"round 999 does not exist; there are shard-0: 1 to {rounds}; shard-1"
    with pytest.raises(ConfigError, match=there):
        explain_round(chronicle, 999)
    with pytest.raises(ConfigError, match="shard-0 and shard-1"):
        explain_round(chronicle, 1, 7)
    with pytest.raises(ConfigError, match=f"{A}, {B}, {C} and {D}"):
        explain_learner(chronicle, "nobody")
    for step in (0, 10_000):
        with pytest.raises(ConfigError, match="shard-0 at 80"):
            explain_step(chronicle, step)
    with pytest.raises(ConfigError, match="there are none"):
        explain_round(RunModel(), 1)


def test_a_learners_time_and_tokens_match_the_accounts(records, chronicle):
    history = run_of(records)
    account = account_for(history).learners[C]
    text = said(explain_learner(history, C))
    assert f"Of {format_duration(account.time.seconds('allocated'))}" in text
    assert f"{format_duration(account.time.seconds('down'))}, " in text
    for part in ("merged", "missed", "crashed"):
        assert f"{account.tokens.tokens(part):.3g}, " in text
    assert "incarnation 1: live" in text
    assert "incarnation 2: live" in text
    assert "killed (SIGKILL)" in text


def test_the_incarnation_of_a_cut_off_learner_has_a_gap(tmp_path):
    write_world(tmp_path, faults=[Fault(50.0, "cut", A, 25.0)])
    records = list(TapeReader(tmp_path))
    lines = explain_learner(run_of(records), A)
    [life] = [line for line in lines if "incarnation 1:" in line]
    began = records[0].wall
    times = {"Accept": [], "Evict": []}
    for record in records:
        if record.type in times and record.data["learner"] == A:
            times[record.type].append(record.wall - began)
    assert f"live from {min(times['Accept']):.2f} s (joined) to" in life
    gone = max(at for at in times["Evict"] if at < 75)
    back = min(at for at in times["Accept"] if at > 75)
    assert f"to {gone:.2f} s (no data arrived and its lease ran out), then again live" in life
    assert f"live from {back:.2f} s (came back) to" in life


def test_a_learners_participation_adds_up(folder, chronicle):
    merged = [d for s in (0, 1) for d in finished(folder, s) if d["verdict"] == "merged"]
    for name in (A, B, C, D):
        text = said(explain_learner(chronicle, name))
        took = sum(
            any(p["learner"] == name and p["state"] == "folded" for p in d["participants"])
            for d in merged
        )
        assert f"It took part in {took} of {len(merged)} merged rounds" in text
        counts = [int(n) for n in re.findall(r"- (\d+): ", text.split("By reason:")[1])]
        assert sum(counts) == len(merged)


def test_the_syncer_has_no_account_of_a_learners_time(records):
    shards = run_of(r for r in records if r.process.startswith("shard-"))
    text = said(explain_learner(shards, C, live=True))
    assert "not known to the syncer" in text
    assert "longest gaps" in text


def test_a_step_names_the_learner_that_set_the_clock(folder, chronicle):
    tape = lines_of(folder / "tape" / "shard-0.jsonl")
    ticks = [r for r in tape if r["type"] == "ClockAdvanced"]
    for tick in ticks[5:60:9]:
        cause = next(r for r in tape if r["kind"] == "event" and r["seq"] == tick["cause"])
        text = said(explain_step(chronicle, tick["data"]["clock"], 0))
        assert f"by the report of {cause['data']['peer']}" in text
        assert f"{cause['data']['peer']} reported it and set the clock" in text
        due = [d["round"] for d in finished(folder, 0) if d["tick"] == tick["data"]["clock"]]
        assert all(f"round {number} " in text for number in due)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The run with shards that receive the reports of 0.6 s at once, as on older tapes."""
    run = tmp_path_factory.mktemp("together")
    with reports_at_once(0.6):
        write_world(run)
    return run


def reports_in(record):
    """Return the step reports in a record of a shard's tape, single or batched."""
    data = record["data"]
    if record["type"] == "Reported":
        return data["reports"]
    alone = record["type"] == "Received" and data["message"]["type"] == "StepReport"
    return [(data["peer"], data["message"])] if alone else []


def test_simultaneous_reports_are_all_counted(together):
    chronicle = run_of(r for r in TapeReader(together) if r.process.startswith("shard-"))
    for shard in (0, 1):
        tape = lines_of(together / "tape" / f"shard-{shard}.jsonl")
        batches = [r for r in tape if r["type"] == "Reported"]
        assert max(len(r["data"]["reports"]) for r in batches) > 1
        heard = {name: [] for name in (A, B, C, D)}
        for name, report in (pair for record in tape for pair in reports_in(record)):
            heard[name].append(report["step"])
        for name in (A, B, C, D):
            told = chronicle.shards[f"shard-{shard}"].reports[name]
            assert len(told) == len(heard[name])
            assert chronicle.learners[name].steps >= max(heard[name])
    assert chronicle.tokens == sum(learner.tokens for learner in chronicle.learners.values()) > 0


def test_the_setter_of_the_clock_among_simultaneous_reports(together):
    """The second learner that reached it, in the order of the reports on the raw tape."""
    chronicle = run_of(TapeReader(together))
    tape = lines_of(together / "tape" / "shard-0.jsonl")
    steps, told = {}, 0
    for record in tape:
        if record["kind"] == "event":
            cause, before = record, dict(steps)
        if record["type"] == "Reported":
            for name, report in record["data"]["reports"]:
                steps[name] = max(report["step"], steps.get(name, 0))
        if record["type"] == "ClockAdvanced" and record["at"] < KILLED_AT:
            clock = record["data"]["clock"]
            assert cause["type"] == "Reported"
            reached = [name for name, step in before.items() if step >= clock]
            for name, report in cause["data"]["reports"]:
                reached += [name] if report["step"] >= clock and name not in reached else []
            text = said(explain_step(chronicle, clock, 0))
            assert f"by the report of {reached[1]}:" in text
            told += 1
    assert told > 10


def test_lines_are_wrapped_and_names_stay_whole():
    lines = ["Title", "", "- learner-12345: " + "word " * 40, "x" * 50]
    text = wrapped(lines, 40)
    assert all(len(line) <= 40 or line == "x" * 50 for line in text.splitlines())
    assert "\n  word" in text


def test_the_quorum_learner_matches_the_raw_tape(folder, chronicle):
    """Compare with the raw pulls: the first instant at which K were in transit or folded."""
    named = early = 0
    for shard in (0, 1):
        completed, present, asked, open_ = {}, Counter(), {}, {}

        def there(fragment, present=present):
            return {name for part, name in present.elements() if part == fragment}

        for r in lines_of(folder / "tape" / f"shard-{shard}.jsonl"):
            data = r["data"]
            if r["type"] == "RoundOpened":
                open_[data["fragment"]] = data["round"]
                if len(there(data["fragment"])) >= 2:
                    completed[data["round"]] = None
            elif r["type"] == "Expect":
                fragment, name = data["fragment"], data["learner"]
                asked[data["path"]] = (fragment, name)
                present[fragment, name] += 1
                if len(there(fragment)) >= 2 and fragment in open_:
                    completed.setdefault(open_[fragment], name)
            elif r["type"] == "Unexpect" and data["path"] in asked:
                present[asked[data["path"]]] -= 1
            elif r["type"] == "RoundFinished":
                open_.pop(data["fragment"], None)
                for p in data["participants"]:
                    present[data["fragment"], p["learner"]] -= p["state"] == "folded"
        for data in finished(folder, shard):
            text = said(explain_round(chronicle, data["round"], shard))
            found = re.search(r"when ([\w-]+) qualified", text)
            if data["quorum_seconds"] is None:
                continue
            assert (found and found[1]) == completed[data["round"]]
            assert bool(found) != ("with requests from before the opening" in text)
            named, early = named + bool(found), early + (not found)
    assert named > 10
    assert early > 1
