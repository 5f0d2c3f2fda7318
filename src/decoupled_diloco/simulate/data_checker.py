"""What must hold of leased data in every world: the ledger against what was really trained.

Checked at every entry: leases do not overlap, what is called durable was trained by whom the ledger
names, under that lease, and every fragment holds it. At the end: nothing skipped, nothing durable
twice, and nothing trained that the ledger does not account for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.observe.data_ledger import DataAccount, account_of_data
from decoupled_diloco.protocol.data_leases.coordinator import HELD_MAX
from decoupled_diloco.protocol.data_leases.ledger import (
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.protocol.data_leases.messages import DataReport, LeaseState
from decoupled_diloco.protocol.events import Merged, Received
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.simulate.bodies import Life, LineageShard
from decoupled_diloco.simulate.leased_loop import NumberedParts, Trained, VirtualData
from decoupled_diloco.simulate.world import World


class DataChecker:
    """Watches one world with data; raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, world: World) -> None:
        assert world.data is not None
        self.world = world
        self.data: VirtualData = world.data
        self.leases: dict[int, Leased] = {}
        self.in_force: set[int] = set()
        self.merged: list[dict[Life, int]] = [{} for _ in range(world.options.fragments)]
        self.reported: dict[int, LeaseState] = {}
        self._trained: dict[tuple[str, int, int], list[Trained]] = defaultdict(list)
        self._seen = self._entries = 0
        self._ended: set[Life] = set()
        world.recorders.append(self)

    def go_on_from(self, earlier: DataChecker) -> None:
        """This world begins with a cut of another, whose parts must have what is called durable."""
        self._ended |= earlier._ended
        if earlier.world.disk_lies or earlier.world.disk_lost:
            # What such a disk has lost was durable by its own word.
            self.merged = [dict(merged) for merged in earlier.merged]
            self.catch_up()
            return
        for shard in self.world.shards:
            for fragment, kept in shard.disk.read().fragments.items():
                value = kept.content
                self.merged[fragment] = {life: value.last(life) for life in value.merged}
        self.catch_up()

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled; entries of earlier ones are on the disk by now."""
        self.catch_up()
        if isinstance(event, Merged):
            self._note_merged(who, event.fragment)
        if isinstance(event, Received) and isinstance(event.message, DataReport):
            self.reported |= {state.lease: state for state in event.message.leases}
        if isinstance(event, Received) and event.peer == COORDINATOR and who in self.world.learners:
            view = self.world.learners[who].machine.state.data
            assert view is None or len(view.leases) <= HELD_MAX, "leases pile up"
        learner = self.world.learners.get(who)
        if learner is not None and (learner.machine.state.ending or learner.machine.state.leaving):
            self._ended.add((who, learner.epoch))

    def catch_up(self) -> None:
        """Looks at what has been entered since; an order that a crash forestalled is no entry."""
        ledger = self.world.coordinator.ledger
        while self._entries < len(ledger):
            self._entries += 1
            self._entered(ledger[self._entries - 1])

    def _note_merged(self, who: str, fragment: int) -> None:
        shard = next(shard for shard in self.world.shard_processes if shard.name == who)
        assert isinstance(shard.bodies, LineageShard)
        merged = self.merged[fragment]
        value = shard.bodies.values[fragment]
        for life in value.merged:
            merged[life] = max(value.last(life), merged.get(life, 0))

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
                leased, source = self.leases[lease], self.data.source
                if isinstance(source, NumberedParts):
                    assert batches == source.length(leased.part, leased.turn), "a part is cut short"
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
        for batch in self.data.trained[self._seen :]:
            self._trained[batch.learner, batch.epoch, batch.lease].append(batch)
        self._seen = len(self.data.trained)
        return self._trained[leased.learner, leased.epoch, leased.lease]

    # ---- liveness

    def check_progress(self, seconds: float) -> None:
        """Without faults every part of the passes that are open now becomes durable."""
        world = self.world
        turns = set(world.coordinator.machine.state.data.turns)
        deadline = world.now + seconds
        while world.now < deadline and not world.finished:
            world.run(until=min(deadline, world.now + seconds / 12))
            if not turns & world.coordinator.machine.state.data.turns.keys():
                return
        ending = world.coordinator.machine.state.phase in ("ending", "finished")
        assert ending, f"passes {sorted(turns)} are never complete"

    # ---- the end

    def account(self) -> DataAccount:
        """The ledger as it stands, which must add up."""
        account = account_of_data(self.world.coordinator.ledger)
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
        for entry in self.world.coordinator.ledger:
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
