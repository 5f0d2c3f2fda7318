"""A codec that sends only the largest elements of each chunk.

A chunk has 4,096 elements. "topk" sends k = 80 of them, "topk-40" sends 40; k is a multiple of 4
from 4 to 1,024. The record of a chunk has ``4 + 7k/4`` bytes:

1. two levels, a and b, in bf16;
2. the indices of the k elements with the largest absolute values, ascending, 12 bits each;
3. their codes, 2 bits each.

The first index and the first code are in the lowest bits of their first bytes. Bit 0 of a code is
the sign. Bit 1 selects ±b (1) or ±a (0): it is set for elements above the mean of the k absolute
values. b is the mean of these elements and a is the mean of the rest. Both are computed in fp32 and
rounded to the nearest bf16; the mean of no elements is 0. Among equal elements any may be sent. All
elements that are not sent decode to 0.

A vector's payload is the records of its chunks, one after the other. A partial last chunk has a
full record, padded with zeros after its elements. A payload whose indices do not ascend is
rejected.

*Error feedback* requires that a decoded chunk is closer to the original than zeros are. A chunk
satisfies ``‖x - dec‖² ≤ ‖x‖² - (1 - 2⁻¹⁵) · max(x)²/k``, if a and b are normal numbers. Without
error feedback the codec is of little use.

*Non-finite values.* A chunk with a NaN or an infinity decodes to k values of which some are not
finite, and is rejected. The same holds if the sum of the k elements leaves fp32's range. An element
decodes to ±a or ±b exactly as stored, so every machine and device decodes the same bits.

Source: SparseLoCo (1 to 3 % of the elements of chunks of 4,096, two bits each, error feedback).

Shapes:
    N  elements of a vector
    C  chunks of 4,096 elements of one block
"""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.merge.codec import add_built_in, bf16_of, register_family
from decoupled_diloco.merge.grouped import GroupedCodec

CHUNK = 4096
"""Number of elements per chunk."""

K = 80
"""Number of elements per chunk that "topk" sends: 2 %."""

K_MAX = 1024


class TopKCodec(GroupedCodec):
    """The codec that this module describes.

    Args:
        name: See `Codec.name`.
        k: Number of elements per chunk to send: 4 to 1,024, a multiple of 4.

    Raises:
        ConfigError: `k` is out of range or not a multiple of 4.
    """

    def __init__(self, name: str, k: int) -> None:
        if not (4 <= k <= K_MAX and k % 4 == 0):
            raise ConfigError(
                f"codec '{name}' would send {k} of {CHUNK} elements: use a multiple of 4 from 4 "
                f"to {K_MAX}"
            )
        super().__init__(name, CHUNK, 4 + 3 * k // 2 + k // 4)
        self.k = k

    def _write(self, groups: Tensor, records: Tensor, elements: int) -> None:
        sizes = groups.abs()
        chosen = _largest(sizes, self.k)
        values = groups.gather(1, chosen)
        sizes = values.abs()
        high = sizes > sizes.mean(1, keepdim=True)
        levels = torch.stack([_mean(sizes, ~high), _mean(sizes, high)], 1)
        codes = (values < 0) + 2 * high.to(torch.uint8)
        cut = 4 + 3 * self.k // 2
        records[:, :4] = levels.bfloat16().view(torch.uint8)
        records[:, 4:cut] = _packed_indices(chosen)
        fours = codes.view(len(codes), -1, 4)
        records[:, cut:] = (
            fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
        )

    def _read(self, records: Tensor, groups: Tensor) -> None:
        cut = 4 + 3 * self.k // 2
        levels = bf16_of(records[:, :4])
        chosen = _unpacked_indices(records[:, 4:cut])
        if not bool((chosen[:, 1:] > chosen[:, :-1]).all()):  # break: topk-slot-twice
            raise ProtocolError(f"a payload of codec '{self.name}' has indices that do not ascend")
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=records.device)
        codes = (records[:, cut:, None] >> shifts & 3).flatten(1)
        values = levels.gather(1, (codes >> 1).long())
        values = torch.where((codes & 1).bool(), -values, values)
        groups.zero_().scatter_(1, chosen, values)


def _mean(sizes: Tensor, which: Tensor) -> Tensor:
    """Return the mean of the selected elements of each row, [C, k] to [C]; 0 if none is selected.

    It is not finite if any element of the row is not finite: NaN or inf times 0 is NaN.
    """
    return (sizes * which).sum(1) / which.sum(1).clamp_(min=1)


def _largest(sizes: Tensor, k: int) -> Tensor:
    """Return the ascending indices, int64 [C, k], of the k largest of each chunk [C, 4096]."""
    if sizes.device.type != "cpu":
        return sizes.topk(k, 1, sorted=False).indices.sort(1).values
    array = sizes.numpy()
    # A full partition of each chunk is slow. So each chunk is split into at least 2k strided parts.
    # At least k elements reach the k-th largest of the parts' maxima: only those are candidates.
    parts = 1 << (2 * k - 1).bit_length()
    maxima = sizes.view(-1, CHUNK // parts, parts).amax(1).numpy()
    least = np.partition(maxima, parts - k, 1)[:, parts - k, None]
    where = _set_bits(~np.packbits(array < least, bitorder="little"))  # NaN counts as the largest
    rows, columns = where >> CHUNK.bit_length() - 1, where & CHUNK - 1
    values, counts = array.reshape(-1)[where], np.bincount(rows, minlength=len(array))
    filled = np.arange(counts.max()) < counts[:, None]
    candidates = np.full(filled.shape, -1, np.float32)
    candidates[filled] = values
    chosen = ~(values < np.partition(candidates, -k, 1)[rows, -k])
    if np.count_nonzero(chosen) > k * len(array):  # ties with the k-th largest: keep exactly k
        found = np.zeros(filled.shape, np.int64)
        found[filled] = columns
        best = np.argpartition(candidates, -k, 1)[:, -k:]
        return torch.from_numpy(np.sort(np.take_along_axis(found, best, 1), 1))
    return torch.from_numpy(columns[chosen].reshape(-1, k))


def _set_bits(octets: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the ascending indices of the set bits, lowest bit first; fast for sparse input."""
    some = np.flatnonzero(octets != 0)
    bits = np.flatnonzero(np.unpackbits(octets[some], bitorder="little").view(np.bool_))
    indices: NDArray[np.int64] = (some[bits >> 3] << 3) + (bits & 7)
    return indices


def _packed_indices(chosen: Tensor) -> Tensor:
    """Pack indices below 4,096, int64 [C, k], into bytes [C, 3k/2]."""
    pairs = chosen.int().view(len(chosen), -1, 2)
    both = pairs[..., 0] | pairs[..., 1] << 12
    return both.view(torch.uint8).view(len(chosen), -1, 4)[..., :3].flatten(1)


def _unpacked_indices(octets: Tensor) -> Tensor:
    """Unpack bytes [C, 3k/2] into indices, int64 [C, k]."""
    threes = octets.long().view(len(octets), octets.shape[1] // 3, 3)
    low, middle, high = threes.unbind(2)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), 2).flatten(1)


def _topk(name: str) -> TopKCodec | None:
    """Return the codec of a name such as "topk-40", which sends 40 of each 4,096 elements."""
    found = re.fullmatch("topk-([1-9][0-9]{0,8})", name)
    return TopKCodec(name, int(found[1])) if found else None


add_built_in(TopKCodec("topk", K))
register_family("topk-<k>", _topk)
