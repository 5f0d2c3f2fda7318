"""Split a layout into fragments, and copy fragments between tensors and flat vectors.

`partition` assigns *pieces* (a tensor and an element range) to `P` fragments, every element exactly
once. A fragment is sent and merged as one flat vector: its pieces, one after the other. `segments`
returns the element ranges of that vector with their merge methods.

Shapes:
    P  fragments
    N  elements of one fragment
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge.layout import DTYPES, Layout, TensorSpec
from decoupled_diloco.merge.memory import is_wrapper

T = TypeVar("T")

Strategy = Literal["balanced", "tensor", "layer-strided", "layer-sequential"]
MergeMethod = Literal["rda", "mean", "own"]
SegmentMerge = Literal["rda", "mean", "buffer", "one", "own", "moment"]
Buffers = Literal["mean", "one"]


@dataclass(frozen=True)
class Piece:
    """Elements `start <= i < stop` of the flattened tensor `layout.tensors[tensor]`."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    """Pieces that are synchronized together, one after the other, as one flat vector [N]."""

    index: int
    pieces: tuple[Piece, ...]

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """The number of elements of each piece."""
        return [piece.numel for piece in self.pieces]

    @cached_property
    def tensors(self) -> list[int]:
        """The index of each piece's tensor in the layout."""
        return [piece.tensor for piece in self.pieces]

    @cached_property
    def known(self) -> dict[object, tuple[Layout, Any]]:
        """Cache of values derived from the fragment and a layout: see `_once`."""
        return {}


@dataclass(frozen=True)
class Segment:
    """Elements `start <= i < stop` of a flat fragment that are merged as one vector.

    A `"buffer"` segment is merged by the mean of values, not of changes, and has no norm. If a mean
    is not valid (see `accumulate`), it is taken from a single contribution. A `"one"` segment is
    always taken from the contribution with the largest weight. An `"own"` segment is merged by the
    user's rule (see `rules`). A `"moment"` segment is merged by the mean of the values of those
    contributions that have it.
    """

    start: int
    stop: int
    merge: SegmentMerge
    shape: tuple[int, ...] = ()  # of an "own" segment that is a whole tensor

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_value(self) -> bool:
        """Whether its values are merged, and not its changes: buffers or a moment."""
        return self.merge in ("buffer", "one", "moment")


def merges_elementwise(spec: TensorSpec) -> bool:
    """Return whether splitting the tensor leaves its merge unchanged, as with a plain mean."""
    return spec.role == "embedding"


def partition(
    layout: Layout,
    fragments: int,
    strategy: Strategy = "balanced",
    splittable: bool | Callable[[TensorSpec], bool] = merges_elementwise,
) -> tuple[Fragment, ...]:
    """Split a layout into fragments deterministically; every element is in exactly one of them.

    - `"balanced"` (default): each tensor, in descending order of size, goes into the smallest bin.
      The buffers of one module stay together, so that values taken from one learner are
      consistent. A tensor larger than a fair share `total / P` is first split into parts of that
      size and a rest, between leading rows if rows are small. Splittable tensors are then spread
      over the smallest bins. The largest fragment is at most 4/3 of the optimum.
    - `"tensor"`: whole tensors in turn; uneven.
    - `"layer-strided"`, `"layer-sequential"`: whole layers, with fragment = layer mod P, or with
      consecutive layers together; bursty. A layer is a name up to its first number (`blocks.3`).
      Tensors outside any layer are grouped by the module that owns them.

    Args:
        fragments: P.
        splittable: With `"balanced"`: the tensors that merge element-wise and may be split
            anywhere. The default is the embedding. True means all tensors, which is right for a
            plain mean. A function decides per tensor. False forbids any split, even of a tensor
            larger than a fair share.

    Raises:
        ConfigError: P < 1, or the layout cannot be split into P fragments.

    Source:
        Decoupled DiLoCo, Appendix C. Splitting single tensors is our addition: if tensors stay
        whole, one large embedding determines the peak.
    """
    if fragments < 1:
        raise ConfigError(f"fragments={fragments} is below 1: use at least one fragment")
    match strategy:
        case "balanced":
            bins = _balanced(layout, fragments, splittable)
        case "tensor":
            groups = [[index] for index in range(len(layout.tensors))]
            bins = _whole_groups(layout, groups, fragments, "tensors", strided=True)
        case "layer-strided" | "layer-sequential":
            strided = strategy == "layer-strided"
            bins = _whole_groups(layout, _layers(layout), fragments, "layers", strided=strided)
        case _:
            raise ConfigError(
                f"strategy='{strategy}' is unknown: use one of {', '.join(get_args(Strategy))}"
            )
    return tuple(Fragment(index, _in_order(pieces)) for index, pieces in enumerate(bins))


