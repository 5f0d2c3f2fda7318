"""The coordinator's state as one JSON document, with the run's layout, settings, ID and key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of, options_of, read_public
from decoupled_diloco.config.resume import lasting
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.merge import Layout
from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.features.checkpoint import raised
from decoupled_diloco.storage.coordinator_states import CoordinatorStates, unreadable
from decoupled_diloco.storage.files import NOT_JSON

_STATE = TypeAdapter(CoordinatorState)


def read_state(folder: Path, config: RunConfig) -> CoordinatorState | None:
    """Return the state from which a coordinator with these settings would continue.

    ``None`` if there is none.

    Raises:
        StorageError: The state cannot be read.
        ConfigError: It belongs to a run with other settings; the budget may differ.
    """
    kept = read_document(CoordinatorStates(folder), config)
    if kept is None:
        return None
    machine = CoordinatorMachine(options_of(config))
    machine.restore(kept[1])
    return machine.state


def read_layout(folder: Path, config: RunConfig) -> Layout | None:
    """Return the model's layout from the coordinator's state; ``None`` if no learner has sent one.

    Raises:
        StorageError: The state cannot be read.
        ConfigError: It belongs to a run with other settings.
    """
    kept = read_document(CoordinatorStates(folder), config)
    return None if kept is None else kept[2]


def document_at_checkpoint(
    part: Mapping[str, Any], newest: CoordinatorState | None
) -> tuple[dict[str, Any], CoordinatorState]:
    """Return the contents of the coordinator's file that continue from a checkpoint, and its state.

    Args:
        part: The document at the checkpoint.
        newest: The newest known state, so that no epoch, term or lease is issued twice.
    """
    state = _STATE.validate_python(part["state"])
    back = raised(state, newest or state)
    return {**part, "state": plain(back)}, back


def plain(state: CoordinatorState) -> Any:
    """Return a state as JSON values."""
    return _STATE.dump_python(state, mode="json")


def read_document(
    states: CoordinatorStates, config: RunConfig
) -> tuple[dict[str, Any], CoordinatorState, Layout | None] | None:
    """Return the newest document, its state and its layout; ``None`` if there is none yet.

    Raises:
        StorageError: The document cannot be read.
        ConfigError: It belongs to a run with other settings.
    """
    document = states.read()
    if document is None:
        return None
    try:
        state = _STATE.validate_python(document["state"])
        layout = document["layout"]
        theirs = read_public(document["settings"])
        found = Layout.from_text(layout) if layout else None
    except ConfigError:
        raise
    except (ProtocolError, *NOT_JSON) as error:
        raise unreadable(states.folder, error) from error
    difference = difference_of(lasting(config), lasting(theirs))
    if difference:
        raise ConfigError(
            f"{states.folder} belongs to a run with other settings: {difference}: move the run "
            "folder away, choose another one, or start with that run's file"
        )
    return document, state, found
