"""A learner's state as one learner gives it to another: a head, and bytes in chunks.

The head is JSON: what the tensors are and where they lie in the bytes, the rest of the state as
`storage.states` packs it, and the digest of each chunk. Its own digest travels on the control
plane.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import digest
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.storage.states import pack, unpack
from decoupled_diloco.transport.ranges import chunk_sizes

ALIGNMENT = 16


@dataclass
class StateBlob:
    """A state that was copied to the host.

    Attributes:
        text: Everything of it but its tensors.
        tensors: Name, dtype, shape and offset of each tensor in ``data``.
        data: Their bytes, uint8 [B]; never written to again.
    """

    text: str
    tensors: list[tuple[str, str, list[int], int]]
    data: Tensor

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateBlob:
        """Copies a state as it is now.

        Raises:
            ConfigError: It cannot be packed.
        """
        tensors, text = pack(dict(state))
        places: list[tuple[str, str, list[int], int]] = []
        nbytes = 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append((name, dtype, list(tensor.shape), nbytes))
            size = tensor.numel() * tensor.element_size()
            nbytes += math.ceil(size / ALIGNMENT) * ALIGNMENT
        data = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        for (_, _, _, offset), tensor in zip(places, tensors.values(), strict=True):
            _view(data, tensor.dtype, list(tensor.shape), offset).copy_(tensor)
        return cls(text, places, data)

    def chunks(self) -> list[Tensor]:
        """Views of the bytes, in order."""
        return list(torch.split(self.data, list(chunk_sizes(self.data.numel()))))

    def head(self) -> bytes:
        """The head, with the digests of all chunks."""
        digests = [digest(chunk) for chunk in self.chunks()]
        return json.dumps([self.text, self.tensors, digests]).encode()

    @classmethod
    def open(cls, head: bytes, nbytes: int) -> tuple[StateBlob, list[str]]:
        """An empty blob with this head, to be filled, and the digests of its chunks.

        Raises:
            StorageError: The head does not fit so many bytes.
        """
        try:
            text, tensors, digests = json.loads(head)
            blob = cls(
                str(text),
                [tuple(place) for place in tensors],
                torch.empty(0, dtype=torch.float32, device="cpu"),
            )
            ends = [
                offset + math.prod(shape) * getattr(torch, dtype).itemsize
                for _, dtype, shape, offset in blob.tensors
            ]
            least = min((min(offset, *shape, 0) for _, _, shape, offset in blob.tensors), default=0)
            fits = max(ends, default=0) <= nbytes and least == 0
            fits = fits and len(digests) == len(chunk_sizes(nbytes))
        except NOT_JSON as error:
            raise StorageError(f"a donor's head cannot be read: {error!r}") from error
        if not fits:
            raise StorageError(f"a donor's head does not fit the {nbytes} bytes that it announced")
        try:
            blob.data = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise StorageError(f"no memory for a donor's {nbytes} bytes: {error}") from error
        return blob, digests

    def state(self) -> Any:
        """The state, its tensors views of the bytes.

        Raises:
            StorageError: It is not one.
        """
        try:
            tensors = {
                name: _view(self.data, getattr(torch, dtype), shape, offset)
                for name, dtype, shape, offset in self.tensors
            }
            return unpack(tensors, self.text)
        except (RuntimeError, *NOT_JSON) as error:
            raise StorageError(f"a donor's state cannot be read: {error!r}") from error


def _view(data: Tensor, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return data[offset : offset + size].view(dtype).view(shape)
