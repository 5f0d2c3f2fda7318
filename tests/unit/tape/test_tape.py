import errno
import json
import math
import re
import resource
import subprocess
import sys
import threading
import time
from typing import get_args, get_type_hints

import pytest
import torch

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.protocol import LearnerMachine, Options, wire
from decoupled_diloco.protocol.messages import (
    Connected,
    Note,
    Paused,
    Received,
    Refusal,
    RoundFinished,
    StepFinished,
    Tick,
)
from decoupled_diloco.tape import (
    MERGED_NAME,
    Follower,
    Recorder,
    TapeReader,
    TapeWriter,
    records,
)
from decoupled_diloco.tape.records import format_record
from decoupled_diloco.tape.replay import replay
from decoupled_diloco.tape.samples import (
    BytesMoved,
    Evaluated,
    GrayPicture,
    LinkState,
    LossMeasured,
    Metric,
    Sample,
    pictures_of,
)


def writer(folder, process="learner-0", monotonic=0.0, wall=1000.0, header=None):
    return TapeWriter(folder, process, header, clock=lambda: monotonic, wall=lambda: wall)


def test_round_trip(tmp_path):
    event, sample = StepFinished(96), LinkState(1, connected=True)
    effects = [Note("Grüße\n", "because"), Note("b", "c")]
    with writer(tmp_path, header={"options": {"quorum": 2}}) as tape:
        seq = tape.event(0.1 + 0.2, event)
        tape.effects(0.1 + 0.2, seq, effects)
        tape.sample(0.5, sample)
    start, *records = TapeReader(tmp_path)
    assert start.kind == "start"
    assert start.data["header"] == {"options": {"quorum": 2}}
    assert {"wall", "monotonic", "pid", "version"} <= start.data.keys()
    assert [r.value() for r in records] == [event, *effects, sample]
    assert [(r.seq, r.kind, r.cause) for r in records] == [
        (1, "event", None),
        (2, "effect", 1),
        (3, "effect", 1),
        (4, "sample", None),
    ]
    assert records[0].at == 0.1 + 0.2
    assert {r.process for r in records} == {"learner-0"}


def test_half_a_surrogate_pair_round_trips(tmp_path):
    note = Note("a\udc80b", "undecodable")
    with writer(tmp_path / "tape", process="learner-0") as tape:
        tape.effects(0.5, tape.event(0.5, StepFinished(1)), [note])
    assert [r.value() for r in TapeReader(tmp_path) if r.type == "Note"] == [note]


