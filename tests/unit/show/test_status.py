"""`status_of` for a virtual run whose every record is known, and for broken tapes."""

import io
import json
import re
import shutil
import socket
import time
from dataclasses import fields, replace

import pytest
from rich.console import Console

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.protocol.messages import NOTHING_NEW, Participant, RoundFinished, Tick
from decoupled_diloco.run_model import RunModel, run_of
from decoupled_diloco.run_model.accounts import account_for
from decoupled_diloco.show.status import RunStatus, headline, position, status_of
from decoupled_diloco.show.terminal import render_status
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import SCHEMA
from decoupled_diloco.tape.samples import EndRequested, ProcessEnded, ProcessStarted
from decoupled_diloco.tape.sources import FolderSource, open_source
from unit.show.show_worlds import BACK_AT, KILLED_AT, A, B, C, D, lines_of, write_world
from worlds.faults import Fault


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = tmp_path_factory.mktemp("status")
    write_world(run, codec={"uplink": "bf16"})
    return run


@pytest.fixture(scope="module")
def records(folder):
    return list(TapeReader(folder))


def at(records, seconds):
    """The status as of an instant of the run."""
    began = records[0].wall
    chronicle = RunModel()
    chronicle.take_all(r for r in records if r.wall <= began + seconds)
    return status_of(chronicle, began + seconds)


def shard_values(folder, kind):
    return [
        record["data"]
        for path in sorted((folder / "tape").glob("shard-*.jsonl"))
        for record in lines_of(path)
        if record["type"] == kind
    ]


def text_of(status, width=80, rows=None):
    console = Console(width=width, file=io.StringIO())
    console.print(render_status(status, width=width, rows=rows))
    return console.file.getvalue()


def test_a_finished_run_has_the_numbers_of_its_tape(folder, records):
    status = status_of(run_of(records), records[-1].wall + 100)
    assert (status.phase, status.name, status.step) == ("finished", "causes", 80)
    assert "finished" in headline(status)
    rounds = shard_values(folder, "RoundFinished")
    merged = [r for r in rounds if r["verdict"] == "merged"]
    assert status.rounds_merged == len(merged)
    idle = [r for r in rounds if r["reason"] == "no live learner has anything new"]
    assert status.rounds_abandoned == len(rounds) - len(merged) - len(idle)
    for learner in status.learners:
        own = lines_of(folder / "tape" / f"{learner.name}.jsonl")
        steps = [r["data"] for r in own if r["type"] == "StepFinished"]
        assert learner.steps == len(steps)
        assert learner.tokens == sum(data["tokens"] for data in steps)
        folded = sum(
            any(p["learner"] == learner.name and p["state"] == "folded" for p in r["participants"])
            for r in merged
        )
        assert learner.participation == folded / len(merged)
        assert learner.state == "finished"


