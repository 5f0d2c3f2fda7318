"""The parts that a participant is made of, from the arguments of its constructor."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decoupled_diloco.config.run import host_and_port
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.learner.checkpoint import OPTIMIZER, CheckpointFolder
from decoupled_diloco.learner.checkpointer import Checkpointer
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.monitor.measures import INSTALL
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tls import ServerTls, Tls
from decoupled_diloco.transport.tokens import Tokens, read_secret

if TYPE_CHECKING:
    from decoupled_diloco.monitor.endpoint import MetricsEndpoint
    from decoupled_diloco.monitor.step_log import StepLog
    from decoupled_diloco.monitor.watched import WatchedLearner

logger = logging.getLogger(__name__)


def open_tape(path: Path, name: str, header: dict[str, Any]) -> TapeWriter:
    """The tape; a full disk ends it, and nothing else."""
    return TapeWriter(path, name, header, on_failure=lambda error: logger.error("%s", error))


def not_negative(name: str, seconds: float) -> float:
    """The same seconds.

    Raises:
        ConfigError: They are less than 0, infinite or no number.
    """
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{name}={seconds}: give 0 or more seconds")
    return seconds


def checkpointer_of(
    learner_id: str | None,
    model: torch.nn.Module,
    stateful: Mapping[str, Any],
    checkpoint: str | Path | None,
    every_seconds: float,
    kind: Callable[..., Checkpointer] = Checkpointer,
) -> Checkpointer:
    """What takes the checkpoints of a `Learner`.

    Raises:
        ConfigError: The arguments do not go together, or a state cannot be kept.
        StorageError: The folder cannot be made, or the checkpoints cannot be read.
    """
    not_negative("checkpoint_every_seconds", every_seconds)
    if checkpoint is None:
        return kind(learner_id or default_id(), model, stateful, None, 0.0)
    if learner_id is None:
        raise ConfigError(
            "checkpoint= without learner_id=: give this learner a name that stays the same when it "
            "is started again"
        )
    path = Path(checkpoint) / learner_id
    try:
        runtime().disk.make_folder(path)
    except OSError as error:
        raise StorageError(
            f"checkpoint={str(checkpoint)!r}: {path} cannot be made ({error.strerror}): give a "
            "folder that this process may write to, or leave it out"
        ) from error
    folder = CheckpointFolder(path)
    return kind(learner_id, model, stateful, folder, every_seconds)


def transfers_of(
    objects: Mapping[str, Any],
    donate: Sequence[str],
    stateful: Mapping[str, Any],
    listen: str | None,
    syncer: str | Sequence[str],
    tls: Tls | None,
) -> StateTransfers:
    """What a `Learner` gives and takes.

    Raises:
        ConfigError: Nothing has one of the names, the address is none, or there is no certificate
            to listen with.
    """
    _require_listening_encrypted(listen, syncer, tls)
    if isinstance(donate, str):
        raise ConfigError(f"donate={donate!r} is a text: write several names, as ({donate!r},)")
    known = {OPTIMIZER, *stateful}
    unknown = [name for name in donate if name not in known]
    if unknown:
        raise ConfigError(f"donate has {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
    given = {name: objects[name] for name in donate if name in objects}
    if listen is None:
        return StateTransfers(given, tls=tls)
    host, port = host_and_port("listen", listen)
    served = _served(tls)
    return StateTransfers(given, lambda key: _server(host, port, key, served), tls)


def endpoint_of(
    metrics: str | None,
    name: str,
    token: str | None,
    look: Callable[[Callable[[WatchedLearner], dict[str, Any]]], dict[str, Any]],
) -> MetricsEndpoint | None:
    """Where a `Learner` can be scraped, if it can.

    Raises:
        ConfigError: The address is none, or it is open to others without a token; or what writes
            metrics is not installed.
    """
    if metrics is None:
        return None
    from decoupled_diloco.monitor.endpoint import MetricsEndpoint

    try:
        from decoupled_diloco.monitor.learner import learner_metrics
    except ImportError:
        raise ConfigError(f"metrics={metrics!r} needs prometheus-client: {INSTALL}") from None
    return MetricsEndpoint(metrics, name, read_secret(token), partial(learner_metrics, look))


def log_of(log: str | None, name: str) -> StepLog | None:
    """What logs a `Learner`'s numbers, if anything does.

    Raises:
        ConfigError: It is no place for them, or its library is not installed.
    """
    if log is None:
        return None
    from decoupled_diloco.monitor.step_log import StepLog

    return StepLog(log, name, Path())


def _require_listening_encrypted(
    listen: str | None, syncer: str | Sequence[str], tls: Tls | None
) -> None:
    """Refuses to give a state in plain text in a run that is encrypted.

    Raises:
        ConfigError: There is no certificate to listen with.
    """
    first = syncer if isinstance(syncer, str) else next(iter(syncer), "")
    if listen is not None and first.startswith("https://") and _served(tls) is None:
        raise ConfigError(
            f"listen={listen!r} would give this learner's state without encryption: give it a "
            "certificate and a key of its own (tls=), or leave listen out: a shard relays it"
        )


def _served(tls: Tls | None) -> ServerTls | None:
    """What this learner shows to those who fetch its state: the certificate of its id."""
    if tls is None or tls.certificate is None or tls.key is None:
        return None
    return ServerTls(Path(tls.certificate), Path(tls.key))


def _server(host: str, port: int, key: str, tls: ServerTls | None) -> HttpServer:
    """What serves this learner's state; it holds no conversations."""

    async def refuse(channel: Channel) -> None:
        await channel.close("a learner is no shard: dial the syncer")

    return HttpServer(
        host=host, port=port, tokens=Tokens(key), on_channel=refuse, pool_bytes=1 << 20, tls=tls
    )


def default_id() -> str:
    """A name of this process: host and process id."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "host"
    return f"{host[:40]}-{os.getpid()}"
