"""Bodies without the buffers that have not changed.

A fragment's body is its parameters in their codec, then its buffers in fp32. Masks and tables never
change, and both sides hold a published version with the same bits. A packed body leaves out each
buffer that has the bits of that version, the *base*:

    parameters | one bit per buffer, set: it is carried | the carried buffers, fp32

The bits begin with the lowest of the first byte; unused ones are 0. A body that would not become
shorter is sent as it is, so that the size shows which of the two it is. Unpacked, a body has
exactly the bits that it had before, so digests and merges do not depend on packing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge.codec import Body, BuffersExact, Codec, as_bytes, codec

_Array = np.ndarray[Any, Any]


def packed_sizes(wire: Codec, numel: int) -> range:
    """The sizes in bytes that a body of N elements can have, packed or not."""
    most = wire.nbytes(numel)
    if not isinstance(wire, BuffersExact):
        return range(most, most + 1)
    return range(min(most, _carried_at(wire)), most + 1)


def packed(body: Tensor, base: Tensor, codec: Codec) -> Tensor:
    """Leave out the buffers that have the bits of the base.

    Args:
        body: uint8 [B], on the CPU, in the codec; not changed.
        base: The buffers of the version that the receiver holds, fp32, flat, contiguous.
        codec: The fragment's.

    Returns:
        A shorter body, or the same one.
    """
    if not isinstance(codec, BuffersExact) or not codec.buffer_sizes:
        return body
    octets = as_bytes(body).numpy()
    parameters = octets[: codec.parameters_nbytes]
    values = octets[codec.parameters_nbytes :].view(np.uint32)
    sizes = np.asarray(codec.buffer_sizes)
    is_carried = np.logical_or.reduceat(values != _bits(base), np.cumsum(sizes) - sizes)
    carried = values[np.repeat(is_carried, sizes)].view(np.uint8)
    flags = np.packbits(is_carried, bitorder="little")
    if parameters.size + flags.size + carried.size >= octets.size:
        return body
    return torch.from_numpy(np.concatenate([parameters, flags, carried]))


def unpacked(body: Body, base: Tensor | None, codec: Codec) -> Body:
    """Put the buffers back that a body leaves out.

    Args:
        body: Bytes, packed or not, never trusted.
        base: As for `packed`; None: not known.
        codec: The fragment's.

    Raises:
        ProtocolError: It is not a packed body of this fragment, or the base is not known.
    """
    if not isinstance(codec, BuffersExact) or not codec.buffer_sizes:
        return body
    octets, sizes = as_bytes(body).numpy(), np.asarray(codec.buffer_sizes)
    start, most = codec.parameters_nbytes, codec.parameters_nbytes + 4 * int(sizes.sum())
    if octets.size == most:
        return body
    if not _carried_at(codec) <= octets.size < most:
        raise ProtocolError(
            f"packed body has {octets.size} bytes, the fragment needs {_carried_at(codec)} to "
            f"{most}"
        )
    flags = np.unpackbits(octets[start : _carried_at(codec)], bitorder="little").astype(bool)
    is_carried, unused = flags[: sizes.size], flags[sizes.size :]
    wanted = _carried_at(codec) + 4 * int(sizes[is_carried].sum())
    if unused.any():
        raise ProtocolError(f"packed body names more buffers than the fragment has ({sizes.size})")
    if octets.size != wanted:
        raise ProtocolError(
            f"packed body has {octets.size} bytes, the buffers that it names need {wanted}"
        )
    if base is None:
        raise ProtocolError(
            "packed body leaves buffers out, but the version that it was made from is not known"
        )
    whole = np.empty(most, dtype=np.uint8)
    whole[:start] = octets[:start]
    values = whole[start:].view(np.uint32)
    values[:] = _bits(base)
    values[np.repeat(is_carried, sizes)] = octets[_carried_at(codec) :].view(np.uint32)
    return torch.from_numpy(whole)


class BufferHistory:
    """The buffers of a fragment's newest version and of earlier ones.

    Of each earlier version it holds only what the next one has changed, so that masks and tables
    cost nothing.

    Args:
        sizes: The elements of each buffer.
        earlier: How many earlier versions to keep.
    """

    def __init__(self, sizes: tuple[int, ...], earlier: int) -> None:
        self._codec = BuffersExact(codec("fp32"), 0, sizes)
        self._earlier = earlier
        self._before: dict[Hashable, Tensor] = {}  # oldest first: packed, the base is the next one
        self._newest: tuple[Hashable, Tensor] | None = None

    def add(self, version: Hashable, buffers: Tensor) -> Tensor | None:
        """Add the newest version; its buffers are not written to again.

        Returns:
            The buffers of the version before it, if there is one.
        """
        before, self._newest = self._newest, (version, buffers)
        if before is None:
            return None
        octets = as_bytes(before[1])
        left = packed(octets, buffers, self._codec)
        self._before[before[0]] = left.clone() if left is octets else left
        while len(self._before) > self._earlier:
            del self._before[next(iter(self._before))]
        return before[1]

    def of(self, version: Hashable) -> Tensor | None:
        """The buffers of a version, fp32, flat; None if it is not known."""
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
    """Where the carried buffers begin in a packed body."""
    return codec.parameters_nbytes - (-len(codec.buffer_sizes) // 8)


def _bits(values: Tensor) -> _Array:
    """Values as integers, so that NaN equals itself and 0 differs from -0."""
    bits: _Array = as_bytes(values).numpy().view(np.uint32)
    return bits