READ_WITHIN = """
import resource, sys
from decoupled_diloco.errors import StorageError
from decoupled_diloco.tape import TapeReader
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
try:
    print(sum(1 for _ in TapeReader(sys.argv[1])))
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("hard", "output"), [(None, "80\n"), (40, "raise the limit with `ulimit -Hn`")]
)
def test_a_tape_of_more_files_than_may_be_open(tmp_path, hard, output):
    for number in range(80):
        writer(tmp_path, process=f"learner-{number}").close()
    if hard is None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = [sys.executable, "-c", READ_WITHIN, str(tmp_path), "40", str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output in done.stdout


def test_every_record_contains_its_schema(tmp_path):
    with writer(tmp_path) as tape:
        tape.event(1.0, StepFinished(1))
    lines = (tmp_path / "learner-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["v"] for line in lines] == [4, 4]


def test_wall_time_comes_from_the_latest_start(tmp_path):
    with writer(tmp_path, monotonic=10.0, wall=1000.0) as tape:
        tape.event(11.0, StepFinished(1))
    with writer(tmp_path, monotonic=500.0, wall=1050.0) as tape:
        tape.event(501.5, StepFinished(1))
    steps = [r for r in TapeReader(tmp_path) if r.kind == "event"]
    assert [r.wall for r in steps] == [1001.0, 1051.5]
    assert [(r.life, r.seq) for r in steps] == [(0, 1), (1, 1)]


def test_files_are_merged_by_wall_time_and_then_by_name(tmp_path):
    with writer(tmp_path, "shard-0", monotonic=7.0) as tape:
        tape.event(8.0, Tick())
        tape.event(9.0, Tick())
    with writer(tmp_path, "learner-0", monotonic=100.0) as tape:
        tape.event(101.0, StepFinished(1))
        tape.event(101.5, StepFinished(2))
    records = [r for r in TapeReader(tmp_path) if r.kind != "start"]
    assert [(r.process, r.wall) for r in records] == [
        ("learner-0", 1001.0),
        ("shard-0", 1001.0),
        ("learner-0", 1001.5),
        ("shard-0", 1002.0),
    ]


def test_a_clock_that_is_set_back_keeps_each_files_order(tmp_path):
    with writer(tmp_path, wall=1000.0) as tape:
        tape.event(5.0, StepFinished(1))
    with writer(tmp_path, wall=900.0) as tape:
        tape.event(1.0, StepFinished(2))
    with writer(tmp_path, "shard-0", wall=1000.0) as tape:
        tape.event(2.0, Tick())
    records = [r for r in TapeReader(tmp_path) if r.process == "learner-0"]
    assert [(r.life, r.seq) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_merged_file_reads_as_the_folder_does(tmp_path, run_folder):
    """`ddiloco events` prints one."""
    expected = list(TapeReader(run_folder))
    merged = tmp_path / MERGED_NAME
    merged.write_text("".join(map(format_record, expected)))
    assert list(TapeReader(merged)) == list(TapeReader(tmp_path)) == expected


def test_a_torn_last_line_is_skipped_and_reported(tmp_path):
    with writer(tmp_path) as tape:
        tape.event(1.0, StepFinished(1))
        tape.event(2.0, StepFinished(2))
    path = tmp_path / "learner-0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    reader = TapeReader(tmp_path)
    assert [r.seq for r in reader] == [0, 1]
    assert len(reader.problems) == 1
    assert "learner-0.jsonl: line 3 is torn and was skipped" in reader.problems[0]


def test_a_restart_ends_the_torn_line_of_the_earlier_incarnation(tmp_path):
    with writer(tmp_path) as tape:
        tape.event(1.0, StepFinished(1))
    path = tmp_path / "learner-0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with writer(tmp_path) as tape:
        tape.event(9.0, StepFinished(3))
    reader = TapeReader(tmp_path)
    assert [(r.life, r.seq) for r in reader] == [(0, 0), (1, 0), (1, 1)]
    assert len(reader.problems) == 1


@pytest.mark.parametrize(
    "line", [b"[1]\n", b'{"v":4}\n', b'{"v":1.5}\n', b"\xff\xfe\n", b'{"v":"x"}\n', b"7\n"]
)
def test_lines_that_are_not_records_are_problems(tmp_path, line):
    with writer(tmp_path) as tape:
        tape.event(1.0, StepFinished(1))
    path = tmp_path / "learner-0.jsonl"
    path.write_bytes(path.read_bytes() + line)
    reader = TapeReader(tmp_path)
    assert [r.seq for r in reader] == [0, 1]
    assert len(reader.problems) == 1


def test_a_file_without_a_start_record_keeps_its_own_clock(tmp_path):
    with writer(tmp_path) as tape:
        tape.event(1.0, StepFinished(1))
    path = tmp_path / "learner-0.jsonl"
    path.write_text(path.read_text().splitlines()[1] + "\n")
    reader = TapeReader(path)
    assert [r.wall for r in reader] == [1.0]
    assert "learner-0 has no start record" in reader.problems[0]


@pytest.mark.parametrize("schema", [3, 5])
def test_the_error_for_another_schema_has_a_fix(tmp_path, schema):
    with writer(tmp_path):
        pass
    path = tmp_path / "learner-0.jsonl"
    path.write_text(path.read_text().replace('"v":4', f'"v":{schema}'))
    message = f"schema {schema}, but this version reads only schema 4: read it with"
    with pytest.raises(StorageError, match=message):
        list(TapeReader(tmp_path))
    with pytest.raises(StorageError, match=message):
        Follower(path).poll()


def test_the_error_for_a_missing_tape_has_a_fix(tmp_path):
    with pytest.raises(StorageError, match="has no event tape: use a run folder"):
        TapeReader(tmp_path)


def test_numbers_that_are_not_finite_become_none(tmp_path):
    with writer(tmp_path) as tape:
        tape.sample(1.0, LossMeasured(1, 1, 32, float("inf")))
        tape.sample(2.0, Evaluated(1, float("nan"), 32))
    values = [r.value() for r in TapeReader(tmp_path) if r.kind == "sample"]
    assert values == [LossMeasured(1, 1, 32, None), Evaluated(1, None, 32)]


def test_records_are_buffered_until_they_are_flushed(tmp_path):
    tape = writer(tmp_path)
    reader = Follower(tmp_path / "learner-0.jsonl")
    assert [r.kind for r in reader.poll()] == ["start"]
    tape.event(1.0, StepFinished(1))
    tape.event(2.0, StepFinished(2))
    assert reader.poll() == []
    tape.flush()
    assert [r.seq for r in reader.poll()] == [1, 2]
    tape.event(3.0, StepFinished(3))
    assert reader.poll() == []
    tape.flush()
    assert [r.seq for r in reader.poll()] == [3]
    tape.close()
    tape.close()


def test_text_is_created_in_parts_and_in_order(tmp_path, monkeypatch):
    made = []
    encode = wire.encode
    monkeypatch.setattr(wire, "encode", lambda value: made.append(value) or encode(value))
    tape = writer(tmp_path)
    for step in range(1, 8):
        tape.event(float(step), StepFinished(step))
    assert made == [], "a thread that writes a record does not wait for its text"
    assert tape.make_text(3)
    assert len(made) == 3
    tape.event(8.0, StepFinished(8))
    assert not tape.make_text(100)
    tape.event(9.0, StepFinished(9))
    tape.close()
    assert [r.seq for r in TapeReader(tmp_path)] == list(range(10))


@pytest.mark.parametrize("kind", [records.Event, records.Effect, Sample])
def test_recorded_values_are_immutable(kind):
    """The text of a record is created later, so the value must be immutable."""
    for cls in get_args(kind):
        assert cls.__dataclass_params__.frozen, cls
        assert not re.search(r"\b(list|dict|set|Tensor)\b", str(get_type_hints(cls))), cls


class SlowFile:
    """A file whose writes block until they are released."""

    def __init__(self, file):
        self.file = file
        self.entered, self.gate = threading.Event(), threading.Event()

    closed = property(lambda self: self.file.closed)

    def write(self, data):
        self.entered.set()
        assert self.gate.wait(10)
        return self.file.write(data[: max(1, len(data) // 2)])

    def close(self):
        self.file.close()


def test_records_are_accepted_while_the_disk_is_slow(tmp_path):
    tape = writer(tmp_path)
    slow = tape._file = SlowFile(tape._file)
    tape.event(1.0, StepFinished(1))
    flushing = [threading.Thread(target=tape.flush) for _ in range(3)]
    flushing[0].start()
    assert slow.entered.wait(10)
    started = time.monotonic()
    for step in range(2, 100):
        tape.event(float(step), StepFinished(step))
    assert time.monotonic() - started < 1.0, "no caller waits for the disk"
    for each in flushing[1:]:
        each.start()
    slow.gate.set()
    for each in flushing:
        each.join(10)
    tape.close()
    assert [r.seq for r in TapeReader(tmp_path)] == list(range(100))
    assert tape.dropped == 0


def test_a_full_buffer_ends_the_tape_and_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.setattr("decoupled_diloco.tape.writer.BUFFER_RECORDS_MAX", 10)
    errors = []
    tape = TapeWriter(tmp_path, "learner-0", on_failure=errors.append)
    for step in range(50):
        tape.event(float(step), StepFinished(step))
    kept = 51 - tape.dropped
    assert 1 < kept < 20
    assert len(errors) == 1
    assert "wait for the disk): no more events of learner-0 are recorded" in str(errors[0])
    tape.flush()
    tape.event(60.0, StepFinished(60))
    tape.close()
    assert [r.seq for r in TapeReader(tmp_path)] == list(range(kept))


def test_text_that_is_not_unicode_survives(tmp_path):
    with writer(tmp_path) as tape:
        tape.effects(1.0, 0, [Note("\ud800ü", "a peer may say anything")])
    assert [r.value().text for r in TapeReader(tmp_path) if r.kind == "effect"] == ["\ud800ü"]


def test_a_closed_tape_drops(tmp_path):
    tape = writer(tmp_path)
    tape.close()
    tape.event(1.0, StepFinished(1))
    tape.flush()
    tape.close()
    assert tape.dropped == 1
    assert tape._file.closed, "a flush does not open it again"


class FullDisk:
    """A file on a disk with a limited number of free bytes."""

    closed = False

    def __init__(self, file, room=0):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self.file.close()
        self.closed = True


def fill_disk(tape, room=0):
    tape._file = FullDisk(tape._file, room)


def test_a_full_disk_is_reported_once_and_its_records_wait(tmp_path):
    tape = writer(tmp_path)
    fill_disk(tape)
    tape.event(1.0, StepFinished(1))
    with pytest.raises(StorageError, match=r"No space left on device: its records wait in memory"):
        tape.flush()
    assert tape.event(2.0, StepFinished(1)) == 2
    tape.flush()
    assert tape.waiting
    assert tape.dropped == 0
    tape.close()
    assert tape.dropped == 2
    assert [r.seq for r in TapeReader(tmp_path)] == [0]


@pytest.mark.parametrize("room", [0, 1, 50, 300])
@pytest.mark.parametrize("times", [1, 3])
def test_a_temporarily_full_disk_loses_no_record(tmp_path, caplog, room, times):
    """Also if it became full in the middle of a line."""
    errors = []
    tape = TapeWriter(tmp_path, "learner-0", on_failure=errors.append)
    for step in range(times):
        fill_disk(tape, room)
        for _ in range(10):
            tape.event(float(step), StepFinished(1))
        tape.flush()
        tape.event(step + 0.5, StepFinished(2))
        tape.flush()
        tape._file.room = 10**6
        tape.flush()
        assert not tape.waiting
    tape.close()
    reader = TapeReader(tmp_path)
    assert [r.seq for r in reader] == list(range(11 * times + 1))
    assert not reader.problems
    assert tape.dropped == 0
    assert len(errors) == times, "once for each time"
    assert caplog.text.count("can be written again, and no record is missing") == times


def test_a_disk_that_stays_full_ends_the_tape(tmp_path, monkeypatch):
    monkeypatch.setattr("decoupled_diloco.tape.writer.BUFFER_RECORDS_MAX", 10)
    errors = []
    tape = TapeWriter(tmp_path, "learner-0", on_failure=errors.append)
    fill_disk(tape)
    for step in range(50):
        tape.event(float(step), StepFinished(1))
        tape.flush()
    assert tape.dropped == 40
    assert "No space left" in str(errors[0])
    assert "10 records wait for the disk): no more events of learner-0 are recorded" in str(
        errors[1]
    )
    assert len(errors) == 2
    tape._file.room = 10**6
    tape.close()
    assert [r.seq for r in TapeReader(tmp_path)] == list(range(11))


def test_a_tape_that_ends_loses_no_effect(tmp_path, monkeypatch, caplog):
    tape = writer(tmp_path)
    fill_disk(tape)
    monkeypatch.setattr("decoupled_diloco.tape.writer.BUFFER_RECORDS_MAX", 2)
    recorder = Recorder(LearnerMachine(Options(), "learner-0", 1, "n"), tape)
    assert [type(e).__name__ for e in recorder.handle(1.0, Connected("shard-0"))] == ["Send"]
    assert [type(e).__name__ for e in recorder.handle(2.0, Connected("shard-0"))] == ["Send"]
    assert caplog.text.count("is written too slowly") == 1
    tape.abandon()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "tape").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        writer(tmp_path / "tape")


def test_a_follower_finds_added_lines_and_new_files(tmp_path):
    reader = Follower(tmp_path)
    assert reader.poll() == []
    tape = writer(tmp_path / "tape")
    assert [r.kind for r in reader.poll()] == ["start"]
    other = writer(tmp_path / "tape", "shard-0")
    tape.event(1.0, StepFinished(1))
    tape.flush()
    assert [(r.process, r.kind) for r in reader.poll()] == [
        ("shard-0", "start"),
        ("learner-0", "event"),
    ]
    tape.close()
    other.close()
    assert reader.poll() == []


def test_a_follower_waits_for_the_end_of_a_line(tmp_path):
    with writer(tmp_path) as tape:
        tape.event(1.0, StepFinished(1))
    path = tmp_path / "learner-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    reader = Follower(path)
    assert [r.seq for r in reader.poll()] == [0]
    assert reader.poll() == []
    path.write_bytes(whole)
    assert [r.seq for r in reader.poll()] == [1]
    assert reader.problems == []


def test_a_follower_reports_torn_lines(tmp_path):
    reader = Follower(tmp_path)
    (tmp_path / "tape").mkdir()
    (tmp_path / "tape" / "learner-0.jsonl").write_text('{"v":1,"at\n')
    assert reader.poll() == []
    assert len(reader.problems) == 1


OPTIONS = Options(fragments=4, period=4, shards=2)


def record_learner(folder, nonce="one"):
    with writer(folder, header={"nonce": nonce}) as tape:
        recorder = Recorder(LearnerMachine(OPTIONS, "learner-0", 1, nonce), tape)
        effects = [
            *recorder.handle(1.0, Connected("shard-0")),
            *recorder.handle(1.25, Connected("shard-1")),
        ]
        effects += recorder.handle(2.0, Received("shard-0", Refusal("busy", False)))
        effects += recorder.handle(3.0, Paused())
        tape.sample(4.0, BytesMoved(1, 2, 3, 4))
    return effects


def machine(header):
    return LearnerMachine(OPTIONS, "learner-0", 1, header["nonce"])


def test_a_recorder_returns_and_records_the_effects(tmp_path):
    effects = record_learner(tmp_path)
    taped = [r.value() for r in TapeReader(tmp_path) if r.kind == "effect"]
    assert [type(effect).__name__ for effect in effects] == ["Send", "Send", "Note"]
    assert taped == effects


def test_replay_is_exact(tmp_path):
    record_learner(tmp_path)
    record_learner(tmp_path, "two")
    records = list(TapeReader(tmp_path))
    assert {r.life for r in records} == {0, 1}
    assert replay(records, machine) == []


def test_replay_finds_differences(tmp_path):
    record_learner(tmp_path)
    path = tmp_path / "learner-0.jsonl"
    path.write_text(path.read_text().replace("refuses for now", "refuses"))
    (difference,) = replay(TapeReader(tmp_path), machine)
    assert difference.event == "Received"
    assert difference.taped["text"] == "shard 0 refuses: busy"
    assert difference.replayed["text"] == "shard 0 refuses for now: busy"


def test_replay_finds_missing_effects(tmp_path):
    record_learner(tmp_path)
    path = tmp_path / "learner-0.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"Note"' not in line]
    path.write_text("\n".join(lines) + "\n")
    (difference,) = replay(TapeReader(tmp_path), machine)
    assert difference.taped is None
    assert difference.replayed["type"] == "Note"


def test_replay_ignores_effects_lost_in_a_kill(tmp_path):
    with writer(tmp_path, header={"nonce": "one"}) as tape:
        Recorder(LearnerMachine(OPTIONS, "learner-0", 1, "one"), tape).handle(
            1.0, Connected("shard-0")
        )
    path = tmp_path / "learner-0.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert replay(TapeReader(tmp_path), machine) == []


def test_effects_with_infinite_numbers_are_written(tmp_path):
    finished = RoundFinished(
        round=1,
        fragment=0,
        tick=1,
        version=None,
        verdict="abandoned",
        reason="r",
        participants=(),
        quorum_seconds=None,
        grace_seconds=0.0,
        closed_seconds=None,
        uploaded_seconds=None,
        finished_seconds=1.0,
        step_seconds=0.0,
        slack_seconds=float("-inf"),
        why="w",
    )
    with writer(tmp_path, "shard-0") as tape:
        tape.effects(1.0, 0, [finished])
    assert list(TapeReader(tmp_path))[1].data["slack_seconds"] is None


def test_further_metrics_of_an_evaluation_are_kept(tmp_path):
    evaluated = Evaluated(7, 0.5, 32, (Metric("accuracy", 0.25), Metric("gain", None)))
    with writer(tmp_path) as tape:
        tape.sample(1.0, evaluated)
    assert [r.value() for r in TapeReader(tmp_path) if r.kind == "sample"] == [evaluated]


def test_an_evaluation_of_an_older_tape_has_no_metrics(tmp_path):
    with writer(tmp_path) as tape:
        tape.sample(1.0, Evaluated(7, 0.5, 32))
    path = tmp_path / "learner-0.jsonl"
    path.write_text(path.read_text().replace(',"metrics":[]', ""))
    values = [r for r in TapeReader(tmp_path) if r.kind == "sample"]
    assert "metrics" not in values[0].data
    assert values[0].value() == Evaluated(7, 0.5, 32, ())


def test_a_picture_is_stored_as_digits():
    pixels = torch.tensor([[0.0, 0.5, 2.0], [-1.0, 1.0, math.nan]])
    assert pictures_of([("a", pixels)]).pictures == (GrayPicture("a", ("049", "090")),)


@pytest.mark.parametrize("shape", [(3,), (257, 2), (1, 8, 8)])
def test_a_picture_of_another_shape_is_rejected(shape):
    with pytest.raises(ConfigError) as error:
        pictures_of([("a", torch.zeros(shape))])
    assert str(error.value) == (
        f"pictures() of the workload returned pixels of shape={shape}: use two dimensions, of at "
        "most 256 pixels each"
    )
