"""A run's tape as traces, compared with a plain reading of the tape's JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from decoupled_diloco.cli.traces_command import NOT_OVER, Reading, traces
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.monitor import spans as spans_module
from decoupled_diloco.monitor.collector import Collector
from decoupled_diloco.monitor.spans import Span
from decoupled_diloco.monitor.traces import PROCESS_ENDED, SETTLE_NANOSECONDS, Tracer
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Done, Failed, Holding, Made, Tick, Version
from decoupled_diloco.tape import TapeReader, TapeWriter
from decoupled_diloco.tape.excerpt import excerpt
from decoupled_diloco.tape.samples import FaultInjected, ProcessEnded
from decoupled_diloco.tape.sources import FolderSource
from otlp_collector import receiving
from unit.show.show_worlds import SHARD_CRASH, lines_of, write_world

AFTERWARDS = {"delivery", "fetch", "apply"}
"""Spans that follow a round; they begin when the round has ended, or later."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual run in which learners miss rounds for every cause, with one common clock."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, until=36.0, faults=[SHARD_CRASH])
    return folder


@pytest.fixture(scope="module")
def told(world: Path) -> list[Span]:
    return spans_of(world)


def spans_of(path: Path) -> list[Span]:
    fold = Tracer()
    found = [span for record in TapeReader(path) for span in fold.spans_of(record)]
    found += fold.rest()
    assert not fold.run.left_out
    return found


def by_id(spans: Iterable[Span]) -> dict[tuple[int, int], Span]:
    spans = list(spans)
    found = {(span.trace, span.id): span for span in spans}
    assert len(found) == len(spans), "every span is returned once"
    return found


def raw(folder: Path) -> list[dict[str, Any]]:
    """Return all records, without the package's readers."""
    return [line for path in sorted((folder / "tape").glob("*.jsonl")) for line in lines_of(path)]


def test_rounds_contributions_and_merges_match_the_raw_tape(world: Path, told: list[Span]) -> None:
    counts = Counter[str]()
    tokens = Counter[tuple[Any, ...]]()
    for line in raw(world):
        data = line["data"]
        if line["type"] != "RoundFinished":
            counts["merge"] += line["type"] == "Done" and data["order"]["type"] == "Merge"
            continue
        key = (line["process"], data["term"], data["round"])
        counts["round"] += 1
        for part in data["participants"]:
            counts["contribution"] += part["state"] != "late"
            if part["state"] == "folded":
                tokens[(*key, part["learner"])] += part["tokens"]
    found = Counter(span.name for span in told)
    assert {name: found[name] for name in counts} == dict(counts)
    roots = {s.trace: s.attributes for s in told if s.parent is None}
    counted = Counter[tuple[Any, ...]]()
    for span in told:
        if span.name == "contribution" and span.attributes["ddiloco.outcome"] == "folded":
            root = roots[span.trace]
            key = tuple(root[f"ddiloco.{name}"] for name in ("shard", "term", "round"))
            told_tokens = span.attributes["ddiloco.tokens"]
            assert isinstance(told_tokens, int)
            counted[(*key, span.attributes["ddiloco.learner"])] += told_tokens
    assert counted == tokens
    for trace, root in roots.items():
        shares = [s.attributes.get("ddiloco.weight_share") for s in told if s.trace == trace]
        assert sum(s for s in shares if isinstance(s, float)) == pytest.approx(
            1.0 if root["ddiloco.contributions.folded"] else 0.0
        )


def test_uploads_fetches_and_applies_match_the_learners_tapes(
    world: Path, told: list[Span]
) -> None:
    """Each one that belongs to a round on a shard's tape."""
    merged, taken = set(), set()
    for line in raw(world):
        if line["type"] == "RoundFinished":
            data = line["data"]
            merged |= {(data["fragment"], _plain(data["version"]))} if data["version"] else set()
            taken |= {
                (line["process"], _plain(part["ask"]))
                for part in data["participants"]
                if part["state"] != "late"
            }
    expected = Counter[tuple[str, str]]()
    for line in raw(world):
        process, name, data = line["process"], line["type"], line["data"]
        if not str(process).startswith("learner-"):
            continue
        if name == "SendBody" and (f"shard-{data['shard']}", _plain(data["ask"])) in taken:
            expected[process, "upload"] += 1
        if name == "Done" and data["order"]["type"] == "Fetch":
            data = data["order"]
            expected[process, "fetch"] += (data["fragment"], _plain(data["version"])) in merged
        if name == "Apply":
            expected[process, "apply"] += (data["fragment"], _plain(data["version"])) in merged
    learners = [s for s in told if s.process.name.startswith("learner-")]
    assert Counter((s.process.name, s.name) for s in learners if not s.error) == expected
    assert expected["learner-0", "upload"] > 20


