"""Which parameters each rank of a learner holds.

Every rank describes its own tensors. Together the descriptions give the logical layout, which
equals that of an unsharded model, and the boxes (`redistribute.Box`) into which it is sharded:

- FSDP2, HSDP, tensor parallel and combinations have DTensors.
- DDP has plain tensors on every rank.
- Pipeline stages have tensors on some ranks only.

A model may consist of several modules: the pipeline stages of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.learner_model import Model, parts_of
from decoupled_diloco.merge import Layout, layout_of
from decoupled_diloco.merge.layout import Constant, TensorSpec, named_tensors
from decoupled_diloco.ranks.redistribute import Box, Sharding


@dataclass(frozen=True)
class RankModel:
    """One rank's part of a learner's model.

    Attributes:
        layout: The logical tensors of all ranks.
        sharding: Which rank holds which elements.
        tensors: For each tensor of the layout, this rank's parameter or buffer, or ``None``.
        counted: The ranks whose tokens count: one of each set that trains the same data.
    """

    layout: Layout
    sharding: Sharding
    tensors: tuple[Tensor | None, ...]
    counted: tuple[int, ...]


def sharded_modules(module: Model) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards, in module order."""
    return [
        each for part in parts_of(module) for each in part.modules() if isinstance(each, FSDPModule)
    ]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Make FSDP2 hold its shards: after an evaluation, the root module holds whole parameters."""
    for each in modules:
        each.reshard()


def data_of(module: Model, rank: int) -> list[Any]:
    """Return a key of the data that this rank trains. Ranks with the same key count once.

    Ranks of DDP and of FSDP2's mesh (shards and replicas) are data-parallel; ranks of a
    tensor-parallel mesh are not. A model of plain tensors without DDP counts as data-parallel: the
    training loop is expected to average it over the ranks. `joined` corrects this for pipeline
    stages.
    """
    for each in (each for part in parts_of(module) for each in part.modules()):
        if isinstance(each, nn.parallel.DistributedDataParallel):
            return ["ddp", dist.get_rank(each.process_group)]
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()  # no public function returns the mesh
            group = state._fsdp_param_group
            if group is not None:
                return ["fsdp", *(group.mesh_info.mesh.get_coordinate() or [])]
    if any(isinstance(p, DTensor) for part in parts_of(module) for p in part.parameters()):
        return ["tensor parallel"]
    return ["rank", rank]


def refuse_placements(module: nn.Module) -> None:
    """Reject parameters whose local values are only summands of the real value.

    Raises:
        ConfigError: A trainable parameter is placed as `Partial`.
    """
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor) and any(
            isinstance(placement, Partial) for placement in parameter.placements
        ):
            raise ConfigError(
                f"parameter {name!r} is placed as {parameter.placements}: a Partial parameter has "
                "no values on any rank; redistribute it to Shard or Replicate"
            )


def described(module: nn.Module, wrapped: Model, rank: int) -> dict[str, Any]:
    """Return this rank's description for the others: layout, boxes and key of its data.

    Args:
        module: The model without its wrappers (`plain`).
        wrapped: The model as it was passed.
        rank: This rank.

    Raises:
        ConfigError: See `refuse_placements` and `layout_of`.
    """
    refuse_placements(module)
    layout = layout_of(module)
    named = named_tensors(module)
    boxes = [_box_of(named[spec.name]) for spec in layout.tensors]
    parts = list(enumerate(parts_of(module)))
    part_with = {
        id(tensor): number
        for number, part in reversed(parts)  # a tied tensor belongs to the first part
        for tensor in (*part.parameters(), *part.buffers())
    }
    return {
        "layout": layout.to_json(),
        "data": data_of(wrapped, rank),
        "boxes": [None if box is None else [box.start, box.stop] for box in boxes],
        "parts": [part_with[id(named[spec.name])] for spec in layout.tensors],
    }


def _box_of(tensor: Tensor) -> Box | None:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box.whole(shape)
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) > 1:
        raise ConfigError(
            f"a tensor of shape {shape} is placed as {tensor.placements}, in {len(chunks)} boxes "
            "on one rank: one box per rank is supported"
        )
    if not chunks or not tensor.to_local().numel():
        return None
    start, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    return Box(start, tuple(first + size for first, size in zip(start, sizes, strict=True)))


def joined(
    module: nn.Module, all_described: Sequence[dict[str, Any]], sync_ranks: tuple[int, ...]
) -> RankModel:
    """Return the learner's model from the descriptions of its ranks.

    Raises:
        ConfigError: The ranks do not fit together. The message has the first difference and rank.
    """
    layouts = [Layout.from_json(each["layout"]) for each in all_described]
    layout = _union(layouts, [each["parts"] for each in all_described])
    boxes: list[tuple[Box | None, ...]] = []
    where = [{spec.name: n for n, spec in enumerate(each.tensors)} for each in layouts]
    for spec in layout.tensors:
        found: list[Box | None] = []
        for own, each in zip(where, all_described, strict=True):
            box = each["boxes"][own[spec.name]] if spec.name in own else None
            found.append(None if box is None else Box(tuple(box[0]), tuple(box[1])))
        boxes.append(tuple(found))
    sharding = Sharding(tuple(spec.shape for spec in layout.tensors), tuple(boxes), sync_ranks)
    missing = sharding.missing()
    if missing is not None:
        raise ConfigError(
            f"tensor {layout.tensors[missing].name!r} is not complete on the {len(layouts)} ranks "
            "of this learner: the process group must contain all ranks of the model's mesh, and no "
            "others"
        )
    named = named_tensors(module)
    tensors = tuple(named.get(spec.name) for spec in layout.tensors)
    staged = any(each.fingerprint != layout.fingerprint for each in layouts)
    return RankModel(layout, sharding, tensors, _counted(all_described, staged=staged))


def _counted(all_described: Sequence[dict[str, Any]], *, staged: bool) -> tuple[int, ...]:
    """Return the first rank of each set that trains the same data.

    Args:
        staged: The ranks have different tensors. All ranks with plain tensors are then stages of
            one pipeline, which train the same data.
    """
    first: dict[str, int] = {}
    for rank, each in enumerate(all_described):
        kind = each["data"][0]
        data = kind if kind == "rank" and staged else str(each["data"])
        first.setdefault(data, rank)
    return tuple(first.values())


def _union(layouts: Sequence[Layout], parts: Sequence[Sequence[int]]) -> Layout:
    """Return one layout from ranks with equal layouts, or from stages without common tensors.

    If a rank has several stages, the first stages of all ranks come before the second ones, as in a
    looped schedule. So the order is that of the whole model.

    Args:
        parts: For each rank, the number of the part that contains each tensor.

    Raises:
        ConfigError: Two ranks have some common tensors, but different layouts.
    """
    tensors: dict[str, tuple[int, TensorSpec]] = {}
    constants: dict[str, Constant] = {}
    excluded: dict[str, None] = {}
    stages: list[tuple[int, Layout]] = []
    for rank, layout in enumerate(layouts):
        names = {spec.name for spec in layout.tensors}
        for first, stage in stages:
            if not names.isdisjoint(spec.name for spec in stage.tensors):
                difference = stage.describe_difference(layout)
                if difference is not None:
                    raise ConfigError(
                        f"ranks {first} (ours) and {rank} (theirs) have different models: "
                        f"{difference}. All ranks must have the same tensors, or none in common, "
                        "as pipeline stages have"
                    )
                break
        else:
            stages.append((rank, layout))
            found = zip(parts[rank], layout.tensors, strict=True)
            tensors.update((spec.name, (part, spec)) for part, spec in found)
            constants.update((constant.name, constant) for constant in layout.constants)
            excluded.update(dict.fromkeys(layout.excluded))
    ordered = [spec for _, spec in sorted(tensors.values(), key=itemgetter(0))]
    parameters = [spec for spec in ordered if not spec.is_buffer]
    buffers = [spec for spec in ordered if spec.is_buffer]
    return Layout((*parameters, *buffers), tuple(excluded), tuple(constants.values()))
