"""Encode vectors as bytes, and identify bytes by digests.

A codec encodes an fp32 vector as a payload, which the code calls a body, and decodes it. Payloads
are raw and little-endian, without a header: their size follows from the codec and the number of
elements. `register_codec` adds codecs, including simpler ones of users (`SimpleCodec`).

Shapes:
    N  elements of one fragment
    B  bytes of its payload
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError, ProtocolError, a_kind
from decoupled_diloco.merge.blocks import is_finite

Body = Tensor | bytes | bytearray | memoryview
"""A payload to read: a contiguous tensor of any dtype, or any buffer, writable or not."""


class Codec(Protocol):
    """Encodes fp32 vectors as payloads and decodes them; the same input gives the same bits."""

    @property
    def name(self) -> str:
        """The codec's name in configurations and on the wire."""

    @property
    def group(self) -> int | None:
        """The number of elements encoded together; a payload can be split between groups.

        If each part of a vector except the last holds whole groups, the vector's payload is the
        payloads of its parts, one after the other. 1 if every element is encoded separately; None
        if payloads cannot be split.
        """

    @property
    def is_exact(self) -> bool:
        """Whether it leaves out too little of a vector for error feedback to matter."""

    def nbytes(self, numel: int) -> int:
        """Return B, the size in bytes of a payload of N elements."""

    def encode(self, vector: Tensor, out: Tensor | memoryview | None = None) -> Tensor:
        """Encode a vector.

        Args:
            vector: [N], fp32, on any device.
            out: [B], uint8, writable; a new tensor on the vector's device if None.
        """

    def decode(self, body: Body, numel: int, out: Tensor | None = None) -> Tensor:
        """Decode a payload.

        Args:
            body: The payload, B bytes; its size is checked.
            numel: N.
            out: [N], fp32, to fill; a new tensor on the payload's device if None.

        Raises:
            ProtocolError: The payload's size is not `nbytes(numel)`, or its content is invalid.
        """


class SimpleCodec(Protocol):
    """The minimal interface of a custom codec: a size and two deterministic functions of tensors.

    ``name`` and ``group`` are optional; see `Codec`. Without ``group`` a payload cannot be divided
    among the sync ranks of a learner.
    """

    def nbytes(self, numel: int) -> int:
        """Return B, the number of bytes for N elements, at least 1."""

    def encode(self, vector: Tensor) -> Tensor:
        """Encode a vector, fp32 [N] on any device, as new bytes, uint8 [B]; do not change it."""

    def decode(self, body: Tensor, numel: int) -> Tensor:
        """Decode a payload, uint8 [B] of the right size but any content, as a vector, fp32 [N].

        Any exception rejects the payload. The same bytes must give the same bits on every machine.
        """


class RawCodec:
    """A codec that stores every element in one floating-point dtype, rounded to nearest even.

    Args:
        dtype: fp32 is lossless. bf16 has a relative error of at most 2⁻⁸ (for normal numbers) and
            uses half the bytes.

    Source:
        Decoupled DiLoCo: outer gradients in bf16 train as well as in fp32.
    """

    group = 1
    is_exact = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def nbytes(self, numel: int) -> int:
        return numel * self._dtype.itemsize

    def encode(self, vector: Tensor, out: Tensor | memoryview | None = None) -> Tensor:
        body = room_for(self.nbytes(vector.numel()), out, vector.device)
        if is_aligned(body, self._dtype):
            body.view(self._dtype).copy_(vector)
        else:
            body.copy_(vector.to(self._dtype).view(torch.uint8))
        return body

    def decode(self, body: Body, numel: int, out: Tensor | None = None) -> Tensor:
        source = as_bytes(body)
        check_size(source, self, numel)
        if not is_aligned(source, self._dtype):
            source = source.clone()
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=source.device)
        return out.copy_(source.view(self._dtype))


ABSENT = 0xFF
"""Each byte of an absent moment. In the codecs of moments it is NaN, or has a scale that is NaN."""


def is_absent(octets: Tensor) -> bool:
    """Return whether a moment's bytes mark it as absent."""
    # The first byte alone is decisive in most cases, and costs no pass over the others.
    return int(octets[0]) == ABSENT and bool((octets == ABSENT).all())


