"""The coordinator's shell: joins and shards on its channels, and its state on disk.

It runs in the process of shard 0. State that it must not lose is synced to disk before any other
process is notified of a change. This state has three parts:

- epochs, terms, layout and phase, in one small JSON file;
- one record for each learner that joined after this file was written;
- the data ledger, which is appended to.

A separate thread writes them, so a slow disk delays joins and never a heartbeat. While the disk is
full, orders wait, and the shards' rounds continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from decoupled_diloco.config.method import (
    difference_of,
    options_of,
    plan_of,
    public_text,
    read_public,
    synchronised,
)
from decoupled_diloco.config.parties import ADD_LEARNER
from decoupled_diloco.config.plugins import MissingCodecError
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.errors import ConfigError, ProtocolError, StorageError, TransportError
from decoupled_diloco.merge import Layout
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.messages import (
    LEDGER_ENTRIES,
    BeginCheckpoint,
    CheckpointWanted,
    CloseRelay,
    Connected,
    CoordinatorEvent,
    Enter,
    Joining,
    KeepCheckpoint,
    LedgerEntry,
    Lost,
    OpenRelay,
    Received,
    RelayOn,
    StopWanted,
    is_shard_peer,
    shard_of,
    shard_peer,
)
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.shell.driver import Driver, HoldsUp, Orders, at_decision, executes
from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.storage.data_ledger import DataLedger
from decoupled_diloco.syncer.coordinator_document import plain, read_document
from decoupled_diloco.syncer.relay import Relay
from decoupled_diloco.syncer.run_checkpoints import CheckpointAnswer, write_manifest
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import DeviceUsed
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.payload_store import BodyBooks

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Interval between attempts to write the state while the disk is full; orders wait."""

LISTEN_SECONDS = 0.1
"""Interval of checks whether the process that already uses a requested name is alive."""

FAREWELL_SECONDS = 20.0
"""Longest wait at the end of the run for the other shards to disconnect."""

DEVICE_CHARACTERS = 80
"""Maximum number of characters kept of a learner's device description."""

LAST_REPORT_SECONDS = 5.0
"""Longest wait at the end of the run for the learners' last data reports, and for them to leave."""

_NOT_THE_RUNS = (
    "the model differs from the run's: build the same model in every learner "
    "(ours: the run's; theirs: this process's)"
)

_ANOTHER_RUN = "this address now belongs to another run"

ShardLink = Callable[[messages.ToShard | messages.ShardAdmitted | messages.JoinRefused], None]


