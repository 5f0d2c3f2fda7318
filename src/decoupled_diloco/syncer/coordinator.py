"""The coordinator's shell: joins and shards at its channels, its state on disk.

It lives in the process of shard 0. What it must not forget (epochs, terms, layout, phase) is one
small JSON file, written whole and forced to disk before anybody hears of the change.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from pydantic import TypeAdapter, ValidationError

from decoupled_diloco.config.method import options_of, plan_of, public_text, read_public
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.errors import ConfigError, ProtocolError, StorageError, TransportError
from decoupled_diloco.merge import Layout
from decoupled_diloco.observe.tape import Recorder, TapeWriter
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.coordinator import CoordinatorMachine, CoordinatorState
from decoupled_diloco.protocol.events import (
    CoordinatorEvent,
    JoinAsked,
    LearnerGone,
    ShardGone,
    ShardGreeted,
    ShardSaid,
)
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.transport.base import Channel

logger = logging.getLogger(__name__)

FILE = "coordinator.json"
_STATE = TypeAdapter(CoordinatorState)

ShardLink = Callable[[say.ToShard | say.ShardAdmitted], None]


class CoordinatorHost:
    """Runs a `CoordinatorMachine`.

    Args:
        config: The run's settings.
        addresses: Where learners reach the shards, in order.
        folder: The run folder; the state is kept here.
        tape: Where its events go.

    Raises:
        StorageError: the state of an earlier life is there and cannot be read.
    """

    def __init__(
        self, config: RunConfig, addresses: tuple[str, ...], folder: Path, tape: TapeWriter
    ) -> None:
        self._settings = public_text(config)
        self._public = read_public(self._settings)
        self._addresses = addresses
        self._file = folder / FILE
        self._layout: Layout | None = None
        self.machine = CoordinatorMachine(
            options_of(self._public),
            weights_from_file=config.sync.initial_weights is not None,
        )
        self._recorder = Recorder(self.machine, tape)
        self._shards: dict[int, ShardLink] = {}
        self._joining: dict[int, tuple[Channel, Layout | None]] = {}
        self._connections = 0
        self._load()

    # ---- learners and observers

    async def serve_join(self, channel: Channel, join: say.Join) -> None:
        """Answers a join, and watches its connection until it is gone."""
        self._connections += 1
        connection = self._connections
        try:
            layout, difference = self._read_layout(join)
        except ProtocolError as error:
            await channel.close(str(error))
            return
        self._joining[connection] = (channel, layout)
        fingerprint = layout.fingerprint if layout else ""
        self._handle(
            JoinAsked(connection, join.learner, join.nonce, join.role, fingerprint, difference)
        )
        try:
            while True:
                await channel.receive()
        except TransportError:
            self._joining.pop(connection, None)
            self._handle(LearnerGone(join.learner, join.nonce))

    def _read_layout(self, join: say.Join) -> tuple[Layout | None, str]:
        """The joining model's layout, and how it differs from the run's, in words."""
        if not join.layout:
            problem = "a learner must say what its layout is"
            return None, problem if join.role == "learner" else ""
        try:
            layout = Layout.from_json(json.loads(join.layout))
        except ValueError as error:
            raise ProtocolError(f"the layout is not JSON: {error}") from error
        if self._layout is not None:
            return layout, self._layout.describe_difference(layout) or ""
        try:
            plan_of(layout, self._public)
        except ConfigError as error:
            return layout, str(error)
        return layout, ""

    # ---- shards

    async def serve_shard(self, channel: Channel, hello: say.ShardHello) -> None:
        """Follows the connection of a shard in another process."""

        def link(message: say.ToShard | say.ShardAdmitted) -> None:
            channel.send(encode(message))

        self.shard_greeted(hello, link)
        kinds = (say.ShardReady, say.Progress, say.Swept)
        try:
            while True:
                message: Any = decode(await channel.receive(), kinds)
                self.shard_said(hello.shard, message)
        except ProtocolError as error:
            await channel.close(str(error))
        except TransportError:
            pass
        if self._shards.get(hello.shard) is link:
            del self._shards[hello.shard]
            self._handle(ShardGone(hello.shard))

    def shard_greeted(self, hello: say.ShardHello, link: ShardLink) -> None:
        """A shard is here; ``link`` brings it messages."""
        self._shards[hello.shard] = link
        self._handle(ShardGreeted(hello.shard, hello.nonce))

    def shard_said(self, shard: int, message: say.FromShard) -> None:
        """A shard said something."""
        self._handle(ShardSaid(shard, message))

    # ---- carrying out

    def _handle(self, event: CoordinatorEvent) -> None:
        for effect in self._recorder.handle(time.monotonic(), event):
            self._do(effect)

    def _do(self, effect: do.CoordinatorEffect) -> None:
        match effect:
            case do.Admit(connection, _, epoch):
                self._answer(
                    connection,
                    say.Admitted(epoch, self._settings, self._layout_text(), self._addresses),
                )
            case do.Deny(connection, reason, retry):
                self._answer(connection, say.JoinRefused(reason, retry))
            case do.AdoptLayout(connection):
                self._layout = self._joining[connection][1]
                for link in self._shards.values():
                    link(say.LayoutSet(self._layout_text()))
            case do.AdmitShard(shard, term, begun):
                self._tell(shard, say.ShardAdmitted(term, begun))
                if self._layout is not None:
                    self._tell(shard, say.LayoutSet(self._layout_text()))
            case do.Order(shard, message):
                self._tell(shard, message)
            case do.Persist():
                self._save()
            case do.Note(text, why):
                logger.info("%s (%s)", text, why)
            case do.Stop():
                pass
            case _:
                assert_never(effect)

    def _answer(self, connection: int, message: say.Message) -> None:
        channel, _ = self._joining[connection]
        channel.send(encode(message))

    def _tell(self, shard: int, message: say.ToShard | say.ShardAdmitted) -> None:
        link = self._shards.get(shard)
        if link is not None:
            link(message)

    def _layout_text(self) -> str:
        return "" if self._layout is None else json.dumps(self._layout.to_json())

    # ---- state on disk

    def _save(self) -> None:
        document = {
            "state": _STATE.dump_python(self.machine.snapshot(), mode="json"),
            "layout": self._layout_text(),
        }
        part = self._file.with_suffix(".part")
        try:
            with part.open("w") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._file)
        except OSError as error:
            raise StorageError(f"{self._file} cannot be written: {error}") from error

    def _load(self) -> None:
        if not self._file.exists():
            return
        try:
            document = json.loads(self._file.read_text())
            state = _STATE.validate_python(document["state"])
            layout = document["layout"]
            self._layout = Layout.from_json(json.loads(layout)) if layout else None
        except (OSError, ValueError, KeyError, ValidationError, ProtocolError) as error:
            raise StorageError(
                f"{self._file} cannot be read ({error}): move the run folder away to begin anew"
            ) from error
        self.machine.restore(state)