class BuffersExact:
    """A codec for a fragment's parameters, with its buffers in fp32 and its moments behind them.

    A rounded table of frequencies would differ from the one that the model was built with, and a
    rounded change could push a falling variance below zero. Buffers are sent as values, because an
    infinite value has no difference.

    Moments are sent as values, too. A moment that is *absent*, because it is not sent or does not
    exist, is NaN. All bytes of its payload are `ABSENT`.

    Args:
        parameters: The codec of the parameters.
        numel: See `parameters_numel`.
        buffer_sizes: The number of elements of each buffer, at least 1; see `packing`.
        moments: The codec of the moments.
        moment_sizes: The number of elements of each moment, at least 1.

    Attributes:
        parameters_numel: The number of elements before the buffers.
        parameters_nbytes: Their size in bytes.
        values_numel: The number of elements before the moments.
        tail_nbytes: The sizes in bytes of each buffer and each moment.
    """

    group = None

    def __init__(
        self,
        parameters: Codec,
        numel: int,
        buffer_sizes: tuple[int, ...] = (),
        moments: Codec | None = None,
        moment_sizes: tuple[int, ...] = (),
    ) -> None:
        self._parameters = parameters
        self.parameters_numel = numel
        self.parameters_nbytes = parameters.nbytes(numel)
        self.buffer_sizes = buffer_sizes
        self.values_numel = numel + sum(buffer_sizes)
        self._buffers = codec("fp32")
        self._moments = moments or self._buffers
        self._moment_sizes = list(moment_sizes)
        self._moment_nbytes = [self._moments.nbytes(size) for size in moment_sizes]
        self.tail_nbytes = [4 * size for size in buffer_sizes] + self._moment_nbytes
        self.name = parameters.name
        self.is_exact = parameters.is_exact

    def nbytes(self, numel: int) -> int:
        moments = sum(self._moment_sizes)
        values = self._buffers.nbytes(numel - self.parameters_numel - moments)
        return self.parameters_nbytes + values + sum(self._moment_nbytes)

    def encode(self, vector: Tensor, out: Tensor | memoryview | None = None) -> Tensor:
        body = room_for(self.nbytes(vector.numel()), out, vector.device)
        cut, start = self.parameters_nbytes, body.numel() - sum(self._moment_nbytes)
        first = vector.numel() - sum(self._moment_sizes)
        self._parameters.encode(vector[: self.parameters_numel], body[:cut])
        self._buffers.encode(vector[self.parameters_numel : first], body[cut:start])
        for values, octets in self._moments_of(vector[first:], body[start:]):
            if bool(values.isfinite().all()):
                self._moments.encode(values, octets)
            else:
                octets.fill_(ABSENT)
        return body

    def decode(self, body: Body, numel: int, out: Tensor | None = None) -> Tensor:
        source, cut = as_bytes(body), self.parameters_nbytes
        check_size(source, self, numel)
        if out is None:
            out = torch.empty(numel, dtype=torch.float32, device=source.device)
        start = source.numel() - sum(self._moment_nbytes)
        first = numel - sum(self._moment_sizes)
        self._parameters.decode(source[:cut], self.parameters_numel, out[: self.parameters_numel])
        self._buffers.decode(
            source[cut:start], first - self.parameters_numel, out[self.parameters_numel : first]
        )
        for values, octets in self._moments_of(out[first:], source[start:]):
            if is_absent(octets):
                values.fill_(math.nan)
            else:
                self._moments.decode(octets, values.numel(), values)
        return out

    def omit_unchanged(self, body: Tensor, values: Tensor, base: Tensor) -> None:
        """Mark the moments of a payload as absent, in place, if they do not change the base.

        Args:
            body: The payload, uint8 [B].
            values: Its decoded elements, fp32 [N].
            base: The elements that the receiver holds, fp32 [N].
        """
        start = body.numel() - sum(self._moment_nbytes)
        first = values.numel() - sum(self._moment_sizes)
        pieces = zip(
            self._moments_of(values[first:], body[start:]),
            torch.split(base[first:], self._moment_sizes),
            strict=True,
        )
        for (own, octets), before in pieces:
            if torch.equal(own, before):
                octets.fill_(ABSENT)

    def _moments_of(self, values: Tensor, octets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the elements and the bytes of each moment."""
        sizes, nbytes = self._moment_sizes, self._moment_nbytes
        return zip(torch.split(values, sizes), torch.split(octets, nbytes), strict=True)


class CustomCodec:
    """Adapter from a `SimpleCodec` to a `Codec`: checks sizes, fills ``out`` and rejects bad input.

    Args:
        name: The codec's name on the wire.
        own: The user's codec.
    """

    is_exact = False

    def __init__(self, name: str, own: SimpleCodec) -> None:
        self.name = name
        self.group: int | None = getattr(own, "group", None)
        self._own = own

    def nbytes(self, numel: int) -> int:
        return self._own.nbytes(numel)

    def encode(self, vector: Tensor, out: Tensor | memoryview | None = None) -> Tensor:
        body = self._own.encode(vector)
        if body.dtype != torch.uint8 or body.shape != (self.nbytes(vector.numel()),):
            raise MergeError(
                f"codec {self.name!r} encoded {vector.numel()} elements as {body.dtype} "
                f"{list(body.shape)}: it must return uint8 [{self.nbytes(vector.numel())}]"
            )
        return body if out is None else room_for(body.numel(), out).copy_(body)

    def decode(self, body: Body, numel: int, out: Tensor | None = None) -> Tensor:
        source = as_bytes(body)
        check_size(source, self, numel)
        source = source.clone()  # `source` may be unaligned or read-only memory
        try:
            vector = self._own.decode(source, numel)
        except Exception as error:
            raise ProtocolError(
                f"codec {self.name!r} cannot decode a payload: {error!r}"
            ) from error
        if vector.dtype != torch.float32 or vector.shape != (numel,):
            raise MergeError(
                f"codec {self.name!r} decoded {vector.dtype} {list(vector.shape)}: it must return "
                f"float32 [{numel}]"
            )
        return vector if out is None else out.copy_(vector)


_codecs: dict[str, Codec] = {}
_families: dict[str, Callable[[str], Codec | None]] = {}


def register_codec(new: Codec | SimpleCodec) -> None:
    """Register a codec under its ``name``, after a trial with a few vectors.

    Raises:
        ConfigError: The name is taken, or the codec violates the contract of `Codec` or
            `SimpleCodec`.
    """
    name = getattr(new, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"codec {new!r} has no name: set its attribute 'name' to a string")
    if name in _codecs:
        raise ConfigError(f"codec '{name}' is already registered: choose another name")
    _codecs[name] = _tried(name, new)


def register_own_codec(name: str, make: Callable[[], Codec | SimpleCodec]) -> None:
    """Register the codec that a user's function returns, unless the name is already registered.

    Args:
        name: The codec's name in configurations and on the wire: ``"module:function"``.
        make: The user's function.

    Raises:
        ConfigError: The function raises an exception, or its result is not a valid codec.
    """
    if name in _codecs:
        return
    try:
        own = make()
    except Exception as error:
        raise ConfigError(
            f"codec '{name}' cannot be created: its function raises {error!r}: correct the function"
        ) from error
    _codecs[name] = _tried(name, own)


def has_codec(name: str) -> bool:
    """Whether a codec of that name exists."""
    return name in _codecs or any(make(name) is not None for make in _families.values())


def own_codecs() -> tuple[object, ...]:
    """Return the registered codecs that are not part of this package."""
    owns = (each._own if isinstance(each, CustomCodec) else each for each in _codecs.values())
    package = __name__.partition(".")[0]
    return tuple(own for own in owns if type(own).__module__.partition(".")[0] != package)


def _tried(name: str, own: Any) -> Codec:
    """Return a codec after a trial with a few vectors.

    Raises:
        ConfigError: The codec fails the trial.
    """
    missing = [m for m in ("nbytes", "encode", "decode") if not callable(getattr(own, m, None))]
    if missing:
        raise ConfigError(
            f"codec '{name}' is {a_kind(own)} without {', '.join(missing)}: return an "
            "object with the methods of decoupled_diloco.merge.SimpleCodec"
        )
    # Only `Codec.encode` has the parameter `out`; `SimpleCodec.encode` does not.
    is_simple = "out" not in inspect.signature(own.encode).parameters
    tried: Codec = CustomCodec(name, own) if is_simple else own
    group = tried.group
    if group is not None and not (type(group) is int and group >= 1):
        raise ConfigError(f"codec '{name}' has group={group!r}: use an integer >= 1, or None")
    # Sizes with a single element, whole groups, and a partial last group.
    for numel in (1, 7, 2 * (group or 1), 3 * (group or 100) + 1):
        vector = torch.linspace(-1, 2, numel, device="cpu", dtype=torch.float32)
        try:
            problem = _problem_of(tried, vector)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise ConfigError(
                f"codec '{name}' fails for {numel} elements: {problem}: correct the codec"
            )
    return tried


def _problem_of(tried: Codec, vector: Tensor) -> str:
    """Return a description of a codec's first fault with a vector [N]; empty if there is none."""
    numel, before = vector.numel(), vector.clone()
    body = tried.encode(vector)
    decoded = tried.decode(body, numel)
    if not torch.equal(vector, before):
        return "encode changed the vector"
    if body.dtype != torch.uint8 or body.shape != (tried.nbytes(numel),):
        return f"a payload is {body.dtype} {list(body.shape)}, not uint8 [{tried.nbytes(numel)}]"
    if decoded.dtype != torch.float32 or decoded.shape != (numel,):
        return f"decode returned {decoded.dtype} {list(decoded.shape)}, not float32 [{numel}]"
    if not is_finite(decoded):
        return "decode returned a value that is not finite"
    if not torch.equal(tried.encode(vector), body) or not torch.equal(
        tried.decode(body, numel), decoded
    ):
        return "a second call returned different bits"
    if tried.group is not None and numel > tried.group:
        cut = max(1, numel // tried.group // 2) * tried.group
        parts = [tried.encode(vector[:cut]), tried.encode(vector[cut:])]
        if not torch.equal(torch.cat(parts), body):
            return f"a payload is not its parts' payloads in order, as group={tried.group} requires"
    return ""


def register_family(pattern: str, make: Callable[[str], Codec | None]) -> None:
    """Register a family of codecs whose names contain a number.

    Args:
        pattern: The form of the names, for messages.
        make: Returns the codec of a name, or None if the name is not in this family.
    """
    _families[pattern] = make


def codec(name: str) -> Codec:
    """Return the codec of a name: see `codec_names`.

    Raises:
        ConfigError: No codec has that name; the message contains the closest match.
    """
    if name in _codecs:
        return _codecs[name]
    for make in _families.values():
        found = make(name)
        if found is not None:
            return found
    near = get_close_matches(name, _codecs, n=1, cutoff=0.0)[0]
    known = ", ".join([*_codecs, *_families])
    raise ConfigError(
        f"codec '{name}' is unknown: did you mean '{near}'? Known codecs: {known}. (For a custom "
        "codec write 'module:function', or register it in a module of run.imports.)"
    )


def codec_names() -> tuple[str, ...]:
    """Return the names of all registered codecs, without families such as ``topk-<k>``.

    >>> {"fp32", "bf16"} <= set(codec_names())
    True
    """
    return tuple(_codecs)


def add_built_in(new: Codec) -> None:
    """Register a codec of this package without a trial, so that an import computes nothing."""
    assert new.name not in _codecs, f"codec '{new.name}' is already registered"
    _codecs[new.name] = new


add_built_in(RawCodec("fp32", torch.float32))
add_built_in(RawCodec("bf16", torch.bfloat16))


def digest(body: Body) -> str:
    """Return the xxh3-128 of a payload, as 32 hex digits, without a copy.

    The digest detects accidents, not attacks: a process that can write the payload can also write
    the matching digest.

    Examples:
        >>> digest(b"decoupled")
        '0984748b2e711515551990b516c749e3'
    """
    return xxhash.xxh3_128_hexdigest(as_bytes(body).numpy().data)


DIGEST_NUMEL = 1 << 16
"""Number of elements of a fragment per block digest, so that parts of it can be verified."""


@contextmanager
def digested_by(numel: int) -> Iterator[None]:
    """Set `DIGEST_NUMEL` to a smaller number within a ``with`` block, for tiny models."""
    global DIGEST_NUMEL
    before, DIGEST_NUMEL = DIGEST_NUMEL, numel
    try:
        yield
    finally:
        DIGEST_NUMEL = before


def is_cuttable(codec: Codec) -> bool:
    """Whether a payload can be split after every `DIGEST_NUMEL` elements."""
    return codec.group is not None and DIGEST_NUMEL % codec.group == 0


def block_ranges(numel: int, count: int) -> tuple[tuple[int, int], ...]:
    """Divide elements 0 to N into `count` ranges of whole blocks; the last ones may be empty."""
    blocks = -(-numel // DIGEST_NUMEL)
    cuts = [min(numel, -(-blocks * n // count) * DIGEST_NUMEL) for n in range(count + 1)]
    return tuple(pairwise(cuts))


def block_digests(body: Body, codec: Codec) -> bytes:
    """Return the xxh3-128 of each block of `DIGEST_NUMEL` elements of a payload, concatenated.

    A payload that cannot be split is one block. If each part of a payload except the last ends at
    the end of a block, the concatenated block digests of the parts are those of the payload.
    """
    octets = as_bytes(body).numpy().data
    step = codec.nbytes(DIGEST_NUMEL) if is_cuttable(codec) else max(1, len(octets))
    cuts = range(0, len(octets), step)
    return b"".join(xxhash.xxh3_128_digest(octets[cut : cut + step]) for cut in cuts)


def joined_digest(blocks: bytes) -> str:
    """Return the digest of a whole payload: its only block digest, or the digest of all of them.

    Examples:
        >>> joined_digest(block_digests(b"decoupled", codec("fp32"))) == digest(b"decoupled")
        True
    """
    return blocks.hex() if 0 < len(blocks) <= 16 else digest(blocks)


def body_digest(body: Body, codec: Codec) -> str:
    """Return the digest of a payload that its sender announces to the receiver."""
    return joined_digest(block_digests(body, codec))


def values_digest(values: Tensor) -> str:
    """Return the digest by which both sides identify a fragment's values, fp32 [N]."""
    return body_digest(values, _codecs["fp32"])


def as_bytes(body: Body) -> Tensor:
    """View a payload as a flat uint8 tensor over the same memory, without a copy.

    If the buffer is read-only, the caller must not write to the result.
    """
    if isinstance(body, Tensor):
        assert body.is_contiguous(), "bytes are read from contiguous tensors"
        return body.detach().view(-1).view(torch.uint8)
    array = np.frombuffer(body, dtype=np.uint8)
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))  # PyTorch has no read-only tensors and would warn
    return torch.from_numpy(array)


def room_for(
    size: int, out: Tensor | memoryview | None, device: torch.device | None = None
) -> Tensor:
    """Return `out`, or new memory on a device, as a uint8 tensor [size]."""
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=device)
    assert isinstance(out, Tensor) or not out.readonly, "out is a read-only buffer"
    body = as_bytes(out)
    assert body.numel() == size, f"out has {body.numel()} bytes, the payload has {size}"
    return body


class _Writable:
    """Presents a read-only array as writable to NumPy, and keeps it alive."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def is_aligned(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether the bytes of a tensor can be viewed as elements of that dtype."""
    size, offset = dtype.itemsize, values.storage_offset() * values.itemsize
    return values.data_ptr() % size == 0 and offset % size == 0


def bf16_of(octets: Tensor) -> Tensor:
    """Read bytes [n, 2m], aligned or not, as bf16 numbers and return them as fp32 [n, m]."""
    return octets.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def check_size(source: Tensor, codec: Codec, numel: int) -> None:
    """Raise ProtocolError unless a payload [B] has the codec's size for N elements."""
    if source.numel() != codec.nbytes(numel):
        raise ProtocolError(
            f"payload has {source.numel()} bytes, codec '{codec.name}' requires "
            f"{codec.nbytes(numel)} for {numel} elements"
        )


if sys.byteorder != "little":
    raise ConfigError(
        f"byte order '{sys.byteorder}' is not supported: payloads are little-endian, use a "
        "little-endian machine"
    )
