"""A shard's event tapes over HTTP, as `ddiloco status` and similar commands read them.

``/tape`` lists the addresses of all shards and the tapes of this one.
``/tape?process=NAME&from=OFFSET`` returns the lines of the next piece of a tape that a reader
needs, and the offset after it. A piece is read and filtered in a thread, one at a time. So no
reader blocks the event loop for the disk, but that thread takes its share of the interpreter: about
ten milliseconds per piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from decoupled_diloco.runtime import runtime
from decoupled_diloco.tape.excerpt import excerpt
from decoupled_diloco.tape.segments import (
    CORRUPT,
    LINE_BYTES_MAX,
    Line,
    lines_of,
    newest_of,
    open_at,
)
from decoupled_diloco.transport.documents import Document, NoSuchDocumentError

PIECE_BYTES = 1 << 20
"""Bytes of a tape that one request covers; they take about ten milliseconds."""


class TapeDocuments:
    """Serves the tapes of one process.

    Args:
        run: The run's name.
        shard: The number of this shard.
        addresses: The addresses of all shards, as sent to learners.
        tapes: The file of each tape by the name of the writing process.
    """

    def __init__(
        self, run: str, shard: int, addresses: tuple[str, ...], tapes: Mapping[str, Path]
    ) -> None:
        self._about = {"run": run, "shard": shard, "shards": list(addresses)}
        self._tapes = dict(tapes)
        self._reading = asyncio.Semaphore(1)

    async def __call__(self, query: Mapping[str, str]) -> Document:
        """Answer a request; see `transport.documents`."""
        if "process" not in query:
            about = {**self._about, "tapes": sorted(self._tapes), "wall": runtime().wall()}
            return Document(json.dumps(about).encode())
        process, start = query["process"], query.get("from", "0")
        if process not in self._tapes:
            names = ", ".join(sorted(self._tapes))
            raise NoSuchDocumentError(
                f"process={process[:80]!r} has no tape here: the tapes are {names}"
            )
        if not (start.isascii() and start.isdigit() and len(start) < 18):
            raise NoSuchDocumentError(f"from={start[:40]!r} is not an offset in a tape")
        async with self._reading:
            return await asyncio.to_thread(
                read_piece, self._tapes[process], int(start), detail=query.get("detail") == "1"
            )


def read_piece(path: Path, start: int, *, detail: bool) -> Document:
    """Return the lines of the next piece of a tape that a reader needs.

    Returns:
        Lines, with three facts. ``next`` is the offset after them, and ``size`` the current length
        of the tape. When ``next`` is the given offset, the reader is at the end, except for a line
        that is being written. ``tape`` identifies the tape: another run's tape at this path may be
        longer.
    """
    try:
        identity, size = _identity(path), newest_of(path).end
        piece, segment_end = _read(path, start)
    except FileNotFoundError:
        return Document(b"", {"next": "0", "size": "0", "tape": ""})  # its process has not begun it
    except OSError as error:
        raise NoSuchDocumentError(f"the tape cannot be read: {error.strerror}") from None
    end = piece.rfind(b"\n") + 1
    if end == 0 and len(piece) >= LINE_BYTES_MAX:
        end, piece = len(piece), b""
    following = start + end
    if end == 0 and segment_end is not None:
        following, piece = segment_end, b"from byte %d to %d missing\n" % (start, segment_end)
        end = len(piece)
    facts = {"next": str(following), "size": str(size), "tape": identity}
    return Document(excerpt(piece[:end], detail=detail), facts)


def _read(path: Path, start: int) -> tuple[bytes, int | None]:
    """Return text with a line end, unless the tape has none, and the end of a full segment."""
    file, begin, end = open_at(path, start)
    piece = b""
    with file, contextlib.suppress(*CORRUPT):
        file.seek(start - begin)
        while len(piece) < LINE_BYTES_MAX and b"\n" not in piece:
            more = file.read(PIECE_BYTES)
            if not more:
                break
            piece += more
    return piece, end


def _identity(path: Path) -> str:
    """Return a digest of a tape's first line, which holds its start time and process."""
    first = next(lines_of(path, []), Line(b"", 0)).text
    return hashlib.sha256(first).hexdigest()[:16] if first.endswith(b"\n") else ""
