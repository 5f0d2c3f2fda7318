"""A tape in segments reads as one text: while it grows, after a kill, and after the run."""

import gc
import lzma
import random
import resource
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

from decoupled_diloco.tape import Follower, TapeReader, TapeWriter, segments, writer
from decoupled_diloco.tape.samples import LossMeasured, SampleGenerated
from decoupled_diloco.tape.segments import lines_of, pack_tapes, segments_of, tapes_in
from decoupled_diloco.tape.sources import FolderSource

LENGTH = 2000


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(writer, "SEGMENT_BYTES", LENGTH)
    monkeypatch.setattr(segments, "PACKED_BYTES_MIN", 500)


def open_tape(folder, process="learner-0"):
    return TapeWriter(folder, process, clock=lambda: 0.0, wall=lambda: 1000.0)


def write(tape, steps, flush_every=1):
    for step in steps:
        tape.sample(float(step), LossMeasured(step, step, 32, 2.5))
        if step % flush_every == 0:
            tape.flush()


def steps_in(path):
    return [r.data["step"] for r in TapeReader(path) if r.type == "LossMeasured"]


def files_in(folder):
    """Return contents by name; the number in a segment's name is its end offset."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_full_segments_are_compressed_and_the_tape_reads_as_one_text(tmp_path):
    with open_tape(tmp_path) as tape:
        write(tape, range(100))
    newest = tmp_path / "learner-0.jsonl"
    parts = segments_of(newest)
    assert len(parts) > 4
    assert [p.path.name for p in parts] == [f"{p.end:012d}.jsonl.xz" for p in parts]
    assert all(LENGTH <= p.end - p.begin < LENGTH + 200 for p in parts)
    assert newest.stat().st_size < LENGTH
    assert sum(p.path.stat().st_size for p in parts) < parts[-1].end / 3
    text = b"".join(lzma.decompress(p.path.read_bytes()) for p in parts) + newest.read_bytes()
    assert text == b"".join(line.text for line in lines_of(newest, []))
    reader = TapeReader(tmp_path)
    assert [r.seq for r in reader] == list(range(101))
    assert reader.problems == []
    assert steps_in(newest) == list(range(100))


def test_a_follower_receives_every_record_once_while_segments_end(tmp_path):
    reader, source = Follower(tmp_path), None
    seen, polled = [], []
    with open_tape(tmp_path / "tape") as tape:
        for step in range(100):
            write(tape, [step])
            source = source or FolderSource(tmp_path)
            if step % 7 == 0:
                seen += reader.poll()
                polled += source.poll()
            if step % 40 == 0:
                segments.compress_later(tape.path).result()
    pack_tapes(tmp_path)
    seen += reader.poll()
    polled += source.poll()
    assert [r.seq for r in seen] == [r.seq for r in polled] == list(range(101))
    assert (source.generation, reader.problems, reader.poll()) == (0, [], [])


def test_segments_do_not_depend_on_the_flushes(tmp_path):
    for name, flush_every in (("a", 1), ("b", 17), ("c", 1000)):
        with open_tape(tmp_path / name / "tape") as tape:
            write(tape, range(100), flush_every)
        pack_tapes(tmp_path / name)
    files = [files_in(tmp_path / name) for name in "abc"]
    assert files[0] == files[1] == files[2]


def text_beside_its_compressed_copy(tape):
    path = segments_of(tape)[1].path
    path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))


def text_not_yet_compressed(tape):
    text_beside_its_compressed_copy(tape)
    segments_of(tape)[1].path.unlink()


def half_a_compressed_copy(tape):
    text_not_yet_compressed(tape)
    text = segments_of(tape)[1].path
    text.with_suffix(".jsonl.part").write_bytes(b"half")


def no_newest_text(tape):
    end = segments_of(tape)[-1].end + tape.stat().st_size
    tape.rename(tape.with_suffix(".segments") / f"{end:012d}.jsonl")


@pytest.mark.parametrize(
    "killed",
    [
        text_beside_its_compressed_copy,
        text_not_yet_compressed,
        half_a_compressed_copy,
        no_newest_text,
    ],
)
def test_a_kill_between_any_two_steps_loses_nothing(tmp_path, killed):
    with open_tape(tmp_path / "tape") as tape:
        write(tape, range(100))
    killed(tape.path)
    assert [r.seq for r in TapeReader(tmp_path)] == list(range(101))
    assert [r.seq for r in Follower(tmp_path).poll()] == list(range(101))
    assert len(list(FolderSource(tape.path.parent).poll())) == 101
    with open_tape(tmp_path / "tape") as tape:
        write(tape, range(100, 200))
    assert steps_in(tmp_path) == list(range(200))
    pack_tapes(tmp_path)
    names = {path.suffix for path in (tmp_path / "tape").rglob("*") if path.is_file()}
    assert names == {".jsonl", ".xz"}
    assert steps_in(tmp_path) == list(range(200))


def test_a_torn_line_in_a_segment_is_reported(tmp_path):
    with open_tape(tmp_path / "tape") as tape:
        write(tape, range(35))
    path = tape.path
    path.write_bytes(path.read_bytes()[:-20])
    with open_tape(tmp_path / "tape") as tape:
        write(tape, range(35, 100))
    follower = Follower(tmp_path)
    reader = TapeReader(tmp_path)
    for problems in (reader.problems, follower.problems):
        steps = steps_of(reader if problems is reader.problems else follower.poll())
        assert steps == [step for step in range(100) if step != 34]
        assert len(problems) == 1
        assert "line 36 is torn and was skipped" in problems[0]


def steps_of(records):
    return [r.data["step"] for r in records if r.type == "LossMeasured"]


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "gone"])
def test_a_corrupted_segment_is_reported_and_the_others_are_read(tmp_path, damage):
    with open_tape(tmp_path / "tape") as tape:
        write(tape, range(100))
    second = segments_of(tape.path)[1]
    content = second.path.read_bytes()
    if damage == "gone":
        second.path.unlink()
    else:
        half = len(content) // 2
        rest = b"" if damage == "cut off" else b"x" * (len(content) - half)
        second.path.write_bytes(content[:half] + rest)
    follower, reader = Follower(tmp_path), TapeReader(tmp_path)
    for records, problems in ((reader, reader.problems), (follower.poll(), follower.problems)):
        steps = steps_of(records)
        assert steps == sorted(set(steps))
        assert 60 < len(steps) < 100
        assert steps[-1] == 99
        assert len(problems) == 1
        assert "are missing" in problems[0]
    assert follower.poll() == []
    assert len(follower.problems) == 1


def test_a_tape_with_two_writers_loses_nothing(tmp_path):
    """A paused process that was replaced may continue to write."""
    with open_tape(tmp_path / "tape") as old:
        write(old, range(10))
        with open_tape(tmp_path / "tape") as new:
            write(new, range(10, 100))
            write(old, range(100, 110))
            pack_tapes(tmp_path)
            assert segments_of(new.path) == []
            write(old, range(110, 120))
    pack_tapes(tmp_path)
    assert len(segments_of(new.path)) == 1
    assert sorted(steps_in(tmp_path)) == list(range(120))


def test_a_tape_of_a_moved_run_does_not_touch_the_new_one(tmp_path):
    with open_tape(tmp_path / "run") as old:
        write(old, range(5))
        (tmp_path / "run").rename(tmp_path / "run.1")
        with open_tape(tmp_path / "run") as new:
            write(new, range(5))
            write(old, range(5, 100))
            write(new, range(5, 100))
    assert steps_in(tmp_path / "run") == steps_in(tmp_path / "run.1") == list(range(100))
    assert segments_of(tmp_path / "run.1" / "learner-0.jsonl") == []


def test_short_tapes_stay_text(tmp_path):
    with open_tape(tmp_path / "tape") as tape, open_tape(tmp_path / "tape", "launcher") as short:
        write(tape, range(12))
        short.sample(1.0, SampleGenerated("text"))
    whole = list(TapeReader(tmp_path))
    pack_tapes(tmp_path)
    assert sorted(files_in(tmp_path)) == [
        "tape/launcher.jsonl",
        "tape/learner-0.jsonl",
        f"tape/learner-0.segments/{segments_of(tape.path)[0].end:012d}.jsonl.xz",
    ]
    assert list(TapeReader(tmp_path)) == whole
    assert tapes_in(tmp_path / "tape") == [short.path, tape.path]


def test_a_failed_segment_keeps_the_text(tmp_path, monkeypatch):
    (tmp_path / "learner-0.segments").write_text("in the way")
    with open_tape(tmp_path) as tape:
        write(tape, range(100))
    assert tape.dropped == 0
    assert tape.path.read_bytes().count(b"\n") == 101
    assert steps_in(tmp_path) == list(range(100))


WRITES_UNTIL_KILLED = """
import sys
from decoupled_diloco.tape import writer
from decoupled_diloco.tape.samples import LossMeasured
writer.SEGMENT_BYTES = 2000
tape = writer.TapeWriter(sys.argv[1], "learner-0")
for step in range(10**9):
    tape.sample(float(step), LossMeasured(step, step, 32, 2.5))
    tape.flush()
    print(step, flush=True)
