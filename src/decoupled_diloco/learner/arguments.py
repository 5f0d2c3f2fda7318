"""Create the parts of a learner from the arguments of its constructor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decoupled_diloco.config.addresses import is_store
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.learner.checkpointer import Checkpointer
from decoupled_diloco.learner.learner_checkpoint import OPTIMIZER, CheckpointFolder
from decoupled_diloco.learner.option_groups import ParticipantOptions, in_one_line
from decoupled_diloco.learner.stored_checkpoints import StoredCheckpoints
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.monitor.metric_table import INSTALL
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.tokens import read_secret

if TYPE_CHECKING:
    from decoupled_diloco.monitor.endpoint import MetricsEndpoint
    from decoupled_diloco.monitor.metric_sources import WatchedLearner
    from decoupled_diloco.monitor.step_log import StepLog

logger = logging.getLogger(__name__)


def require_model(model: object, *, stages: bool = True) -> None:
    """Check that a value is a model.

    Args:
        model: The argument of the program.
        stages: Whether a list of pipeline stages is a model, too.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(model, torch.nn.Module):
        return
    if stages and isinstance(model, Sequence) and not isinstance(model, str) and model:
        wrong = [part for part in model if not isinstance(part, torch.nn.Module)]
        if not wrong:
            return
    also = ", or the list of its pipeline stages" if stages else ""
    raise ConfigError(
        f"model={in_one_line(model)} is not a torch.nn.Module: pass the model{also} as the first "
        "argument"
    )


def checkpointer_of(
    options: ParticipantOptions,
    model: torch.nn.Module,
    objects: Mapping[str, Any],
    kind: Callable[..., Checkpointer] = Checkpointer,
) -> Checkpointer:
    """Create the object that takes the checkpoints of a `Learner`.

    Raises:
        ConfigError: The learner has no name, or a state cannot be saved.
        StorageError: The folder cannot be created, the checkpoints cannot be read, or the object
            store is unreachable.
    """
    checkpoint = options.checkpoint
    if checkpoint.folder is None:
        return kind(options.participant_name, model, objects, None, 0.0)
    if options.name is None:
        raise ConfigError(
            f"checkpoint={str(checkpoint.folder)!r} needs name=: pass a name that stays the same "
            "when this learner restarts"
        )
    if is_store(str(checkpoint.folder)):
        stored = StoredCheckpoints(str(checkpoint.folder), options.name)
        return kind(options.name, model, objects, stored, checkpoint.interval_seconds)
    path = Path(checkpoint.folder) / options.name
    try:
        runtime().disk.make_folder(path)
    except OSError as error:
        raise StorageError(
            f"checkpoint={str(checkpoint.folder)!r}: cannot create {path} ({error.strerror}): pass "
            "a folder that this process can write to, or leave checkpoint= out"
        ) from error
    return kind(options.name, model, objects, CheckpointFolder(path), checkpoint.interval_seconds)


def transfers_of(objects: Mapping[str, Any], shared: Sequence[str]) -> StateTransfers:
    """Create the object that exchanges a `Learner`'s state with other learners.

    Args:
        objects: The optimizer and the other objects with a state, by name.
        shared: Names of the objects to share.

    Raises:
        ConfigError: No object has one of the names.
    """
    known = {OPTIMIZER, *objects}
    unknown = [name for name in shared if name not in known]
    if unknown:
        raise ConfigError(
            f"StateSharing(objects={tuple(shared)!r}): {unknown[0]!r} is not one of "
            f"{', '.join(sorted(known))}: add it to Checkpointing(state=…), or leave it out"
        )
    return StateTransfers({name: objects[name] for name in shared if name in objects})


def endpoint_of(
    address: str | None,
    name: str,
    token: str | None,
    read: Callable[[Callable[[WatchedLearner], dict[str, Any]]], dict[str, Any]],
) -> MetricsEndpoint | None:
    """Create the endpoint at which Prometheus scrapes a `Learner`, if it has an address.

    Args:
        address: Address to listen on; `None`: do not listen.
        name: The learner's name.
        token: The auth token that a scraper must send, if any.
        read: Calls a function with the watched learner and returns the result.

    Raises:
        ConfigError: The address is not valid, or is open to other machines without a token; or
            prometheus-client is not installed.
    """
    if address is None:
        return None
    from decoupled_diloco.monitor.endpoint import MetricsEndpoint

    try:
        from decoupled_diloco.monitor.learner_metrics import learner_metrics
    except ImportError:
        raise ConfigError(
            f"metrics_address={address!r} needs prometheus-client: {INSTALL}"
        ) from None
    return MetricsEndpoint(address, name, read_secret(token), partial(learner_metrics, read))


def step_log_of(tracker: str | None, name: str) -> StepLog | None:
    """Create the log that sends a `Learner`'s metrics to an experiment tracker, if it has one.

    Raises:
        ConfigError: The tracker is unknown, or its library is not installed.
    """
    if tracker is None:
        return None
    from decoupled_diloco.monitor.step_log import StepLog

    return StepLog(tracker, name, Path())
