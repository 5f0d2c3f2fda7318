"""What the ranks of one learner hold of its model.

Every rank lists its own tensors; what they say together is the logical layout, the same as a plain
model's, and the boxes (`boxes.Box`) in which it is cut. FSDP2, HSDP, tensor parallel and mixtures
say it by their DTensors, DDP by plain tensors on every rank, pipeline stages by tensors that only
some ranks have.

A model may be several modules: the parts of a pipeline that one rank has.
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
        layout: The logical tensors, of all ranks.
        sharding: Which rank holds what.
        tensors: For each tensor of the layout, this rank's own parameter or buffer, or ``None``.
        counted: The ranks whose tokens count: one of those that train the same data.
    """

    layout: Layout
    sharding: Sharding
    tensors: tuple[Tensor | None, ...]
    counted: tuple[int, ...]


def sharded_modules(module: Model) -> list[FSDPModule]:
    """Lists the modules that FSDP2 shards, in module order."""
    return [
        each for part in parts_of(module) for each in part.modules() if isinstance(each, FSDPModule)
    ]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Makes FSDP2 hold its shards: after an evaluation, the root module holds whole parameters."""
    for each in modules:
        each.reshard()


def data_of(module: Model, rank: int) -> list[Any]:
    """Says which data this rank trains: ranks that say the same train the same, and count once.

    Data-parallel are the ranks of DDP and of FSDP2's mesh (a shard or a replica each); not those of
    a tensor-parallel mesh. A model of plain tensors without DDP is taken to be averaged over the
    ranks by the training loop itself; of a pipeline's stages `joined` knows better.
    """
    for each in (each for part in parts_of(module) for each in part.modules()):
        if isinstance(each, nn.parallel.DistributedDataParallel):
            return ["ddp", dist.get_rank(each.process_group)]
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()  # it has no public name
            group = state._fsdp_param_group
            if group is not None:
                return ["fsdp", *(group.mesh_info.mesh.get_coordinate() or [])]
    if any(isinstance(p, DTensor) for part in parts_of(module) for p in part.parameters()):
        return ["tensor parallel"]
    return ["rank", rank]


def refuse_placements(module: nn.Module) -> None:
    """Refuses what is in parts that only add up.

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
                f"parameter {name!r} is placed as {parameter.placements}: what is Partial has no "
                "values of its own; redistribute it to Shard or Replicate"
            )


def described(module: nn.Module, wrapped: Model, rank: int) -> dict[str, Any]:
    """What this rank tells the others: its layout, a box of each tensor, which data it trains.

    Args:
        module: The model without its wrappers (`plain`).
        wrapped: The model as it was given.
        rank: This one.

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
        for number, part in reversed(parts)  # what is tied belongs to the first
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
            "on one rank: one box a rank is supported"
        )
    if not chunks or not tensor.to_local().numel():
        return None
    start, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    return Box(start, tuple(first + size for first, size in zip(start, sizes, strict=True)))


def joined(
    module: nn.Module, all_described: Sequence[dict[str, Any]], carriers: tuple[int, ...]
) -> RankModel:
    """The learner's model from what its ranks have described.

    Raises:
        ConfigError: The ranks do not fit together; the first difference and the rank are named.
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
    sharding = Sharding(tuple(spec.shape for spec in layout.tensors), tuple(boxes), carriers)
    missing = sharding.missing()
    if missing is not None:
        raise ConfigError(
            f"tensor {layout.tensors[missing].name!r} is not whole on the {len(layouts)} ranks of "
            "this learner: all ranks of its mesh have to be in the process group, and nobody else"
        )
    named = named_tensors(module)
    tensors = tuple(named.get(spec.name) for spec in layout.tensors)
    staged = any(each.fingerprint != layout.fingerprint for each in layouts)
    return RankModel(layout, sharding, tensors, _counted(all_described, staged=staged))


def _counted(all_described: Sequence[dict[str, Any]], *, staged: bool) -> tuple[int, ...]:
    first: dict[str, int] = {}
    for rank, each in enumerate(all_described):
        kind = each["data"][0]
        data = kind if kind == "rank" and staged else str(each["data"])
        first.setdefault(data, rank)
    return tuple(first.values())


def _union(layouts: Sequence[Layout], parts: Sequence[Sequence[int]]) -> Layout:
    """One layout: that of every rank, or that of stages which have no tensor in common.

    Of several stages a rank, the first of every rank come before the second, as a looped schedule
    has them: the order is that of the whole model.

    Args:
        parts: For each rank, in which of its parts each tensor is.
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
                        f"{difference}. Ranks have the same tensors, or none in common as the "
                        "stages of a pipeline"
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
