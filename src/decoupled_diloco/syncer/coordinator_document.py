"""The coordinator's state as one JSON document, with the run's layout, settings, id and key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of, options_of, read_public
from decoupled_diloco.config.resume import lasting
from decoupled_diloco.errors import ConfigError, ProtocolError, StorageError
from decoupled_diloco.merge import Layout
from decoupled_diloco.protocol.checkpoints.coordinator import raised
from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, exists
from decoupled_diloco.syncer.coordinator_disk import joined_since, newest_state

_STATE = TypeAdapter(CoordinatorState)


def read_state(folder: Path, config: RunConfig) -> CoordinatorState | None:
    """The state that a coordinator would go on from with these settings; ``None``: none is there.

    Raises:
        StorageError: It cannot be read.
        ConfigError: It is of a run with other settings; the budget may differ.
    """
    kept = read_document(newest_state(folder), config, joined_since(folder))
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
    kept = read_document(newest_state(folder), config, ())
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
    file: Path, config: RunConfig, joined: Sequence[str]
) -> tuple[Any, CoordinatorState, Layout | None] | None:
    """The document in a file, the state in it and the layout; ``None``: there is no file.

    Raises:
        StorageError: It cannot be read.
        ConfigError: It is of a run with other settings.
    """
    if not exists(file):
        return None
    try:
        document = json.loads(runtime().disk.read(file))
        for name, record in map(json.loads, joined):
            known = document["state"]["learners"].get(name, {"epoch": 0})
            if record["epoch"] >= known["epoch"]:
                document["state"]["learners"][name] = record
        state = _STATE.validate_python(document["state"])
        layout = document["layout"]
        theirs = read_public(document["settings"])
        found = Layout.from_text(layout) if layout else None
    except (OSError, ProtocolError, *NOT_JSON) as error:
        raise StorageError(
            f"{file} cannot be read ({error}): move the run folder away to begin anew"
        ) from error
    difference = difference_of(lasting(config), lasting(theirs))
    if difference:
        raise ConfigError(
            f"{file} is of a run with other settings: {difference}: move the run folder "
            "away, choose another, or give this run's own file"
        )
    return document, state, found
