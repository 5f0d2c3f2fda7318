"""The coordinator's shell: joins and shards at its channels, its state on disk.

It lives in the process of shard 0. What it must not forget is forced to disk before anybody hears
of a change: epochs, terms, layout and phase in one small JSON file, learners that have joined since
it was written, a line each, and the data ledger, which is appended to. A thread writes them, so
that a slow disk delays joins and never a heartbeat; while the disk is full, orders wait, and the
rounds of the shards go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never, cast, get_args

from decoupled_diloco.config.method import (
    difference_of,
    options_of,
    plan_of,
    public_text,
    read_public,
    synchronised,
)
from decoupled_diloco.config.plugins import MissingCodecError
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.errors import ConfigError, ProtocolError, StorageError, TransportError
from decoupled_diloco.merge import Layout
from decoupled_diloco.observe.samples import DeviceUsed
from decoupled_diloco.observe.tape import Recorder, TapeWriter
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.checkpoints.effects import BeginCheckpoint, KeepCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointWanted
from decoupled_diloco.protocol.coordinator import (
    CoordinatorMachine,
)
from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.data_leases.ledger import LEDGER_ENTRIES, LedgerEntry
from decoupled_diloco.protocol.events import (
    Connected,
    CoordinatorEvent,
    Joining,
    Lost,
    Received,
    Tick,
)
from decoupled_diloco.protocol.peers import is_shard_peer, shard_of, shard_peer
from decoupled_diloco.protocol.transfer.effects import CloseRelay, OpenRelay, RelayOn
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.data_ledger import DataLedger
from decoupled_diloco.syncer.checkpoints import CheckpointAnswer, write_manifest
from decoupled_diloco.syncer.coordinator_disk import CoordinatorDisk, joined_since
from decoupled_diloco.syncer.coordinator_document import plain, read_document
from decoupled_diloco.syncer.relay import Relay
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.bodies import BodyBooks

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""How long orders wait before the state is written again after the disk was full."""

LISTEN_SECONDS = 0.1
"""How often it looks whether the process that bears a wanted id is heard."""

FAREWELL_SECONDS = 20.0
"""How long the coordinator waits at the end for the other shards to be gone."""

DEVICE_CHARACTERS = 80
"""So much of what a learner says of its device is kept."""

LAST_REPORT_SECONDS = 5.0
"""How long it waits at the end for learners to say which of their data are durable, and to go."""

_NOT_THE_RUNS = (
    "the model is not the run's: build the same one in every learner "
    "(ours: the run's; theirs: this process's)"
)

_ANOTHER_RUN = "another run is at this address now"