def mapped(layout: Layout, modules: Sequence[Sequence[str]]) -> tuple[Fragment, ...]:
    """Split a layout by a user's map: one fragment for each list of modules.

    Args:
        modules: Lists of names. A name, such as `blocks.0`, selects the tensor or module of that
            name and everything below it. `*`, `?` and `[...]` match as in file names. A tensor
            belongs to the first list that selects it.

    Raises:
        ConfigError: A tensor is in no list, or a list selects no tensor.

    Source:
        torchft's DiLoCo takes a list of modules; the selection by name is our addition.
    """
    bins: list[list[Piece]] = [[] for _ in modules]
    for index, spec in enumerate(layout.tensors):
        for pieces, names in zip(bins, modules, strict=True):
            if any(_is_or_is_below(spec.name, name) for name in names):
                pieces.append(Piece(index, 0, spec.numel))
                break
        else:
            raise ConfigError(
                f"fragment_map does not select the tensor {spec.name!r}: add it or its module to "
                "one of the lists, or end the last list with '*'"
            )
    for index, pieces in enumerate(bins):
        if not pieces:
            raise ConfigError(
                f"fragment_map: no tensor is left for list {index}, {list(modules[index])}: use "
                f"modules of the model, such as {_layer_name(layout.tensors[0].name)!r}, that no "
                "earlier list selects"
            )
    return tuple(Fragment(index, _in_order(pieces)) for index, pieces in enumerate(bins))


def with_moments(fragments: Sequence[Fragment], layout: Layout) -> tuple[Fragment, ...]:
    """Add to each fragment the moments of its parameters' elements, after all other pieces."""
    firsts = range(len(layout.of_model.tensors), len(layout.tensors), layout.trained)
    return tuple(
        Fragment(
            each.index,
            each.pieces
            + tuple(
                Piece(first + piece.tensor, piece.start, piece.stop)
                for first in firsts
                for piece in each.pieces
                if piece.tensor < layout.trained
            ),
        )
        for each in fragments
    )


def _is_or_is_below(tensor: str, name: str) -> bool:
    return fnmatchcase(tensor, name) or fnmatchcase(tensor, f"{name}.*")


