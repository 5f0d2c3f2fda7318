"""Bodies kept for a replay: from them and the tape a run's weights follow again, bit for bit.

With ``syncer.record_payloads`` each shard keeps what the tape does not: every contribution and
whole copy that it has verified, the initial weights that it has read, and what it has recovered
from its disk after a restart. A contribution is kept before it is folded, by the merge worker,
which waits for the kernel and not for the disk.

Files below ``RUN/payloads/shard-N``, named by the paths on the tape::

    layout.json                                what the bodies are cut from
    up/<term>/<round>/<learner>/<epoch>/<ask>  a contribution, in the uplink codec
    copy/<term>/<fragment>/<learner>/<ask>     a whole fragment, fp32
    file/<fragment>                            a fragment of the run's file of initial weights, fp32
    recovered/<term>.safetensors               all that the shard's disk had, in a checkpoint's form

That is two bytes a parameter in bf16 for every learner and period H, and it is not bounded: when
the disk has less left than the shard's journal and checkpoints may still need, or a file cannot be
written, recording ends for good and says so; the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from decoupled_diloco.errors import ProtocolError, StorageError
from decoupled_diloco.merge import Body, Layout, as_bytes
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import exists
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.syncer.durable import JOURNAL_CHECKPOINTS_MAX, as_tensors, from_tensors
from decoupled_diloco.syncer.shard_tensors import FragmentTensors, ShardTensors

PAYLOADS = "payloads"
"""The folder in the run folder; each shard has its own in it."""

LAYOUT = "layout.json"

RESERVE_BYTES_A_PARAMETER = 12 * 2 * (2 + JOURNAL_CHECKPOINTS_MAX)
"""What is left free for the shard's disk: two pairs, and one being written."""


class Payloads:
    """Keeps the bodies of one shard; its merge worker alone uses it.

    Args:
        run: The run folder.
        shard: Whose they are.
        tensors: The shard's tensors.
        on_end: Told why recording has ended, once.

    Attributes:
        folder: Where they are.
    """

    def __init__(
        self, run: Path, shard: int, tensors: ShardTensors, on_end: Callable[[str], object]
    ) -> None:
        self.folder = run / PAYLOADS / f"shard-{shard}"
        self._tensors = tensors
        numel = sum(tensors.plan.fragments[p].numel for p in tensors.owned)
        self._reserve_bytes = RESERVE_BYTES_A_PARAMETER * numel
        self._on_end = on_end
        self._ended = False
        self._disk = runtime().disk
        text = json.dumps(tensors.plan.layout.to_json())
        self.keep(LAYOUT, text.encode())

    def keep(self, path: str, body: Body) -> None:
        """Keeps a body under its path on the tape."""
        if self._ended:
            return
        content = as_bytes(body).numpy().data
        file = self.folder / path.strip("/")
        try:
            self._disk.make_folder(file.parent)
            self._leave_room(content.nbytes)
            self._disk.put(file, content)
        except StorageError as error:
            self._end(str(error))
        except OSError as error:
            self._end(f"{file} cannot be written: {error.strerror or error}")

    def keep_file(self, fragments: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Passes the fragments of the run's file of initial weights on, and keeps each."""
        for fragment, values in fragments:
            self.keep(f"file/{fragment}", values)
            yield fragment, values

    def keep_recovered(self, term: int) -> None:
        """Keeps all that the shard has recovered from its disk."""
        if self._ended:
            return
        entries = self._tensors.fragments
        state = {f"{p}.{n}": t for p, e in entries.items() for n, t in as_tensors(e).items()}
        try:
            self._leave_room(sum(t.numel() * t.element_size() for t in state.values()))
            save_weights(_recovered(self.folder, term), state)
        except OSError as error:
            self._end(str(error))

    def _leave_room(self, nbytes: int) -> None:
        free = self._disk.free_bytes(self.folder)
        if free - nbytes < self._reserve_bytes:
            raise StorageError(
                f"{self.folder}: {free >> 20} MiB are free, and the journal may need "
                f"{self._reserve_bytes >> 20} MiB of them: free disk space before the next run"
            )

    def _end(self, problem: str) -> None:
        self._ended = True
        self._on_end(problem)


def read_layout(folder: Path) -> Layout:
    """The layout of a shard's payloads.

    Raises:
        StorageError: It is missing, or torn.
    """
    path = folder / LAYOUT
    try:
        return Layout.from_text(runtime().disk.read(path))
    except (OSError, ProtocolError) as error:
        raise StorageError(f"{path} cannot be read ({error}): there is no layout") from error


def read_body(folder: Path, path: str) -> bytearray | None:
    """The body of a path on the tape; ``None``: it was not kept."""
    try:
        return bytearray(runtime().disk.read(folder / path.strip("/")))
    except OSError:
        return None


def read_recovered(
    folder: Path, term: int, tensors: ShardTensors
) -> Mapping[int, FragmentTensors] | None:
    """What the shard had recovered when it was given a term; ``None``: it was not kept."""
    path = _recovered(folder, term)
    if not exists(path):
        return None
    state = load_weights(path)
    fragments = sorted({int(name.split(".")[0]) for name in state})
    return {p: from_tensors(tensors, p, state) for p in fragments}


def _recovered(folder: Path, term: int) -> Path:
    return folder / "recovered" / f"{term}.safetensors"
