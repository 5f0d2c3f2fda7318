"""A codec that sends the largest elements of each chunk, and nothing of the others.

A chunk is 4,096 elements, and k of them are sent: 80 by "topk", 40 by "topk-40", a multiple of 4
from 4 to 1,024. Its record, of ``4 + 7k/4`` bytes, holds two levels, a and b, in bf16; the indices
of the k elements of largest absolute value, ascending, 12 bits each; and their codes, 2 bits each.
Of indices and codes the first is in the lowest bits of the first byte. A code is 1 for a negative
element, and 2 more for one that stands for ±b in the place of ±a. Those above the mean of the k
absolute values do: b is their own mean, a that of the rest, both computed in fp32 and rounded to
the nearest bf16, and 0 is the mean of none. Of equal elements any may be sent. All others decode
to 0. A vector's body is its chunks' records, one after the other; a last chunk that is not full has
a whole record, with zeros behind its elements. A body whose indices do not ascend is refused.

*Error feedback* needs a chunk to be nearer to what it stands for than nothing is. A chunk keeps
``‖x - dec‖² ≤ ‖x‖² - (1 - 2⁻¹⁵) · max(x)²/k``, if a and b are normal numbers. Without error
feedback the codec is of little use.

*Not finite.* A chunk with NaN or an infinity in it decodes to k values of which some are not
finite, and is refused. So is one in which the sum of the k leaves fp32's range. An element is ±a or
±b as it stands in the record, so every machine and device decodes the same bits.

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
"""Elements of which the largest are sent."""

K = 80
"""How many of them "topk" sends: 2 %."""

K_MAX = 1024


class TopKCodec(GroupedCodec):
    """See the module.

    Args:
        name: See `Codec.name`.
        k: Elements of a chunk that are sent: 4 to 1,024, a multiple of 4.

    Raises:
        ConfigError: It is not.
    """

    def __init__(self, name: str, k: int) -> None:
        if not (4 <= k <= K_MAX and k % 4 == 0):
            raise ConfigError(
                f"codec '{name}' would send {k} of {CHUNK} elements: take a multiple of 4 from 4 "
                f"to {K_MAX}"
            )
        super().__init__(name, CHUNK, 4 + 3 * k // 2 + k // 4)
        self.k = k

    def _write(self, groups: Tensor, records: Tensor) -> None:
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
            raise ProtocolError(f"a body of codec '{self.name}' has indices that do not ascend")
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=records.device)
        codes = (records[:, cut:, None] >> shifts & 3).flatten(1)
        values = levels.gather(1, (codes >> 1).long())
        values = torch.where((codes & 1).bool(), -values, values)
        groups.zero_().scatter_(1, chosen, values)


def _mean(sizes: Tensor, which: Tensor) -> Tensor:
    """The mean of some of each row, [C, k] to [C]; 0 of none; not finite if one is not."""
    return (sizes * which).sum(1) / which.sum(1).clamp_(min=1)


def _largest(sizes: Tensor, k: int) -> Tensor:
    """The indices, int64 [C, k], ascending, of the k largest of each chunk, fp32 [C, 4096]."""
    if sizes.device.type != "cpu":
        return sizes.topk(k, 1, sorted=False).indices.sort(1).values
    array = sizes.numpy()
    # A chunk is cut into 2k or more parts, each of elements that are that far apart. k elements are
    # as large as the k-th largest of the parts' maxima, and only what is as large is looked at.
    parts = 1 << (2 * k - 1).bit_length()
    maxima = sizes.view(-1, CHUNK // parts, parts).amax(1).numpy()
    least = np.partition(maxima, parts - k, 1)[:, parts - k, None]
    where = _set_bits(~np.packbits(array < least, bitorder="little"))  # NaN counts as the largest
    rows, columns = where >> CHUNK.bit_length() - 1, where & CHUNK - 1
    values, counts = array.reshape(-1)[where], np.bincount(rows, minlength=len(array))
    there = np.arange(counts.max()) < counts[:, None]
    candidates = np.full(there.shape, -1, np.float32)
    candidates[there] = values
    chosen = ~(values < np.partition(candidates, -k, 1)[rows, -k])
    if np.count_nonzero(chosen) > k * len(array):  # others are as large as the k-th
        found = np.zeros(there.shape, np.int64)
        found[there] = columns
        best = np.argpartition(candidates, -k, 1)[:, -k:]
        return torch.from_numpy(np.sort(np.take_along_axis(found, best, 1), 1))
    return torch.from_numpy(columns[chosen].reshape(-1, k))


def _set_bits(octets: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The indices of the ones, ascending; fast where most octets are 0. The lowest bit is first."""
    some = np.flatnonzero(octets != 0)
    bits = np.flatnonzero(np.unpackbits(octets[some], bitorder="little").view(np.bool_))
    indices: NDArray[np.int64] = (some[bits >> 3] << 3) + (bits & 7)
    return indices


def _packed_indices(chosen: Tensor) -> Tensor:
    """Indices below 4,096, int64 [C, k], as bytes [C, 3k/2]."""
    pairs = chosen.int().view(len(chosen), -1, 2)
    both = pairs[..., 0] | pairs[..., 1] << 12
    return both.view(torch.uint8).view(len(chosen), -1, 4)[..., :3].flatten(1)


def _unpacked_indices(octets: Tensor) -> Tensor:
    """The inverse: bytes [C, 3k/2] as indices, int64 [C, k]."""
    threes = octets.long().view(len(octets), octets.shape[1] // 3, 3)
    low, middle, high = threes.unbind(2)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), 2).flatten(1)


def _topk(name: str) -> TopKCodec | None:
    """The codec of a name such as "topk-40", which sends 40 of each 4,096 elements."""
    found = re.fullmatch("topk-([1-9][0-9]{0,8})", name)
    return TopKCodec(name, int(found[1])) if found else None


add_built_in(TopKCodec("topk", K))
register_family("topk-<k>", _topk)
