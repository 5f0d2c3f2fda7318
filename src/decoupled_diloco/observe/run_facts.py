"""What is known of a run as of its latest record, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

from decoupled_diloco.observe import samples
from decoupled_diloco.observe.acting import is_shard
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.run_data import (
    TOOK_PART,
    CutOff,
    Evaluation,
    FaultLog,
    LearnerLog,
    Outage,
    Rate,
    Remark,
)
from decoupled_diloco.observe.shard_data import RoundLog, ShardLog
from decoupled_diloco.protocol.checkpoints.effects import KeepCheckpoint
from decoupled_diloco.protocol.revisions import Revision

REMARKS_MAX = 500
"""Remarks that are kept of a run that goes on, the newest."""

REPEAT_SECONDS = 5.0
"""A remark that several processes make within this time is listed once."""

Keep = Literal["now", "run", "details"]
"""What is remembered: the present state; also every step and round; also each round's details."""


class RunFacts:
    """What a `RunModel` has taken in; its folds fill it in, a subject each."""

    def __init__(self, keep: Keep = "now") -> None:
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
        self.checkpoint: tuple[float, KeepCheckpoint] | None = None
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
        self._told: dict[str, float] = {}

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
        return sorted(every, key=lambda cut: (cut.cut_at, cut.learner))

    @cached_property
    def training_span(self) -> tuple[float, float] | None:
        """From the first step of a learner to the last step of any, once a tape is read."""
        steps = [at for learner in self.learners.values() for at in learner.steps_at]
        return (min(steps), max(steps)) if steps else None

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
        return {name: _sum_of(lives.values()) for name, lives in self._bytes.items()}

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

    def observe_only(self, name: str) -> None:
        """A process that looks like a learner by its name takes no part."""
        self.observers.add(name)
        self.learners.pop(name, None)

    def count_tokens(self, learner: LearnerLog) -> None:
        """Counts what is new of its tokens."""
        tokens = learner.tokens
        self.tokens += tokens - learner.tokens_counted
        learner.tokens_counted = tokens

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


def _sum_of(parts: Iterable[samples.BytesMoved]) -> samples.BytesMoved:
    return samples.BytesMoved(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))
