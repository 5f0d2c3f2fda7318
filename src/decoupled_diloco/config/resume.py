"""The settings that identify a run, and those that may change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.config.method import difference_of
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.toml_files import load_config
from decoupled_diloco.errors import ConfigError

RUN_FILE = "run.toml"

_MAY_CHANGE = {
    "run": {"max_steps", "max_tokens", "checkpoint_interval_seconds"},
    "workload": {"total_steps"},
    "privacy": {"members"},
}


def lasting(config: RunConfig) -> dict[str, Any]:
    """The public settings without those that may change on a resume, such as the budget."""
    return {
        table: _without(values, _MAY_CHANGE.get(table, set()))
        for table, values in config.public().items()
    }


def _without(values: Any, keys: set[str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without(value, keys) for key, value in values.items() if key not in keys}


def identity_of(config: RunConfig) -> str:
    """A digest of the lasting settings; two states of one run have the same digest."""
    canonical = json.dumps(lasting(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def load_resumed(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings with which a run resumes in its folder.

    The method, the model and the learners cannot change.

    Raises:
        ConfigError: It is not a run folder, or a setting was changed that cannot change.
    """
    file = folder / RUN_FILE
    if not file.is_file():
        raise ConfigError(
            f"{folder} is not a run folder, because it has no {RUN_FILE}: pass the folder of a run "
            "to --resume, such as runs/quickstart"
        )
    if any(override.partition("=")[0].strip() == "run.folder" for override in overrides):
        raise ConfigError(f"run.folder cannot change: the run resumes in {folder}")
    here = f"run.folder={json.dumps(str(folder))}"
    before, config = load_config(file, [here]), load_config(file, [*overrides, here])
    difference = difference_of(_public(config), _public(before))
    if difference:
        raise ConfigError(
            f"the run in {folder} cannot resume with other settings: {difference}: take it out of "
            "--set (a budget, addresses, ports, secrets, threads, ranks, faults and the evaluator "
            "may change), or start a new run"
        )
    return config


def _public(config: RunConfig) -> dict[str, Any]:
    return lasting(config) | {"persist": config.syncer.persist}
