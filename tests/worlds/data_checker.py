"""Rules for leased data in every world: compare the ledger with what was really trained.

At every ledger entry: leases do not overlap. The learner in the ledger really trained the batches
that are called durable, under that lease, and every fragment contains them. At the end: no batch is
skipped or durable twice, and the ledger accounts for everything that was trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoupled_diloco.protocol.features.partitions import HELD_MAX
from decoupled_diloco.protocol.messages import (
    Done,
    Enter,
    Leased,
    LedgerEntry,
    Merge,
    Received,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.run_model.data_usage import DataAccount, account_of_data
from decoupled_diloco.storage.data_ledger import Basis, ledger_files, read_ledger
from decoupled_diloco.workloads.text import region
from decoupled_diloco_lab.simulate.hosts import LearnerHost
from decoupled_diloco_lab.simulate.system import System
from worlds.lineage import Lineage, Steps

Life = tuple[str, int]
"""A learner and its epoch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One batch that was really trained, with its learner, step and lease."""

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
    """Data in partitions.

    Attributes:
        parts: Number of partitions.
        batches: Batches per epoch.
    """

    parts: int
    batches: int

    def part(self, number: int) -> range:
        """Return the batches of a partition."""
        return region(self.batches, number, self.parts)


class Drawn:
    """The batches that a learner's loop has taken but not trained yet.

    Args:
        host: The learner's process.
        parts: The data.
        trained: Receives every trained batch, in order.
    """

    def __init__(self, host: LearnerHost, parts: Parts, trained: list[Trained]) -> None:
        self._host, self._parts, self._trained = host, parts, trained
        self._taken: list[tuple[int, int, int, int, bool]] = []

    def take(self, turn: int, batch: int) -> None:
        """Take a batch of the loop's present lease."""
        view = self._host.machine.state.data
        lease = view.leases[view.current].lease
        index = batch - self._parts.part(lease.part).start
        self._taken.append((lease.number, turn, lease.part, index, view.repeating))

    def train(self) -> None:
        """Note that the step with these batches is finished."""
        machine = self._host.machine
        step, process = machine.state.step + 1, self._host.name
        self._trained += [Trained(process, machine.epoch, step, *each) for each in self._taken]
        self._taken.clear()


class DataChecker:
    """Checks one system with leased data. It raises `AssertionError` at a violation."""

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

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled.

        The entries of earlier events are on the disk by now.
        """
        if isinstance(event, Done) and isinstance(event.order, Merge):
            self._note_merged(event.order.fragment)
        if process == "coordinator" or any(type(effect) is Enter for effect in effects):
            self.catch_up()
        learner = self.system.learners.get(process)
        if learner is None:
            return
        state = learner.machine.state
        if isinstance(event, Received):
            assert state.data is None or len(state.data.leases) <= HELD_MAX, "leases pile up"
        if state.ending or state.leaving:
            self._ended.add((process, learner.machine.epoch))

    def catch_up(self) -> None:
        """Check the ledger entries since the last call.

        Only entries on the disk count: a crash may have prevented an order.
        """
        sizes = {path: path.stat().st_size for path in ledger_files(self.system.folder)}
        if sizes != self._read:
            self._read = sizes
            for item in list(self._ledger())[self._entries :]:
                self._entries += 1
                self._check(item)

    def _ledger(self) -> Iterator[LedgerEntry | Basis]:
        for path in ledger_files(self.system.folder):
            yield from read_ledger(path)

    def _check(self, item: LedgerEntry | Basis) -> None:
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
        for (process, epoch), life in lineage.epochs.items():
            last = content.get((process, life), 0).bit_length() - 1
            merged[process, epoch] = max(last, merged.get((process, epoch), 0))

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
                assert batches == whole, f"a partition of {whole} batches ends after {batches}"
            case TakenBack(lease, _, durable, trained):
                self.in_force.remove(lease)
                assert durable <= trained
                self._durable(self.leases[lease], durable)
            case _:
                pass

    def _durable(self, leased: Leased, end: int) -> None:
        """Check a ledger entry by which a lease made its partition durable up to ``end``."""
        mine = self._of_lease(leased)
        first = {batch.index: batch.step for batch in reversed(mine) if not batch.repeat}
        claimed = range(leased.start, end)
        missing = [index for index in claimed if index not in first]
        assert not missing, f"{leased}: batches {missing} are durable but were never trained"
        life = (leased.learner, leased.epoch)
        if life in self._ended or not claimed:
            return  # the closing sweep may lose overwritten steps of a fragment, which are counted
        last = max(first[index] for index in claimed)
        for fragment, merged in enumerate(self.merged):
            assert merged.get(life, 0) >= last, (
                f"{leased}: fragment {fragment} has not merged the durable step {last}"
            )

    def _of_lease(self, leased: Leased) -> list[Trained]:
        for batch in self.trained[self._seen :]:
            self._by_lease[batch.learner, batch.epoch, batch.lease].append(batch)
        self._seen = len(self.trained)
        return self._by_lease[leased.learner, leased.epoch, leased.lease]

    def check_progress(self, seconds: float) -> None:
        """Check that without faults all partitions of the open epochs become durable."""
        system = self.system
        turns = set(system.coordinator.state.data.turns)
        deadline = system.now + seconds
        while system.now < deadline and not system.finished:
            system.run(until=min(deadline, system.now + seconds / 100))
            if not turns & system.coordinator.state.data.turns.keys():
                return
        ending = system.coordinator.state.phase in ("ending", "finished")
        assert ending, f"epochs {sorted(turns)} are never complete"

    def account(self) -> DataAccount:
        """Return the account of the present ledger, which must add up."""
        account = account_of_data(self._ledger())
        assert not account.problems, account.problems
        return account

    def check_accounts(self) -> None:
        """Check that the ledger accounts for all training: durable, in force, or a repeat.

        After a lease is taken back, another learner trains its partition again from the durable
        position. So all wasted training belongs to leases that the ledger lists as taken back,
        after that position.
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
                listed = again[leased.lease]
                unlisted = sum(b.repeat for b in mine) - listed
                assert unlisted >= 0, f"{leased}: the ledger lists {listed} repeats, too many"
