"""Every output that is made from the tapes of a run, as text that is the same on every machine.

`OUTPUTS` has one function for each file in ``expected/RUN``. Commands are given as a user gives
them, in this process. What no command prints at once (the live page, a log of experiments, a
display that follows a run) is told by the class that makes it, while the tape grows.

Nothing here may look at the clock, the zone, the terminal or the machine: see `steady`.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from decoupled_diloco import runtime
from decoupled_diloco.cli.main import app
from decoupled_diloco.cli.watch import Reader, _picture
from decoupled_diloco.config import load_config
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.monitor.counters import LearnerTally, ShardTally
from decoupled_diloco.monitor.learner_metrics import learner_metrics
from decoupled_diloco.monitor.metric_sources import WatchedLearner, WatchedShard
from decoupled_diloco.monitor.shard_metrics import ShardMetrics
from decoupled_diloco.monitor.sinks import TensorBoardSink
from decoupled_diloco.monitor.traces import Tracer
from decoupled_diloco.monitor.values import run_values
from decoupled_diloco.protocol.messages import Apply, Received, RoundFinished, StepFinished
from decoupled_diloco.run_model import RunModel, read_run
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.page import fold
from decoupled_diloco.show.report import render_report, settings_near
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.terminal import ProgressDisplay, print_summary
from decoupled_diloco.syncer.run_checkpoints import checkpoint_folders, read_manifest
from decoupled_diloco.syncer.tapes import read_piece
from decoupled_diloco.tape import TapeReader, sources
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.replay import by_process, machine_of
from decoupled_diloco.tape.sources import FolderSource
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.interface import Stats
from decoupled_diloco_lab.chaos.verdict import judge

WIDTH = 100
SLICES = 8
"""A tape grows in so many pieces of equal time."""

LATER_SECONDS = 75.0
"""Commands are given so long after the last record."""

SPANS_SHOWN = 40
ADDRESS = "http://127.0.0.1:7070"


@dataclass(frozen=True)
class Recorded:
    """A recorded run. Instants are seconds since 1970.

    Attributes:
        name: Also its folder, beneath the current one.
        half: A folder with the first half of it, as if the run were going on.
        steps_from: When a learner finished the first step; ``steps_to``: the last one.
        ended: When the last record was written.
    """

    name: str
    half: str
    steps_from: float
    steps_to: float
    ended: float

    @property
    def middle(self) -> float:
        return self.at(SLICES // 2)

    def at(self, piece: int) -> float:
        """When a piece of the tape ends: the first one before the steps, the last one behind."""
        share = (piece - 1) / (SLICES - 2)
        steps = self.steps_from + share * (self.steps_to - self.steps_from)
        return self.ended if piece == SLICES else steps


@contextmanager
def steady(instant: float, width: int = WIDTH) -> Iterator[None]:
    """The clock stands, the terminal has this width, and a syncer answers from the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: instant)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("LINES", "40")
        patch.setenv("TERM", "dumb")
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        yield


def ddiloco(*arguments: str) -> str:
    """What a command prints, below the command itself."""
    done = CliRunner().invoke(app, list(arguments))
    if isinstance(done.exception, DilocoError):
        told = f"error: {done.exception}\n"
    elif done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    else:
        told = f"[exit code {done.exit_code}]\n" if done.exit_code else ""
    output = done.output.replace(str(Path.cwd()), "FOLDER")
    lines = "\n".join(line.rstrip() for line in output.splitlines())
    return f"$ ddiloco {' '.join(arguments)}\n{lines}\n{told}\n"


def status(run: Recorded) -> str:
    parts = []
    with steady(run.ended + LATER_SECONDS):
        parts.append(ddiloco("status", run.name))
    for width in (WIDTH, 50):
        with steady(run.middle, width):
            parts.append(ddiloco("status", run.half))
    return "".join(parts)


