"""Pack payloads: leave out the buffers that have not changed, and absent moments.

A fragment's payload is its parameters in their codec, followed by its buffers in fp32. Masks and
tables never change, and both sides hold a published version with the same bits. A packed payload
omits each buffer that has the bits of that version, the *base*:

    parameters | one bit per buffer and moment, set if it is included | those included

The first buffer's bit is the lowest bit of the first byte. Unused bits are 0. A moment is omitted
if it is absent (see `codec.BuffersExact`), whatever the base. A payload that would not become
shorter is not packed, so the size shows whether a payload is packed. An unpacked payload
has exactly its original bits, so digests and merges do not depend on packing.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate, compress, pairwise, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge.codec import ABSENT, Body, BuffersExact, Codec, as_bytes, codec

_Array = np.ndarray[Any, Any]


def packed_sizes(wire: Codec, numel: int) -> range:
    """Return the sizes in bytes that a payload of N elements can have, packed or not."""
    most = wire.nbytes(numel)
    if not isinstance(wire, BuffersExact):
        return range(most, most + 1)
    return range(min(most, _carried_at(wire)), most + 1)


def packed(body: Tensor, base: Tensor | None, codec: Codec) -> Tensor:
    """Leave out the buffers that have the bits of the base, and absent moments.

    Args:
        body: The payload, uint8 [B], on the CPU; not changed.
        base: The buffers of the version that the receiver holds, fp32, flat, contiguous; None if
            the fragment has none.
        codec: The codec of the fragment.

    Returns:
        A shorter payload, or `body` itself.
    """
    if not isinstance(codec, BuffersExact) or not codec.tail_nbytes:
        return body
    octets = as_bytes(body).numpy()
    parameters, tail = octets[: codec.parameters_nbytes], _Tail(codec, base)
    own = octets[codec.parameters_nbytes :]
    is_carried = np.asarray(
        [not np.array_equal(own[each], tail.omitted(each)) for each in tail.slices], dtype=bool
    )
    flags = np.packbits(is_carried, bitorder="little")
    carried = [own[each] for each in compress(tail.slices, is_carried)]
    if parameters.size + flags.size + sum(each.size for each in carried) >= octets.size:
        return body
    return torch.from_numpy(np.concatenate([parameters, flags, *carried]))


def unpacked(body: Body, base: Tensor | None, codec: Codec) -> Body:
    """Restore the buffers that a packed payload omits.

    Args:
        body: The payload, packed or not, not validated yet.
        base: As for `packed`; None if it is not known.
        codec: The codec of the fragment.

    Raises:
        ProtocolError: `body` is not a valid payload of this fragment, or the base is not known.
    """
    if not isinstance(codec, BuffersExact) or not codec.tail_nbytes:
        return body
    octets, sizes = as_bytes(body).numpy(), np.asarray(codec.tail_nbytes)
    start, most = codec.parameters_nbytes, codec.parameters_nbytes + int(sizes.sum())
    if octets.size == most:
        return body
    if not _carried_at(codec) <= octets.size < most:
        raise ProtocolError(
            f"packed payload has {octets.size} bytes, the fragment requires {_carried_at(codec)} "
            f"to {most}"
        )
    flags = np.unpackbits(octets[start : _carried_at(codec)], bitorder="little").astype(bool)
    is_carried, unused = flags[: sizes.size], flags[sizes.size :]
    expected = _carried_at(codec) + int(sizes[is_carried].sum())
    if unused.any():
        raise ProtocolError(
            f"packed payload includes more buffers than the fragment has ({sizes.size})"
        )
    if octets.size != expected:
        raise ProtocolError(
            f"packed payload has {octets.size} bytes, its parameters and buffers require {expected}"
        )
    if base is None and not is_carried[: len(codec.buffer_sizes)].all():
        raise ProtocolError("packed payload omits buffers, but its base version is not known")
    whole, tail = np.empty(most, dtype=np.uint8), _Tail(codec, base)
    whole[:start] = octets[:start]
    position = _carried_at(codec)
    for each, carried in zip(tail.slices, is_carried, strict=True):
        nbytes = each.stop - each.start
        target = whole[start + each.start : start + each.stop]
        target[:] = octets[position : position + nbytes] if carried else tail.omitted(each)
        position += nbytes if carried else 0
    return torch.from_numpy(whole)


class _Tail:
    """The buffers and moments behind a payload's parameters.

    Args:
        codec: The codec of the fragment.
        base: The buffers of the base, fp32; None: an omitted buffer cannot be restored.

    Attributes:
        slices: The bytes of each, from the end of the parameters.
    """

    def __init__(self, codec: BuffersExact, base: Tensor | None) -> None:
        stops = list(accumulate(codec.tail_nbytes))
        self.slices = list(starmap(slice, pairwise([0, *stops])))
        self._buffers = 4 * sum(codec.buffer_sizes)
        self._base = None if base is None else as_bytes(base).numpy()

    def omitted(self, part: slice) -> _Array:
        """Return the bytes of a buffer or moment that a payload omits."""
        if part.start >= self._buffers:
            return np.full(part.stop - part.start, ABSENT, dtype=np.uint8)
        assert self._base is not None, "only moments are omitted without a base"
        return self._base[part]


class BufferHistory:
    """The buffers of a fragment's newest version and of earlier ones.

    For each earlier version it stores only the buffers that the next version changed, so masks and
    tables use no extra memory.

    Args:
        sizes: The number of elements of each buffer.
        earlier: The number of earlier versions to keep.
    """

    def __init__(self, sizes: tuple[int, ...], earlier: int) -> None:
        self._codec = BuffersExact(codec("fp32"), 0, sizes)
        self._earlier = earlier
        # Oldest first; each version is packed, and its base is the version after it.
        self._before: dict[Hashable, Tensor] = {}
        self._newest: tuple[Hashable, Tensor] | None = None

    def add(self, version: Hashable, buffers: Tensor) -> Tensor | None:
        """Add the newest version. The caller must not change its buffers afterwards.

        Returns:
            The buffers of the previous version, if any.
        """
        before, self._newest = self._newest, (version, buffers)
        if before is None:
            return None
        octets = as_bytes(before[1])
        left = packed(octets, buffers, self._codec)
        # If packing saves nothing, `packed` returns its input: a clone keeps the history
        # independent of the tensor that is returned to the caller.
        self._before[before[0]] = left.clone() if left is octets else left
        while len(self._before) > self._earlier:
            del self._before[next(iter(self._before))]
        return before[1]

    def of(self, version: Hashable) -> Tensor | None:
        """Return the buffers of a version, fp32, flat; None if it is not known."""
        if self._newest is None:
            return None
        later, buffers = self._newest
        for earlier, left in reversed(self._before.items()):
            if later == version:
                break
            later, buffers = (
                earlier,
                as_bytes(unpacked(left, buffers, self._codec)).view(torch.float32),
            )
        return buffers if later == version else None


def _carried_at(codec: BuffersExact) -> int:
    """Return the offset in bytes of what a packed payload includes behind its parameters."""
    return codec.parameters_nbytes - (-len(codec.tail_nbytes) // 8)
