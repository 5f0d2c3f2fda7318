"""The weights in a run folder, and how to load them into a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.learner.learner_model import plain
from decoupled_diloco.merge import layout_of
from decoupled_diloco.merge.layout import unwrapped
from decoupled_diloco.storage import weight_files as files
from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.storage.weight_files import load_metadata
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.syncer.result import RESULT, SHARES, read_layout, read_shares, share_file
from decoupled_diloco.syncer.stored_weights import kept_layout, read_kept

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Weights, their source, the fragments' versions (if known) and the run's step (if known)."""

    source: Path
    tensors: dict[str, Tensor]
    versions: dict[str, str]
    global_step: int | None


def find_weights(
    run: Path, config: RunConfig, given: Path | None = None, *, average: bool = False
) -> Found:
    """Return a run's newest weights: its result, its shards' final shares, or their durable state.

    Args:
        given: A safetensors file to use instead.
        average: Return the average of the weights instead, which is only in the durable state.

    Raises:
        ConfigError: The run keeps no average, or there is both ``given`` and ``average``.
        StorageError: There are no weights, or they cannot be read.
    """
    if average:
        _require_average(config, given)
    if given is not None:
        return Found(given, files.load_weights(given), _versions(given), None)
    layout = kept_layout(run, config)
    if average:
        if layout is None:
            raise StorageError(
                f"{run} has no average of the weights: the shards store it after the first learner "
                "has joined, unless syncer.persist is false"
            )
        return Found(run / DURABLE, *read_kept(run, config, layout, average=True))
    state = _last_state(run)
    # While a run has not ended, the result of an earlier end is not the newest state.
    over = layout is None or state.get("phase") == "finished"
    if over and (run / RESULT).exists():
        path = run / RESULT
        return Found(path, files.load_weights(path), _versions(path), _global_step(state))
    paths = [share_file(run, shard) for shard in range(config.syncer.shards)]
    missing = [path.name for path in paths if not path.exists()]
    if layout is not None and (missing or not over):
        return Found(run / DURABLE, *read_kept(run, config, layout))
    if missing:
        raise StorageError(
            f"{run} has no weights: {RESULT} is written when the run is finished, and "
            f"{', '.join(missing)} in {run / SHARES} when a shard is. Before that, shards store "
            "theirs after the first learner has joined, unless syncer.persist is false: start a "
            "learner, let the run finish, or pass a safetensors file with --weights"
        )
    plan = plan_of(read_layout(run), config)
    tensors, versions = read_shares(run, plan, config.syncer.shards)
    return Found(run / SHARES, tensors, versions, _global_step(state))


def _require_average(config: RunConfig, given: Path | None) -> None:
    if given is not None:
        raise ConfigError(
            f"the weights {str(given)!r} cannot be combined with average=True, which is of the "
            "run's own weights: take one of them out"
        )
    if config.outer.average is None:
        raise ConfigError(
            "outer.average is not set, so the run keeps no average of its weights: start a run "
            "with outer.average, such as 0.5, or export the weights themselves"
        )


def load_weights(model: nn.Module, file: str | Path) -> None:
    """Load the weights of a run into a model, in place.

    Tied weights are stored once, with the names that share them in the metadata, so that
    `model.load_state_dict(…, strict=True)` reports missing names. Tensors that the run did not
    synchronize (frozen parameters, local buffers) are not in the file and remain unchanged.

    Args:
        model: The model as the learners built it, on any device, in any dtypes. Wrappers
            (`torch.compile`, DDP) are allowed.
        file: `RUN/weights.safetensors`, or a `model.safetensors` that `ddiloco export` wrote.

    Raises:
        StorageError: The file is missing, truncated, or not a safetensors file.
        ConfigError: A trainable parameter is missing, or a tensor does not match; it is named.
    """
    path, model = Path(file), plain(model)
    tensors = files.load_weights(path)
    for spec in layout_of(model).tensors:
        names = (spec.name, *spec.aliases)
        values = next((tensors[name] for name in names if name in tensors), None)
        if values is not None:  # another program's file may have only one of the tied names
            tensors |= dict.fromkeys(names, values)
    problem = misfit(model, tensors)
    if problem:
        raise ConfigError(f"{path} {problem}: build the same model as the learners of the run")
    _copy(model, tensors)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Load these weights into a model: all trained tensors, and any others in `tensors`.

    Raises:
        ConfigError: They do not match the model; names the first such tensor.
    """
    problem = misfit(model, tensors)
    if problem:
        raise ConfigError(
            f"{source} {problem}: export with the configuration and the code with which the run "
            "was trained"
        )
    for spec in layout_of(model).tensors:
        if spec.name not in tensors:
            logger.warning("%s lacks the buffer %r, which remains unchanged", source, spec.name)
    _copy(model, tensors)


def _copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = _tensors_of(model)
    with torch.no_grad():
        for name, values in tensors.items():
            own[name].copy_(values)


def misfit(model: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Return why weights do not match a model, as a predicate; empty if they match."""
    own = _tensors_of(model)
    for spec in layout_of(model).tensors:
        if spec.name not in tensors and not spec.is_buffer:
            return f"lacks {spec.name!r}, which the model has"
    for name, values in tensors.items():
        if name not in own:
            return f"has {name!r}, which the model lacks"
        if own[name].shape != values.shape:
            there, here = tuple(values.shape), tuple(own[name].shape)
            return f"has {name!r} of shape {there}, but the model has {here}"
    return ""


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    state = unwrapped(model.state_dict().items())
    own = {name: value for name, value in state if isinstance(value, Tensor)}
    return own | dict(unwrapped(model.named_parameters(remove_duplicate=False)))


def _versions(path: Path) -> dict[str, str]:
    try:
        versions = json.loads(load_metadata(path).get("versions", "{}"))
    except (ValueError, RecursionError):
        return {}  # Another program's file. The versions are informative only.
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def _last_state(run: Path) -> dict[str, Any]:
    """Return the coordinator's newest state; empty if there is none that can be read."""
    try:
        return dict((CoordinatorStates(run).read() or {})["state"])
    except (StorageError, *NOT_JSON):
        return {}


def _global_step(state: dict[str, Any]) -> int | None:
    """Return the step that all shards have reached, according to the coordinator's last state."""
    try:
        return min(int(clock) for clock in state["clocks"].values())
    except NOT_JSON:
        return None
