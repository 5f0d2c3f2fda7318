"""Save and load model, inner optimizer and stateful objects of a multi-rank learner.

Each rank writes and reads its own shards (torch.distributed.checkpoint), so no rank holds more than
it trains. Tensors and the optimizer's settings are stored by parameter name. So they can be read
with any number of ranks, also by a single process, and with any parallelism. Each rank saves its
other objects separately. If the number of ranks has changed, all ranks load the objects of rank 0.

A step waits only for the copy to host memory.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from decoupled_diloco.errors import ConfigError, DilocoError, StorageError, a_kind
from decoupled_diloco.learner.learner_checkpoint import OPTIMIZER, LearnerCheckpoint
from decoupled_diloco.learner.optimizers import exact
from decoupled_diloco.merge.layout import unwrapped
from decoupled_diloco.storage.states import pack, unpack

logger = logging.getLogger(__name__)

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Stores the optimizer's state by parameter name: the stages of a pipeline differ in parameters."""

_CAUSES = (RuntimeError, ValueError, KeyError, TypeError, OSError, AssertionError)


class ShardedState:
    """Saves and loads one rank's state; see the module.

    Args:
        module: This rank's part of the model.
        stateful: Name to object; the inner optimizer's name is ``"optimizer"``.
        group: A process group in host memory that nothing else uses; ``None``: a single process.

    Raises:
        ConfigError: An inner optimizer is not a `torch.optim.Optimizer`.
    """

    def __init__(
        self,
        module: nn.Module,
        stateful: Mapping[str, Any],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._objects = dict(stateful)
        inner = self._objects.pop(OPTIMIZER, None)
        self._inner: tuple[torch.optim.Optimizer, ...] = () if inner is None else inner.all
        for each in self._inner:
            if not isinstance(each, torch.optim.Optimizer):
                raise ConfigError(
                    f"optimizer is {a_kind(each)}: checkpoints of several ranks name its "
                    "state by parameter, which only a torch.optim.Optimizer allows; pass that, or "
                    "leave out checkpoint="
                )
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._writing: Future[Any] | None = None

    def _state(self) -> dict[str, Any]:
        model, inner = get_state_dict(self._module, self._inner, options=BY_NAME)
        return {"model": model, "optimizer": inner}

    def save(self, folder: Path) -> Future[Any]:
        """Copy the current state, and write it in another thread; all ranks must call this.

        Returns:
            A future that is done when all ranks have written; it has the error of a rank that
            failed.
        """
        if self._writing is not None:
            # Wait: another rank's write may have ended earlier, and saves must not overlap.
            self._writing.exception()
        objects = {name: thing.state_dict() for name, thing in self._objects.items()}
        state = self._state() | {_objects_of(self._rank): _packed(objects)}
        writing = async_save(state, checkpoint_id=folder, process_group=self._group)
        self._writing = cast("Future[Any]", writing)
        return self._writing

    def load(self, folder: Path, ranks: int) -> None:
        """Restore the state; all ranks must call this.

        Args:
            folder: A folder that `save` has written.
            ranks: Number of ranks that wrote it.

        Raises:
            ConfigError: The checkpoint does not fit this learner.
            StorageError: The checkpoint cannot be read.
        """
        same = ranks == self._ranks
        if not same and self._objects:
            logger.warning(
                "%s was written by %d ranks and is read by %d: all ranks load %s of rank 0",
                folder,
                ranks,
                self._ranks,
                ", ".join(sorted(self._objects)),
            )
        own = _objects_of(self._rank if same else 0)
        state = self._state() | {own: b""}
        try:
            load(
                state,
                checkpoint_id=folder,
                process_group=self._group,
                no_dist=self._group is None,
            )
            objects = _unpacked(state[own])
            with exact(self._inner):
                set_state_dict(
                    self._module,
                    self._inner,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                    options=BY_NAME,
                )
            for name, thing in self._objects.items():
                thing.load_state_dict(objects[name])
        except DilocoError:
            raise
        except CheckpointException as error:
            raise StorageError(f"{folder} cannot be read ({causes(error)}): {_FIX}") from error
        except _CAUSES as error:
            raise ConfigError(
                f"the checkpoint {folder} does not fit this learner ({error!s:.300}): build the "
                "same model, optimizer and objects, or pass another folder"
            ) from error


def spread_out(
    checkpoint: LearnerCheckpoint, module: nn.Module, stateful: Mapping[str, Any], folder: Path
) -> None:
    """Write the checkpoint of a single-process learner so that `ShardedState.load` can read it.

    Args:
        checkpoint: A checkpoint whose file has the model and state.
        module: This rank's part of the model; it must have all parameters.
        stateful: As for `ShardedState`.
        folder: The folder to write, for ``load(folder, 1)``.

    Raises:
        ConfigError: The checkpoint does not fit this learner.
        StorageError: The folder cannot be written.
    """
    objects = dict(checkpoint.state)
    kept, inner = objects.pop(OPTIMIZER, None), stateful.get(OPTIMIZER)
    if checkpoint.state.keys() != stateful.keys():
        raise ConfigError(
            f"it has the state of {sorted(checkpoint.state)}, not of {sorted(stateful)}"
        )
    named = {id(parameter): name for name, parameter in unwrapped(module.named_parameters())}
    optimizer: dict[str, Any] = {}
    states = (checkpoint.model, module.state_dict())
    model, own = (dict(unwrapped(each.items())) for each in states)
    if not own.keys() <= model.keys():
        raise ConfigError(_OTHER_MODEL)
    try:
        for each, state in inner.paired(kept) if inner else []:
            optimizer |= _by_name(each, state, named)
    except DilocoError:
        raise
    except (ValueError, KeyError) as error:
        raise ConfigError(_OTHER_MODEL) from error
    whole = {"model": model, "optimizer": optimizer}
    try:
        save(whole | {_objects_of(0): _packed(objects)}, checkpoint_id=folder, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise StorageError(f"{folder} cannot be written ({causes(error)})") from error


def _by_name(
    optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], named: Mapping[int, str]
) -> dict[str, Any]:
    """Return an optimizer's state with parameter names instead of numbers."""
    trained = [named[id(p)] for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in kept["param_groups"] for number in group["params"]]
    names = dict(zip(numbers, trained, strict=True))
    flat: dict[str, Any] = {}
    for group in kept["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        for number in group["params"]:
            for what, values in (
                ("state", kept["state"].get(number, {})),
                ("param_groups", settings),
            ):
                flat |= {f"{what}.{names[number]}.{k}": v for k, v in values.items()}
    return flat


_FIX = "delete it and the file with the same number, and the previous checkpoint is used"
_OTHER_MODEL = "it belongs to another model or optimizer than that of rank 0"


def causes(error: BaseException) -> str:
    """Return the text of an error, for a checkpoint with the ranks that failed."""
    if isinstance(error, CheckpointException):
        failures = [f"rank {rank}: {why[0]!r}" for rank, why in error.failures.items()]
        return f"{'; '.join(failures):.300}"
    return f"{error!s:.300}"


def _objects_of(rank: int) -> str:
    return f"objects-{rank}"


def _packed(objects: dict[str, Any]) -> bytes:
    tensors, text = pack(objects)
    on_host = {name: each.detach().cpu() for name, each in tensors.items()}
    file = io.BytesIO()
    torch.save({"tensors": on_host, "text": text}, file)
    return file.getvalue()


def _unpacked(data: bytes) -> dict[str, Any]:
    kept = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return dict(unpack(kept["tensors"], kept["text"]))
