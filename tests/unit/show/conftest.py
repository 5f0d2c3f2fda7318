"""A made-up run whose every number is known: 4 learners, 2 shards, and one outage.

Seconds count from the launcher's start. Learner m takes a step every 0.5 s (learner-3: 0.75 s) from
4 s on; learner-1 is killed at 30.2 s, starts again at 31.2 s, is back at 36.0 s and steps on until
the end at 64 s. Both shards tick every 0.5 s; every tick opens a round of one fragment that merges
0.3 s later; each 40th is abandoned. At the end all learners deliver the rest. Every process has a
separate clock with another origin.
"""

import json
import math
import random
from pathlib import Path

import pytest

from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Apply,
    ClockAdvanced,
    EndTraining,
    Evict,
    Lost,
    Note,
    Participant,
    Ready,
    Received,
    RoundFinished,
    Send,
    ShardAdmitted,
    StepFinished,
    StepReport,
    Tick,
    Version,
)
from decoupled_diloco.run_model.ledger import TOOK_PART
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import (
    BytesMoved,
    CorpusDescribed,
    Evaluated,
    FaultInjected,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    SampleGenerated,
    WeightsSaved,
)

WALL = 1_780_000_000.0
BEGIN, KILL, RESTART, BACK, END = 4.0, 30.2, 31.2, 36.0, 64.0
TOKENS = 512
LEARNERS = ("learner-0", "learner-1", "learner-2", "learner-3")
HEADER = {
    "settings": {"run": {"name": "made-up"}, "sync": {"fragments": 24}},
    "versions": {"torch": "2.13.0", "python": "3.11.2"},
}
SETTINGS = """[run]
name = "made-up"
learners = 4
max_steps = 120

[sync]
fragments = 24
quorum = 1
"""


class Author:
    """Writes one incarnation of one process; instants are seconds of the run."""

    def __init__(self, folder: Path, process: str, started_at: float) -> None:
        self.origin = random.Random(process).uniform(100, 9000) + started_at
        self._wall = started_at
        self.tape = TapeWriter(
            folder,
            process,
            HEADER if process == "launcher" else {},
            clock=lambda: self.origin + self._wall,
            wall=lambda: WALL + self._wall,
        )

    def turn(self, at, event, *effects):
        seq = self.tape.event(self.origin + at, event)
        self.tape.effects(self.origin + at, seq, effects)

    def sample(self, at, sample):
        self.tape.sample(self.origin + at, sample)


def period(name: str) -> float:
    return 0.75 if name == "learner-3" else 0.5


def loss_at(at: float) -> float:
    return 2.0 + 3.5 * math.exp(-at / 18)


def write_learner(folder: Path, name: str, started_at: float, ready_at: float, end: float) -> None:
    author = Author(folder, name, started_at)
    rng = random.Random(f"{name} {started_at}")
    author.turn(ready_at, Tick(), Ready("every fragment is held"))
    steps = math.floor((end - ready_at) / period(name) + 1e-9)
    for step in range(1, steps + 1):
        at = ready_at + step * period(name)
        effects = [
            Send("shard-0", StepReport(step, step * TOKENS, period(name)), "a step is finished")
        ]
        if step % 4 == 0:
            effects.append(Apply(step % 24, Version(1, step), "overwrite", 128, "it took part"))
        author.turn(at, StepFinished(TOKENS), *effects)
        loss = loss_at(at) + rng.gauss(0, 0.08)
        author.sample(at, LossMeasured(step, round((at - BEGIN) / 0.5), step * TOKENS, loss))
    if end == END:
        rest = [Apply(p, Version(1, 121), "carry", 0, f"{TOOK_PART} this one") for p in range(24)]
        author.turn(END + 0.1, Tick(), EndTraining("the budget is spent"), *rest)
    author.sample(end, BytesMoved(1000, 2000, 3_000_000, 4_000_000))
    author.tape.close()


