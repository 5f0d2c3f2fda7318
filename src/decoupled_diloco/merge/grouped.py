"""Base class of codecs that encode elements in groups, each group as a separate record.

Shapes:
    N  elements of a vector
    G  groups of one block
    R  bytes of a record
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoupled_diloco.merge.codec import Body, as_bytes, check_size, room_for

STEP = 2**19
"""Number of elements per step: 2 MiB of fp32, which stay in a CPU cache."""


class GroupedCodec:
    """A `Codec` that encodes groups of elements. The subclass defines the format of a record.

    A vector's payload is the records of its groups, one after the other. A partial last group has a
    full record, padded with zeros after its elements.

    Args:
        name: See `Codec.name`.
        group: Number of elements per group; must divide `STEP`.
        record: R, the bytes per group.
    """

    is_exact = False

    def __init__(self, name: str, group: int, record: int) -> None:
        self.name = name
        self.group = group
        self.record = record

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.group) * self.record

    def encode(self, vector: Tensor, out: Tensor | memoryview | None = None) -> Tensor:
        body = room_for(self.nbytes(vector.numel()), out, vector.device)
        records, whole = body.view(-1, self.record), vector.numel() // self.group
        for low in range(0, whole, STEP // self.group):
            high = min(low + STEP // self.group, whole)
            groups = vector[low * self.group : high * self.group].view(-1, self.group)
            self._write(groups, records[low:high], self.group)
        if whole < len(records):
            last = vector.new_zeros(1, self.group)
            rest = vector.numel() - whole * self.group
            last[0, :rest] = vector[whole * self.group :]
            self._write(last, records[whole:], rest)
        return body

    def decode(self, body: Body, numel: int, out: Tensor | None = None) -> Tensor:
        source = as_bytes(body)
        check_size(source, self, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=source.device)
        records, whole = source.view(-1, self.record), numel // self.group
        for low in range(0, whole, STEP // self.group):
            high = min(low + STEP // self.group, whole)
            groups = out[low * self.group : high * self.group].view(-1, self.group)
            self._read(records[low:high], groups)
        if whole < len(records):
            last = out.new_empty(1, self.group)
            self._read(records[whole:], last)
            out[whole * self.group :] = last[0, : numel - whole * self.group]
        return out

    def _write(self, groups: Tensor, records: Tensor, elements: int) -> None:
        """Encode groups, fp32 [G, group], into records, uint8 [G, R].

        Only the first ``elements`` of each group are of the vector; zeros follow.
        """
        raise NotImplementedError

    def _read(self, records: Tensor, groups: Tensor) -> None:
        """Decode records, uint8 [G, R], into groups, fp32 [G, group].

        Raises:
            ProtocolError: A record is invalid.
        """
        raise NotImplementedError
