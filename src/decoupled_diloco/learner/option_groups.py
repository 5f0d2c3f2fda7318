"""The options of `Learner` and `Observer` that belong together, one class for each group."""

from __future__ import annotations

import math
import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from decoupled_diloco.config.addresses import alternatives, is_store, require_address, require_store
from decoupled_diloco.config.parties import OwnParty, Parties, load_parties
from decoupled_diloco.config.settings import refuse_url, shown
from decoupled_diloco.errors import ConfigError, a_kind
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.transport.tokens import read_secret

MakeTape = Callable[[dict[str, Any]], TapeWriter]
"""Opens a participant's event tape, given its header."""

Group = TypeVar("Group")

_PATHS = (str, os.PathLike)


def require_kind(name: str, value: object, kinds: tuple[type, ...], what: str, fix: str) -> None:
    """Check the type of an argument; ``None`` is allowed.

    Raises:
        ConfigError: The value is of another type.

    >>> require_kind("name", "learner-0", (str,), "text", "pass name='learner-0'")
    """
    if value is not None and not isinstance(value, kinds):
        raise ConfigError(f"{name}={in_one_line(value)} is not {what}: {fix}")


def in_one_line(value: object) -> str:
    """Return the beginning of a value for a message; some objects are shown in several lines."""
    return " ".join(shown(value).split())


