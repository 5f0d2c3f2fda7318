"""The weights at both ends of a run: the file of initial weights, and the shares of the result.

Each shard writes its share of the final published copies to the run folder before the run counts as
finished. `assemble` combines the shares into one safetensors file with the model's own names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, ProtocolError, StorageError
from decoupled_diloco.merge import DTYPES, Layout, gather, scatter
from decoupled_diloco.merge.fragments import clipped
from decoupled_diloco.merge.layout import TensorSpec
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.storage.weight_files import load_metadata, load_weights, save_weights
from decoupled_diloco.syncer.shard_tensors import ShardTensors

SHARES = "checkpoints"
RESULT = "weights.safetensors"


def initial_values(
    path: Path, plan: MergePlan, fragments: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the run's initial weights for these fragments, one after the other, each fp32 [N].

    The file is read once.

    Raises:
        ConfigError: The file is missing or torn, lacks a tensor, or a tensor has another shape.
    """
    try:
        weights = load_weights(path)
    except StorageError as error:
        raise ConfigError(
            f"initial_weights={str(path)!r} cannot be used: {error}: correct the path, or omit "
            "initial_weights"
        ) from error
    tensors: list[Tensor] = []
    for spec in plan.layout.tensors:
        found = _unknown(spec) if spec.is_moment else weights.get(spec.name)
        if found is None:
            fix = 'set sync.merge.buffers="local"' if spec.is_buffer else "omit initial_weights"
            raise ConfigError(
                f"initial_weights={str(path)!r} lacks {spec.name!r}, which the model has: use the "
                f"weights of this model, or {fix}"
            )
        if tuple(found.shape) != spec.shape:
            raise ConfigError(
                f"{spec.name!r} has shape {tuple(found.shape)} in {str(path)!r} and {spec.shape} "
                "in the model: use the weights of this model, or omit initial_weights"
            )
        tensors.append(found)
    for fragment in fragments:
        yield fragment, gather(plan.fragments[fragment], tensors)


def _unknown(moment: TensorSpec) -> Tensor:
    """Return a moment that no learner has sent: NaN, without memory for each element."""
    return torch.tensor(math.nan, dtype=torch.float32, device="cpu").expand(moment.shape)


def share_file(run: Path, shard: int) -> Path:
    """Return the file of one shard's share."""
    return run / SHARES / f"shard-{shard}.safetensors"


def save_share(folder: Path, shard: int, tensors: ShardTensors, versions: dict[int, str]) -> None:
    """Write one shard's published copies, with the layout and versions.

    Raises:
        StorageError: The file cannot be written.
    """
    copies = {f"fragment.{p}": tensors.whole(p) for p in tensors.owned if p in tensors.fragments}
    metadata = {
        "layout": json.dumps(tensors.plan.layout.to_json()),
        "versions": json.dumps(versions),
    }
    save_weights(share_file(folder, shard), copies, metadata)


def assemble(folder: Path, plan: MergePlan, shards: int) -> Path:
    """Combine the shards' shares into the result.

    Args:
        folder: The run folder.
        plan: The run's merge plan.
        shards: The number of shards S.

    Returns:
        The file with the global weights, under the model's names (including tied ones) and dtypes.

    Raises:
        StorageError: A share is missing or torn, or the file cannot be written.
    """
    named, versions = read_shares(folder, plan, shards)
    result = folder / RESULT
    save_weights(result, named, {"versions": json.dumps(versions)})
    return result


def read_shares(
    folder: Path, plan: MergePlan, shards: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the global weights by the model's names, and the version of each fragment.

    Raises:
        StorageError: A share is missing or torn.
    """
    copies: dict[int, Tensor] = {}
    versions: dict[str, str] = {}
    for shard in range(shards):
        path = share_file(folder, shard)
        try:
            for name, values in load_weights(path).items():
                fragment = int(name.removeprefix("fragment."))
                if values.shape != (plan.fragments[fragment].numel,) or fragment < 0:
                    raise ValueError(f"{name} has the shape {tuple(values.shape)}")
                copies[fragment] = values
            versions |= json.loads(load_metadata(path)["versions"])
        except NOT_JSON as error:
            raise StorageError(f"{path} is not a share of a result: {error!r:.200}") from error
    missing = sorted(set(range(len(plan.fragments))) - copies.keys())
    if missing:
        raise StorageError(
            f"fragments {missing} are missing from the shares below {folder / SHARES}"
        )
    return by_name(plan, copies), versions


def values_in(path: Path, plan: MergePlan, fragments: Iterable[int]) -> dict[int, Tensor]:
    """Return fragments from a file of weights, each fp32 [N].

    Raises:
        StorageError: The file is missing, torn, or of another model.
    """
    weights = load_weights(path)
    tensors = [
        _unknown(spec)
        if spec.is_moment
        else weights.get(spec.name, torch.empty(0, dtype=torch.float32, device="cpu"))
        for spec in plan.layout.tensors
    ]
    for spec, found in zip(plan.layout.tensors, tensors, strict=True):
        if tuple(found.shape) != spec.shape:
            raise StorageError(f"{path} belongs to another model: {spec.name!r} has another shape")
    return {fragment: gather(plan.fragments[fragment], tensors) for fragment in fragments}


def by_name(plan: MergePlan, copies: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of whole copies under the model's names, including tied ones."""
    tensors = [
        torch.empty(s.shape, dtype=DTYPES[s.dtype], device="cpu")
        for s in plan.layout.of_model.tensors
    ]
    for fragment, values in copies.items():
        stop = plan.moments_start(fragment)
        scatter(clipped(plan.fragments[fragment], 0, stop), values[:stop], tensors)
    named: dict[str, Tensor] = {}
    for spec, tensor in zip(plan.layout.of_model.tensors, tensors, strict=True):
        named[spec.name] = tensor
        named |= dict.fromkeys(spec.aliases, tensor)
    return named | {constant.name: constant.tensor() for constant in plan.layout.constants}


def read_layout(folder: Path) -> Layout:
    """Return the run's layout, from the first shard's share.

    Raises:
        StorageError: The share is missing or torn.
    """
    path = share_file(folder, 0)
    try:
        return Layout.from_text(load_metadata(path)["layout"])
    except (KeyError, ProtocolError) as error:
        raise StorageError(f"{path} is not a share of a result: {error}") from error
