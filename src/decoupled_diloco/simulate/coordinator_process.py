"""The virtual process that hosts the coordinator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from decoupled_diloco.protocol.checkpoints.coordinator import raised
from decoupled_diloco.protocol.checkpoints.effects import BeginCheckpoint, KeepCheckpoint
from decoupled_diloco.protocol.coordinator import CoordinatorMachine, CoordinatorState
from decoupled_diloco.protocol.data_leases.coordinator import LeaseBook, apply, copied
from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.data_leases.ledger import LedgerEntry
from decoupled_diloco.protocol.effects import (
    Admit,
    AdmitShard,
    AdoptLayout,
    CoordinatorEffect,
    Deny,
    DenyShard,
    Note,
    Persist,
    Send,
)
from decoupled_diloco.protocol.events import Connected, Joining, Lost, Received
from decoupled_diloco.protocol.messages import (
    Admitted,
    Join,
    JoinRefused,
    LayoutSet,
    ShardAdmitted,
    ShardHello,
    ToMember,
)
from decoupled_diloco.protocol.peers import is_shard_peer, shard_of, shard_peer
from decoupled_diloco.protocol.transfer.effects import CloseRelay, OpenRelay, RelayOn
from decoupled_diloco.simulate.network import Connection
from decoupled_diloco.simulate.shell import Shell

if TYPE_CHECKING:
    from decoupled_diloco.simulate.world import World

LAYOUT = "{}"
"""Every learner of a virtual world has the same layout."""


class CoordinatorProcess(Shell):
    """Runs the `CoordinatorMachine`; what it persists outlives its crashes."""

    machine: CoordinatorMachine

    def __init__(self, world: World) -> None:
        super().__init__(world, "coordinator")
        self.durable: CoordinatorState | None = None
        self.ledger: list[LedgerEntry] = []
        self._book = LeaseBook()
        self.part = CoordinatorState()
        self.guests: dict[int, Join | ShardHello] = {}
        self.visits: Counter[tuple[str, str]] = Counter()
        self.shards: dict[int, Connection] = {}
        self.denied = False

    def begin(self) -> None:
        """Starts, or starts again from what is durable."""
        if self.durable is not None:
            self.durable = replace(self.durable, data=copied(self._book))
        super().begin()
        self.guests.clear()
        self.visits.clear()
        self.shards.clear()
        self.machine = CoordinatorMachine(
            self.world.options, weights_from_file=self.world.weights_from_file
        )
        if self.durable is not None:
            self.machine.restore(self.durable)

    def go_back(self, part: CoordinatorState, earlier: CoordinatorProcess) -> None:
        """What is durable is a part of a cut of another world, with the ledger as of then."""
        newest = replace(earlier.durable or part, data=earlier._book)
        self.durable = raised(part, newest)
        self._book = copied(self.durable.data)
        self.ledger = earlier.ledger[: part.data.entries]

    def received(self, connection: Connection, message: Any) -> None:
        """A message of a learner, an observer or a shard."""
        if isinstance(message, Join):
            self.guests[connection.number] = message
            self.visits[message.learner, message.nonce] += 1
            self.tell(
                Connected(
                    message.learner,
                    Joining(message.nonce, message.role, LAYOUT, ""),
                    connection.number,
                )
            )
        elif isinstance(message, ShardHello):
            self._greeted(connection, message)
        else:
            hello = self.guests.get(connection.number)
            if isinstance(hello, Join):
                self.tell(Received(hello.learner, message, hello.nonce))
            elif isinstance(hello, ShardHello) and self.shards.get(hello.shard) is connection:
                self.tell(Received(shard_peer(hello.shard), message))
            elif isinstance(hello, ShardHello) and hello.claim:
                connection.close(self)  # another process acts for this shard now
                self.guests.pop(connection.number)

    def _greeted(self, connection: Connection, hello: ShardHello) -> None:
        self.guests[connection.number] = hello
        before = self.shards.get(hello.shard)
        self.shards[hello.shard] = connection
        self.denied = False
        self.tell(
            Connected(
                shard_peer(hello.shard), ShardHello(hello.shard, hello.nonce, claim=hello.claim)
            )
        )
        if self.denied and before is not None:
            self.shards[hello.shard] = before

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        guest = self.guests.pop(connection.number, None)
        if isinstance(guest, ShardHello):
            if self.shards.get(guest.shard) is connection:
                del self.shards[guest.shard]
                self.tell(Lost(shard_peer(guest.shard)))
        elif guest is not None and guest.role == "learner":
            self._uncount(guest)
            if not self.visits[guest.learner, guest.nonce]:
                self.tell(Lost(guest.learner, guest.nonce))

    def carry_out(self, effect: CoordinatorEffect) -> None:
        """Carries one order out."""
        match effect:
            case Persist():
                self.durable = self.machine.snapshot()
                self._written()
            case Enter(entry):
                self.ledger.append(entry)
                apply(self._book, entry)
                self._written()
            case Admit(number, _, epoch):
                self._answer(number, Admitted(epoch, "", LAYOUT, ()))
            case Deny(number, reason, retry):
                connection = self.connections.get(number)
                self._answer(number, JoinRefused(reason, retry))
                guest = self.guests.pop(number, None)
                if isinstance(guest, Join):
                    self._uncount(guest)
                if connection is not None:
                    connection.close(self)
            case AdmitShard(shard, term, begun):
                self._order(shard, ShardAdmitted(term, begun))
                self._order(shard, LayoutSet(LAYOUT))
            case DenyShard(shard, _, reason):
                self.denied = True
                connection = self.shards.pop(shard)
                connection.send(self, JoinRefused(reason, True))
                self.guests.pop(connection.number, None)
                connection.close(self)
            case Send(peer, message) if is_shard_peer(peer):
                self._order(shard_of(peer), cast("Any", message))
            case Send(learner, message):
                self._inform(learner, cast("Any", message))
            case OpenRelay() | RelayOn() | CloseRelay():
                pass  # a virtual chunk passes whenever both ends are alive
            case BeginCheckpoint():
                self.part = self.machine.snapshot()
            case KeepCheckpoint(number):
                self.world.cuts.complete[number] = effect, self.part
            case AdoptLayout() | Note():
                pass

    def _written(self) -> None:
        if self.choices.chance(self.world.crash_after_persist):
            self.world.crash(self)
            self.world.clockwork.after(self.choices.uniform(0.1, 3.0), self.world.restart, self)

    def _inform(self, learner: str, message: ToMember) -> None:
        for number, guest in reversed(self.guests.items()):
            if isinstance(guest, Join) and guest.learner == learner:
                self._answer(number, message)
                return

    def _uncount(self, guest: Join) -> None:
        self.visits[guest.learner, guest.nonce] -= 1

    def _answer(self, number: int, message: Any) -> None:
        connection = self.connections.get(number)
        if connection is not None:
            connection.send(self, message)

    def _order(self, shard: int, message: Any) -> None:
        connection = self.shards.get(shard)
        if connection is not None:
            connection.send(self, message)