"""


def test_a_process_that_is_killed_at_any_moment_loses_nothing_that_was_flushed(tmp_path):
    """Also while a segment ends or is compressed. The next incarnation continues the same tape."""
    choices, flushed = random.Random(1), []
    for _ in range(4):
        command = [sys.executable, "-c", WRITES_UNTIL_KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(choices.randint(30, 200)):
                last = process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            flushed.append(int((process.stdout.read().split() or [last])[-1]))
    lives = [[] for _ in flushed]
    for record in TapeReader(tmp_path):
        lives[record.life].append(record.seq)
    for seqs, last in zip(lives, flushed, strict=True):
        assert all(b == a + 1 for a, b in pairwise(seqs))
        assert len(seqs) >= last + 2


ENDS_LATE = """
import atexit, sys
from decoupled_diloco.tape import writer
from decoupled_diloco.tape.samples import LossMeasured
writer.SEGMENT_BYTES = 2000
tape = writer.TapeWriter(sys.argv[1], "learner-0")

def end():
    for step in range(100):
        tape.sample(float(step), LossMeasured(step, step, 32, 2.5))
    tape.close()

atexit.register(end)
"""


def test_a_tape_written_while_its_process_ends_is_complete(tmp_path):
    """No thread can be started then: text that would be compressed stays text."""
    command = [sys.executable, "-c", ENDS_LATE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert steps_in(tmp_path) == list(range(100))
    assert {part.path.suffix for part in segments_of(tmp_path / "learner-0.jsonl")} == {".jsonl"}


@pytest.mark.parametrize("offset", [0, 400])
def test_text_that_becomes_a_segment_while_it_is_opened_is_read(tmp_path, monkeypatch, offset):
    with open_tape(tmp_path) as tape:
        write(tape, range(8))
    whole = tape.path.read_bytes()
    start = whole.find(b"\n", offset) + 1 if offset else 0
    listed = segments.segments_of

    def ends_behind_ones_back(path):
        found = listed(path)
        monkeypatch.setattr(segments, "segments_of", listed)
        with segments.open_to_append(path) as file:
            assert segments.end_segment(path, file)
        segments.open_to_append(path).close()
        return found

    monkeypatch.setattr(segments, "segments_of", ends_behind_ones_back)
    assert b"".join(line.text for line in lines_of(tape.path, [], start)) == whole[start:]


def test_a_tape_that_cannot_be_written_to_is_closed_again(tmp_path):
    tape = tmp_path / "learner-0.jsonl"
    tape.write_bytes(b"torn")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="File too large"):
            segments.open_to_append(tape)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()  # an unclosed file warns now
