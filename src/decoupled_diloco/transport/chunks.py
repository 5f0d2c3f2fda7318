"""How a large body is cut, so that a broken link costs a chunk and not the whole."""

from __future__ import annotations

CHUNK_BYTES = 4 << 20
"""A tenth of a second at 300 Mbit/s: small against a stall, large against a round trip."""


def chunk_sizes(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """The sizes of a body's chunks, in order.

    >>> chunk_sizes(10, 4), chunk_sizes(8, 4), chunk_sizes(0, 4)
    ((4, 4, 2), (4, 4), ())
    """
    whole, rest = divmod(nbytes, chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())
