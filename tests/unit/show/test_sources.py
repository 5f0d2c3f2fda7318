"""Excerpts of its tape that a shard serves give a reader the same state as the files."""

import json

import pytest

from decoupled_diloco.run_model import run_of
from decoupled_diloco.show.status import status_of
from decoupled_diloco.tape.excerpt import excerpt
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import Parser
from unit.show.show_worlds import write_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = tmp_path_factory.mktemp("sources")
    write_world(run)
    return run


def records_of(text, tmp_path):
    parser = Parser(tmp_path / "served", [])
    return [record for line in text.splitlines() if (record := parser.parse(line)) is not None]


@pytest.fixture(scope="module")
def tape(folder):
    return (folder / "tape" / "shard-0.jsonl").read_bytes()


def test_a_detailed_excerpt_gives_the_same_state(folder, tape, tmp_path):
    whole = run_of(TapeReader(folder / "tape" / "shard-0.jsonl"))
    served = run_of(records_of(excerpt(tape, detail=True), tmp_path))
    assert status_of(served, 0.0) == status_of(whole, 0.0)
    assert served.shards["shard-0"].rounds == whole.shards["shard-0"].rounds
    assert served.shards["shard-0"].reports == whole.shards["shard-0"].reports
    assert served.shards["shard-0"].ticks == whole.shards["shard-0"].ticks


def test_a_thinned_excerpt_gives_the_same_state_with_less_data(tape, tmp_path):
    detailed, thinned = excerpt(tape, detail=True), excerpt(tape, detail=False)
    assert len(thinned) < len(detailed) < len(tape)
    a, b = (status_of(run_of(records_of(t, tmp_path)), 0.0) for t in (detailed, thinned))
    assert a.to_json()["shards"] == b.to_json()["shards"]
    for one, other in zip(a.learners, b.learners, strict=True):
        assert one.seen_seconds is not None
        assert (one.steps, one.tokens, one.reasons_recent, one.versions_behind) == (
            other.steps,
            other.tokens,
            other.reasons_recent,
            other.versions_behind,
        )


def test_a_thinned_excerpt_has_the_last_message_time_of_every_process(tape, tmp_path):
    lines = tape.splitlines(keepends=True)
    heard = [n for n, each in enumerate(lines) if b'"type":"Heard"' in each]
    assert len(heard) > 5
    for end in (*heard[2::3], len(lines)):
        piece = b"".join(lines[: end + 1])
        whole, thinned = (
            run_of(records_of(excerpt(piece, detail=detail), tmp_path)) for detail in (True, False)
        )
        for name, learner in whole.learners.items():
            assert thinned.learners[name].seen_at == learner.seen_at, name
    assert excerpt(tape, detail=False).count(b'"Heard"') <= 4


def test_steps_within_a_second_are_thinned_to_one_and_the_last():
    def report(at, step):
        data = {"peer": "a", "message": {"type": "StepReport", "step": step}}
        fields = {"v": 4, "at": at, "process": "shard-0", "seq": step, "kind": "event"}
        return (
            json.dumps({**fields, "type": "Received", "data": data}, separators=(",", ":")).encode()
            + b"\n"
        )

    piece = b"".join(report(0.1 * step, step) for step in range(35))
    kept = [json.loads(line)["seq"] for line in excerpt(piece, detail=False).splitlines()]
    assert kept == [0, 10, 20, 30, 34]
    assert len(excerpt(piece, detail=True).splitlines()) == 35


def test_the_last_ping_of_every_process_is_kept():
    def heard(at, *learners):
        fields = {"v": 4, "at": float(at), "process": "shard-0", "seq": at, "kind": "event"}
        data = {"type": "Heard", "data": {"learners": learners}}
        return json.dumps({**fields, **data}, separators=(",", ":")).encode() + b"\n"

    piece = heard(1, "a", "b") + heard(2, "a", "b") + heard(3, "a") + heard(4, "c") + heard(5, "a")
    kept = [json.loads(line)["seq"] for line in excerpt(piece, detail=False).splitlines()]
    assert kept == [2, 4, 5]


def test_nonces_and_restart_data_are_left_out(folder):
    for process in ("shard-0", "coordinator"):
        tape = (folder / "tape" / f"{process}.jsonl").read_bytes()
        nonces = {
            record["data"]["greeting"]["nonce"]
            for line in tape.splitlines()
            if (record := json.loads(line))["type"] == "Connected"
            if record["data"]["greeting"]["type"] == "Hello"
        }
        text = excerpt(tape, detail=True)
        assert b"settings" in text
        assert b'"nonce":"' not in text.replace(b'"nonce":""', b"")
        assert not any(nonce.encode() in text for nonce in nonces)
        starts = [json.loads(line) for line in text.splitlines() if b'"kind":"start"' in line]
        assert all(not {"state", "nonce"} & start["data"]["header"].keys() for start in starts)


@pytest.mark.parametrize("ending", ['","role":"learner"}}}', '"}', '"', "", "\\"])
@pytest.mark.parametrize("nonce", ["plain-secret", 'a"quoted-secret', "a\\secret", 'x\\"secret'])
def test_no_part_of_a_nonce_is_served_however_it_is_written_or_torn(nonce, ending):
    written = json.dumps(nonce)[1:-1]
    begin = '{"v":4,"at":1.0,"process":"shard-0","seq":1,"kind":"event","type":"Connected","data":{'
    greeted = begin + f'"peer":"a","greeting":{{"type":"Hello","learner":"a","nonce":"{written}'
    served = excerpt((greeted + ending + "\n" + greeted + "\n").encode(), detail=True)
    assert b"secret" not in served
    assert served.count(b"\n") == 2
    assert served.count(b'"learner":"a"') == 2


def test_a_single_tape_of_a_virtual_run_is_marked_as_virtual(tape, tmp_path):
    for text in (tape, excerpt(tape, detail=False)):
        assert run_of(records_of(text, tmp_path)).virtual


def test_torn_lines_are_passed_on_so_that_the_reader_can_report_them(tmp_path):
    problems = []
    parser = Parser(tmp_path / "served", problems)
    for line in excerpt(b'{"v":4,"at":3\n', detail=False).splitlines():
        parser.parse(line)
    assert "torn" in problems[0]
