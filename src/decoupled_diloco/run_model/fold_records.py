"""The fold of a run's tape, record by record: all outputs read the resulting `RunModel`.

A growing tape is folded as its records arrive (``keep="now"``). The size of the model then does not
grow with the run, but only with joins: learners, incarnations of processes, epochs. `read_run`
folds a whole tape at once, and then the model keeps every step, loss, tick and round.

Most facts come from the tapes of the shards, which a running syncer serves. If the learners' own
tapes are available, they add facts that only the learners recorded.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import LOSS_MAX, KeepCheckpoint, Revision
from decoupled_diloco.run_model import learners as learner_fold
from decoupled_diloco.run_model.absences import find_absences
from decoupled_diloco.run_model.accounts import RunAccount, account_for
from decoupled_diloco.run_model.facts import (
    Acting,
    Evaluation,
    FaultLog,
    Keep,
    ProcessLife,
    Remark,
    RunFacts,
    ShardLog,
    SiteLog,
    is_learner,
    is_shard,
)
from decoupled_diloco.run_model.phrases import (
    ending_in_words,
    is_preempted,
    note_in_words,
    subjects_of,
    was_ended,
)
from decoupled_diloco.run_model.shards import ShardFold
from decoupled_diloco.tape import samples
from decoupled_diloco.tape.excerpt import LOOKED_AT, MESSAGES
from decoupled_diloco.tape.reader import Follower, TapeReader, check_readable
from decoupled_diloco.tape.records import Record
from decoupled_diloco.units import format_duration

WARNINGS_MAX = 20
"""Maximum number of warnings that are kept: the first ones, each with its newest text."""

PROBLEMS_MAX = 10
"""Maximum number of torn lines that are listed individually."""


class Listener(Protocol):
    """An object that receives all records that the model decodes, and the types in ``looks_at``."""

    looks_at: frozenset[str]

    def take(self, process: str, at: float, value: Any) -> None:
        """Receive one record of a process; ``value`` is ``None`` for a start record."""


class RunModel(RunFacts):
    """The state of a run as of its latest record."""

    def __init__(self, keep: Keep = "now", listener: Listener | None = None) -> None:
        super().__init__(keep)
        self._acting = Acting()
        self._listener = listener
        self._looks_at = LOOKED_AT | (listener.looks_at if listener else frozenset())
        self._folds: dict[str, ShardFold] = {}

    @cached_property
    def account(self) -> RunAccount:
        """The use of time and tokens; valid after a whole tape has been read."""
        return account_for(self)

    def take_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Fold one record; a record that this version cannot decode is counted and skipped."""
        if not self.records:
            self.started_wall = record.wall
        self.records += 1
        self.record = record
        self.at = max(0.0, record.wall - self.started_wall)  # negative if the clock was set back
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
        if self._listener is not None:  # before the folds: it may read the state before this record
            self._listener.take(record.process, self.at, value)
        if is_shard(record.process):
            self._folds[record.process].take(value)
        elif record.process in self.learners and life is not None:
            learner_fold.take(self, self.learners[record.process], life, value)
        self._general(value)

    def _shard(self, name: str) -> ShardLog:
        if name not in self.shards:
            self.shards[name] = ShardLog(name)
            self._folds[name] = ShardFold(self, self.shards[name])
            self.shards = dict(sorted(self.shards.items(), key=lambda item: item[1].index))
        return self.shards[name]

    def _started(self, record: Record) -> None:
        process, header = record.process, record.data.get("header")
        self.headers[process] = header = dict(header) if isinstance(header, dict) else {}
        self.releases[process] = str(record.data.get("version", "unknown"))
        self.virtual = self.virtual or header.get("virtual") is True
        settings = header.get("settings")
        if isinstance(settings, dict) and (not self.settings or is_shard(process)):
            self.settings = settings
        if header.get("machine") == "coordinator":
            self.stopped_by = _stopped_by(header.get("state"))
        if header.get("role") == "observer":
            self.observe_only(process)
        if is_shard(process):
            self._sites_listed(header.get("sites"))
            self._shard(process)
            self._folds[process].started()
            if self._listener is not None:
                self._listener.take(process, self.at, None)
        elif self._is_learner(process):
            learner = self.learner(process)
            learner.process, learner.left, learner.supervised = "joining", "", True
            learner.rate.clear()
            learner.cut_from.clear()

    def _sites_listed(self, sites: Any) -> None:
        """Record the sites of the run's file, whose relays may never connect."""
        for name, learners in sites.items() if isinstance(sites, dict) else ():
            names = map(str, learners) if isinstance(learners, list) else ()
            self.sites.setdefault(name, SiteLog()).learners = tuple(names)

    def _life(self, record: Record) -> ProcessLife | None:
        """Return the incarnation that a record of a learner or shard belongs to."""
        process = record.process
        if is_shard(process):
            shard = self._shard(process)
            shard.heard_at, lives = self.at, shard.lives
        elif self._is_learner(process):
            learner = self.learner(process)
            if not learner.has_tape:
                # Its own tape has more detail: drop the incarnations that only shards reported.
                learner.has_tape, learner.lives = True, []
            lives = learner.lives
        else:
            return None
        if record.kind == "start" or not lives:
            lives.append(ProcessLife(self.at, self.at, spawned_at=self.spawns.pop(process, None)))
        lives[-1].last_at = self.at
        return lives[-1]

    def _is_learner(self, name: str) -> bool:
        return is_learner(name) and name not in self.observers

    def _general(self, value: Any) -> None:
        """Fold a record whose meaning does not depend on the kind of process that wrote it."""
        match value:
            case KeepCheckpoint():
                self.checkpoint = self.at, value
            case samples.EndRequested(names):
                self._end_requested(names)
            case samples.ProcessStarted(name, _):
                self._process_started(name)
            case samples.ProcessEnded():
                self._process_ended(value)
            case samples.RestartScheduled(name, seconds):
                self._set_process(self._acting.name_of(name), "restarting")
                self.remark(name, f"{name} will restart in {format_duration(seconds)}")
            case samples.FaultInjected(kind, target, processes):
                self.faults.append(FaultLog(kind, target, processes, self.at))
                self.remark(target, f"fault injected: {kind} {target}")
            case samples.FaultEnded(kind, target, processes):
                for fault in self.faults:
                    place = (fault.kind, fault.target, fault.processes)
                    if place == (kind, target, processes) and math.isinf(fault.end):
                        fault.end = self.at
                        break
                self.remark(target, f"fault removed: {kind} {target}")
            case samples.StoreMirrored():
                if self.store is None or self.store[1].state != value.state:
                    self.store_state_at = self.at if value.state else None
                self.store = self.at, value
            case samples.TookOver():
                self.remark(self.record.process, self._acting.took_over(value))
            case messages.Send(_, Revision() as plan, why):
                self.revisions.setdefault(plan.number, (plan, why))
            case messages.StopWanted(by):
                self.stopped_by = by
            case messages.Note(text, why, warns):
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
                self._bytes.setdefault(self.record.process, {})[self.record.life] = value
            case samples.DeviceUsed(name, device) if name not in self.observers:
                self.learner(name).device = device
            case samples.Evaluated():
                self._evaluated(value)
            case samples.WeightsSaved(path):
                self.remark("", f"weights saved: {path}")
            case samples.SampleGenerated(text):
                self.sample_text = text
            case samples.PicturesGenerated(pictures):
                self.pictures = pictures
            case samples.CorpusDescribed(description):
                self._corpus_described(description)

    def _evaluated(self, value: samples.Evaluated) -> None:
        loss = None if value.loss is None or abs(value.loss) > LOSS_MAX else value.loss
        named = tuple((metric.name, metric.value) for metric in value.metrics)
        if not self.whole:
            self.evaluations.clear()
        self.evaluations.append(Evaluation(self.at, value.global_step, loss, value.tokens, named))
        results = ", ".join(
            f"{name} {'not finite' if number is None else f'{number:.4f}'}"
            for name, number in (("loss", loss), *named)
        )
        self.remark("", f"evaluation at step {value.global_step}: {results}")

    def _corpus_described(self, description: str) -> None:
        corpus: Any = None
        with contextlib.suppress(ValueError):
            corpus = json.loads(description)
        self.corpus = corpus if isinstance(corpus, dict) else None
        if self.corpus is None:
            self.problems.append("the description of the corpus is not a JSON object")

    def _end_requested(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.orders.setdefault(name, []).append(self.at)
        if not self.finished:
            subject = f"{names[0]} is" if len(names) == 1 else f"{len(names)} processes are"
            self.remark("", f"{subject} asked to stop")
        self.told_to_end |= set(names)

    def _process_started(self, process: str) -> None:
        self.spawns[self._acting.name_of(process)] = self.at
        self.told_to_end.discard(process)
        if is_shard(process):
            self._shard(process)
        elif self._is_learner(process):
            learner = self.learner(process)
            learner.process, learner.left = "joining", ""

    def _process_ended(self, ended: samples.ProcessEnded) -> None:
        name = self._acting.name_of(ended.name)
        self.ends.setdefault(name, []).append((self.at, ended))
        if ended.name in self.told_to_end:
            if name in self.shards and not self.finished:
                self.shards[name].phase = "ended"
            return
        self._set_process(name, "finished" if ended.code == 0 else "down")
        if ended.code != 0:
            if name in self.learners:
                self.learners[name].down_at = self.at
                preempted = is_preempted(ended.code, ended.signal)
                self.learners[name].ends["preempted" if preempted else "failed"] += 1
            how = was_ended(ending_in_words(ended.code, ended.signal))
            self.remark(name, f"{ended.name} {how} at step {self.global_step}")

    def _set_process(self, name: str, state: str) -> None:
        if is_shard(name) and name in self.shards:
            self.shards[name].phase = state
        elif self._is_learner(name):
            self.learner(name).process = state

    def _noted(self, text: str, why: str, warns: bool) -> None:
        process, names = self.record.process, [n for n in subjects_of(text) if n in self.learners]
        subject = process if text.startswith("it ") else next(iter(names), "")
        visit_ended = self.has_devices and why.startswith("left: ")
        words = "" if visit_ended else note_in_words(process, text, why)
        if warns and (text in self.warnings or len(self.warnings) < WARNINGS_MAX):
            self.warnings[f"{process} {text}" if text.startswith("it ") else text] = words
        self.remark(subject, words)


def _stopped_by(state: Any) -> str:
    """Return the party that has ended the run, by a coordinator's state; empty: none."""
    stopped = state.get("stopped") if isinstance(state, dict) else None
    return str(stopped.get("by", "")) if isinstance(stopped, dict) else ""


def read_run(path: str | Path, keep: Keep = "run") -> RunModel:
    """Return the model of a run, from its run folder, its tape folder or a single tape file.

    Raises:
        StorageError: The tape does not exist, or it has another schema.
    """
    reader = TapeReader(path)
    model = run_of(reader, keep)
    if not model.records:
        check_readable(path, reader.problems)
    more = len(reader.problems) - PROBLEMS_MAX
    torn = [f"… and {more} more lines."] if more > 0 else []
    model.problems[:0] = [*reader.problems[:PROBLEMS_MAX], *torn]
    if not model.records:
        model.problems.append(f"{path} is empty: no process has written a record yet.")
    return model


def run_of(
    records: Iterable[Record], keep: Keep = "details", listener: Listener | None = None
) -> RunModel:
    """Return the model of a run, from all its records in order of time."""
    model = RunModel(keep, listener)
    model.take_all(records)
    for learner in model.learners.values():
        for life in learner.lives:
            life.spread_burst()
    find_absences(model)
    model.problems += [
        f"{count} records that this version cannot read were skipped: {why}"
        for why, count in model.left_out.items()
    ]
    return model


def _matters(record: Record) -> bool:
    """Whether a record must be decoded; most records with messages need no decoding."""
    relevant = MESSAGES.get(record.type)
    if relevant is None:
        return True
    message = record.data.get("message")
    name = message.get("type") if isinstance(message, dict) else None
    return isinstance(name, str) and name in relevant


class FollowedRun:
    """The model of a run, updated by each `poll`.

    Args:
        run_folder: The run's folder; its tape need not exist yet.

    Attributes:
        problems: One sentence for each part of the tape that could not be read.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.run = RunModel()
        self._follower = Follower(run_folder)
        self.problems = self._follower.problems
        self._remarks_taken = 0

    def poll(self) -> None:
        """Fold the records added to the tape.

        Raises:
            StorageError: A file cannot be read or has another schema.
        """
        self.run.take_all(self._follower.poll())

    def take_remarks(self) -> list[Remark]:
        """Return the remarks since the last call."""
        fresh = self.run.remarks_made - self._remarks_taken
        self._remarks_taken += fresh
        return self.run.remarks[-fresh:] if fresh else []
