"""Rules that every world must keep, with any faults. They use only events and effects.

Safety is checked at every event, and by `Lineage` at every tensor operation. Liveness is checked
over the time since faults have ceased. The end is checked when a run with a budget is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.copies import NOT_TAKEN
from decoupled_diloco.protocol.messages import (
    Apply,
    Began,
    BodyArrived,
    Broadcast,
    ClockAdvanced,
    Done,
    Failed,
    Fold,
    GivenUp,
    Hold,
    Install,
    Merge,
    Note,
    Published,
    Received,
    RoundFinished,
    Send,
    ShardAdmitted,
    Snapshot,
    Version,
)
from decoupled_diloco.protocol.rounds import MERGE_PAUSE_SECONDS, SWEEP_TRIES_MAX
from decoupled_diloco_lab.simulate.hosts import LearnerHost, ShardHost
from decoupled_diloco_lab.simulate.system import System
from worlds.bounds import sees_the_end

READ = 10
"""Number of messages of each kind that are checked to survive encoding and decoding."""


class Checker:
    """Checks one world. It raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.shards = {shard.name: shard for shard in system.shard_processes}
        self.published: dict[int, dict[Version, str]] = defaultdict(dict)
        self.newest: dict[int, Version] = {}
        self.clocks: dict[tuple[str, int], int] = {}
        self.epochs: dict[str, int] = {}
        self.terms: dict[int, int] = {}
        self.merges: dict[int, int] = defaultdict(int)
        self.merged_at: dict[int, float] = {}
        self.longest: dict[int, float] = defaultdict(float)
        self.forgot_at = 0.0
        self.failed_at: dict[tuple[str, int, int], float] = {}
        self.merged_from: dict[int, set[str]] = defaultdict(set)
        self.rounds: list[RoundFinished] = []
        self.closing_tries: dict[tuple[str, int, int], int] = defaultdict(int)
        self.restarts = 0
        self.dropped: dict[tuple[str, int], int] = {}
        self.notes: list[str] = []
        self.read: dict[type, int] = defaultdict(int)
        system.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        for effect in effects:
            if isinstance(effect, Send | Broadcast):
                self._can_be_read(effect.message)
            match effect:
                case Merge() if not self._is_replaced(process):
                    self._merge(process, effect)
                case Fold():
                    self._fold(process, event, effect)
                case RoundFinished():
                    self._round(effect)
                    self._closing(process, effect, effects)
                case Broadcast(Published() as message):
                    self._published(process, message)
                case Install(fragment, version) if not self._is_replaced(process):
                    self._installed(fragment, version)
                case ClockAdvanced(clock):
                    self._clock(process, clock)
                case Hold():
                    assert self.system.options.wait == "at_overlap", f"{process} waits"
                case Apply(fragment, _, _, discarded, why):
                    assert discarded >= 0
                    if why == NOT_TAKEN:
                        self.dropped[process, fragment] = discarded
                case Note(text):
                    self.notes.append(text)
                case Snapshot():
                    assert process in self.system.learners, f"{process} trains"
        self._is_later(process, event)
        match event:
            case Failed(Merge(fragment=fragment)):
                self._merge_failed(self.shards[process], fragment)
            case Done(Merge(fragment=fragment)):
                self._count(fragment)
        if isinstance(event, Received) and isinstance(event.message, GivenUp):
            waits_for = self.system.participants[process].machine._owed()
            text = (
                f"{process} waits for fragment {event.message.fragment}, whose round was abandoned"
            )
            assert event.message.fragment not in waits_for, text

    def _can_be_read(self, message: Any) -> None:
        """Check that the first messages of each kind survive encoding and decoding."""
        kind = type(message)
        self.read[kind] += 1
        if self.read[kind] > READ:
            return
        try:
            arrived = wire.decode(wire.encode(message), (kind,))
        except ProtocolError as error:  # a server would blame its peer for a ProtocolError
            raise AssertionError(f"cannot decode {message}: {error}") from error
        assert arrived == message

    def _is_later(self, process: str, event: Any) -> None:
        """Check that no process receives an epoch or a term older than an earlier one."""
        if isinstance(event, Began):
            epoch = self.system.participants[process].machine.epoch
            assert epoch >= self.epochs.get(process, 0), "an epoch goes back"
            self.epochs[process] = epoch
        if isinstance(event, Received) and isinstance(event.message, ShardAdmitted):
            shard, term = self.shards[process].shard, event.message.term
            assert term >= self.terms.get(shard, 0), "a term goes back"
            self.terms[shard] = term

    def _count(self, fragment: int) -> None:
        self.longest[fragment] = self.seconds_without_merge(fragment)
        self.merges[fragment] += 1
        self.merged_at[fragment] = self.system.now

    def _merge_failed(self, shard: ShardHost, fragment: int) -> None:
        """Check that a shard pauses after a failed merge, by its own clock, before the next."""
        place = (shard.name, shard.life, fragment)
        now = self.system.now + shard.ahead_seconds
        paused = now - self.failed_at.get(place, float("-inf"))
        text = f"{shard.name} retries a merge of fragment {fragment} {paused:.3f} s after a failure"
        assert paused > 0.99 * MERGE_PAUSE_SECONDS[0], text
        self.failed_at[place] = now

    def _issued(self, fragment: int, version: Version) -> None:
        newest = self.newest.get(fragment)
        assert newest is None or version > newest, f"fragment {fragment}: {version} after {newest}"
        self.newest[fragment] = version

    def _installed(self, fragment: int, version: Version) -> None:
        if version not in self.published[fragment]:  # the start of a fragment may be repeated
            assert version >= self.newest.get(fragment, version)
            self.newest[fragment] = version
        else:
            self._issued(fragment, version)

    def _merge(self, process: str, order: Merge) -> None:
        newest = self.newest.get(order.fragment)
        assert newest is not None
        assert order.version > newest
        assert order.base == newest, "a merge starts from the newest version"

    def _is_replaced(self, process: str) -> bool:
        """Whether a shard process has been replaced; `ClaimChecker` checks it then."""
        return self.system.is_replaced(self.shards[process])

    def _published(self, process: str, message: Published) -> None:
        known = self.published[message.fragment]
        assert known.get(message.version, message.digest) == message.digest, (
            f"fragment {message.fragment}: {message.version} has two different contents"
        )
        if message.version not in known and not self._is_replaced(process):
            newest = self.newest.get(message.fragment)
            if newest is not None and message.version != newest:
                self._issued(message.fragment, message.version)
        known[message.version] = message.digest

    def _fold(self, process: str, event: Any, order: Fold) -> None:
        if process not in self.shards:  # a relay carries out what its shard has decided
            return
        assert isinstance(event, BodyArrived)
        assert order.learner == event.learner
        identity = self.shards[process].machine.state.identities[order.learner]
        assert event.epoch == identity.epoch, "an old epoch is merged"
        assert (
            0
            < order.steps
            <= self.system.options.counter_cap_periods * self.system.options.periods[1]
        )
        self.merged_from[order.fragment].add(order.learner)

    def _round(self, finished: RoundFinished) -> None:
        self.rounds.append(finished)
        if finished.verdict != "merged":
            return
        folded = {p.learner for p in finished.participants if p.state == "folded"}
        needed = 1 if "sweep" in finished.why else self.system.options.quorum
        assert len(folded) >= needed, f"too few: {finished}"

    def _closing(self, process: str, finished: RoundFinished, effects: Sequence[Any]) -> None:
        """Check that a rest is lost only after `SWEEP_TRIES_MAX` failed closing rounds."""
        states = {participant.state for participant in finished.participants}
        has_failed = "refused" in states or (finished.verdict == "abandoned" and "folded" in states)
        if "sweep" not in finished.why or not has_failed:
            return
        place = (process, self.shards[process].life, finished.fragment)
        self.closing_tries[place] += 1
        lost = any(type(e) is Note and _is_without(e.text, finished.fragment) for e in effects)
        tries = self.closing_tries[place]
        text = f"fragment {finished.fragment} is abandoned after {tries} closing rounds"
        assert not lost or tries >= SWEEP_TRIES_MAX, text

    def _clock(self, process: str, clock: int) -> None:
        key = (process, self.shards[process].life)
        assert clock > self.clocks.get(key, clock - 1), "the clock goes forward"
        self.clocks[key] = clock

    def forget(self) -> None:
        """Restart the counts for liveness from now on."""
        self.merges.clear()
        self.merged_at.clear()
        self.longest.clear()
        self.forgot_at = self.system.now
        self.merged_from.clear()

    def fragments_without_merge(self) -> list[int]:
        """Return the fragments without a merge since `forget`."""
        return [p for p in range(self.system.options.fragments) if not self.merges[p]]

    def seconds_without_merge(self, fragment: int) -> float:
        """Return the longest time without a merge of a fragment since `forget`."""
        since = self.merged_at.get(fragment, self.forgot_at)
        return max(self.longest[fragment], self.system.now - since)

    def not_merged_from(self) -> list[tuple[int, str]]:
        """Return pairs of a fragment and a live learner not merged into it since `forget`."""
        live = [learner.name for learner in self.system.learners.values() if learner.alive]
        return [
            (p, name)
            for p in range(self.system.options.fragments)
            for name in live
            if name not in self.merged_from[p]
        ]

    def check_end(self) -> None:
        """Check that contributions missing in the result are reported, for learners at the end."""
        for learner in self.system.learners.values():
            if learner.over and learner.machine is not None and learner.machine.state.over:
                self._check_result(learner)

    def _check_result(self, learner: LearnerHost) -> None:
        for fragment in range(self.system.options.fragments):
            shard = self.system.acting(self.system.options.owner(fragment))
            finished = shard.machine is not None and shard.machine.state.phase == "finished"
            if finished and sees_the_end(self.system, learner.name, shard.shard):
                self._check_dropped(learner.name, fragment)

    def _check_dropped(self, learner: str, fragment: int) -> None:
        """Check that the shard has reported a learner whose last contribution is in no version."""
        dropped = self.dropped.get((learner, fragment))
        reported = any(_is_without(note, fragment) and learner in note for note in self.notes)
        text = f"{dropped} tokens of {learner} are not in fragment {fragment}, but no note says so"
        assert dropped is None or reported, text


def _is_without(note: str, fragment: int) -> bool:
    """Whether a shard's note reports that a fragment lacks a contribution at the end."""
    return note.startswith(f"fragment {fragment} lacks the last training")