def test_an_idle_round_is_neither_merged_nor_abandoned(tmp_path):
    """The status counts rounds as the summary does."""
    idle = Participant("a", "declined", 0, 0, 0.0, None, NOTHING_NEW)
    gone = replace(idle, state="gone", reason="its lease ran out")
    last = {"quorum_seconds": None, "grace_seconds": 0.0, "closed_seconds": None, "why": ""}
    last |= {"uploaded_seconds": None, "finished_seconds": 0.1, "step_seconds": 1.0}
    with TapeWriter(tmp_path, "shard-0", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        for number, one in enumerate((idle, idle, gone)):
            finished = RoundFinished(
                number, 0, 8, None, "abandoned", "", (one,), slack_seconds=0.0, **last
            )
            tape.effects(float(number), tape.event(float(number), Tick()), [finished])
    status = status_of(run_of(TapeReader(tmp_path)), 1003.0)
    history = run_of(TapeReader(tmp_path))
    assert (status.rounds_merged, status.rounds_abandoned) == (0, 1)
    assert (history.rounds_merged, history.rounds_abandoned) == (0, 1)


def test_a_live_learner_without_participation_is_visible(records):
    status = at(records, 75.0)
    d = next(learner for learner in status.learners if learner.name == D)
    assert d.state == "stepping"
    assert d.participation_recent < 0.3
    assert d.reasons_recent["late"] > d.reasons_recent.get("took part", 0)
    assert d.rounds_behind > 5
    assert d.steps_behind > 0
    a = next(learner for learner in status.learners if learner.name == A)
    assert (a.participation, a.rounds_behind) == (1.0, 0)


def test_a_killed_learner_is_down_and_comes_back(records):
    states = {
        seconds: next(x.state for x in at(records, seconds).learners if x.name == C)
        for seconds in (15.0, KILLED_AT + 1, KILLED_AT + 6, BACK_AT + 5)
    }
    assert list(states.values()) == ["stepping", "down", "down", "stepping"]
    c = next(x for x in at(records, BACK_AT + 5).learners if x.name == C)
    assert c.epoch == 2


def test_a_cut_off_learner_that_steps_is_visible(tmp_path):
    write_world(tmp_path, faults=[Fault(50.0, "cut", A, 25.0)])
    records = list(TapeReader(tmp_path))
    states = [
        learner.state
        for seconds in (45.0, 65.0, 81.0)
        for learner in at(records, seconds).learners
        if learner.name == A
    ]
    assert states == ["stepping", "cut off", "stepping"]


def test_a_running_run_has_a_rate_and_an_estimate(records):
    status = at(records, 50.0)
    assert status.phase == "running"
    assert status.left_by == "steps"
    assert status.steps_per_second == pytest.approx(1.0, rel=0.05)
    assert status.seconds_left == pytest.approx(80 - status.step, rel=0.05)


def test_open_rounds_name_the_awaited_learners(records):
    waiting = [
        round
        for seconds in range(3, 30)
        for shard in at(records, seconds).shards
        for round in shard.open_rounds
    ]
    assert any(round.waits_for == "upload" and round.learners == (D,) for round in waiting)
    assert all(round.open_seconds >= 0 for round in waiting)


def test_a_run_without_new_records_is_silent(records):
    began = records[0].wall
    chronicle = RunModel()
    chronicle.take_all(r for r in records if r.wall <= began + 50)
    chronicle.virtual = False
    status = status_of(chronicle, began + 3650)
    assert status.phase == "silent"
    assert status.silent_seconds == pytest.approx(3600, abs=2)
    assert "stopped" in headline(status)
    assert status.seconds_left is None


def interrupted(folder, records, seconds, told, ended=()):
    """The run up to an instant at which its launcher stopped these processes."""
    began, chronicle = records[0].wall, RunModel()
    tape = TapeWriter(folder, "launcher", {}, clock=lambda: 0.0, wall=lambda: began)
    for name in told:
        tape.sample(1.0, ProcessStarted(name, 1))
    tape.sample(seconds, EndRequested(tuple(told)))
    for name in ended:
        tape.sample(seconds + 1, ProcessEnded(name, 130, None))
    tape.close()
    launcher = list(TapeReader(folder))
    chronicle.take_all(launcher[: 1 + len(told)])
    chronicle.take_all(r for r in records if r.wall <= began + seconds)
    chronicle.take_all(launcher[1 + len(told) :])
    return status_of(chronicle, began + seconds + 2)


def test_an_interrupted_run_is_reported_at_once_without_an_estimate(records, tmp_path):
    told = (A, B, C, D, "shard-0", "shard-1")
    status = interrupted(tmp_path, records, 15.0, told, ended=told)
    assert status.phase == "interrupted"
    assert status.seconds_left is None
    assert status.tokens_per_second is None
    assert {learner.state for learner in status.learners} == {"ended"}
    assert {shard.state for shard in status.shards} == {"ended"}
    assert f"interrupted at step {status.step}, 1 s ago" in text_of(status)
    assert "left," not in text_of(status)
    assert [text for _, text in status.remarks if "ended with exit code" in text] == []
    assert at(records, 15.0).phase == "running"


def test_an_interrupted_syncer_reports_remote_learners_as_out_of_reach(records, tmp_path):
    status = interrupted(tmp_path, records, 15.0, ("shard-0", "shard-1"))
    assert status.phase == "interrupted"
    assert {learner.state for learner in status.learners} == {"out of reach"}


def test_a_run_interrupted_before_the_first_record(tmp_path):
    tape = TapeWriter(tmp_path, "launcher", {}, clock=lambda: 0.0, wall=lambda: 1000.0)
    tape.sample(1.0, ProcessStarted("shard-0", 1))
    tape.sample(1.0, ProcessStarted("learner-0", 2))
    tape.sample(2.0, EndRequested(("learner-0",)))
    tape.sample(3.0, EndRequested(("shard-0",)))
    tape.close()
    chronicle = run_of(TapeReader(tmp_path))
    status = status_of(chronicle, 1003.0)
    assert status.phase == "interrupted"
    assert [learner.state for learner in status.learners] == ["ended"]


def test_stopping_processes_after_the_end_is_not_an_interruption(records, tmp_path):
    status = interrupted(tmp_path, records, 1000.0, (A, "shard-0"))
    assert status.phase == "finished"


def test_discards_match_the_tape_or_are_unknown(folder, records):
    full = status_of(run_of(records), records[-1].wall)
    shards_only = [r for r in records if r.process.startswith("shard-")]
    partial = status_of(run_of(shards_only), records[-1].wall)
    for own, told in zip(full.learners, partial.learners, strict=True):
        applied = [
            r["data"]["discarded_tokens"]
            for r in lines_of(folder / "tape" / f"{own.name}.jsonl")
            if r["type"] == "Apply"
        ]
        assert own.discarded_tokens == sum(applied) / 4
        assert sum(own.discarded_why.values()) == pytest.approx(own.discarded_tokens)
        assert told.discarded_why is None
        assert told.loss == own.loss, "reports contain it"
        # A killed incarnation has not reported its last discarded tokens.
        assert 0.7 * own.discarded_tokens < told.discarded_tokens <= own.discarded_tokens


def test_json_has_every_field(records):
    plain = json.loads(json.dumps(at(records, 50.0).to_json(), allow_nan=False))
    assert set(plain) == {field.name for field in fields(RunStatus)}
    assert {learner["name"] for learner in plain["learners"]} == {A, B, C, D}


def test_discards_match_the_account_or_are_a_lower_bound(records):
    chronicle = run_of(records)
    now, account = records[-1].wall, account_for(run_of(records))
    known, alone = (status_of(chronicle, now, (), each) for each in (account, None))
    assert known.discarded_tokens == pytest.approx(account.tokens.tokens("discarded"))
    assert account.tokens.crashed > 0
    assert alone.discarded_tokens < known.discarded_tokens
    assert " % discarded" in text_of(known)
    assert "at least" not in text_of(known)
    assert re.search(r", at least [\d.]+ % discarded", text_of(alone))
    del account.learners[A]
    assert not status_of(chronicle, now, (), account).discarded_whole


def test_a_long_remark_is_wrapped_and_not_truncated(records):
    status = at(records, 50.0)
    text = "shard-1 cannot write its tape any more: " + "why and wherefore, " * 8
    status = replace(status, remarks=((1.0, text),))
    assert " ".join(text.split()) in " ".join(text_of(status).split())
    assert max(map(len, text_of(status, rows=24).splitlines())) <= 80
    assert len(text_of(status, rows=24).splitlines()) < 24


@pytest.mark.parametrize("width", [40, 55, 80, 120])
def test_the_status_fits_its_width(records, width):
    text = text_of(at(records, 50.0), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text, "a table is truncated"
    left_out = " ".join(text.split()).partition("no room for: ")[2].partition(" (ddiloco")[0]
    tables = text.partition("no room for: ")[0].partition("\n\n")[2]
    for column in ("stale copies", "discarded", "silent", "versions", "grace"):
        assert (column.split()[-1] in tables) != (column in left_out), column


def test_a_long_name_is_wrapped(records):
    status = at(records, 50.0)
    long = replace(status.learners[0], name="a-name-without-an-end-" * 2)
    text = text_of(replace(status, learners=(long, *status.learners[1:])), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert long.name in "".join(line.split(" ")[0] for line in text.splitlines())


def test_progress_beyond_the_budget_names_the_budget(records):
    """Learners train on until they receive the end."""
    status = at(records, 50.0)
    within = replace(status, step=60, max_steps=60, tokens=100, max_tokens=100)
    beyond = replace(within, step=65, tokens=120)
    assert position(within) == "step 60/60"
    assert position(beyond) == "step 65 (budget 60)"
    assert "100 tokens of 100" in text_of(within)
    assert "120 tokens (budget 100)" in text_of(beyond)


def test_a_low_terminal_shows_learners_with_problems(records):
    text = text_of(at(records, KILLED_AT + 6), rows=14)
    assert len(text.splitlines()) <= 14
    assert f"{C} " in text
    assert "3 more" in text


def test_an_empty_tape(tmp_path):
    (tmp_path / "tape").mkdir()
    source = FolderSource(tmp_path)
    chronicle = RunModel()
    chronicle.take_all(source.poll())
    status = status_of(chronicle, 0.0, source.problems())
    assert status.phase == "empty"
    assert "the tape is empty" in text_of(status)


def test_a_torn_tape_is_shown_and_reported(folder, tmp_path):
    whole = (folder / "tape" / "shard-0.jsonl").read_bytes()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(whole[: len(whole) // 2] + b'\n{"v":1,"at"\n' + whole[len(whole) // 2 :])
    source = FolderSource(torn)
    chronicle = RunModel()
    chronicle.take_all(source.poll())
    status = status_of(chronicle, 0.0, source.problems())
    assert status.rounds_merged > 5
    assert any("torn" in problem for problem in status.problems)
    assert "torn" in " ".join(text_of(status).split())


def test_another_schema_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "shard-0.jsonl"
    path.write_text(json.dumps({"v": SCHEMA + 1}) + "\n")
    with pytest.raises(StorageError, match=f"schema {SCHEMA + 1}"):
        FolderSource(path).poll()


def test_sources_that_are_not_runs_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        FolderSource(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="is not a run folder"):
        FolderSource(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(StorageError, match="is not an event tape"):
        FolderSource(tmp_path / "notes.txt")


def test_another_run_in_the_same_place_is_read_from_the_start(folder, tmp_path):
    path = tmp_path / "shard-0.jsonl"
    path.write_bytes((folder / "tape" / "shard-0.jsonl").read_bytes())
    source = FolderSource(path)
    first = source.poll()
    assert source.poll() == []
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:100]))
    assert len(source.poll()) == 100 < len(first)
    assert source.generation == 1


def test_a_longer_run_in_the_same_place_is_read_from_the_start(folder, tmp_path):
    whole = (folder / "tape" / "shard-0.jsonl").read_bytes()
    path = tmp_path / "shard-0.jsonl"
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:100]))
    source = FolderSource(path)
    assert len(source.poll()) == 100
    path.rename(tmp_path / "older")
    path.write_bytes(whole)
    assert len(source.poll()) == len(whole.splitlines())
    assert source.generation == 1
    with path.open("ab") as file:
        file.write(whole.splitlines(keepends=True)[-1])
    assert len(source.poll()) == 1
    assert source.generation == 1


