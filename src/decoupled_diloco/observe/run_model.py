"""The state of a run, kept up to date record by record: everything that tells of a run reads it.

A tape that grows is fed as it comes (``keep="now"``): what is kept then does not grow with the run,
but for what follows from joining: learners, lives of processes, epochs. A whole tape is fed
at once (`read_run`): then every step, loss, tick and round is kept.

Most of it comes from the tapes of the shards, which a running syncer serves; the learners' own
tapes, where they are at hand, add what only they know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.observe import learner_fold, samples
from decoupled_diloco.observe.absences import find_absences
from decoupled_diloco.observe.accounts import RunAccount, account_for
from decoupled_diloco.observe.acting import Acting, is_learner, is_shard
from decoupled_diloco.observe.looked_at import LOOKED_AT, MESSAGES
from decoupled_diloco.observe.reader import TapeReader, check_readable
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.run_data import (
    TOOK_PART,
    CutOff,
    Evaluation,
    FaultLog,
    LearnerLog,
    Outage,
    ProcessLife,
    Rate,
    Remark,
)
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog
from decoupled_diloco.observe.shard_fold import ShardFold
from decoupled_diloco.observe.words import ending_in_words, note_in_words, subjects_of
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol.checkpoints.effects import KeepCheckpoint
from decoupled_diloco.protocol.messages import LOSS_MAX
from decoupled_diloco.protocol.revisions import Revision
from decoupled_diloco.units import format_duration

REMARKS_MAX = 500
"""Remarks that are kept of a run that goes on, the newest."""

WARNINGS_MAX = 20
"""Warnings that are kept: the first ones, each in its newest words."""

REPEAT_SECONDS = 5.0
"""A remark that several processes make within this time is told once."""

PROBLEMS_MAX = 10
"""No more torn lines than this are named one by one."""

Keep = Literal["now", "run", "details"]
"""What is remembered: the present state; also every step and round; also each round's details."""


class Listener(Protocol):
    """An object that is told every record that the model decodes, and those in ``looks_at``."""

    looks_at: frozenset[str]

    def take(self, who: str, at: float, value: Any) -> None:
        """One record; ``None`` stands for a start record."""


