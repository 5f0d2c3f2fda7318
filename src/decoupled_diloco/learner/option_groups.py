"""The options of `Learner` and `Observer` that belong together, one class for each group."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from decoupled_diloco.config.addresses import alternatives, require_address
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tls import TLSConfig

MakeTape = Callable[[dict[str, Any]], TapeWriter]
"""Opens a participant's event tape, given its header."""


class Filled:
    """A group of options whose default values can be filled in from another group."""

    def filled(self, other: Self) -> Self:
        """Return these options; a field that has its default value is taken from ``other``."""
        default = type(self)()
        mine = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        kept = {name: value for name, value in mine.items() if value != getattr(default, name)}
        return replace(other, **kept)  # type: ignore[type-var]


@dataclass(frozen=True)
class Checkpointing(Filled):
    """Options for a learner's checkpoints: folder, interval, and additional state.

    A learner that restarts continues from its newest checkpoint: the model, the optimizer and the
    objects in ``state`` are restored. Fragments that the run has changed since are overwritten.

    Args:
        folder: Folder for the checkpoints of all learners; each uses a subfolder with its name, so
            `Learner` needs ``name=``. ``None``: no checkpoints.
        interval_seconds: Seconds between two checkpoints, 0 or more. They are taken at the end of
            a `Learner.step`, so call that last in the loop. The step waits only for the copy to
            host memory. 0: only in `Learner.close`.
        state: Objects with ``state_dict`` and ``load_state_dict`` that checkpoints hold beside the
            model and the optimizer, by name: data loader, learning rate schedule, random state.

    Raises:
        ConfigError: ``interval_seconds`` is negative or not finite.
    """

    folder: str | Path | None = None
    interval_seconds: float = 60.0
    state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_seconds("Checkpointing(interval_seconds)", self.interval_seconds, zero=True)

    @classmethod
    def of(cls, given: str | Path | Checkpointing | None) -> Checkpointing:
        """Return the options that ``Learner(checkpoint=…)`` stands for: a path is a folder."""
        return given if isinstance(given, Checkpointing) else cls(given)


@dataclass(frozen=True)
class Timeouts(Filled):
    """Time limits for a participant that waits for the syncer.

    Args:
        join: Seconds within which the run must accept this process, more than 0; then
            `TransportError` is raised. The default lets the syncer start a little later. ``None``:
            try forever.
        disconnect: Seconds without any reachable shard after which `TransportError` is raised,
            more than 0. ``None``: keep training and retry forever.
        flush: Seconds that `Learner.close` waits for steps that are not merged yet, if the run
            continues without this learner, 0 or more. 0: they are discarded.

    Raises:
        ConfigError: A value is out of range.
    """

    join: float | None = 300.0
    disconnect: float | None = None
    flush: float = 10.0

    def __post_init__(self) -> None:
        for name in ("join", "disconnect"):
            seconds = getattr(self, name)
            if seconds is not None:
                _require_seconds(f"Timeouts({name})", seconds, zero=False)
        _require_seconds("Timeouts(flush)", self.flush, zero=True)


@dataclass(frozen=True)
class StateSharing:
    """The state that a learner sends to a new learner, and requests if it is a new one itself.

    A new learner without a checkpoint gets the state from another learner through the syncer, so
    that it does not start with an empty optimizer.

    Args:
        objects: Names: ``"optimizer"``, and names in ``Checkpointing(state=…)`` whose objects are
            of the same kind in all learners. Empty: share nothing. A multi-rank learner shares
            nothing.

    Raises:
        ConfigError: ``objects`` is a string instead of several names.
    """

    objects: Sequence[str] = ("optimizer",)

    def __post_init__(self) -> None:
        if isinstance(self.objects, str):
            raise ConfigError(
                f"StateSharing(objects={self.objects!r}) is a string: pass several names, as "
                f"({self.objects!r},)"
            )


@dataclass(frozen=True)
class Observability(Filled):
    """Options for reports: experiment tracker, metrics endpoint and event tape.

    Args:
        tracker: Experiment tracker that receives this learner's metrics about once a second:
            ``"tensorboard"``, ``"wandb"`` or ``"mlflow"``, or one of them with a destination, as
            ``"tensorboard:runs/x"`` or ``"wandb:project"``. Only rank 0 of a multi-rank learner
            reports.
        metrics_address: ``"host:port"`` at which Prometheus scrapes `/metrics` of this learner,
            with the auth token. Port 0 picks a free port; the log shows it. Only rank 0 listens.
            It needs the extra ``metrics``.
        event_tape: File to which this participant's events are appended.
    """

    tracker: str | None = None
    metrics_address: str | None = None
    event_tape: str | Path | MakeTape | None = None


@dataclass(frozen=True)
class SyncerConnection:
    """Addresses of the shards, and the client that connects to them.

    Args:
        addresses: URLs of the shards. With a standby, one is ``"http://a:1|http://b:1"``, which
            becomes two addresses.
        client: Creates the transport's client. ``None``: HTTP.

    Raises:
        ConfigError: An address is not text.
    """

    addresses: tuple[str, ...]
    client: Callable[[], Client] | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            if not isinstance(address, str):
                require_address(address)
        split = tuple(each for address in self.addresses for each in alternatives(address))
        object.__setattr__(self, "addresses", split)

    @classmethod
    def of(cls, syncer: str | Sequence[str] | SyncerConnection) -> SyncerConnection:
        """Return the connection that ``Learner(model, syncer)`` stands for.

        Raises:
            ConfigError: ``syncer`` is empty, or an address is not a URL.
        """
        if isinstance(syncer, SyncerConnection):
            return syncer
        given = (syncer,) if isinstance(syncer, str) else tuple(syncer)
        if not given:
            raise ConfigError("syncer=[] has no address: pass one or several 'http://host:port'")
        return cls(given)


@dataclass(frozen=True)
class ParticipantOptions:
    """The arguments of `Learner` that a launcher can pass instead of the program."""

    name: str | None = None
    auth_token: str | None = None
    tls: TLSConfig | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    observability: Observability = field(default_factory=Observability)
    sync_ranks: int | Literal["hosts", "all"] | None = None
    checkpoint: Checkpointing = field(default_factory=Checkpointing)

    def filled(self, other: ParticipantOptions) -> ParticipantOptions:
        """Return these options, with those of ``other`` where these are at their defaults."""
        return ParticipantOptions(
            self.name or other.name,
            self.auth_token or other.auth_token,
            self.tls or other.tls,
            self.timeouts.filled(other.timeouts),
            self.observability.filled(other.observability),
            other.sync_ranks if self.sync_ranks is None else self.sync_ranks,
            self.checkpoint.filled(other.checkpoint),
        )

    @property
    def participant_name(self) -> str:
        """The name to join with: the one given, or host name and process id."""
        if self.name is not None:
            return self.name
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "host"
        return f"{host[:40]}-{os.getpid()}"


def _require_seconds(name: str, seconds: float, *, zero: bool) -> None:
    least = "0 or more" if zero else "more than 0"
    number = isinstance(seconds, int | float) and math.isfinite(seconds)
    if not number or seconds < 0 or (seconds == 0 and not zero):
        raise ConfigError(f"{name}={seconds!r} is out of range: pass {least} seconds")
