"""What all codecs have in common that code elements in groups, each group in a record of its own.

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
"""Elements worked on at a time: 2 MiB of fp32, which stay in a cache."""


class GroupedCodec:
    """A codec by groups: see `Codec`. What is in a record is the subclass's.

    A vector's body is its groups' records, one after the other. A last group that is not full has a
    whole record, with zeros behind its elements.

    Args:
        name: See `Codec.name`.
        group: Elements of a group; `STEP` is a multiple.
        record: R, the bytes of a group.
    """

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
            self._write(groups, records[low:high])
        if whole < len(records):
            last = vector.new_zeros(1, self.group)
            last[0, : vector.numel() - whole * self.group] = vector[whole * self.group :]
            self._write(last, records[whole:])
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

    def _write(self, groups: Tensor, records: Tensor) -> None:
        """Writes the records, uint8 [G, R], of groups, fp32 [G, group]."""
        raise NotImplementedError

    def _read(self, records: Tensor, groups: Tensor) -> None:
        """Writes the groups, fp32 [G, group], of records, uint8 [G, R].

        Raises:
            ProtocolError: No group has such a record.
        """
        raise NotImplementedError