class CoordinatorHost:
    """Runs a `CoordinatorMachine`.

    Args:
        config: The run's settings.
        addresses: The shards' addresses for learners, in order.
        folder: The run folder, which holds the state.
        tape: Creates the tape of the coordinator's events from the header that a replay needs.
        fail: Ends the process; called once, with the error.
        bodies: The data plane of the process of shard 0, for relays.
        shard_lease: The leadership lease of this process.

    Raises:
        StorageError: The state of an earlier coordinator exists and cannot be read.
        ConfigError: That state belongs to a run with other settings.
    """

    def __init__(
        self,
        config: RunConfig,
        addresses: tuple[str, ...],
        folder: Path,
        tape: Callable[[Mapping[str, Any]], TapeWriter],
        fail: Callable[[BaseException], None],
        bodies: BodyBooks,
        shard_lease: ShardLease | NoStandby = NO_STANDBY,
    ) -> None:
        self._settings = public_text(config)
        self._config = config
        self._addresses = addresses
        self._shard_lease = shard_lease
        self._folder = folder
        self._layout: Layout | None = None
        self._run = runtime().unique_id()
        self._states = CoordinatorStates(folder, shard_lease.nonce or self._run)
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
        self._driver = Driver[CoordinatorEvent, messages.CoordinatorEffect](
            self.machine, tape=self.tape, on_failure=fail, lease=shard_lease
        )
        self._driver.set_handlers(Orders(messages.CoordinatorEffect, self))
        self._relay = Relay(bodies, self._driver.spawn)
        self._writing = False
        self._shards: dict[int, ShardLink] = {}
        self._greeting: ShardLink = lambda message: None
        self._gone = asyncio.Event()
        self._joining: dict[int, tuple[Channel, messages.Join, Layout | None]] = {}
        self._connections_of: dict[str, list[int]] = {}
        self._connections = 0
        self._part: dict[str, Any] = {}
        self._checkpoint_kept = CheckpointAnswer("given up", 0)

    async def serve_join(self, channel: Channel, join: messages.Join) -> None:
        """Answer a join, and serve its connection until it closes."""
        if channel.closed:
            return  # its process is gone, and a newer one of this name may have joined meanwhile
        if join.run and join.run != self._run:
            channel.send(encode(messages.JoinRefused(_ANOTHER_RUN, False)))
            await channel.close(_ANOTHER_RUN)
            return
        if join.role == "learner" and await self._has_a_live_process(join):
            reason = (
                f"name={join.learner!r} is in use by a live process of this run: pass "
                "another name=, or stop the other process first"
            )
            channel.send(encode(messages.JoinRefused(reason, True)))
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
        self._driver.deliver(
            Connected(
                join.learner, Joining(join.nonce, join.role, fingerprint, difference), connection
            )
        )
        try:
            while True:
                message = decode(await channel.receive(), messages.FROM_MEMBER)
                self._note_active(connection, join.learner)
                self._driver.deliver(Received(join.learner, message, join.nonce))
        finally:
            self._leave(connection)
            self._gone.set()
            # A process that joined again before its old connection was found dead is not lost.
            if all(other.nonce != join.nonce for _, other in self._present(join.learner)):
                self._driver.deliver(Lost(join.learner, join.nonce))

    def _enter(
        self, connection: int, channel: Channel, join: messages.Join, layout: Layout | None
    ) -> None:
        self._joining[connection] = (channel, join, layout)
        self._connections_of.setdefault(join.learner, []).append(connection)

    def _note_active(self, connection: int, learner: str) -> None:
        """Move a connection that received a message to the end of its learner's list.

        Other connections of this learner may be dead and not yet found so.
        """
        connections = self._connections_of[learner]
        if connections[-1] != connection:
            connections.remove(connection)
            connections.append(connection)

    def _leave(self, connection: int) -> None:
        _, join, _ = self._joining.pop(connection)
        self._connections_of[join.learner].remove(connection)
        if not self._connections_of[join.learner]:
            del self._connections_of[join.learner]

    def _present(self, learner: str) -> list[tuple[Channel, messages.Join]]:
        """Return a learner's connections, the one with the newest message last."""
        return [self._joining[each][:2] for each in self._connections_of.get(learner, ())]

    async def _has_a_live_process(self, join: messages.Join) -> bool:
        """Whether another live process uses the name of a join.

        A live process sends a byte within a ping interval. The connection of a dead one is closed
        within its lease.
        """
        since = now()
        while others := [
            channel for channel, other in self._present(join.learner) if other.nonce != join.nonce
        ]:
            if any(channel.last_received > since for channel in others):
                return True
            await asyncio.sleep(LISTEN_SECONDS)
        return False  # break: id-always-taken

    def _read_layout(self, join: messages.Join) -> tuple[Layout | None, str]:
        """Return the layout of a joining model, and why the run rejects the process, in words."""
        parties = self._config.privacy.agreed
        if join.role == "learner" and parties is not None and parties.find(join.learner) is None:
            return None, f"learner {join.learner!r} belongs to no party of this run: {ADD_LEARNER}"
        if not join.layout:
            problem = "the join has no layout: a learner must send its model's layout"
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

    async def serve_shard(self, channel: Channel, hello: messages.ShardHello) -> None:
        """Serve the connection of a shard in another process until it closes."""
        problem = self._shard_problem(hello)
        if problem:
            channel.send(encode(messages.JoinRefused(problem, False)))
            await channel.close(problem)
            return

        def link(message: messages.ToShard | messages.ShardAdmitted | messages.JoinRefused) -> None:
            channel.send(encode(message))

        self.shard_greeted(hello, link)
        kinds = get_args(messages.FromShard)
        try:
            while True:
                message: Any = decode(await channel.receive(), kinds)
                if self._shards.get(hello.shard) is not link:
                    raise ProtocolError(f"another process now acts for shard {hello.shard}")
                self.shard_sent(hello.shard, message)
        except ProtocolError as error:
            await channel.close(str(error))
        except TransportError:
            pass
        finally:
            if self._shards.get(hello.shard) is link:
                del self._shards[hello.shard]
                self._gone.set()
                self._driver.deliver(Lost(shard_peer(hello.shard)))

    def _shard_problem(self, hello: messages.ShardHello) -> str:
        """Return why a shard in another process does not belong to this run; empty if it does."""
        if not 0 < hello.shard < len(self._addresses):
            return (
                f"shard={hello.shard} is not valid: this run has shards 0 to "
                f"{len(self._addresses) - 1}, and shard 0 hosts the coordinator: correct --shard"
            )
        try:
            difference = difference_of(self._config.public(), read_public(hello.settings).public())
        except (ProtocolError, MissingCodecError) as error:
            return f"shard {hello.shard}: {error}"
        if difference:
            return (
                f"shard {hello.shard} was started with other settings than shard 0: {difference}: "
                "start all shards with the same file"
            )
        return ""

    async def everyone_gone(self) -> None:
        """Wait until learners have sent their last reports and other shards have disconnected.

        The wait is bounded by ``LAST_REPORT_SECONDS`` and ``FAREWELL_SECONDS``.
        """

        async def absence(seconds: float, present: Callable[[], bool]) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while present():
                        self._gone.clear()
                        await self._gone.wait()

        await absence(LAST_REPORT_SECONDS, lambda: self._writing or self._has_learners())
        await absence(FAREWELL_SECONDS, lambda: any(shard != 0 for shard in self._shards))

    def _has_learners(self) -> bool:
        return any(join.role == "learner" for _, join, _ in self._joining.values())

    def shard_greeted(self, hello: messages.ShardHello, link: ShardLink) -> None:
        """Handle the first message of a shard.

        Args:
            hello: The message.
            link: Sends messages to the shard, if this process may act for the shard.
        """
        self._greeting = link
        greeting = replace(hello, settings="")  # the tape's header has them
        self._driver.deliver(Connected(shard_peer(hello.shard), greeting))

    def shard_sent(self, shard: int, message: messages.FromShard) -> None:
        """Handle a message of a shard."""
        self._driver.deliver(Received(shard_peer(shard), message))

    async def close(self) -> None:
        """Stop the driver: no more events are handled."""
        await self._driver.close()

    @at_decision(messages.AdoptLayout)
    def _adopt(self, order: messages.AdoptLayout) -> None:
        self._layout = self._joining[order.connection][2]

    @at_decision(messages.AdmitShard)
    def _take_link(self, order: messages.AdmitShard) -> ShardLink:
        self._shards[order.shard] = self._greeting
        return self._greeting

    @at_decision(messages.DenyShard)
    def _deny_shard(self, order: messages.DenyShard) -> None:
        self._greeting(messages.JoinRefused(order.reason, True))

    @at_decision(messages.Send)
    def _addressed(self, order: messages.Send) -> ShardLink | None:
        """Return the link to the process that acts for the shard now.

        The message is for this process, even if the order waits until another one has replaced it.
        """
        return self._shards.get(shard_of(order.peer)) if is_shard_peer(order.peer) else None

    @executes(messages.Persist)
    def _persist(self, order: messages.Persist) -> HoldsUp:
        return HoldsUp(self._write(self._saving_of(order)))

    @executes(Enter)
    def _enter_in_ledger(self, order: Enter) -> HoldsUp:
        # One write for all waiting entries: an entry may be on disk before its turn.
        entries = [order.entry, *(each.entry for each in self._driver.take(Enter))]
        return HoldsUp(self._write(partial(self._appending, entries)))

    def _saving_of(self, first: messages.Persist) -> Callable[[], Callable[[], None]]:
        """Return one write for all waiting orders: the state is the one after the last of them."""
        wanted = [first, *self._driver.take(messages.Persist)]
        learners = {order.learner for order in wanted}
        return self._saving if "" in learners else partial(self._adding, sorted(learners))

    def _adding(self, learners: list[str]) -> Callable[[], None]:
        """Return a write of these learners' records alone, or of the whole state if need be."""
        if not self._states.can_append:
            return self._saving()
        known = self.machine.state.learners
        records = {name: dataclasses.asdict(known[name]) for name in learners}
        return lambda: self._states.append(records)

    async def _write(self, task: Callable[[], Callable[[], None]]) -> None:
        """Write, and try again while the disk is full; later orders wait until then."""
        self._writing, reported = True, False
        while True:
            try:
                await asyncio.to_thread(task())
                break
            except StorageError as error:
                if not reported:
                    logger.error("%s: joins, leases and the end of the run wait", error)
                reported = True
                await asyncio.sleep(RETRY_SECONDS)
        self._writing = False
        self._gone.set()

    def _note_device(self, connection: int) -> None:
        """Record the device of an admitted learner on the tape.

        The text comes from the learner, so it is truncated and reduced to printable characters.
        """
        join = self._joining[connection][1] if connection in self._joining else None
        if join is not None and join.role == "learner" and join.device:
            text = "".join(each for each in join.device[:DEVICE_CHARACTERS] if each.isprintable())
            self.tape.sample(now(), DeviceUsed(join.learner, text))

    @executes(messages.Admit)
    def _admit(self, order: messages.Admit) -> None:
        admitted = messages.Admitted(
            order.epoch,
            self._settings,
            self._layout_text(),
            self._addresses,
            self._run,
            order.index,
            max(order.count, self._config.run.learners),
        )
        self._answer(order.connection, admitted)
        self._note_device(order.connection)

    @executes(messages.Deny)
    def _deny(self, order: messages.Deny) -> None:
        self._answer(order.connection, messages.JoinRefused(order.reason, order.retry))

    @executes(OpenRelay)
    def _open_relay(self, order: OpenRelay) -> None:
        self._relay.open(order.path, order.donor, order.head_nbytes, order.nbytes)

    @executes(RelayOn)
    def _relay_on(self, order: RelayOn) -> None:
        self._relay.taken(order.path, order.chunk)

    @executes(CloseRelay)
    def _close_relay(self, order: CloseRelay) -> None:
        self._relay.close(order.path, order.why)

    @executes(BeginCheckpoint)
    def _begin_checkpoint(self, order: BeginCheckpoint) -> None:
        # A copy from this instant: the state may change before the shards' parts are complete.
        self._part = self._document()

    @executes(KeepCheckpoint)
    def _keep_part(self, order: KeepCheckpoint) -> Coroutine[Any, Any, None]:
        return self._keep_checkpoint(order, self._part)

    @executes(messages.AdoptLayout)
    def _send_layout(self, order: messages.AdoptLayout, _: None) -> None:
        for link in self._shards.values():
            link(messages.LayoutSet(self._layout_text()))

    @executes(messages.AdmitShard)
    def _admit_shard(self, order: messages.AdmitShard, link: ShardLink) -> None:
        if self._shards.get(order.shard) is not link:
            return  # the newer process receives its own messages
        link(messages.ShardAdmitted(order.term, order.begun, self._key, self._run))
        if self._layout is not None:
            link(messages.LayoutSet(self._layout_text()))

    @executes(messages.Send)
    def _send(self, order: messages.Send, link: ShardLink | None) -> None:
        if not is_shard_peer(order.peer):
            self._send_to_learner(order.peer, order.message)
        elif link is not None and self._shards.get(shard_of(order.peer)) is link:
            link(cast("messages.ToShard", order.message))

    @executes(messages.Note)
    def _note(self, order: messages.Note) -> None:
        level = logging.WARNING if order.warns else logging.INFO
        logger.log(level, "%s (%s)", order.text, order.why)

    async def _keep_checkpoint(self, effect: KeepCheckpoint, part: dict[str, Any]) -> None:
        missing = f", without {', '.join(effect.missing)}" if effect.missing else ""
        try:
            await asyncio.to_thread(write_manifest, self._folder, effect, part)
            logger.info("checkpoint %d of the whole run is complete%s", effect.number, missing)
            self._checkpoint_kept = CheckpointAnswer.kept(self._folder, effect)
        except StorageError as error:
            logger.error("%s: checkpoint %d of the run is incomplete", error, effect.number)
            self._checkpoint_kept = CheckpointAnswer("given up", effect.number, str(error))

    def want_checkpoint(self) -> CheckpointAnswer:
        """Begin a checkpoint, unless one is in progress."""
        problem = self.machine.why_no_checkpoint
        if problem:
            return CheckpointAnswer("refused", 0, problem)
        self._driver.deliver(CheckpointWanted())
        return self.checkpoint_answer(self.machine.state.checkpoint)

    def checkpoint_answer(self, number: int) -> CheckpointAnswer:
        """Return the state of a checkpoint that this process began."""
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
        words = reason if given_up == number else "this coordinator has no such checkpoint"
        return CheckpointAnswer("given up", number, words)

    def want_stop(self, by: str) -> str:
        """End the run in order; return why it cannot be ended, or an empty text."""
        problem = self.machine.why_no_stop
        if self.machine.state.phase == "running":
            self._driver.deliver(StopWanted(by))
        return problem

    def _answer(self, connection: int, message: messages.Message) -> None:
        if connection in self._joining:
            self._joining[connection][0].send(encode(message))

    def _send_to_learner(self, learner: str, message: messages.Message) -> None:
        present = self._present(learner)
        if present:
            channel, _ = present[-1]
            channel.send(encode(message))

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

        # The state first: only one coordinator can create its number, so an earlier coordinator
        # fails here before it appends to the ledger.
        def write() -> None:
            self._states.write(document)
            self._ledger.append(entries)

        return write

    def _saving(self) -> Callable[[], None]:
        document = self._document_before([])
        return lambda: self._states.write(document)

    def _document_before(self, entries: list[LedgerEntry]) -> dict[str, Any]:
        """Return the document to write before these entries, with entries that the ledger lacks.

        The state already contains every decided entry, and some of these still wait to be written.
        """
        orders = (order for order, _ in self._driver.waiting)
        waiting = [order.entry for order in orders if isinstance(order, Enter)]
        return self._document() | {"entered": [encode(entry) for entry in (*entries, *waiting)]}

    def _load(self) -> Any:
        """Restore the state of an earlier coordinator and return it; ``None`` if there is none."""
        kept = read_document(self._states, self._config)
        if kept is None:
            return None
        document, state, self._layout = kept
        self._run = str(document.get("run", self._run))
        self._key = str(document.get("key", self._key))
        self._entered = tuple(decode(each, LEDGER_ENTRIES) for each in document.get("entered", ()))
        self.machine.restore(state)
        return document["state"]