def chosen(name: str, value: Group | None, kind: type[Group]) -> Group:
    """Return the group of options passed as an argument, or its default.

    Raises:
        ConfigError: The value is something else.
    """
    default = kind()
    fix = f"pass dd.{kind.__name__}({fields(default)[0].name}=…), or leave it out"  # type: ignore[arg-type]
    require_kind(name, value, (kind,), f"a dd.{kind.__name__}", fix)
    return default if value is None else value


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
            `Learner` needs ``name=``. An address as text, such as ``"s3://bucket/x"``, stores them
            in an object store, for learners of one process; see ``store`` in ``[run]``. ``None``:
            no checkpoints.
        interval_seconds: Seconds between two checkpoints, 0 or more. They are taken at the end of
            a `Learner.step`, so call that last in the loop. The step waits only for the copy to
            host memory. 0: only in `Learner.close`.
        state: Objects with ``state_dict`` and ``load_state_dict`` that checkpoints hold beside the
            model and the optimizer, by name: data loader, learning rate schedule, random state.

    Raises:
        ConfigError: ``folder`` is empty or not a path, ``interval_seconds`` is negative or not
            finite, or ``state`` has no names.
    """

    folder: str | Path | None = None
    interval_seconds: float = 60.0
    state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_folder("Checkpointing(folder", self.folder, ")")
        _require_seconds("Checkpointing(interval_seconds", self.interval_seconds, zero=True)
        if not isinstance(self.state, Mapping):
            raise ConfigError(
                f"Checkpointing(state=…) is {a_kind(self.state)} without names: pass a "
                'dict, as in state={"loader": loader}'
            )
        for name in self.state:
            if not isinstance(name, str):
                raise ConfigError(
                    f"Checkpointing(state=…) has the name {name!r}, which is not text: pass names "
                    'in quotes, as in state={"loader": loader}'
                )

    @classmethod
    def of(cls, given: str | Path | Checkpointing | None) -> Checkpointing:
        """Return the options that ``Learner(checkpoint=…)`` stands for: a path is a folder.

        Raises:
            ConfigError: ``given`` is neither a path nor `Checkpointing`.
        """
        if isinstance(given, Checkpointing):
            return given
        _require_folder("checkpoint", given, "")
        return cls(given)


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
                _require_seconds(f"Timeouts({name}", seconds, zero=False)
        _require_seconds("Timeouts(flush", self.flush, zero=True)


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
        ConfigError: ``objects`` is something else than several names.
    """

    objects: Sequence[str] = ("optimizer",)

    def __post_init__(self) -> None:
        if isinstance(self.objects, str):
            raise ConfigError(
                f"StateSharing(objects={self.objects!r}) is a string: pass several names, as "
                f"({self.objects!r},)"
            )
        several = isinstance(self.objects, Collection)
        if not several or not all(isinstance(name, str) for name in self.objects):
            raise ConfigError(
                f"StateSharing(objects={in_one_line(self.objects)}) is not a list of names: pass "
                "several names, as ('optimizer',), or () to share nothing"
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

    def __post_init__(self) -> None:
        fix = "pass one as 'wandb' or 'tensorboard:runs/x', or leave it out"
        require_kind("tracker", self.tracker, (str,), "an experiment tracker", fix)
        fix = "pass 'host:port', or leave it out"
        require_kind("metrics_address", self.metrics_address, (str,), "an address", fix)
        if not callable(self.event_tape):
            fix = "pass a file as text or a Path, or leave it out"
            require_kind("event_tape", self.event_tape, _PATHS, "a path", fix)


@dataclass(frozen=True)
class PartyFiles(Filled):
    """The party's own files, for a run that several organizations train.

    The learner takes part only if the syncer has the same parties as this file. Both files stay on
    this machine, and nothing of them is accepted from the syncer.

    Args:
        parties: The party's copy of ``parties.toml``, or the `Parties` that were read from it.
        key: File with the party's private key, as ``ddiloco parties create-key`` writes it, or a
            folder with the keys of several parties. ``None``: the learner does not sign.

    Raises:
        ConfigError: A value is not a path, or there is a key without ``parties``.
    """

    parties: str | Path | Parties | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        fix = "pass the path of parties.toml, or leave it out"
        require_kind("parties", self.parties, (*_PATHS, Parties), "a path", fix)
        require_kind("key", self.key, _PATHS, "a path", "pass a file, or leave it out")
        if self.key is not None and self.parties is None:
            raise ConfigError(
                f"PartyFiles(key={str(self.key)!r}) has no parties: pass parties=, the path of "
                "parties.toml"
            )

    def load(self, learner: str) -> OwnParty | None:
        """Read the files and return the party of a learner; ``None`` without ``parties``.

        Raises:
            ConfigError: A file cannot be read, or no party has the learner.
        """
        if self.parties is None:
            return None
        parties = self.parties if isinstance(self.parties, Parties) else load_parties(self.parties)
        return OwnParty.load(parties, learner, None if self.key is None else Path(self.key))


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
            ConfigError: ``syncer`` is empty or not an address, or an address is not a URL.
        """
        if isinstance(syncer, SyncerConnection):
            return syncer
        if isinstance(syncer, bytes) or not isinstance(syncer, Iterable):
            raise ConfigError(
                f"syncer={in_one_line(syncer)} is not an address: pass one or several "
                "'http://host:port'"
            )
        given = (syncer,) if isinstance(syncer, str) else tuple(syncer)
        if not given:
            raise ConfigError("syncer=[] has no address: pass one or several 'http://host:port'")
        return cls(given)


@dataclass(frozen=True)
class ParticipantOptions:
    """The arguments of `Learner` that a launcher can pass instead of the program.

    Raises:
        ConfigError: The name, ``tls`` or ``sync_ranks`` has a wrong type.
    """

    name: str | None = None
    auth_token: str | None = None
    tls: TLSConfig | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    observability: Observability = field(default_factory=Observability)
    sync_ranks: int | Literal["hosts", "all"] | None = None
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    party: PartyFiles = field(default_factory=PartyFiles)

    def __post_init__(self) -> None:
        require_kind("name", self.name, (str,), "text", "pass a name as 'learner-0'")
        fix = "pass dd.TLSConfig(ca_cert=…), or leave it out"
        require_kind("tls", self.tls, (TLSConfig,), "a dd.TLSConfig", fix)
        fix = "pass a number, 'hosts' (one per host) or 'all'"
        require_kind("sync_ranks", self.sync_ranks, (int, str), "a number of ranks", fix)
        read_secret(self.auth_token)

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
            self.party.filled(other.party),
        )

    @property
    def participant_name(self) -> str:
        """The name to join with: the one given, or host name and process id."""
        if self.name is not None:
            return self.name
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "host"
        return f"{host[:40]}-{os.getpid()}"


def _require_folder(argument: str, folder: object, end: str) -> None:
    fix = "pass a folder as text or a Path, or None for no checkpoints"
    if isinstance(folder, str) and is_store(folder):
        require_store(argument, folder, end)
    elif isinstance(folder, _PATHS):
        refuse_url(f"{argument}={in_one_line(folder)}{end}", folder)
    if isinstance(folder, str) and not folder:
        raise ConfigError(f"{argument}=''{end} is empty: {fix}")
    if folder is not None and not isinstance(folder, _PATHS):
        raise ConfigError(f"{argument}={in_one_line(folder)}{end} is not a path: {fix}")


def _require_seconds(argument: str, seconds: object, *, zero: bool) -> None:
    """Check an argument that is named as ``"Timeouts(join"``."""
    least = "0 or more" if zero else "more than 0"
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        problem = "is not a number"
    elif seconds > sys.float_info.max:
        problem = "is too large"
    elif math.isnan(seconds) or seconds < 0 or (seconds == 0 and not zero):
        problem = "is out of range"
    else:
        return
    raise ConfigError(f"{argument}={in_one_line(seconds)}) {problem}: pass {least} seconds")
