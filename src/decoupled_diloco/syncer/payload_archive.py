"""Recorded payloads: with them and the tape, a replay reproduces a run's weights exactly.

With ``syncer.record_payloads`` each shard records what the tape lacks: every verified contribution
and whole copy, the initial weights that it read, and the state that it recovered from disk after a
restart. The merge worker records a contribution before it folds it. It waits for the kernel, not
for the disk.

Files below ``RUN/payloads/shard-N``, named by the paths on the tape::

    layout.json                                the layout that the payloads belong to
    up/<term>/<round>/<learner>/<epoch>/<ask>  a contribution, in the uplink codec
    copy/<term>/<fragment>/<learner>/<ask>     a whole fragment, fp32
    file/<fragment>                            a fragment of the run's file of initial weights, fp32
    recovered/<term>.safetensors               the state on the shard's disk, as in a checkpoint

In bf16 this takes two bytes per parameter for every learner and period H, without a bound.
Recording ends for good, with a warning, if a file cannot be written. It also ends when the free
space falls below what the shard's journal and checkpoints may still need. The run continues.
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
"""Subfolder of the run folder that contains one folder per shard."""

LAYOUT = "layout.json"

RESERVE_BYTES_PER_PARAMETER = 12 * 2 * (2 + JOURNAL_CHECKPOINTS_MAX)
"""Free space left for the shard's disk: two pairs, and one that is being written."""


class Payloads:
    """Records the payloads of one shard; only its merge worker uses it.

    Args:
        run: The run folder.
        shard: The shard's number.
        tensors: The shard's tensors.
        on_end: Called once, with the reason, when recording ends.

    Attributes:
        folder: The folder of the recorded payloads.
    """

    def __init__(
        self, run: Path, shard: int, tensors: ShardTensors, on_end: Callable[[str], object]
    ) -> None:
        self.folder = run / PAYLOADS / f"shard-{shard}"
        self._tensors = tensors
        numel = sum(tensors.plan.fragments[p].numel for p in tensors.owned)
        self._reserve_bytes = RESERVE_BYTES_PER_PARAMETER * numel
        self._on_end = on_end
        self._ended = False
        self._disk = runtime().disk
        text = json.dumps(tensors.plan.layout.to_json())
        self.keep(LAYOUT, text.encode())

    def keep(self, path: str, body: Body) -> None:
        """Record a payload under its path on the tape."""
        if self._ended:
            return
        content = as_bytes(body).numpy().data
        file = self.folder / path.strip("/")
        try:
            self._disk.make_folder(file.parent)
            self._require_space(content.nbytes)
            self._disk.put(file, content)
        except StorageError as error:
            self._end(str(error))
        except OSError as error:
            self._end(f"{file} cannot be written: {error.strerror or error}")

    def keep_file(self, fragments: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """Yield the fragments of the run's file of initial weights, and record each."""
        for fragment, values in fragments:
            self.keep(f"file/{fragment}", values)
            yield fragment, values

    def keep_recovered(self, term: int) -> None:
        """Record the state that the shard recovered from its disk."""
        if self._ended:
            return
        entries = self._tensors.fragments
        state = {f"{p}.{n}": t for p, e in entries.items() for n, t in as_tensors(e).items()}
        try:
            self._require_space(sum(t.numel() * t.element_size() for t in state.values()))
            save_weights(_recovered(self.folder, term), state)
        except OSError as error:
            self._end(str(error))

    def _require_space(self, nbytes: int) -> None:
        free = self._disk.free_bytes(self.folder)
        if free - nbytes < self._reserve_bytes:
            raise StorageError(
                f"{self.folder} has {free >> 20} MiB of free space, and the journal may need "
                f"{self._reserve_bytes >> 20} MiB of it: free disk space before the next run"
            )

    def _end(self, problem: str) -> None:
        self._ended = True
        self._on_end(problem)


def read_layout(folder: Path) -> Layout:
    """Return the layout of a shard's payloads.

    Raises:
        StorageError: It is missing or torn.
    """
    path = folder / LAYOUT
    try:
        return Layout.from_text(runtime().disk.read(path))
    except (OSError, ProtocolError) as error:
        raise StorageError(f"{path} cannot be read, and it holds the layout: {error}") from error


def read_body(folder: Path, path: str) -> bytearray | None:
    """Return the payload of a path on the tape; ``None`` if it was not recorded."""
    try:
        return bytearray(runtime().disk.read(folder / path.strip("/")))
    except OSError:
        return None


def read_recovered(
    folder: Path, term: int, tensors: ShardTensors
) -> Mapping[int, FragmentTensors] | None:
    """Return the state that the shard recovered before a term; ``None`` if it was not recorded."""
    path = _recovered(folder, term)
    if not exists(path):
        return None
    state = load_weights(path)
    fragments = sorted({int(name.split(".")[0]) for name in state})
    return {p: from_tensors(tensors, p, state) for p in fragments}


def _recovered(folder: Path, term: int) -> Path:
    return folder / "recovered" / f"{term}.safetensors"