def _plain(value: dict[str, Any]) -> tuple[int, ...]:
    return tuple(part for part in value.values() if isinstance(part, int))


def test_spans_of_learners_and_shards_share_a_trace(told: list[Span]) -> None:
    found = by_id(told)
    for span in found.values():
        if span.parent is None:
            assert span.name == "round"
            continue
        parent = found[span.trace, span.parent]  # KeyError: it has no parent
        if span.name == "upload":
            assert parent.name == "contribution"
            assert parent.attributes["ddiloco.learner"] == span.process.name
            assert parent.attributes["ddiloco.tokens"] == span.attributes["ddiloco.tokens"]
        else:
            assert parent.name == "round"
    assert len({s.process.name for s in found.values()}) == 6


def test_a_span_lies_within_its_parent_with_a_common_clock(told: list[Span]) -> None:
    found = by_id(told)
    late = 0
    for span in found.values():
        assert span.start <= span.end
        if span.parent is None:
            continue
        parent = found[span.trace, span.parent]
        if span.name in AFTERWARDS:
            assert span.start >= parent.end
        elif span.name == "contribution" and span.start < parent.start:
            late += 1
            assert span.end <= parent.end
            assert span.link is None or span.link.trace != span.trace
        else:
            assert parent.start <= span.start
            assert span.end <= parent.end
    assert late, "this world has late contributions"
    linked = [s.link for s in found.values() if s.link is not None]
    assert linked
    assert all((link.trace, link.span) in found for link in linked)


def test_the_stages_of_a_round_are_contiguous(told: list[Span]) -> None:
    for root in (s for s in told if s.parent is None):
        stages = [
            s
            for s in told
            if s.trace == root.trace and s.name in ("quorum", "grace", "bodies", "merge")
        ]
        assert stages[0].start == root.start
        assert stages[-1].end == root.end
        assert all(a.end == b.start for a, b in pairwise(stages))
        assert len(stages) == 4 or root.error


def test_ids_do_not_depend_on_the_reader(world: Path, told: list[Span], tmp_path: Path) -> None:
    """From the run folder, from one shard's tape, and from a running shard's answers."""
    whole = by_id(told)
    assert by_id(spans_of(world)) == whole
    served = excerpt((world / "tape" / "shard-0.jsonl").read_bytes(), detail=True)
    (tmp_path / "shard-0.jsonl").write_bytes(served)
    for path in (world / "tape" / "shard-0.jsonl", tmp_path / "shard-0.jsonl"):
        alone = by_id(spans_of(path))
        of_shard = {k: s for k, s in whole.items() if s.process.name == "shard-0"}
        assert alone.keys() == of_shard.keys()
        assert {k: (s.start, s.end) for k, s in alone.items()} == {
            k: (s.start, s.end) for k, s in of_shard.items()
        }
    assert len({trace for trace, _ in whole}) == sum(s.parent is None for s in whole.values())