def test_the_status_of_a_run_in_a_store_is_as_of_its_newest_state(folder, tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[store]'")
    from decoupled_diloco.storage.mirror import Mirror
    from decoupled_diloco.storage.object_store import Objects

    run, second, address = tmp_path / "run", tmp_path / "second", f"file://{tmp_path}/store"
    shutil.copytree(folder / "tape", run / "tape")
    (run / "run.toml").write_text("[run]\n")
    (second / "tape").mkdir(parents=True)
    (second / "tape/shard-9.jsonl").write_text("")
    main = Mirror(run, Objects(address), "x")
    part = Mirror(second, Objects(address), "x", "shard-9")
    part.write()
    for number in range(3):
        (run / "tape/shard-0-standby.jsonl").write_text("\n" * number)
        assert main.write()
        part.write()
    source = open_source(address)
    status = status_of(run_of(source.poll()), time.time() + 100, stored=source.stored)
    store = status.store
    assert store is not None
    assert (store.address, store.state, store.backlog_bytes) == (address, 3, 0)
    assert 100 <= store.seconds_ago < 200
    (of_part,) = store.parts
    assert (of_part.name, of_part.host) == ("shard-9", socket.gethostname())
    assert store.seconds_ago < of_part.seconds_ago < 200
    shown = " ".join(text_of(status).split())
    # A long address is broken over lines.
    assert re.search(r"has state 3 of \d min( \d+ s)? ago, part shard-9 from", shown)
