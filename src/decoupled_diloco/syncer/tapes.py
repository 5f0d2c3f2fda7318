"""A shard's event tapes, as `ddiloco status` and its like read them from a running syncer.

``/tape`` tells where all shards are and which tapes this one has; ``/tape?who=NAME&from=OFFSET``
gives what a reader needs of the next piece of one, and where to go on. A piece is read and looked
through in a thread, one at a time: no reader holds the event loop up for the disk, but that thread
takes its share of the interpreter, about ten milliseconds for a piece.
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
"""How much of a tape one request goes through: about ten milliseconds."""


class TapeDocuments:
    """Serves the tapes of one process.

    Args:
        run: Name of the run.
        shard: Number of this shard.
        addresses: Where all shards are, as learners are told.
        tapes: The file of each tape by the name of who writes it.
    """

    def __init__(
        self, run: str, shard: int, addresses: tuple[str, ...], tapes: Mapping[str, Path]
    ) -> None:
        self._about = {"run": run, "shard": shard, "shards": list(addresses)}
        self._tapes = dict(tapes)
        self._reading = asyncio.Semaphore(1)

    async def __call__(self, query: Mapping[str, str]) -> Document:
        """Answers a request; see `transport.documents`."""
        if "who" not in query:
            about = {**self._about, "tapes": sorted(self._tapes), "wall": runtime().wall()}
            return Document(json.dumps(about).encode())
        who, start = query["who"], query.get("from", "0")
        if who not in self._tapes:
            names = ", ".join(sorted(self._tapes))
            raise NoSuchDocumentError(f"no tape of {who[:80]!r} is here: there is {names}")
        if not (start.isascii() and start.isdigit() and len(start) < 18):
            raise NoSuchDocumentError(f"from={start[:40]!r} is no offset in a tape")
        async with self._reading:
            return await asyncio.to_thread(
                read_piece, self._tapes[who], int(start), detail=query.get("detail") == "1"
            )


def read_piece(path: Path, start: int, *, detail: bool) -> Document:
    """What a reader needs of the next piece of a tape.

    Returns:
        Lines; ``next`` is where to go on, ``size`` how long the tape is now. When ``next`` is where
        it began there is no more, perhaps but a line that is being written. ``tape`` is the same
        for as long as it is this tape: another run's may be longer.
    """
    try:
        identity, size = _identity(path), newest_of(path).end
        piece, segment_end = _read(path, start)
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
    """Some text, with the end of a line if there is one; where its segment ends, if it does."""
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
    """Of a tape's first line, which tells when it was begun, and by which process."""
    first = next(lines_of(path, []), Line(b"", 0)).text
    return hashlib.sha256(first).hexdigest()[:16] if first.endswith(b"\n") else ""