def test_following_a_run_gives_the_same_spans_as_the_whole_tape(
    world: Path, told: list[Span], tmp_path: Path
) -> None:
    """Tapes grow by pieces, those of the learners later; each read returns complete spans."""
    whole = {path: path.read_bytes() for path in (world / "tape").glob("*.jsonl")}
    tape = tmp_path / "run" / "tape"
    tape.mkdir(parents=True)
    with receiving() as collector:
        sender = Collector(collector.url)
        reading = Reading(FolderSource(tmp_path / "run"), sender)
        sent = []
        for look in range(1, 8):
            for path, text in whole.items():
                share = look - (not path.stem.startswith("shard")) * 2
                (tape / path.name).write_bytes(text[: max(0, len(text) * share // 5)])
            reading._send(reading._records())
            sent.append(sender.sent)
        reading.end()
        sender.close()
    assert sent[0] > 0
    assert sorted(sent) == sent
    got = {(int.from_bytes(s.trace_id), int.from_bytes(s.span_id)) for _, s in collector.spans}
    assert got == by_id(told).keys()
    assert len(collector.spans) == len(got) == sender.sent
    assert max(count for _, _, count in collector.requests) <= 512


def test_memory_is_bounded_for_any_tape(
    world: Path, told: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full tables drop the oldest entries: learners' spans are lost, but no round is."""
    whole = by_id(told)
    monkeypatch.setattr(spans_module, "KEPT_MAX", 2)
    few = by_id(spans_of(world))
    assert few.keys() < whole.keys()
    assert {k for k, s in few.items() if s.name == "round"} == {
        k for k, s in whole.items() if s.name == "round"
    }


class Author:
    """Writes the tape of one process; ``ahead``: offset of its clock to the run's seconds."""

    def __init__(self, folder: Path, process: str, ahead: float = 0.0) -> None:
        wall = 1_780_000_000.0 + ahead
        settings = {"run": {"name": "made-up"}, "sync": {"quorum": 2}}
        self.tape = TapeWriter(
            folder, process, {"settings": settings}, clock=lambda: 0.0, wall=lambda: wall
        )

    def tell(self, at: float, event: Any, *effects: Any) -> None:
        self.tape.effects(at, self.tape.event(at, event), effects)


ASKS = [Asking(1, number) for number in (1, 2, 3)]
BASE, NEXT = Version(1, 1), Version(1, 2)


def opened(number: int) -> messages.RoundOpened:
    return messages.RoundOpened(number, 0, 8, BASE, False, 0.5, 1.0, 1.0, 0.1, 0.1, 0.1, "due", 1)


def finished(number: int, *parts: messages.Participant) -> messages.RoundFinished:
    return messages.RoundFinished(
        number, 0, 8, NEXT, "merged", "all are in", parts, 0.1, 0.5, 0.5, 0.9, 1.0, 1.0, 1.0,
        "the grace window is over", BASE, quorum_learner="learner-1", term=1,
    )  # fmt: skip


def write_shard(folder: Path) -> None:
    shard = Author(folder, "shard-0")
    expects = [
        messages.Expect(
            f"/up/{ask.number}", f"learner-{ask.number}", 1, 1, 0, ask, "it reported", "bf16"
        )
        for ask in ASKS
    ]
    shard.tell(10.0, Tick(), opened(1), *expects)
    for ask in ASKS[:2]:
        arrived = messages.BodyArrived(f"learner-{ask.number}", 1, 0, ask, BASE, 4, 400, 5000)
        fold = messages.Fold(0, f"learner-{ask.number}", ask, 4.0, 400.0, "delivered in time")
        shard.tell(10.3, arrived, fold)
    shard.tell(
        10.4, Tick(), messages.Drop(0, "learner-1", Asking(1, 0), "its request was replaced")
    )
    corrupt = messages.BodyCorrupt("learner-3", 0, ASKS[2], "its digest is wrong")
    shard.tell(10.6, corrupt, messages.Unexpect("/up/3", "its digest is wrong"))
    parts = [
        messages.Participant(f"learner-{a.number}", "folded", 4, 400, 0.0, 0.3, "", a) for a in ASKS
    ]
    wrong = "its digest is wrong"
    parts[2] = messages.Participant("learner-3", "refused", 0, 0, 0.0, None, wrong, ASKS[2])
    shard.tell(
        11.0, Done(messages.Merge(1, 0, NEXT, BASE, ""), Made("digest")), finished(1, *parts)
    )
    shard.tell(11.5, messages.Received("learner-1", Holding(0, NEXT)))
    shard.tell(12.0, Tick(), opened(2))
    shard.tape.close()


def write_learner(folder: Path, ahead: float, *, fails: bool = False) -> None:
    learner = Author(folder, "learner-1", ahead)
    send = messages.SendBody(0, 0, ASKS[0], BASE, 4, 400, "bf16", "/up/1", "pulled")
    learner.tell(10.1, Tick(), send)
    learner.tell(10.2, messages.BodyEncoded(0, ASKS[0], "digest"))
    if fails:
        learner.tell(10.25, Failed(send, "the link broke"))
    fetch = messages.Fetch(0, 0, NEXT, "/d", False, "digest", "it follows")
    learner.tell(11.1, Tick(), fetch)
    learner.tell(11.2, Done(fetch))
    learner.tell(11.4, Tick(), messages.Apply(0, NEXT, "overwrite", 7, "it took part"))
    learner.tape.close()


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_rejections_drops_and_faults_are_events_of_the_round(
    tmp_path: Path,
) -> None:
    write_shard(tmp_path)
    launcher = Author(tmp_path, "launcher")
    launcher.tape.sample(10.2, FaultInjected("kill", "learner-3", ("learner-3",)))
    launcher.tape.sample(10.25, ProcessEnded("learner-3", None, 9))
    launcher.tape.sample(11.5, FaultInjected("kill", "learner-2", ("learner-2",)))
    launcher.tape.close()
    spans = spans_of(tmp_path)
    (root,) = named(spans, "round")
    assert [event.name for event in root.events] == ["fault", "process ended", "dropped", "refused"]
    assert root.events[0].attributes == {"ddiloco.fault": "kill", "ddiloco.target": "learner-3"}
    assert root.events[2].attributes["ddiloco.reason"] == "its request was replaced"
    refused = named(spans, "contribution")[2]
    assert refused.error == "its digest is wrong"
    assert refused.end - root.start == 600_000_000
    assert root.attributes["ddiloco.contributions.refused"] == 1
    assert root.attributes["ddiloco.tokens"] == 800
    assert root.attributes["ddiloco.body_bytes"] == 10_000
    (delivery,) = named(spans, "delivery")
    assert (delivery.start, delivery.end) == (root.end, root.end + 500_000_000)


@pytest.mark.parametrize("ahead", [0.0, 30.0, -30.0])
def test_different_clocks_lose_no_span(tmp_path: Path, ahead: float) -> None:
    write_shard(tmp_path)
    write_learner(tmp_path, ahead)
    spans = spans_of(tmp_path)
    (upload,), (fetch,), (apply,) = (named(spans, n) for n in ("upload", "fetch", "apply"))
    assert fetch.end - fetch.start == 100_000_000
    assert apply.end - apply.start == 200_000_000
    assert [event.name for event in upload.events] == ["encoded"]
    apart = upload.attributes.get("ddiloco.clocks_apart_seconds")
    if ahead > 0:
        assert upload.end == upload.start
        assert apart == pytest.approx(29.8)
    else:
        assert upload.end - upload.start == pytest.approx((0.2 - ahead) * 1e9)
        assert apart is None


@pytest.mark.parametrize("ahead", [0.0, 30.0])
def test_a_failed_upload_has_its_reason(tmp_path: Path, ahead: float) -> None:
    write_shard(tmp_path)
    write_learner(tmp_path, ahead, fails=True)
    (upload,) = named(spans_of(tmp_path), "upload")
    if ahead == 0.0:  # otherwise the shard, which has the payload, is read first
        assert upload.error == "the link broke"
        assert upload.end - upload.start == 150_000_000


def test_an_unfinished_round_ends_with_its_shard(tmp_path: Path) -> None:
    write_shard(tmp_path)
    fold = Tracer()
    spans = [span for record in TapeReader(tmp_path) for span in fold.spans_of(record)]
    assert not named(spans, "round"), f"not before {SETTLE_NANOSECONDS} ns have passed"
    rest = list(fold.rest(NOT_OVER))
    assert [(s.attributes["ddiloco.round"], s.error) for s in rest] == [(1, ""), (2, NOT_OVER)]
    Author(tmp_path, "shard-0", 5.0).tape.close()  # it is restarted
    over = named(spans_of(tmp_path), "round")
    assert [(s.attributes["ddiloco.round"], s.error) for s in over] == [(1, ""), (2, PROCESS_ENDED)]


def test_a_corrupted_tape_gives_only_valid_spans(tmp_path: Path) -> None:
    write_shard(tmp_path)
    path = tmp_path / "shard-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["type"] == "RoundFinished":
            line["data"]["reason"] = "\ud800" * 3000
            again = json.loads(json.dumps(line))
            again["data"] |= {"round": 7, "finished_seconds": 1e300}
    lines += [again, {**again, "at": 9e11}, {**again, "data": {"round": "x"}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with receiving() as collector:
        sender = Collector(collector.url)
        fold = Tracer()
        for record in TapeReader(tmp_path):
            sender.send(fold.spans_of(record))
        sender.send(fold.rest())
        sender.flush()
        sender.close()
    assert fold.run.left_out.total() == 3
    assert [s.name for _, s in collector.spans].count("round") == 1


@pytest.mark.parametrize(
    ("source", "error", "sentence"),
    [
        ("nowhere", ConfigError, "nowhere does not exist: use a run folder, a tape, or the"),
        ("empty", StorageError, "is not a run folder: it has neither a tape nor run.toml"),
        ("tape/learner-1.jsonl", StorageError, "has no round that has ended: give a run folder"),
        ("torn.jsonl", StorageError, "has no round that has ended \\(.* is torn"),
    ],
)
def test_a_run_without_rounds_is_reported(
    tmp_path: Path, source: str, error: type[Exception], sentence: str
) -> None:
    write_learner(tmp_path / "tape", 0.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.jsonl").write_text("no tape\n")
    app = typer.Typer()
    app.command()(traces)
    with receiving() as collector:
        given = [
            str(tmp_path / source),
            "--collector",
            collector.url,
            "--interval-seconds",
            "0.2",
            "--once",
        ]
        with pytest.raises(error, match=sentence):
            CliRunner().invoke(app, given, catch_exceptions=False)
    assert not collector.requests