def _balanced(
    layout: Layout, fragments: int, splittable: bool | Callable[[TensorSpec], bool]
) -> list[list[Piece]]:
    """Put each tensor, or part of one, into the smallest bin; then spread the splittable ones."""
    if splittable is False:
        limit, unit, fix = len(layout.tensors), "tensors", "or allow tensors to be split"
    else:
        limit, unit, fix = layout.numel, "elements", "or train a larger model"
    if fragments > limit:
        raise ConfigError(
            f"fragments={fragments} exceeds {unit}={limit} of the layout: "
            f"lower fragments to at most {limit}, {fix}"
        )
    pourable = [
        splittable if isinstance(splittable, bool) else splittable(spec) for spec in layout.tensors
    ]
    by_size = sorted(range(len(layout.tensors)), key=lambda i: (-layout.tensors[i].numel, i))
    together = [] if splittable is False else _buffers_together(layout, fragments)
    for group in together:
        for index in group:
            pourable[index] = False
    grouped = {index for group in together for index in group}
    parts = [
        [part]
        for index in by_size
        if not pourable[index] and index not in grouped
        for part in _cut(layout, index, fragments if splittable is not False else 1)
    ]
    parts += [[Piece(i, 0, layout.tensors[i].numel) for i in group] for group in together]
    bins: list[list[Piece]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    smallest_first = [(0, p) for p in range(fragments)]
    for part in sorted(parts, key=lambda part: (-_numel(part), part[0].tensor, part[0].start)):
        _, p = smallest_first[0]
        bins[p] += part
        loads[p] += _numel(part)
        heapq.heapreplace(smallest_first, (loads[p], p))
    for index in by_size:
        if pourable[index]:
            _pour(layout, index, fragments, bins, loads)
    return bins


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _buffers_together(layout: Layout, fragments: int) -> list[list[int]]:
    """Return the buffers of each module that has several, if together they fit a fair share."""
    owned: dict[str, list[int]] = {}
    for index, spec in enumerate(layout.tensors):
        if spec.is_buffer:
            owned.setdefault(spec.name.rpartition(".")[0], []).append(index)
    return [
        group
        for group in owned.values()
        if len(group) > 1
        and sum(layout.tensors[index].numel for index in group) * fragments <= layout.numel
    ]


def _cut(layout: Layout, index: int, fragments: int) -> list[Piece]:
    """Return a tensor as one piece, or as fair shares and a rest if it exceeds a fair share."""
    spec = layout.tensors[index]
    if spec.numel * fragments <= layout.numel:
        return [Piece(index, 0, spec.numel)]
    unit = _unit(spec, layout.numel, fragments)
    part = layout.numel // (fragments * unit) * unit
    cuts = [*range(0, spec.numel, part), spec.numel]
    return [Piece(index, start, stop) for start, stop in pairwise(cuts)]


def _pour(
    layout: Layout, index: int, fragments: int, bins: list[list[Piece]], loads: list[int]
) -> None:
    """Spread a tensor over the bins so that the smallest bins fill up first."""
    spec = layout.tensors[index]
    unit = _unit(spec, layout.numel, fragments)
    start = 0
    for p, count in enumerate(_water_fill(loads, spec.numel // unit, unit)):
        if count:
            stop = start + count * unit
            bins[p].append(Piece(index, start, stop))
            loads[p] += stop - start
            start = stop
    assert start == spec.numel


def _unit(spec: TensorSpec, total: int, fragments: int) -> int:
    """Return the unit of a split: a leading row if it is small against a fair share, otherwise 1.

    "Small" means at most 1/16 of a fair share, so that whole rows still balance well.
    """
    row = math.prod(spec.shape[1:])
    return row if 16 * row * fragments <= total else 1


def _water_fill(loads: Sequence[int], count: int, unit: int) -> list[int]:
    """Distribute `count` units of size `unit`, each into the bin that is smallest at that time."""
    low, high = min(loads), max(loads) + count * unit
    while low < high:  # binary search for the highest level that the units can fill
        level = (low + high + 1) // 2
        if sum(max(0, level - load) // unit for load in loads) <= count:
            low = level
        else:
            high = level - 1
    filled = [max(0, low - load) // unit for load in loads]
    rest = count - sum(filled)
    smallest = sorted(range(len(loads)), key=lambda p: (loads[p] + filled[p] * unit, p))
    for p in smallest[:rest]:
        filled[p] += 1
    return filled


def _layers(layout: Layout) -> list[list[int]]:
    """Return tensor indices by layer, with layers in the order of their first tensors."""
    groups: dict[str, list[int]] = {}
    for index, spec in enumerate(layout.tensors):
        groups.setdefault(_layer_name(spec.name), []).append(index)
    return list(groups.values())


def _layer_name(name: str) -> str:
    """Truncate a name after its first integer component, or before its last component.

    >>> _layer_name("blocks.3.attention.query.weight"), _layer_name("norm.weight")
    ('blocks.3', 'norm')
    """
    components = name.split(".")
    for position, component in enumerate(components):
        if component.isdecimal():
            return ".".join(components[: position + 1])
    return ".".join(components[:-1]) or name


def _whole_groups(
    layout: Layout, groups: list[list[int]], fragments: int, unit: str, *, strided: bool
) -> list[list[Piece]]:
    """Assign whole groups of tensors, in turn or consecutively."""
    if fragments > len(groups):
        raise ConfigError(
            f"fragments={fragments} exceeds {unit}={len(groups)} of the layout: lower fragments to "
            f"at most {len(groups)}, or use strategy='balanced', which can split tensors"
        )
    bins: list[list[Piece]] = [[] for _ in range(fragments)]
    for position, group in enumerate(groups):
        p = position % fragments if strided else position * fragments // len(groups)
        bins[p] += [Piece(index, 0, layout.tensors[index].numel) for index in group]
    return bins


def _in_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Sort pieces in layout order and join adjacent ones."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.start)):
        if joined and joined[-1].tensor == piece.tensor and joined[-1].stop == piece.start:
            piece = Piece(piece.tensor, joined.pop().start, piece.stop)
        joined.append(piece)
    return tuple(joined)


def segments(
    fragment: Fragment, layout: Layout, method: MergeMethod, buffers: Buffers = "mean"
) -> tuple[Segment, ...]:
    """Return the element ranges of the flat fragment with their merge methods.

    Args:
        method: With `"rda"` each piece is a separate vector, merged by RDA, except that embeddings
            are merged by a plain mean. With `"mean"` all parameters are merged by one mean. With
            `"own"` each piece is merged by the user's rule. The buffers come last; see `buffers`.
        buffers: With `"mean"` each buffer is a segment, merged by the mean of its values; those of
            a parametrization are taken from one learner. With `"one"` all are taken from one.

    Source:
        Decoupled DiLoCo: a plain weighted mean for the embedding, RDA for all other tensors.
    """
    key = (segments, method, buffers)
    return _once(fragment, layout, key, lambda: _segments(fragment, layout, method, buffers))


def _segments(
    fragment: Fragment, layout: Layout, method: MergeMethod, buffers: Buffers
) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for start, stop, piece in _spans(fragment):
        spec = layout.tensors[piece.tensor]
        merge = _merge_of(spec, method, buffers)
        if found and merge == found[-1].merge and merge in ("mean", "one"):
            start = found.pop().start
        whole = merge == "own" and piece.numel == spec.numel
        found.append(Segment(start, stop, merge, spec.shape if whole else ()))
    return tuple(found)


def _merge_of(spec: TensorSpec, method: MergeMethod, buffers: Buffers) -> SegmentMerge:
    if spec.is_moment:
        return "moment"
    if spec.is_buffer:
        return "buffer" if buffers == "mean" and spec.role == "buffer" else "one"
    return "mean" if merges_elementwise(spec) and method != "own" else method


def parameters_numel(fragment: Fragment, layout: Layout) -> int:
    """Return the number of parameter elements of a flat fragment; buffers and moments follow."""
    specs = layout.tensors
    return _once(
        fragment,
        layout,
        parameters_numel,
        lambda: sum(p.numel for p in fragment.pieces if not specs[p.tensor].is_value),
    )


def _once(fragment: Fragment, layout: Layout, key: object, make: Callable[[], T]) -> T:
    """Return a value derived from a fragment and its layout, computed once for all rounds."""
    known = fragment.known.get(key)
    if known is None or known[0] is not layout:
        known = fragment.known[key] = (layout, make())
    found: T = known[1]
    return found


def buffer_sizes(fragment: Fragment, layout: Layout) -> tuple[int, ...]:
    """Return the number of elements of each nonempty buffer, or buffer piece, of a fragment."""
    return tuple(p.numel for p in fragment.pieces if layout.tensors[p.tensor].is_buffer and p.numel)


def moment_sizes(fragment: Fragment, layout: Layout) -> tuple[int, ...]:
    """Return the number of elements of each piece of a moment in a fragment."""
    specs = layout.tensors
    return _once(
        fragment,
        layout,
        moment_sizes,
        lambda: tuple(p.numel for p in fragment.pieces if specs[p.tensor].is_moment),
    )


def clipped(fragment: Fragment, start: int, stop: int) -> Fragment:
    """Return elements `start <= i < stop` of the flat fragment as a fragment."""
    pieces = []
    for first, end, piece in _spans(fragment):
        low, high = max(first, start), min(end, stop)
        if low < high:
            pieces.append(
                Piece(piece.tensor, piece.start + low - first, piece.start + high - first)
            )
    return Fragment(fragment.index, tuple(pieces))


@dataclass(frozen=True)
class Views:
    """A fragment's pieces as flat views of its tensors.

    With thousands of small tensors, creating the views takes as long as the rest of a step's work.
    A caller that copies a fragment repeatedly therefore keeps them and passes them to `views_of`.
    """

    fragment: Fragment
    owners: list[Tensor]
    addresses: list[int]
    pieces: list[Tensor]
    kinds: frozenset[tuple[torch.dtype, torch.device]]

    @property
    def devices(self) -> set[torch.device]:
        return {device for _, device in self.kinds}

    def hold_for(self, fragment: Fragment, owners: Sequence[Tensor]) -> bool:
        """Whether these are still the fragment's tensors, with the same memory."""
        return (
            self.fragment is fragment
            and all(map(is_, self.owners, owners))
            and list(map(Tensor.data_ptr, owners)) == self.addresses
            and all(map(Tensor.is_contiguous, owners))
        )


def views_of(
    fragment: Fragment, tensors: Sequence[Tensor], before: Views | None = None
) -> Views | None:
    """Return flat views of a fragment's pieces; None if a tensor has no such view.

    Args:
        tensors: The tensors of the layout, in its order.
        before: The result of the previous call; it is returned again if it is still valid.
    """
    owners = [tensors[number] for number in fragment.tensors]
    if before is not None and before.hold_for(fragment, owners):
        return before
    if not _are_plain(owners) or not all(map(Tensor.is_contiguous, owners)):
        return None
    with torch.no_grad():
        pieces = _pieces(fragment, tensors)
    kinds = frozenset((piece.dtype, piece.device) for piece in pieces)
    return Views(fragment, owners, list(map(Tensor.data_ptr, owners)), pieces, kinds)


def gather(
    fragment: Fragment,
    tensors: Sequence[Tensor],
    out: Tensor | None = None,
    views: Views | None = None,
) -> Tensor:
    """Copy a fragment's pieces into one flat vector.

    Args:
        tensors: The tensors of the layout, in its order; any floating dtype, device and strides.
        out: Vector [N] to fill, any floating dtype and device; a new fp32 one on the CPU if None.
        views: The result of `views_of` for these tensors.
    """
    if out is None:
        out = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
    assert out.shape == (fragment.numel,), f"out has shape {tuple(out.shape)}"
    with torch.no_grad():
        pieces = _pieces(fragment, tensors) if views is None else views.pieces
        devices = set(map(attrgetter("device"), pieces)) if views is None else views.devices
        if devices == {out.device}:
            torch.cat(pieces, out=out)  # one call for any number of small tensors
        else:
            for (start, stop, _), piece in zip(_spans(fragment), pieces, strict=True):
                out[start:stop].copy_(piece)
    return out


def scatter(
    fragment: Fragment, flat: Tensor, tensors: Sequence[Tensor], views: Views | None = None
) -> None:
    """Copy a flat vector back into the tensors, in place, rounding to each tensor's dtype.

    Args:
        flat: Vector [N], any floating dtype and device.
        tensors: The tensors of the layout, in its order; may be leaves that require gradients.
        views: The result of `views_of` for these tensors.
    """
    assert flat.shape == (fragment.numel,), f"flat has shape {tuple(flat.shape)}"
    views = views_of(fragment, tensors) if views is None else views
    with torch.no_grad():
        if views is None:
            _scatter_one_by_one(fragment, flat, tensors)
        elif views.kinds == {(flat.dtype, flat.device)}:
            torch.split_with_sizes_copy(flat, fragment.sizes, out=views.pieces)
        elif views.pieces:
            torch._foreach_copy_(views.pieces, list(flat.split_with_sizes(fragment.sizes)))


def _scatter_one_by_one(fragment: Fragment, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat vector into tensors that are wrapped or have no flat view."""
    for piece, source in zip(fragment.pieces, flat.split_with_sizes(fragment.sizes), strict=True):
        tensor = tensors[piece.tensor].detach()
        if tensor.is_contiguous() and not is_wrapper(tensor):
            _part(tensor.view(-1), piece).copy_(source)
        else:
            # The elements have no flat view, so write to a flat copy and copy it back.
            whole = _flat(tensor).clone()
            whole[piece.start : piece.stop].copy_(source)
            tensor.copy_(whole.view(tensor.shape))


def _pieces(fragment: Fragment, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each piece as a flat vector: a view if the strides allow it, otherwise a copy."""
    owners = [tensors[number] for number in fragment.tensors]
    # A model may have ten thousand small tensors, and every step runs this code. `map` keeps the
    # loops over them in C.
    if not _are_plain(owners):
        return [
            _part(_flat(owner.detach()), piece)
            for owner, piece in zip(owners, fragment.pieces, strict=True)
        ]
    flat = list(map(Tensor.ravel, owners))
    if list(map(Tensor.numel, flat)) != fragment.sizes:  # some pieces cover only part of a tensor
        flat = [_part(each, piece) for each, piece in zip(flat, fragment.pieces, strict=True)]
    return flat


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these are ordinary tensors; a subclass may store its elements elsewhere."""
    return set(map(type, tensors)) <= {Tensor, Parameter}


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements in order: a view if the strides allow it, otherwise a copy."""
    if is_wrapper(tensor):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.reshape(-1)


def _part(flat: Tensor, piece: Piece) -> Tensor:
    # Slicing costs as much as copying a small tensor, and most pieces are whole tensors.
    return flat if piece.numel == flat.numel() else flat[piece.start : piece.stop]


def cast_like(
    fragment: Fragment, layout: Layout, flat: Tensor, out: Tensor | None = None
) -> Tensor:
    """Round every element to the dtype of its tensor.

    The result is what `gather` would return after `scatter` of `flat`, without access to a model.

    Args:
        flat: Vector [N], fp32.
        out: Vector [N], fp32, to fill; may be `flat` itself; a new one if None.
    """
    assert flat.shape == (fragment.numel,), f"flat has shape {tuple(flat.shape)}"
    if out is None:
        out = torch.empty_like(flat)
    for start, stop, dtype in dtype_runs(fragment, layout):
        source, target = flat[start:stop], out[start:stop]
        target.copy_(source if dtype.itemsize >= 4 else source.to(dtype))
    return out


def dtype_runs(fragment: Fragment, layout: Layout) -> list[tuple[int, int, torch.dtype]]:
    """Return the element ranges of the flat fragment that share a dtype, in order."""
    return _once(fragment, layout, dtype_runs, lambda: _dtype_runs(fragment, layout))


def _dtype_runs(fragment: Fragment, layout: Layout) -> list[tuple[int, int, torch.dtype]]:
    runs: list[tuple[int, int, torch.dtype]] = []
    for start, stop, piece in _spans(fragment):
        dtype = DTYPES[layout.tensors[piece.tensor].dtype]
        if runs and runs[-1][2] == dtype:
            start = runs.pop()[0]
        runs.append((start, stop, dtype))
    return runs


def _spans(fragment: Fragment) -> Iterator[tuple[int, int, Piece]]:
    """Yield the start and stop of each piece in the flat fragment, with the piece."""
    start = 0
    for piece in fragment.pieces:
        yield start, start + piece.numel, piece
        start += piece.numel