ShardLink = Callable[[say.ToShard | say.ShardAdmitted | say.JoinRefused], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _ForProcess:
    """An order for the process of a shard that had this link as it was given."""

    shard: int
    link: ShardLink | None
    order: do.CoordinatorEffect


class CoordinatorHost:
    """Runs a `CoordinatorMachine`.

    Args:
        config: The run's settings.
        addresses: Where learners reach the shards, in order.
        folder: The run folder; the state is kept here.
        tape: Makes the tape of its events, given what a replay needs to know of this life.
        bodies: Where the process of shard 0 takes bodies in and offers them: for relays.
        spawn: Runs a coroutine in the process's loop; should it fail, the process ends.
        shard_lease: The claim by which this process acts.

    Raises:
        StorageError: the state of an earlier life is there and cannot be read.
        ConfigError: it is there, and of a run with other settings.
    """

    def __init__(
        self,
        config: RunConfig,
        addresses: tuple[str, ...],
        folder: Path,
        tape: Callable[[Mapping[str, Any]], TapeWriter],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        bodies: BodyBooks,
        shard_lease: ShardLease | NoStandby = NO_STANDBY,
    ) -> None:
        self._settings = public_text(config)
        self._config = config
        self._addresses = addresses
        self._shard_lease = shard_lease
        self._folder = folder
        self._disk = CoordinatorDisk(folder, shard_lease)
        self._layout: Layout | None = None
        self._run = runtime().unique_id()
        self._key = runtime().secret()
        from_file = config.sync.initial_weights is not None
        self.machine = CoordinatorMachine(options_of(config), weights_from_file=from_file)
        self._entered: tuple[LedgerEntry, ...] = ()
        state = self._load()
        book = self.machine.state.data
        self._ledger = DataLedger(folder, book, self._entered, shard_lease.number)
        if state is not None or self._ledger.book.entries:
            self.machine.restore(replace(self.machine.snapshot(), data=self._ledger.book))
            state = self._state()
        header = {"machine": "coordinator", "weights_from_file": from_file, "state": state}
        self.tape = tape(header | {"settings": config.public()})
        self._recorder = Recorder(self.machine, self.tape)
        self._spawn = spawn
        self._relay = Relay(bodies, spawn)
        self._orders: deque[do.CoordinatorEffect | _ForProcess] = deque()
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._shards: dict[int, ShardLink] = {}
        self._greeting: ShardLink = lambda message: None
        self._gone = asyncio.Event()
        self._joining: dict[int, tuple[Channel, say.Join, Layout | None]] = {}
        self._connections_of: dict[str, list[int]] = {}
        self._connections = 0
        self._part: dict[str, Any] = {}
        self._checkpoint_kept = CheckpointAnswer("given up", 0)

    async def serve_join(self, channel: Channel, join: say.Join) -> None:
        """Answers a join, and watches its connection until it is gone."""
        if join.run and join.run != self._run:
            channel.send(encode(say.JoinRefused(_ANOTHER_RUN, False)))
            await channel.close(_ANOTHER_RUN)
            return
        if join.role == "learner" and await self._has_a_live_process(join):
            reason = (
                f"{join.learner} is in the run already, and its process is alive: give this one "
                "another learner id, or stop the other one first"
            )
            channel.send(encode(say.JoinRefused(reason, True)))
            await channel.close(reason)
            return
        self._connections += 1
        connection = self._connections
        try:
            layout, difference = self._read_layout(join)
        except ProtocolError as error:
            await channel.close(str(error))
            return
        self._enter(connection, channel, join, layout)
        fingerprint = layout.fingerprint if layout else ""
        self._handle(
            Connected(
                join.learner, Joining(join.nonce, join.role, fingerprint, difference), connection
            )
        )
        try:
            while True:
                message = decode(await channel.receive(), say.FROM_MEMBER)
                self._heard_on(connection, join.learner)
                self._handle(Received(join.learner, message, join.nonce))
        finally:
            self._leave(connection)
            self._gone.set()
            # Who has joined again before its old connection was found dead is not gone.
            if all(other.nonce != join.nonce for _, other in self._present(join.learner)):
                self._handle(Lost(join.learner, join.nonce))

    def _enter(
        self, connection: int, channel: Channel, join: say.Join, layout: Layout | None
    ) -> None:
        self._joining[connection] = (channel, join, layout)
        self._connections_of.setdefault(join.learner, []).append(connection)

    def _heard_on(self, connection: int, learner: str) -> None:
        """It is this connection that works: others may be dead and not found so yet."""
        connections = self._connections_of[learner]
        if connections[-1] != connection:
            connections.remove(connection)
            connections.append(connection)

    def _leave(self, connection: int) -> None:
        _, join, _ = self._joining.pop(connection)
        self._connections_of[join.learner].remove(connection)
        if not self._connections_of[join.learner]:
            del self._connections_of[join.learner]

    def _present(self, learner: str) -> list[tuple[Channel, say.Join]]:
        """The connections of an id, the one that was heard last at the end; of nobody else's."""
        return [self._joining[each][:2] for each in self._connections_of.get(learner, ())]

    async def _has_a_live_process(self, join: say.Join) -> bool:
        """Whether another process bears this id; one that is dead is found so within its lease.

        Who is alive is heard again within a ping.
        """
        asked_at = now()
        while others := [
            channel for channel, other in self._present(join.learner) if other.nonce != join.nonce
        ]:
            if any(channel.last_received > asked_at for channel in others):
                return True
            await asyncio.sleep(LISTEN_SECONDS)
        return False  # break: id-always-taken

    def _read_layout(self, join: say.Join) -> tuple[Layout | None, str]:
        """The joining model's layout, and how it differs from the run's, in words."""
        if not join.layout:
            problem = "a learner must say what its layout is"
            return None, problem if join.role == "learner" else ""
        layout = synchronised(Layout.from_text(join.layout), self._config)
        if self._layout is not None:
            difference = self._layout.describe_difference(layout)
            return layout, f"{_NOT_THE_RUNS}: {difference}" if difference else ""
        try:
            plan_of(layout, self._config)
        except (ConfigError, ProtocolError) as error:
            return layout, str(error)
        return layout, ""

    async def serve_shard(self, channel: Channel, hello: say.ShardHello) -> None:
        """Follows the connection of a shard in another process."""
        problem = self._shard_problem(hello)
        if problem:
            channel.send(encode(say.JoinRefused(problem, False)))
            await channel.close(problem)
            return

        def link(message: say.ToShard | say.ShardAdmitted | say.JoinRefused) -> None:
            channel.send(encode(message))

        self.shard_greeted(hello, link)
        kinds = get_args(say.FromShard)
        try:
            while True:
                message: Any = decode(await channel.receive(), kinds)
                if self._shards.get(hello.shard) is not link:
                    raise ProtocolError(f"another process acts for shard {hello.shard} now")
                self.shard_said(hello.shard, message)
        except ProtocolError as error:
            await channel.close(str(error))
        except TransportError:
            pass
        finally:
            if self._shards.get(hello.shard) is link:
                del self._shards[hello.shard]
                self._gone.set()
                self._handle(Lost(shard_peer(hello.shard)))

    def _shard_problem(self, hello: say.ShardHello) -> str:
        """Why a shard in another process cannot be one of this run, in words."""
        if not 0 < hello.shard < len(self._addresses):
            return (
                f"shard={hello.shard} does not fit: this run has shards 0 to "
                f"{len(self._addresses) - 1}, and 0 hosts the coordinator: correct --shard"
            )
        try:
            difference = difference_of(self._config.public(), read_public(hello.settings).public())
        except (ProtocolError, MissingCodecError) as error:
            return f"shard {hello.shard}: {error}"
        if difference:
            return (
                f"shard {hello.shard} was started with other settings than shard 0: {difference}: "
                "give all shards the same file"
            )
        return ""

    async def everyone_gone(self) -> None:
        """Waits until learners and other shards have said their last and gone, but not for ever."""

        async def nobody(seconds: float, present: Callable[[], bool]) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while present():
                        self._gone.clear()
                        await self._gone.wait()

        await nobody(LAST_REPORT_SECONDS, lambda: self._writing or self._has_learners())
        await nobody(FAREWELL_SECONDS, lambda: any(shard != 0 for shard in self._shards))

    def _has_learners(self) -> bool:
        return any(join.role == "learner" for _, join, _ in self._joining.values())

    def shard_greeted(self, hello: say.ShardHello, link: ShardLink) -> None:
        """A shard is here; ``link`` brings it messages, if it may act for the shard."""
        self._greeting = link
        greeting = replace(hello, settings="")  # what the tape has in its header
        self._handle(Connected(shard_peer(hello.shard), greeting))

    def shard_said(self, shard: int, message: say.FromShard) -> None:
        """A shard said something."""
        self._handle(Received(shard_peer(shard), message))

    def _handle(self, event: CoordinatorEvent) -> None:
        if not self._shard_lease.holds():
            return  # this process is about to end, and another may decide by now
        for effect in self._recorder.handle(now(), event):
            match effect:
                case do.AdoptLayout(connection):
                    self._layout = self._joining[connection][2]
                case do.AdmitShard(shard):
                    self._shards[shard] = self._greeting
                case do.DenyShard(reason=reason):
                    self._greeting(say.JoinRefused(reason, True))
            self._orders.append(self._addressed(effect))
        self._carry_out()
        self._arm()

    def _addressed(self, effect: do.CoordinatorEffect) -> do.CoordinatorEffect | _ForProcess:
        """An order for a shard is for the process that acts for it now, however long it waits."""
        match effect:
            case do.AdmitShard(shard):
                return _ForProcess(shard, self._shards.get(shard), effect)
            case do.Send(peer) if is_shard_peer(peer):
                shard = shard_of(peer)
                return _ForProcess(shard, self._shards.get(shard), effect)
        return effect

    def _arm(self) -> None:
        """Wakes the machine at its deadline."""
        self.close()
        deadline = self.machine.deadline()
        if deadline is not None:
            delay = max(0.0, deadline - now())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay, self._wake)

    def close(self) -> None:
        """Nothing more happens of itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        self._spawn(self._tick())

    async def _tick(self) -> None:
        self._handle(Tick())

    def _carry_out(self) -> None:
        """Carries orders out, in order, up to one that must be on disk first."""
        while self._orders and not self._writing:  # break: orders-before-disk
            effect = self._orders.popleft()
            if isinstance(effect, do.Persist):
                self._write_by(self._saving_of(effect))
            elif isinstance(effect, Enter):
                # Those that follow go along: an entry may be on the disk before its time.
                entries = [effect.entry, *self._pending_entries()]
                self._write_by(partial(self._appending, entries))
            else:
                self._do(effect)

    def _saving_of(self, first: do.Persist) -> Callable[[], Callable[[], None]]:
        """One write for all that wait for one: the state is as it is after the last of them."""
        wanted = [first, *(order for order in self._orders if isinstance(order, do.Persist))]
        self._orders = deque(o for o in self._orders if not isinstance(o, do.Persist))
        learners = {order.learner for order in wanted}
        return self._saving if "" in learners else partial(self._adding, sorted(learners))

    def _adding(self, learners: list[str]) -> Callable[[], None]:
        """Adds the records of these to what is on the disk; all of it, if that cannot be."""
        if not self._disk.can_append:
            return self._saving()
        records = self.machine.state.learners
        lines = [json.dumps([name, dataclasses.asdict(records[name])]) for name in learners]
        return lambda: self._disk.append(lines)

    def _pending_entries(self) -> list[LedgerEntry]:
        entries = [order.entry for order in self._orders if isinstance(order, Enter)]
        self._orders = deque(o for o in self._orders if not isinstance(o, Enter))
        return entries

    def _write_by(self, task: Callable[[], Callable[[], None]]) -> None:
        self._writing = True
        self._spawn(self._write(task))

    async def _write(self, task: Callable[[], Callable[[], None]]) -> None:
        """Writes, trying again for as long as the disk is full; then orders go on."""
        told = False
        while True:
            try:
                await asyncio.to_thread(task())
                break
            except StorageError as error:
                if not told:
                    logger.error("%s: joins, leases and the end of the run wait for it", error)
                told = True
                await asyncio.sleep(RETRY_SECONDS)
        self._writing = False
        self._gone.set()
        self._carry_out()

    def _note_device(self, connection: int) -> None:
        """Puts the device of a learner that was let in on the tape: the text is anybody's."""
        join = self._joining[connection][1] if connection in self._joining else None
        if join is not None and join.role == "learner" and join.device:
            text = "".join(each for each in join.device[:DEVICE_CHARACTERS] if each.isprintable())
            self.tape.sample(now(), DeviceUsed(join.learner, text))

    def _do(self, effect: do.CoordinatorEffect | _ForProcess) -> None:
        match effect:
            case _ForProcess(shard, link, order):
                if self._shards.get(shard) is link:  # else the newer process is told its own
                    self._do(order)
            case do.Admit(connection, _, epoch, _, index, count):
                admitted = say.Admitted(
                    epoch,
                    self._settings,
                    self._layout_text(),
                    self._addresses,
                    self._run,
                    index,
                    max(count, self._config.run.learners),
                )
                self._answer(connection, admitted)
                self._note_device(connection)
            case do.Deny(connection, reason, retry):
                self._answer(connection, say.JoinRefused(reason, retry))
            case OpenRelay(_, donor, _, path, head_nbytes, nbytes):
                self._relay.open(path, donor, head_nbytes, nbytes)
            case RelayOn(path, chunk):
                self._relay.taken(path, chunk)
            case CloseRelay(path, why):
                self._relay.close(path, why)
            case BeginCheckpoint():
                self._part = self._document()
            case KeepCheckpoint():
                self._spawn(self._keep_checkpoint(effect, self._part))
            case do.AdoptLayout():
                for link in self._shards.values():
                    link(say.LayoutSet(self._layout_text()))
            case do.AdmitShard(shard, term, begun):
                self._tell(shard, say.ShardAdmitted(term, begun, self._key))
                if self._layout is not None:
                    self._tell(shard, say.LayoutSet(self._layout_text()))
            case do.Send(peer, message) if is_shard_peer(peer):
                self._tell(shard_of(peer), cast("say.ToShard", message))
            case do.Send(learner, message):
                self._inform(learner, message)
            case do.Note(text, why, warns):
                logger.log(logging.WARNING if warns else logging.INFO, "%s (%s)", text, why)
            case do.DenyShard():
                pass  # it was told at once
            case do.Persist() | Enter():
                raise AssertionError("carried out elsewhere")
            case _:
                assert_never(effect)

    async def _keep_checkpoint(self, effect: KeepCheckpoint, part: dict[str, Any]) -> None:
        missing = f", without {', '.join(effect.missing)}" if effect.missing else ""
        try:
            await asyncio.to_thread(write_manifest, self._folder, effect, part)
            logger.info("checkpoint %d of the whole run is complete%s", effect.number, missing)
            self._checkpoint_kept = CheckpointAnswer.kept(self._folder, effect)
        except StorageError as error:
            logger.error("%s: checkpoint %d of the run is not complete", error, effect.number)
            self._checkpoint_kept = CheckpointAnswer("given up", effect.number, str(error))

    def want_checkpoint(self) -> CheckpointAnswer:
        """Begins a checkpoint; one that is under way will do."""
        problem = self.machine.why_no_checkpoint
        if problem:
            return CheckpointAnswer("refused", 0, problem)
        self._handle(CheckpointWanted())
        return self.checkpoint_answer(self.machine.state.checkpoint)

    def checkpoint_answer(self, number: int) -> CheckpointAnswer:
        """What has become of a checkpoint of this life."""
        under_way, (given_up, reason) = (
            self.machine.checkpoints.open,
            self.machine.checkpoints.given_up,
        )
        if self._checkpoint_kept.number == number:
            return self._checkpoint_kept
        if under_way is not None and under_way.number == number:
            return CheckpointAnswer.of_open(under_way)
        if number in self.machine.state.checkpoints_kept:
            return CheckpointAnswer("open", number, "its manifest is being written")
        words = reason if given_up == number else "this coordinator knows nothing of it"
        return CheckpointAnswer("given up", number, words)

    def _answer(self, connection: int, message: say.Message) -> None:
        if connection in self._joining:
            self._joining[connection][0].send(encode(message))

    def _inform(self, learner: str, message: say.Message) -> None:
        present = self._present(learner)
        if present:
            channel, _ = present[-1]
            channel.send(encode(message))

    def _tell(self, shard: int, message: say.ToShard | say.ShardAdmitted) -> None:
        link = self._shards.get(shard)
        if link is not None:
            link(message)

    def _layout_text(self) -> str:
        return "" if self._layout is None else self._layout.to_text()

    def _document(self) -> dict[str, Any]:
        return {
            "state": self._state(),
            "layout": self._layout_text(),
            "settings": self._settings,
            "run": self._run,
            "key": self._key,
        }

    def _state(self) -> Any:
        return plain(self.machine.snapshot())

    def _appending(self, entries: list[LedgerEntry]) -> Callable[[], None]:
        if not self._shard_lease.number:
            return lambda: self._ledger.append(entries)
        document = self._document_before(entries)

        def write() -> None:  # first the state, which only one coordinator can go on from
            self._disk.write(json.dumps(document))
            self._ledger.append(entries)

        return write

    def _saving(self) -> Callable[[], None]:
        document = self._document_before([])
        return lambda: self._disk.write(json.dumps(document))

    def _document_before(self, entries: list[LedgerEntry]) -> dict[str, Any]:
        """The document as it is written before these entries, with all that the ledger lacks.

        The state is that after every entry that has been decided, and some of them wait.
        """
        waiting = [order.entry for order in self._orders if isinstance(order, Enter)]
        return self._document() | {"entered": [encode(entry) for entry in (*entries, *waiting)]}

    def _load(self) -> Any:
        """Goes on from the state of an earlier life, and returns it; ``None`` if there is none."""
        kept = read_document(self._disk.find(), self._config, joined_since(self._folder))
        if kept is None:
            return None
        document, state, self._layout = kept
        self._run = str(document.get("run", self._run))
        self._key = str(document.get("key", self._key))
        self._entered = tuple(decode(each, LEDGER_ENTRIES) for each in document.get("entered", ()))
        self.machine.restore(state)
        return document["state"]