def status_json(run: Recorded) -> str:
    found = []
    for folder, instant in ((run.half, run.middle), (run.name, run.ended + LATER_SECONDS)):
        with steady(instant):
            _, text, *_ = ddiloco("status", folder, "--json").splitlines()
            found.append(json.loads(text))
    return as_json(found)


def running(run: Recorded) -> str:
    """As a running syncer tells it: from the shards' tapes alone, thinned."""
    learner = sorted(names(run, "learner"))[0]
    with steady(run.middle), serving(run.half):
        return "".join(
            [
                ddiloco("status", ADDRESS),
                ddiloco("explain", "learner", learner, ADDRESS),
                ddiloco("intervals", ADDRESS),
            ]
        )


@contextmanager
def serving(folder: str) -> Iterator[None]:
    """A syncer answers at `ADDRESS` with what is on its shards' tapes."""
    tapes = {path.stem: path for path in Path(folder, "tape").glob("*.jsonl")}
    shards = sorted(name for name in tapes if name.startswith("shard-") and name[6:].isdecimal())

    def answer(
        address: str, path: str, query: dict[str, str], token: object, tls: object
    ) -> Document:
        if "process" not in query:
            names = [*shards, "coordinator"]
            told = {"shards": [ADDRESS] * len(shards), "tapes": names, "wall": time.time()}
            return Document(json.dumps(told).encode())
        return read_piece(
            tapes[query["process"]], int(query["from"]), detail=query.get("detail") == "1"
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "fetch", answer)
        yield


def watch(run: Recorded) -> str:
    """Two terminals of `ddiloco watch` in the middle of the run."""
    parts = []
    for width, rows in ((WIDTH, 30), (60, 14)):
        with steady(run.middle, width):
            console = console_of(width)
            console.print(_picture(Reader(FolderSource(Path(run.half)), 1.0), console, rows=rows))
            parts.append(f"{width} columns, {rows} lines\n{printed(console)}\n")
    return "".join(parts)


def progress(run: Recorded) -> str:
    """What `ddiloco train` prints as the run goes on, without a terminal and with one."""
    clock = [0.0]
    console, seconds = console_of(WIDTH), run.at(3) - run.at(2)
    growing = Growing(run, "progress")
    display = ProgressDisplay(growing.folder, console=console, clock=lambda: clock[0])
    pictures = []
    with display:
        for piece in range(1, SLICES + 1):
            clock[0] += seconds
            growing.to(run.at(piece))
            display.poll()
            if piece == SLICES // 2:
                terminal = console_of(80)
                terminal.print(display.render())
                pictures.append(printed(terminal))
    return "\n".join([printed(console), "On a terminal, in the middle:", *pictures])


def summary(run: Recorded) -> str:
    console = console_of(WIDTH)
    model = read_run(run.name)
    print_summary(model, ["report.html"], console)
    return printed(console) + "\nwhat it writes:\n" + (model.sample_text or "nothing") + "\n"


