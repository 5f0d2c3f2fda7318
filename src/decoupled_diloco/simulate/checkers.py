"""What must hold in every world, whatever befalls it; looks at events and effects only.

Safety is checked at every event (and by `Lineage` at every tensor operation); liveness by asking
what has happened since faults have ceased; the end, when a run with a budget is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.effects import (
    Apply,
    Broadcast,
    ClockAdvanced,
    Fold,
    Hold,
    Install,
    Merge,
    Note,
    RoundFinished,
    Send,
    Snapshot,
)
from decoupled_diloco.protocol.events import Began, BodyArrived, Merged, MergeFailed, Received
from decoupled_diloco.protocol.learner_fragments import NOT_TAKEN
from decoupled_diloco.protocol.messages import GivenUp, Published, ShardAdmitted
from decoupled_diloco.protocol.syncer_rounds import MERGE_PAUSE_SECONDS, SWEEP_TRIES_MAX
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.simulate.bounds import sees_the_end
from decoupled_diloco.simulate.hosts import LearnerHost, ShardHost
from decoupled_diloco.simulate.system import System

READ = 10
"""How many messages of each kind are checked to survive the wire."""


class Checker:
    """Watches one world; raises `AssertionError` at the event that breaks a rule."""

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
        self.heard: dict[int, set[str]] = defaultdict(set)
        self.rounds: list[RoundFinished] = []
        self.closing_tries: dict[tuple[str, int, int], int] = defaultdict(int)
        self.restarts = 0
        self.dropped: dict[tuple[str, int], int] = {}
        self.notes: list[str] = []
        self.read: dict[type, int] = defaultdict(int)
        system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        for effect in effects:
            if isinstance(effect, Send | Broadcast):
                self._can_be_read(effect.message)
            match effect:
                case Merge() if not self._is_replaced(who):
                    self._merge(who, effect)
                case Fold():
                    self._fold(who, event, effect)
                case RoundFinished():
                    self._round(effect)
                    self._closing(who, effect, effects)
                case Broadcast(Published() as message):
                    self._published(who, message)
                case Install(fragment, version) if not self._is_replaced(who):
                    self._installed(fragment, version)
                case ClockAdvanced(clock):
                    self._clock(who, clock)
                case Hold():
                    assert self.system.options.wait == "at_overlap", f"{who} waits"
                case Apply(fragment, _, _, discarded, why):
                    assert discarded >= 0
                    if why == NOT_TAKEN:
                        self.dropped[who, fragment] = discarded
                case Note(text):
                    self.notes.append(text)
                case Snapshot():
                    assert who in self.system.learners, f"{who} trains"
        self._is_later(who, event)
        if isinstance(event, MergeFailed):
            self._merge_failed(self.shards[who], event.fragment)
        if isinstance(event, Merged):
            self._count(event.fragment)
        if isinstance(event, Received) and isinstance(event.message, GivenUp):
            waits_for = self.system.participants[who].machine._owed()
            text = f"{who} waits for fragment {event.message.fragment}, whose round is given up"
            assert event.message.fragment not in waits_for, text

    def _can_be_read(self, message: Any) -> None:
        """What is said survives the wire: of each kind the first are looked at."""
        kind = type(message)
        self.read[kind] += 1
        if self.read[kind] > READ:
            return
        try:
            arrived = wire.decode(wire.encode(message), (kind,))
        except ProtocolError as error:  # whoever serves a peer takes it for the peer's
            raise AssertionError(f"{message} cannot be read: {error}") from error
        assert arrived == message

    def _is_later(self, who: str, event: Any) -> None:
        """Nobody is told of an epoch or a term that is older than one that was told before."""
        if isinstance(event, Began):
            epoch = self.system.participants[who].machine.epoch
            assert epoch >= self.epochs.get(who, 0), "an epoch goes back"
            self.epochs[who] = epoch
        if isinstance(event, Received) and isinstance(event.message, ShardAdmitted):
            shard, term = self.shards[who].shard, event.message.term
            assert term >= self.terms.get(shard, 0), "a term goes back"
            self.terms[shard] = term

    def _count(self, fragment: int) -> None:
        self.longest[fragment] = self.seconds_without_merge(fragment)
        self.merges[fragment] += 1
        self.merged_at[fragment] = self.system.now

    def _merge_failed(self, shard: ShardHost, fragment: int) -> None:
        """Who has failed pauses before it tries again, by its own clock, whatever is due."""
        place = (shard.name, shard.life, fragment)
        now = self.system.now + shard.ahead_seconds
        paused = now - self.failed_at.get(place, float("-inf"))
        text = f"{shard.name} merges into fragment {fragment} {paused:.3f} s after it has failed"
        assert paused > 0.99 * MERGE_PAUSE_SECONDS[0], text
        self.failed_at[place] = now

    def _issued(self, fragment: int, version: Version) -> None:
        newest = self.newest.get(fragment)
        assert newest is None or version > newest, f"fragment {fragment}: {version} after {newest}"
        self.newest[fragment] = version

    def _installed(self, fragment: int, version: Version) -> None:
        if version not in self.published[fragment]:  # an attempt to begin may be repeated
            assert version >= self.newest.get(fragment, version)
            self.newest[fragment] = version
        else:
            self._issued(fragment, version)

    def _merge(self, who: str, order: Merge) -> None:
        newest = self.newest.get(order.fragment)
        assert newest is not None
        assert order.version > newest
        assert order.base == newest, "a merge starts from the newest version"

    def _is_replaced(self, who: str) -> bool:
        """Whether it tells of nothing new any more; that is seen to by `ClaimChecker`."""
        return self.system.is_replaced(self.shards[who])

    def _published(self, who: str, message: Published) -> None:
        known = self.published[message.fragment]
        assert known.get(message.version, message.digest) == message.digest, (
            f"fragment {message.fragment}: two contents are called {message.version}"
        )
        if message.version not in known and not self._is_replaced(who):
            newest = self.newest.get(message.fragment)
            if newest is not None and message.version != newest:
                self._issued(message.fragment, message.version)
        known[message.version] = message.digest

    def _fold(self, who: str, event: Any, order: Fold) -> None:
        assert isinstance(event, BodyArrived)
        assert order.learner == event.learner
        identity = self.shards[who].machine.state.identities[order.learner]
        assert event.epoch == identity.epoch, "an old epoch is merged"
        assert (
            0
            < order.steps
            <= self.system.options.counter_cap_periods * self.system.options.periods[1]
        )
        self.heard[order.fragment].add(order.learner)

    def _round(self, finished: RoundFinished) -> None:
        self.rounds.append(finished)
        if finished.verdict != "merged":
            return
        folded = {p.learner for p in finished.participants if p.state == "folded"}
        needed = 1 if "sweep" in finished.why else self.system.options.quorum
        assert len(folded) >= needed, f"too few: {finished}"

    def _closing(self, who: str, finished: RoundFinished, effects: Sequence[Any]) -> None:
        """Nobody's rest is given up before its closing round has failed so and so many times."""
        states = {participant.state for participant in finished.participants}
        has_failed = "refused" in states or (finished.verdict == "abandoned" and "folded" in states)
        if "sweep" not in finished.why or not has_failed:
            return
        place = (who, self.shards[who].life, finished.fragment)
        self.closing_tries[place] += 1
        lost = any(type(e) is Note and _is_without(e.text, finished.fragment) for e in effects)
        tries = self.closing_tries[place]
        text = f"fragment {finished.fragment} is given up after {tries} closing rounds"
        assert not lost or tries >= SWEEP_TRIES_MAX, text

    def _clock(self, who: str, clock: int) -> None:
        key = (who, self.shards[who].life)
        assert clock > self.clocks.get(key, clock - 1), "the clock goes forward"
        self.clocks[key] = clock

    def forget(self) -> None:
        """From here on counts what liveness is about."""
        self.merges.clear()
        self.merged_at.clear()
        self.longest.clear()
        self.forgot_at = self.system.now
        self.heard.clear()

    def fragments_without_merge(self) -> list[int]:
        """Fragments that nothing was merged into since `forget`."""
        return [p for p in range(self.system.options.fragments) if not self.merges[p]]

    def seconds_without_merge(self, fragment: int) -> float:
        """The longest time since `forget` in which nothing was merged into a fragment."""
        since = self.merged_at.get(fragment, self.forgot_at)
        return max(self.longest[fragment], self.system.now - since)

    def unheard(self) -> list[tuple[int, str]]:
        """Live learners that some fragment has not heard since `forget`."""
        live = [learner.name for learner in self.system.learners.values() if learner.alive]
        return [
            (p, name)
            for p in range(self.system.options.fragments)
            for name in live
            if name not in self.heard[p]
        ]

    def check_end(self) -> None:
        """What no version has taken in the end is said, for everybody who saw the end."""
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
        """What no version has taken in the end: the shard has said of whom it lacks something."""
        dropped = self.dropped.get((learner, fragment))
        said = any(_is_without(note, fragment) and learner in note for note in self.notes)
        text = f"{dropped} tokens of {learner} are not in fragment {fragment}, and nobody says so"
        assert dropped is None or said, text


def _is_without(note: str, fragment: int) -> bool:
    """Whether a shard says by this that a fragment lacks something in the end."""
    return note.startswith(f"fragment {fragment} is without what")