def write_shard(folder: Path, shard: int) -> None:
    author = Author(folder, f"shard-{shard}", 0.5)
    author.turn(0.6, Received(COORDINATOR, ShardAdmitted(1, False)))
    for tick in range(1, 121):
        at = BEGIN + tick * 0.5
        author.turn(
            at,
            Received("learner-0", StepReport(tick, tick * TOKENS, 0.5)),
            ClockAdvanced(tick, 4 if not KILL < at < BACK else 3, "1 learner has reached it"),
        )
        author.turn(at + 0.3, Tick(), finished(shard, tick, at))
        if KILL - 0.5 < at < KILL:
            why = "its connection broke and its lease ran out"
            note = Note("learner-1 (incarnation 1) is no longer live", why)
            author.turn(KILL + 0.1, Lost("learner-1"), Evict("learner-1", why, why), note)
    author.tape.close()


def finished(shard: int, tick: int, at: float) -> RoundFinished:
    merged = tick % 40 != 0
    present = [m for m in LEARNERS if m != "learner-1" or not KILL - 0.3 < at < BACK + 0.5]
    if tick % 3 == 0:
        present.remove("learner-3")
    return RoundFinished(
        round=tick,
        fragment=(2 * tick + shard) % 24,
        tick=tick,
        version=Version(1, tick) if merged else None,
        verdict="merged" if merged else "abandoned",
        reason="merged" if merged else "nobody delivered in time",
        participants=tuple(
            Participant(m, "folded" if merged else "late", 24, 24 * TOKENS, 0.0, 0.1, "")
            for m in present
        ),
        quorum_seconds=0.0,
        grace_seconds=0.12,
        closed_seconds=0.12,
        uploaded_seconds=0.2,
        finished_seconds=0.3,
        step_seconds=0.5,
        slack_seconds=0.15,
        why="every live learner qualifies",
    )


def write_launcher(folder: Path) -> None:
    author = Author(folder, "launcher", 0.0)
    corpus = {"name": "standard library", "bytes": 12_345_678, "sha256": "ab12" * 16}
    author.sample(0.1, CorpusDescribed(json.dumps(corpus)))
    for pid, name in enumerate(("shard-0", "shard-1", *LEARNERS, "evaluator"), start=100):
        author.sample(0.5, ProcessStarted(name, pid))
    author.sample(KILL, FaultInjected("kill", "learner-1", ("learner-1",)))
    author.sample(KILL, ProcessEnded("learner-1", None, 9))
    author.sample(KILL, RestartScheduled("learner-1", 1.0))
    author.sample(RESTART, ProcessStarted("learner-1", 200))
    for name in LEARNERS:
        author.sample(END + 1, ProcessEnded(name, 0, None))
    author.sample(END + 1.5, WeightsSaved("weights.safetensors"))
    author.sample(END + 2, SampleGenerated("def step(self):\n    <b>return</b> self.loss\n"))
    author.tape.close()


def write_evaluator(folder: Path) -> None:
    author = Author(folder, "evaluator", 0.5)
    for number in range(7):
        at = BEGIN + 0.25 + number * 9.9
        step = min(120, int((at - BEGIN) / 0.5))
        author.sample(at, Evaluated(step, round(loss_at(at) + 0.05, 4), 65_536))
    author.tape.close()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """The run folder of the synthetic run."""
    run = tmp_path_factory.mktemp("made-up")
    write_run(run)
    return run


def write_run(run: Path) -> None:
    (run / "run.toml").write_text(SETTINGS)
    folder = run / "tape"
    for name in LEARNERS:
        if name == "learner-1":
            write_learner(folder, name, 0.5, BEGIN, KILL)
            write_learner(folder, name, RESTART, BACK, END)
        else:
            write_learner(folder, name, 0.5, BEGIN, END)
    write_shard(folder, 0)
    write_shard(folder, 1)
    write_launcher(folder)
    write_evaluator(folder)
