"""The coordinator's state as one JSON document, with the run's layout, settings, id and key."""

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
    """The state that a coordinator would go on from with these settings; ``None``: none is there.

    Raises:
        StorageError: It cannot be read.
        ConfigError: It is of a run with other settings; the budget may differ.
    """
    kept = read_document(CoordinatorStates(folder), config)
    if kept is None:
        return None
    machine = CoordinatorMachine(options_of(config))
    machine.restore(kept[1])
    return machine.state


def read_layout(folder: Path, config: RunConfig) -> Layout | None:
    """The model's layout that the coordinator has kept; ``None``: no learner has brought one.

    Raises:
        StorageError: It cannot be read.
        ConfigError: It is of a run with other settings.
    """
    kept = read_document(CoordinatorStates(folder), config)
    return None if kept is None else kept[2]


def document_at_checkpoint(
    part: Mapping[str, Any], newest: CoordinatorState | None
) -> tuple[dict[str, Any], CoordinatorState]:
    """What the coordinator's file holds to go on from a checkpoint, and the state in it.

    Args:
        part: The document as it was then.
        newest: What it has known last: no epoch, term or lease is given out twice.
    """
    state = _STATE.validate_python(part["state"])
    back = raised(state, newest or state)
    return {**part, "state": plain(back)}, back


def plain(state: CoordinatorState) -> Any:
    """A state as it is written."""
    return _STATE.dump_python(state, mode="json")


def read_document(
    states: CoordinatorStates, config: RunConfig
) -> tuple[dict[str, Any], CoordinatorState, Layout | None] | None:
    """The newest document, the state in it and the layout; ``None``: there is none yet.

    Raises:
        StorageError: It cannot be read.
        ConfigError: It is of a run with other settings.
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
            f"{states.folder} is of a run with other settings: {difference}: move the run folder "
            "away, choose another, or give this run's own file"
        )
    return document, state, found
