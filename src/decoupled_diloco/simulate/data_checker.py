"""What must hold of leased data in every world: the ledger against what was really trained.

Checked at every entry: leases do not overlap, what is called durable was trained by whom the ledger
names, under that lease, and every fragment holds it. At the end: nothing skipped, nothing durable
twice, and nothing trained that the ledger does not account for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoupled_diloco.observe.data_ledger import DataAccount, account_of_data
from decoupled_diloco.protocol.data_leases.coordinator import HELD_MAX
from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.data_leases.ledger import (
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.protocol.events import Merged, Received
from decoupled_diloco.simulate.hosts import LearnerHost
from decoupled_diloco.simulate.lineage import Lineage, Steps
from decoupled_diloco.simulate.system import System
from decoupled_diloco.storage.data_ledger import Basis, ledger_files, read_ledger
from decoupled_diloco.workloads.text import region

Life = tuple[str, int]
"""A learner and its epoch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One batch that was really trained: whose step, under which lease."""

    learner: str
    epoch: int
    step: int
    lease: int
    turn: int
    part: int
    index: int
    repeat: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """Data in parts: so many batches in a pass, in so many parts."""

    parts: int
    batches: int

    def part(self, number: int) -> range:
        """The batches of a part."""
        return region(self.batches, number, self.parts)


class Drawn:
    """The batches that a learner's loop has taken and not trained yet.

    Args:
        host: Whose.
        parts: The data.
        trained: Everything that is trained, in order.
    """

    def __init__(self, host: LearnerHost, parts: Parts, trained: list[Trained]) -> None:
        self._host, self._parts, self._trained = host, parts, trained
        self._taken: list[tuple[int, int, int, int, bool]] = []

    def take(self, turn: int, batch: int) -> None:
        """A batch of the loop's present lease is drawn."""
        view = self._host.machine.state.data
        lease = view.leases[view.current].lease
        index = batch - self._parts.part(lease.part).start
        self._taken.append((lease.number, turn, lease.part, index, view.repeating))

    def train(self) -> None:
        """The step that has drawn them is finished."""
        machine = self._host.machine
        step, who = machine.state.step + 1, self._host.name
        self._trained += [Trained(who, machine.epoch, step, *each) for each in self._taken]
        self._taken.clear()


