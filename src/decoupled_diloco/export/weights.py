"""Which weights a run folder has, and a model that takes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.learner.modules import plain
from decoupled_diloco.merge import layout_of
from decoupled_diloco.merge.layout import unwrapped
from decoupled_diloco.storage import weights as files
from decoupled_diloco.storage.weights import load_metadata
from decoupled_diloco.syncer.coordinator_disk import FILE as COORDINATOR_FILE
from decoupled_diloco.syncer.coordinator_disk import newest_state
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.syncer.kept import kept_layout, read_kept
from decoupled_diloco.syncer.result import RESULT, SHARES, read_layout, read_shares, share_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Weights, where from, the fragments' versions (or none) and the run's step, if known."""

    source: Path
    tensors: dict[str, Tensor]
    versions: dict[str, str]
    global_step: int | None


def find_weights(run: Path, config: RunConfig, given: Path | None = None) -> Found:
    """The newest weights of a run: its result, what its shards have handed in, or what they keep.

    ``given``: a safetensors file to take instead.

    Raises:
        StorageError: There are none, or they cannot be read.
    """
    if given is not None:
        return Found(given, files.load_weights(given), _versions(given), None)
    layout = kept_layout(run, config)
    over = layout is None or _is_over(run)  # else what an earlier end has left is not the newest
    if over and (run / RESULT).exists():
        path = run / RESULT
        return Found(path, files.load_weights(path), _versions(path), _global_step(run))
    paths = [share_file(run, shard) for shard in range(config.syncer.shards)]
    missing = [path.name for path in paths if not path.exists()]
    if layout is not None and (missing or not over):
        return Found(run / DURABLE, *read_kept(run, config, layout))
    if missing:
        raise StorageError(
            f"{run} has no weights: {RESULT} is written when the run is finished, and "
            f"{', '.join(missing)} below {run / SHARES} when a shard is; before that shards keep "
            "theirs once a learner has joined, unless syncer.durable is false: let it join, let "
            "the run finish, or give a safetensors file with --weights"
        )
    plan = plan_of(read_layout(run), config)
    tensors, versions = read_shares(run, plan, config.syncer.shards)
    return Found(run / SHARES, tensors, versions, _global_step(run))


def load_weights(model: nn.Module, file: str | Path) -> None:
    """Load the weights of a run into a model, in place.

    Tied weights are once in the file, and the names that share them in its metadata, so that
    `model.load_state_dict(…, strict=True)` misses names. What the run did not synchronize (frozen
    parameters, buffers that stay local) is not in the file and stays as it is.

    Args:
        model: The model as the learners built it, on any device, in any dtypes. Wrappers
            (`torch.compile`, DDP) do not matter.
        file: `RUN/weights.safetensors`, or a `model.safetensors` that `ddiloco export` wrote.

    Raises:
        StorageError: The file is missing, torn, or not a safetensors file.
        ConfigError: A trainable parameter is missing, or a tensor does not fit; it is named.
    """
    path, model = Path(file), plain(model)
    tensors = files.load_weights(path)
    for spec in layout_of(model).tensors:
        names = (spec.name, *spec.aliases)
        values = next((tensors[name] for name in names if name in tensors), None)
        if values is not None:  # a file of another program may have one of the tied names alone
            tensors |= dict.fromkeys(names, values)
    problem = misfit(model, tensors)
    if problem:
        raise ConfigError(f"{path} {problem}: build the same model as the learners of the run")
    _copy(model, tensors)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Gives a model these weights: all that is trained, and whatever else of it is there.

    Raises:
        ConfigError: They are not of this model; names the first tensor that does not fit.
    """
    problem = misfit(model, tensors)
    if problem:
        raise ConfigError(
            f"{source} {problem}: export with the configuration and the code that the run was "
            "trained with"
        )
    for spec in layout_of(model).tensors:
        if spec.name not in tensors:
            logger.warning("%s lacks the buffer %r: it stays as it is", source, spec.name)
    _copy(model, tensors)


def _copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = _tensors_of(model)
    with torch.no_grad():
        for name, values in tensors.items():
            own[name].copy_(values)


def misfit(model: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Why weights are not of a model, in words that follow their name; empty: they are."""
    own = _tensors_of(model)
    for spec in layout_of(model).tensors:
        if spec.name not in tensors and not spec.is_buffer:
            return f"lacks {spec.name!r}, which the model has"
    for name, values in tensors.items():
        if name not in own:
            return f"has {name!r}, which the model lacks"
        if own[name].shape != values.shape:
            there, here = tuple(values.shape), tuple(own[name].shape)
            return f"has {name!r} of shape {there}, which in the model is {here}"
    return ""


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    state = unwrapped(model.state_dict().items())
    own = {name: value for name, value in state if isinstance(value, Tensor)}
    return own | dict(unwrapped(model.named_parameters(remove_duplicate=False)))


def _versions(path: Path) -> dict[str, str]:
    try:
        versions = json.loads(load_metadata(path).get("versions", "{}"))
    except (ValueError, RecursionError):
        return {}  # Another program's file: they are for people only.
    return {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {}


def _is_over(run: Path) -> bool:
    """Whether the run has ended, as the coordinator last wrote it down."""
    try:
        state = json.loads(newest_state(run).read_text())["state"]
        return bool(state["phase"] == "finished")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _global_step(run: Path) -> int | None:
    """The step that all shards have reached, as the coordinator last wrote it down."""
    try:
        clocks = json.loads((run / COORDINATOR_FILE).read_text())["state"]["clocks"]
        return min(int(clock) for clock in clocks.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