def explain_rounds(run: Recorded) -> str:
    """A round at the beginning, one in the middle, the last one, and one that is not there."""
    numbers = sorted({r.data["round"] for r in records(run) if r.type == "RoundOpened"})
    chosen = {numbers[1], numbers[len(numbers) // 2], numbers[-1], numbers[-1] + 7}
    return explained(run, "round", map(str, sorted(chosen)))


def explain_learners(run: Recorded) -> str:
    return explained(run, "learner", sorted(names(run, "learner")))


def explain_steps(run: Recorded) -> str:
    last = max(r.data["clock"] for r in records(run) if r.type == "ClockAdvanced")
    return explained(run, "step", map(str, (last // 3, last // 2, last + 100)))


def explained(run: Recorded, what: str, which: Any) -> str:
    with steady(run.ended + LATER_SECONDS):
        return "".join(ddiloco("explain", what, each, run.name) for each in which)


def report_html(run: Recorded) -> str:
    return in_lines(render_report(read_run(run.name), settings_near(Path(run.name))))


def in_lines(page: str) -> str:
    """A page with a line for each tag. Of its style, the same in every page, only the digest."""
    before, style, after = re.split("</?style>", page)
    digest = hashlib.sha256(style.encode()).hexdigest()
    return f"{before}<style>SHA-256 {digest}</style>{after}".replace("><", ">\n<")


def report_command(run: Recorded) -> str:
    """What the command prints; its page is that of `report_html`."""
    with steady(run.ended + LATER_SECONDS):
        told = ddiloco("report", run.name, "--out", f"{run.name}.html")
    assert in_lines(Path(f"{run.name}.html").read_text(encoding="utf-8")) == report_html(run)
    return told


def verdict(run: Recorded) -> str:
    """The promises of `ddiloco chaos`."""
    found = judge(Path(run.name), accepted_share=0.9, finished=True)
    return as_json(asdict(found))


def data(run: Recorded) -> str:
    return ddiloco("data", run.name) + ddiloco("data", run.name, "--json")


def named(record: dict[str, Any]) -> str:
    """The type of a record; for an answer to an order also the type of the order."""
    order = record["data"].get("order")
    return f"{record['type']} {order['type']}" if order else str(record["type"])


def events(run: Recorded) -> str:
    """How many records of each type each process has, and a digest of the output of `events`."""
    done = CliRunner().invoke(app, ["events", run.name])
    lines = done.stdout_bytes.splitlines()
    told = [json.loads(line) for line in lines]
    counts = Counter((each["process"], each["kind"], named(each)) for each in told)
    rows = [
        f"{process} {kind} {name}: {counts[process, kind, name]}"
        for process, kind, name in sorted(counts)
    ]
    digest = hashlib.sha256(done.stdout_bytes).hexdigest()
    return "\n".join([f"{len(lines)} lines, SHA-256 {digest}", done.stderr, *rows, ""])


def replay(run: Recorded) -> str:
    told = ddiloco("replay", run.name)
    assert "the same" in told
    assert "differ" not in told
    began = next(iter(TapeReader(run.name))).wall
    return told + ddiloco("replay", run.name, "--until-seconds", f"{run.middle - began:.1f}")


def intervals(run: Recorded) -> str:
    with steady(run.ended + LATER_SECONDS):
        return ddiloco("intervals", run.name) + ddiloco("intervals", f"{run.name}/run.toml")


def track(run: Recorded) -> str:
    """What a log of experiments gets, read from TensorBoard's own files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = Path("logs", run.name)
    sink = TensorBoardSink(str(folder), run.name, folder, {"run": run.name})
    growing, model = Growing(run, "log"), RunModel()
    source = FolderSource(growing.to(run.at(1)))
    for piece in range(1, SLICES + 1):
        growing.to(run.at(piece))
        model.take_all(source.poll())
        seen = status_of(model, run.at(piece), source.problems())
        sink.log(seen.step, run_values(seen))
    sink.close()
    found = EventAccumulator(str(folder))
    found.Reload()
    lines = [
        f"{tag}: " + ", ".join(f"{each.step} {each.value:.6g}" for each in found.Scalars(tag))
        for tag in sorted(found.Tags()["scalars"])
    ]
    return "\n".join([*lines, ""])


def traces(run: Recorded) -> str:
    """The spans of the first rounds, and of all how many there are of each name and their time."""
    made = Tracer()
    spans = [span for record in TapeReader(run.name) for span in made.spans_of(record)]
    spans += made.rest("the tape ends")
    counts, seconds = Counter[str](), Counter[str]()
    for span in spans:
        name = f"{span.name} ({span.kind}){': ' + span.error if span.error else ''}"
        counts[name] += 1
        seconds[name] += span.end - span.start
    spans.sort(key=lambda span: (span.start, span.process.name, span.name, span.id))
    rows = [f"{name}: {counts[name]}, {seconds[name] / 1e9:.6f} s" for name in sorted(counts)]
    told = [json.dumps(asdict(span), ensure_ascii=False) for span in spans[:SPANS_SHOWN]]
    whole = hashlib.sha256("\n".join(repr(span) for span in spans).encode()).hexdigest()
    return "\n".join([f"{made.rounds} rounds, {len(spans)} spans, {whole}", *rows, *told, ""])


def page(run: Recorded) -> str:
    """What the live page is told as the run goes on: the whole state, then what has changed."""
    growing, out = Growing(run, "page"), io.BytesIO()
    growing.to(run.at(1))
    shards = sorted(names(run, "shard"))
    places = fold.Places(growing.folder, [[each] for each in shards], (ADDRESS,), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "LOOK_SECONDS", float("inf"))
        live = fold.LiveFold(places, out)
        for piece in range(1, SLICES + 1):
            with steady(run.at(piece)):
                growing.to(run.at(piece))
                live.poll()
        with steady(run.ended + LATER_SECONDS):
            live.poll()
    lines = [line.split(b" ", 1) for line in out.getvalue().splitlines()]
    told = [(kind.decode(), as_json(in_words(json.loads(text)))) for kind, text in lines]
    return "\n".join(f"{kind}\n{text}" for kind, text in told)


def in_words(message: dict[str, Any]) -> dict[str, Any]:
    """A message to the page, with a sentence and a digest for each picture."""
    charts = message["charts"]
    for name, svg in charts.items():
        if isinstance(svg, str) and svg:
            [told, *_] = re.findall('aria-label="([^"]*)"', svg)
            charts[name] = f"{told} SHA-256 {hashlib.sha256(svg.encode()).hexdigest()}"
    return message


def checkpoints(run: Recorded) -> str:
    """The checkpoints of the whole run, with the parts of each."""
    found = [read_manifest(each) for each in checkpoint_folders(Path(run.name))]
    return as_json([asdict(each) | {"coordinator": "not shown"} for each in found])


def metrics(run: Recorded) -> str:
    """`/metrics` of each process in the middle of the run, and Prometheus' configuration.

    The machines are brought there by what they were told; disks and processors are left out.
    """
    config = load_config(Path(run.name, "run.toml"), plugins=False)
    parts = [ddiloco("metrics", "config", run.name)]
    for process, own in by_process(TapeReader(run.half)):
        kind = own[0].data["header"]["machine"]
        if kind in ("shard", "learner"):
            text = asyncio.run((of_shard if kind == "shard" else of_learner)(config, process, own))
            told = [line for line in text.splitlines() if not belongs_to_machine(line)]
            parts.append("\n".join([f"{process}:", *told, "", ""]))
    return "".join(parts)


def belongs_to_machine(line: str) -> bool:
    name = line.removeprefix("# HELP ").removeprefix("# TYPE ")
    return name.startswith(("process_", "ddiloco_shard_disk_", "ddiloco_shard_durable_"))


class Standing(runtime.Runtime):
    """A runtime whose clock stands at a record."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def now(self) -> float:
        return self._record.at

    def wall(self) -> float:
        return self._record.wall


STATS = SimpleNamespace(stats=Stats(1, 2, 3, 4), certificate_ends_at=None)
"""A server or client; a tape tells what they have moved elsewhere."""


async def of_shard(config: Any, process: str, own: list[Record]) -> str:
    machine: Any = None
    tally, heard = ShardTally(), dict[str, float]()
    for record in own:
        if record.kind == "start":
            machine, tally = machine_of(record.data["header"]), ShardTally()
            heard.clear()
        elif record.kind == "event":
            event: Any = record.value()
            if isinstance(event, Received):
                heard[event.peer] = record.at
                tally.count_message(event.peer, event.message)  # type: ignore[arg-type]
            for effect in machine.handle(record.at, event):
                if isinstance(effect, RoundFinished):
                    tally.finished(effect)
    server: Any = STATS
    watched = WatchedShard(config, machine, tally, server, lambda: heard, Path(), Path("none"))
    with runtime.within(Standing(own[-1])):
        return (await ShardMetrics(watched)({})).body.decode()


async def of_learner(config: Any, process: str, own: list[Record]) -> str:
    machine: Any = None
    tally = LearnerTally()
    for record in own:
        if record.kind == "start":
            machine, tally = machine_of(record.data["header"]), LearnerTally()
        elif record.kind == "event":
            event: Any = record.value()
            applied = [e for e in machine.handle(record.at, event) if isinstance(e, Apply)]
            if isinstance(event, StepFinished):
                tally.stepped(record.at, record.at + 0.001, len(applied), 2.5)
    state = machine.state
    client: Any = STATS
    told = (state.step, state.tokens, state.discarded_tokens // len(state.fragments))
    run_step = machine.global_step
    watched = WatchedLearner(process, config.run.name, 1, *told, run_step, state, tally, client)
    with runtime.within(Standing(own[-1])):
        return (await learner_metrics(lambda read: read(watched), {})).body.decode()


class Growing:
    """A copy of a run whose tapes grow.

    Attributes:
        folder: The copy.
    """

    def __init__(self, run: Recorded, purpose: str) -> None:
        self.folder = Path("growing", purpose, run.name)
        tape = self.folder / "tape"
        tape.mkdir(parents=True)
        self._left = {tape / path.name: timed(path) for path in tapes(run.name)}
        for path in Path(run.name).glob("*.toml"):
            (self.folder / path.name).write_bytes(path.read_bytes())

    def to(self, wall: float) -> Path:
        """Adds what was written until then."""
        for path, lines in self._left.items():
            due = [text for at, text in lines if at <= wall]
            if due:
                with path.open("ab") as file:
                    file.writelines(due)
                del lines[: len(due)]
        return self.folder


def timed(path: Path) -> list[tuple[float, bytes]]:
    """The lines of a tape with their instants, which never fall."""
    lines, offset, latest = list[tuple[float, bytes]](), 0.0, 0.0
    for text in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(text)
        except ValueError:  # torn by a kill
            lines.append((latest, text))
            continue
        if record["kind"] == "start":
            offset = record["data"]["wall"] - record["data"]["monotonic"]
        latest = max(latest, record["at"] + offset)
        lines.append((latest, text))
    return lines


def tapes(folder: str) -> list[Path]:
    return sorted(Path(folder, "tape").glob("*.jsonl"))


def records(run: Recorded) -> list[Record]:
    return list(TapeReader(run.name))


def names(run: Recorded, kind: str) -> set[str]:
    """The processes of a kind that have a state machine of their own."""
    found = set()
    for path in tapes(run.name):
        header = next(iter(TapeReader(path))).data.get("header", {})
        if header.get("machine") == kind and header.get("role") != "observer":
            found.add(path.stem.removesuffix("-standby"))
    return found


def console_of(width: int) -> SteadyConsole:
    return SteadyConsole(file=io.StringIO(), width=width, color_system=None)


def printed(console: SteadyConsole) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


OUTPUTS: dict[str, Callable[[Recorded], str]] = {
    "status.txt": status,
    "status.json": status_json,
    "running.txt": running,
    "watch.txt": watch,
    "progress.txt": progress,
    "summary.txt": summary,
    "explain-rounds.txt": explain_rounds,
    "explain-learners.txt": explain_learners,
    "explain-steps.txt": explain_steps,
    "report.html": report_html,
    "report.txt": report_command,
    "verdict.json": verdict,
    "data.txt": data,
    "events.txt": events,
    "replay.txt": replay,
    "intervals.txt": intervals,
    "track.txt": track,
    "traces.txt": traces,
    "page.txt": page,
    "checkpoints.json": checkpoints,
    "metrics.txt": metrics,
}


def compared(first: Recorded, second: Recorded) -> str:
    """The page of two runs side by side, and where their tapes part."""
    with steady(second.ended + LATER_SECONDS):
        told = ddiloco("report", first.name, second.name, "--out", "both.html")
    told += ddiloco("replay", first.name, "--diff", second.name)
    return told + in_lines(Path("both.html").read_text(encoding="utf-8"))