class DataChecker:
    """Watches one system with leased data; raises `AssertionError` at what breaks a rule."""

    def __init__(self, system: System, lineage: Lineage, parts: Parts) -> None:
        self.system = system
        self.parts = parts
        self.trained: list[Trained] = []
        self.leases: dict[int, Leased] = {}
        self.in_force: set[int] = set()
        self.merged: list[dict[Life, int]] = [{} for _ in range(system.options.fragments)]
        self._lineage = lineage
        self._by_lease: dict[tuple[str, int, int], list[Trained]] = defaultdict(list)
        self._seen = self._entries = 0
        self._read: dict[Path, int] = {}
        self._ended: set[Life] = set()
        system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled; entries of earlier ones are on the disk by now."""
        if isinstance(event, Merged):
            self._note_merged(event.fragment)
        if who == "coordinator" or any(type(effect) is Enter for effect in effects):
            self.catch_up()
        learner = self.system.learners.get(who)
        if learner is None:
            return
        state = learner.machine.state
        if isinstance(event, Received):
            assert state.data is None or len(state.data.leases) <= HELD_MAX, "leases pile up"
        if state.ending or state.leaving:
            self._ended.add((who, learner.machine.epoch))

    def catch_up(self) -> None:
        """Looks at what has been entered since; an order that a crash forestalled is no entry."""
        sizes = {path: path.stat().st_size for path in ledger_files(self.system.folder)}
        if sizes != self._read:
            self._read = sizes
            for item in list(self._ledger())[self._entries :]:
                self._entries += 1
                self._look_at(item)

    def _ledger(self) -> Iterator[LedgerEntry | Basis]:
        for path in ledger_files(self.system.folder):
            yield from read_ledger(path)

    def _look_at(self, item: LedgerEntry | Basis) -> None:
        if isinstance(item, Basis):
            self.in_force = {n for held in item.book.holders.values() for n in held}
            for entry in item.entered:
                if isinstance(entry, Leased):
                    self.leases[entry.lease] = entry
        else:
            self._entered(item)

    def _note_merged(self, fragment: int) -> None:
        lineage, merged = self._lineage, self.merged[fragment]
        content: Steps = lineage.contents[fragment, lineage.newest[fragment]]
        for (who, epoch), life in lineage.epochs.items():
            last = content.get((who, life), 0).bit_length() - 1
            merged[who, epoch] = max(last, merged.get((who, epoch), 0))

    def _entered(self, entry: LedgerEntry) -> None:
        match entry:
            case Leased():
                mine = [self.leases[n] for n in self.in_force]
                other = [e for e in mine if (e.turn, e.part) == (entry.turn, entry.part)]
                assert not other, f"two leases overlap: {entry} and {other}"
                self.leases[entry.lease] = entry
                self.in_force.add(entry.lease)
            case Settled(lease, _, batches):
                self.in_force.remove(lease)
                self._durable(self.leases[lease], batches)
                whole = len(self.parts.part(self.leases[lease].part))
                assert batches == whole, f"a part of {whole} batches is cut short at {batches}"
            case TakenBack(lease, _, durable, trained):
                self.in_force.remove(lease)
                assert durable <= trained
                self._durable(self.leases[lease], durable)
            case _:
                pass

    def _durable(self, leased: Leased, end: int) -> None:
        """The ledger says that this lease made its part durable up to here."""
        mine = self._of_lease(leased)
        first = {batch.index: batch.step for batch in reversed(mine) if not batch.repeat}
        wanted = range(leased.start, end)
        missing = [index for index in wanted if index not in first]
        assert not missing, f"{leased}: batches {missing} are durable, and were never trained"
        life = (leased.learner, leased.epoch)
        if life in self._ended or not wanted:
            return  # what the closing sweep found overwritten is lost in that fragment, and counted
        last = max(first[index] for index in wanted)
        for fragment, merged in enumerate(self.merged):
            assert merged.get(life, 0) >= last, (
                f"{leased}: fragment {fragment} has not merged step {last}, which is called durable"
            )

    def _of_lease(self, leased: Leased) -> list[Trained]:
        for batch in self.trained[self._seen :]:
            self._by_lease[batch.learner, batch.epoch, batch.lease].append(batch)
        self._seen = len(self.trained)
        return self._by_lease[leased.learner, leased.epoch, leased.lease]

    def check_progress(self, seconds: float) -> None:
        """Without faults every part of the passes that are open now becomes durable."""
        system = self.system
        turns = set(system.coordinator.state.data.turns)
        deadline = system.now + seconds
        while system.now < deadline and not system.finished:
            system.run(until=min(deadline, system.now + seconds / 100))
            if not turns & system.coordinator.state.data.turns.keys():
                return
        ending = system.coordinator.state.phase in ("ending", "finished")
        assert ending, f"passes {sorted(turns)} are never complete"

    def account(self) -> DataAccount:
        """The ledger as it stands, which must add up."""
        account = account_of_data(self._ledger())
        assert not account.problems, account.problems
        return account

    def check_accounts(self) -> None:
        """Everything that was trained is in the ledger: durable, in force, or told as a repeat.

        Of a lease that was taken back, what lies behind its durable position is trained again by
        whoever has the part now: so everything that was trained for nothing belongs to a lease that
        the ledger lists as taken back, from that position on.
        """
        self.catch_up()
        self.account()
        back, settled, again = dict[int, int](), dict[int, int](), defaultdict[int, int](int)
        for entry in self._ledger():
            match entry:
                case TakenBack(lease, _, durable):
                    back[lease] = durable
                case Settled(lease, _, batches):
                    settled[lease] = batches
                case Repeated(lease, _, batches):
                    again[lease] += batches
        for leased in self.leases.values():
            mine = self._of_lease(leased)
            once = [b.index for b in mine if not b.repeat]
            assert once == list(range(leased.start, leased.start + len(once))), f"{leased}: {once}"
            if leased.lease in settled:
                assert leased.start + len(once) == settled[leased.lease], f"{leased} is not exact"
            if leased.lease not in back:
                told = again[leased.lease]
                untold = sum(b.repeat for b in mine) - told
                assert untold >= 0, f"{leased}: {told} repeats are listed, fewer were made"