class RunModel:
    """Everything that is known of a run as of its latest record."""

    def __init__(self, keep: Keep = "now", listener: Listener | None = None) -> None:
        self.keep = keep
        self.record: Record  # that is being taken in, ``at`` its instant
        self.at = 0.0
        self.records = 0  # how many it has taken in
        self.started_wall = 0.0  # the first one's; instants are seconds since then
        self.duration = 0.0  # the latest one's instant
        self.shards: dict[str, ShardLog] = {}
        self.learners: dict[str, LearnerLog] = {}
        self.observers: set[str] = set()
        self.settings: dict[str, Any] = {}  # public ones, of a shard if any tells them
        self.revisions: dict[int, tuple[Revision, str]] = {}  # of H and τ, and why, by number
        self.virtual = False
        self.tokens = 0
        self.clock_rate = Rate()
        self.token_rate = Rate()
        self.evaluations: list[Evaluation] = []  # of the present state the last one
        self.faults: list[FaultLog] = []
        self.remarks: list[Remark] = []  # of the present state the newest of all ``remarks_told``
        self.remarks_told = 0
        self.warnings: dict[str, str] = {}  # what people should act on, by what it is about
        self.cut: tuple[float, KeepCheckpoint] | None = None
        self.headers: dict[str, dict[str, Any]] = {}
        self.releases: dict[str, str] = {}
        self.corpus: dict[str, Any] | None = None
        self.sample_text: str | None = None
        self.told_to_end: set[str] = set()  # by the launcher, and not started again
        self.ends: dict[str, list[tuple[float, samples.ProcessEnded]]] = {}
        self.orders: dict[str, list[float]] = {}
        self.spawns: dict[str, float] = {}
        self.left_out: Counter[str] = Counter()  # records that cannot be read, by why
        self.problems: list[str] = []  # what could not be read of the tape
        self._bytes: dict[str, dict[int, samples.BytesMoved]] = {}
        self.fragments_seen = 0
        self._acting = Acting()
        self._told: dict[str, float] = {}
        self._listener = listener
        self._looks_at = LOOKED_AT | (listener.looks_at if listener else frozenset())
        self._folds: dict[str, ShardFold] = {}

    @property
    def whole(self) -> bool:
        """Whether every step and round is kept."""
        return self.keep != "now"

    @property
    def latest(self) -> float:
        """Wall-clock seconds of the latest record."""
        return self.started_wall + self.duration

    @property
    def finished(self) -> bool:
        """Whether every shard has seen the end of the run."""
        return bool(self.shards) and all(s.phase == "finished" for s in self.shards.values())

    @property
    def interrupted(self) -> bool:
        """Whether the launcher has ended the syncer of a run that was not over."""
        return any(map(is_shard, self.told_to_end)) and not self.finished

    @property
    def step(self) -> int:
        """How far the slowest shard has come: what a budget of steps is measured by."""
        return min((shard.clock_max for shard in self.shards.values()), default=0)

    @property
    def global_step(self) -> int:
        """The latest clock of any shard: the step at which something happens."""
        return max((shard.clock for shard in self.shards.values()), default=0)

    def global_step_by(self, at: float) -> int:
        """The latest clock of any shard at an instant, from a whole tape."""
        return max((shard.clock_by(at) for shard in self.shards.values()), default=0)

    @property
    def fragments(self) -> int:
        """P, from the run's settings, or as far as learners have told; 0: it is not known."""
        told = self.settings_of("sync").get("fragments")
        return max(told if isinstance(told, int) else 0, self.fragments_seen)

    @property
    def rounds_merged(self) -> int:
        return sum(shard.merged for shard in self.shards.values())

    @property
    def rounds_abandoned(self) -> int:
        return sum(shard.abandoned for shard in self.shards.values())

    @property
    def rounds(self) -> Iterator[RoundLog]:
        """Every round that is over and kept, shard by shard."""
        return (round for shard in self.shards.values() for round in shard.rounds)

    @property
    def trained(self) -> dict[str, LearnerLog]:
        """The learners that a tape tells something of, beside that they were started."""
        return {name: learner for name, learner in self.learners.items() if learner.lives}

    @property
    def members(self) -> list[LearnerLog | ShardLog]:
        """All learners, then all shards."""
        return [*self.trained.values(), *self.shards.values()]

    @property
    def afar(self) -> list[str]:
        """The learners that only the shards tell of."""
        return [learner.name for learner in self.trained.values() if learner.afar]

    @property
    def outages(self) -> list[Outage]:
        """The outages of all learners and shards, in order of time."""
        every = [outage for member in self.members for outage in member.outages]
        return sorted(every, key=lambda outage: outage.down_at)

    @property
    def cuts(self) -> list[CutOff]:
        """When learners were out of the syncer's reach, in order of time."""
        every = [cut for learner in self.learners.values() for cut in learner.cuts]
        return sorted(every, key=lambda cut: (cut.cut_at, cut.who))

    @cached_property
    def training_span(self) -> tuple[float, float] | None:
        """From the first step of a learner to the last step of any, once a tape is read."""
        steps = [at for learner in self.learners.values() for at in learner.steps_at]
        return (min(steps), max(steps)) if steps else None

    @cached_property
    def account(self) -> RunAccount:
        """Where time and tokens went, once a whole tape is read."""
        return account_for(self)

    def participation_of(self, learner: LearnerLog) -> float | None:
        """Share of the run's merged rounds that its contribution went into."""
        merged = self.rounds_merged
        return learner.reasons[TOOK_PART] / merged if merged else None

    def settings_of(self, table: str) -> dict[str, Any]:
        """One table of the run's public settings; empty while they are not known."""
        found = self.settings.get(table)
        return found if isinstance(found, dict) else {}

    @property
    def bytes_moved(self) -> dict[str, samples.BytesMoved]:
        """What each process has sent and received, all its lives together."""
        return {who: _sum_of(lives.values()) for who, lives in self._bytes.items()}

    def bytes_of(self, *, syncer: bool) -> samples.BytesMoved | None:
        """What all learners have sent and received, as the shards have counted it or they have."""
        moved, whose = self.bytes_moved, self.shards if syncer else self.learners
        parts = [b.seen_from_there if syncer else b for who, b in moved.items() if who in whose]
        return _sum_of(parts) if parts else None

    @property
    def bytes_total(self) -> samples.BytesMoved | None:
        """What all learners together have sent and received.

        Where learners have their tapes elsewhere it is what the shards have received and sent, in
        which an evaluator's part is small.
        """
        return self.bytes_of(syncer=bool(self.afar))

    def take_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Takes one record in; one that this version cannot read is counted and left out."""
        if not self.records:
            self.started_wall = record.wall
        self.records += 1
        self.record = record
        self.at = max(0.0, record.wall - self.started_wall)  # less: the clock was set back
        self.duration = max(self.duration, self.at)
        if record.kind == "start":
            self._started(record)
        life = self._life(record)
        if record.type in self._looks_at and _matters(record):
            self._decode(record, life)
        elif record.type == "SendBody" and life is not None and self.whole:
            learner_fold.note_sent(self, life, record)

    def _decode(self, record: Record, life: ProcessLife | None) -> None:
        try:
            value = record.value()
        except ProtocolError as error:
            self.leave_out(str(error))
            return
        if self._listener is not None:
            self._listener.take(record.who, self.at, value)
        if is_shard(record.who):
            self._folds[record.who].take(value)
        elif record.who in self.learners and life is not None:
            learner_fold.take(self, self.learners[record.who], life, value)
        self._anybody(value)

    def leave_out(self, why: str) -> None:
        """Counts the record as one that cannot be read, and tells of the first such."""
        who = self.record.who
        if not self.left_out[f"{who}: {why}"]:
            self.remark("", f"a record of {who} is left out: {why}")
        self.left_out[f"{who}: {why}"] += 1

    def learner(self, name: str) -> LearnerLog:
        """The learner of this name, which need not be known yet."""
        if name not in self.learners:
            self.learners[name] = LearnerLog(name)
        return self.learners[name]

    def _shard(self, name: str) -> ShardLog:
        if name not in self.shards:
            self.shards[name] = ShardLog(name)
            self._folds[name] = ShardFold(self, self.shards[name])
            self.shards = dict(sorted(self.shards.items(), key=lambda item: item[1].index))
        return self.shards[name]

    def _started(self, record: Record) -> None:
        who, header = record.who, record.data.get("header")
        self.headers[who] = header = dict(header) if isinstance(header, dict) else {}
        self.releases[who] = str(record.data.get("version", "unknown"))
        self.virtual = self.virtual or header.get("virtual") is True
        settings = header.get("settings")
        if isinstance(settings, dict) and (not self.settings or is_shard(who)):
            self.settings = settings
        if header.get("role") == "observer":
            self.observe_only(who)
        if is_shard(who):
            self._shard(who)
            self._folds[who].started()
            if self._listener is not None:
                self._listener.take(who, self.at, None)
        elif self._is_learner(who):
            learner = self.learner(who)
            learner.process, learner.left = "joining", ""
            learner.rate.clear()
            learner.cut_from.clear()

    def observe_only(self, name: str) -> None:
        """A process that looks like a learner by its name takes no part."""
        self.observers.add(name)
        self.learners.pop(name, None)

    def _life(self, record: Record) -> ProcessLife | None:
        """The life that a record of a learner or shard belongs to."""
        who = record.who
        if is_shard(who):
            shard = self._shard(who)
            shard.heard_at, lives = self.at, shard.lives
        elif self._is_learner(who):
            learner = self.learner(who)
            if not learner.has_tape:  # which tells more than what was heard from afar
                learner.has_tape, learner.lives = True, []
            lives = learner.lives
        else:
            return None
        if record.kind == "start" or not lives:
            lives.append(ProcessLife(self.at, self.at, spawned_at=self.spawns.pop(who, None)))
        lives[-1].last_at = self.at
        return lives[-1]

    def _is_learner(self, name: str) -> bool:
        return is_learner(name) and name not in self.observers

    def count_tokens(self, learner: LearnerLog) -> None:
        """Counts what is new of its tokens."""
        tokens = learner.tokens
        self.tokens += tokens - learner.tokens_counted
        learner.tokens_counted = tokens

    def _anybody(self, value: Any) -> None:
        match value:
            case KeepCheckpoint():
                self.cut = self.at, value
            case samples.EndRequested(names):
                self._told_to_end(names)
            case samples.ProcessStarted(name, _):
                self._process_started(name)
            case samples.ProcessEnded():
                self._process_ended(value)
            case samples.RestartScheduled(name, seconds):
                self._set_process(self._acting.whose(name), "restarting")
                self.remark(name, f"{name} is started again in {format_duration(seconds)}")
            case samples.FaultInjected(kind, target, processes):
                self.faults.append(FaultLog(kind, target, processes, self.at))
                self.remark(target, f"fault on purpose: {kind} {target}")
            case samples.FaultEnded(kind, target, processes):
                for fault in self.faults:
                    place = (fault.kind, fault.target, fault.processes)
                    if place == (kind, target, processes) and math.isinf(fault.end):
                        fault.end = self.at
                        break
                self.remark(target, f"fault undone: {kind} {target}")
            case samples.TookOver():
                self.remark(self.record.who, self._acting.took_over(value))
            case do.Send(_, Revision() as plan, why):
                self.revisions.setdefault(plan.number, (plan, why))
            case do.Note(text, why, warns):
                self._noted(text, why, warns)
            case samples.WentBack(told):
                for shard in self.shards.values():
                    shard.clock = shard.clock_max = 0
                self.clock_rate.clear()
                self.remark("", told)
            case _:
                self._result(value)

    def _result(self, value: Any) -> None:
        match value:
            case samples.BytesMoved():
                self._bytes.setdefault(self.record.who, {})[self.record.life] = value
            case samples.DeviceUsed(name, device) if name not in self.observers:
                self.learner(name).device = device
            case samples.Evaluated():
                self._evaluated(value)
            case samples.WeightsSaved(path):
                self.remark("", f"weights saved: {path}")
            case samples.SampleGenerated(text):
                self.sample_text = text
            case samples.CorpusDescribed(description):
                self._corpus_described(description)

    def _evaluated(self, value: samples.Evaluated) -> None:
        loss = None if value.loss is None or abs(value.loss) > LOSS_MAX else value.loss
        named = tuple((metric.name, metric.value) for metric in value.metrics)
        if not self.whole:
            self.evaluations.clear()
        self.evaluations.append(Evaluation(self.at, value.global_step, loss, value.tokens, named))
        told = ", ".join(
            f"{name} {'not finite' if number is None else f'{number:.4f}'}"
            for name, number in (("loss", loss), *named)
        )
        self.remark("", f"evaluation at step {value.global_step}: {told}")

    def _corpus_described(self, description: str) -> None:
        corpus: Any = None
        with contextlib.suppress(ValueError):
            corpus = json.loads(description)
        self.corpus = corpus if isinstance(corpus, dict) else None
        if self.corpus is None:
            self.problems.append("the description of the corpus is no JSON object")

    def _told_to_end(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.orders.setdefault(name, []).append(self.at)
        if not self.finished:
            told = f"{names[0]} is" if len(names) == 1 else f"{len(names)} processes are"
            self.remark("", f"{told} told to end")
        self.told_to_end |= set(names)

    def _process_started(self, process: str) -> None:
        self.spawns[self._acting.whose(process)] = self.at
        self.told_to_end.discard(process)
        if is_shard(process):
            self._shard(process)
        elif self._is_learner(process):
            learner = self.learner(process)
            learner.process, learner.left = "joining", ""

    def _process_ended(self, ended: samples.ProcessEnded) -> None:
        name = self._acting.whose(ended.name)
        self.ends.setdefault(name, []).append((self.at, ended))
        if ended.name in self.told_to_end:
            if name in self.shards and not self.finished:
                self.shards[name].phase = "ended"
            return
        self._set_process(name, "finished" if ended.code == 0 else "down")
        if ended.code != 0:
            if name in self.learners:
                self.learners[name].down_at = self.at
            was = "" if ended.signal is None else "was "
            how = ending_in_words(ended.code, ended.signal)
            self.remark(name, f"{ended.name} {was}{how} at step {self.global_step}")

    def _set_process(self, name: str, state: str) -> None:
        if is_shard(name) and name in self.shards:
            self.shards[name].phase = state
        elif self._is_learner(name):
            self.learner(name).process = state

    def _noted(self, text: str, why: str, warns: bool) -> None:
        who, names = self.record.who, [n for n in subjects_of(text) if n in self.learners]
        subject = who if text.startswith("it ") else next(iter(names), "")
        words = note_in_words(who, text, why)
        if warns and (text in self.warnings or len(self.warnings) < WARNINGS_MAX):
            self.warnings[f"{who} {text}" if text.startswith("it ") else text] = words
        self.remark(subject, words)

    def remark(self, subject: str, text: str) -> None:
        """Notes what is worth a line, unless there is none or it was told just before."""
        if not text:
            return
        told = self._told.get(text)
        self._told[text] = at = self.at
        if told is not None and at - told <= REPEAT_SECONDS:
            return
        if len(self._told) > REMARKS_MAX:
            self._told = {t: w for t, w in self._told.items() if at - w <= REPEAT_SECONDS}
        self.remarks_told += 1
        self.remarks.append(Remark(at, self.record.who, subject, self.record.type, text))
        if not self.whole:
            del self.remarks[:-REMARKS_MAX]


def read_run(path: str | Path, keep: Keep = "run") -> RunModel:
    """What happened in a run, from its run folder, its tape folder or a single tape file.

    Raises:
        StorageError: There is no tape, or it is of a newer schema.
    """
    reader = TapeReader(path)
    model = run_of(reader, keep)
    if not model.records:
        check_readable(path, reader.problems)
    more = len(reader.problems) - PROBLEMS_MAX
    torn = [f"… and {more} more lines."] if more > 0 else []
    model.problems[:0] = [*reader.problems[:PROBLEMS_MAX], *torn]
    if not model.records:
        model.problems.append(f"{path} is empty: no process had written a record yet.")
    return model


def run_of(
    records: Iterable[Record], keep: Keep = "details", listener: Listener | None = None
) -> RunModel:
    """What happened in a run, from all its records in the order of time."""
    model = RunModel(keep, listener)
    model.take_all(records)
    for learner in model.learners.values():
        for life in learner.lives:
            life.spread_burst()
    find_absences(model)
    model.problems += [
        f"{count} records that this version cannot read were left out: {why}"
        for why, count in model.left_out.items()
    ]
    return model


def _matters(record: Record) -> bool:
    """Whether the message in a record is one to look at: most are not, and need no decoding."""
    wanted = MESSAGES.get(record.type)
    if wanted is None:
        return True
    message = record.data.get("message")
    name = message.get("type") if isinstance(message, dict) else None
    return isinstance(name, str) and name in wanted


def _sum_of(parts: Iterable[samples.BytesMoved]) -> samples.BytesMoved:
    return samples.BytesMoved(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))
