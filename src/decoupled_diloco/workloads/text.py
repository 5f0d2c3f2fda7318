"""Training text that needs no download: the source of Python's standard library, as bytes.

Each learner has a separate region of the training text. Whole files are held out for evaluation, so
that learners never train on any line of them.

Shapes: `B` windows in a batch, `T` bytes of context, `N` bytes of text.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError

FOLDERS_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
"""Folders without training text: tests are repetitive, and installed packages differ by machine."""

FILES_LEFT_OUT = "_sysconfigdata"
"""Prefix of generated files that contain paths of the machine."""

HELD_OUT_ONE_IN = 20
"""One of this many files is held out."""

HELD_OUT_BYTES_SHARE = 0.1
"""Limit of the held-out text as a share of `bytes_max`."""

SEPARATOR = b"\0"
"""Follows each file, so that the model can see where a file ends."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, in two sets that share no file.

    Args:
        train: uint8 [N], the concatenated training files.
        held_out: uint8 [N'], the concatenated held-out files.
        train_files: Paths relative to the library's folder.
        held_out_files: Paths relative to the library's folder.
        digest: Hex SHA-256 over both texts: learners with the same digest have the same data.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    digest: str


def load_corpus(bytes_max: int | None = None, root: Path | None = None) -> Corpus:
    """Read the standard library's source, without its tests.

    Files are in the order of the SHA-256 of their relative paths. This order is the same on all
    machines. It also mixes the files, so that a limited text or a learner's region is not one
    corner of the alphabet.

    Args:
        bytes_max: Limit of the training text in bytes, which may truncate the last file; None: no
            limit.
        root: The folder of the files; default: Python's standard library.

    Raises:
        ConfigError: The training text or the held-out text is empty.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    names = sorted(_source_files(root), key=_digest_of_name)
    held_out_names = [name for name in names if _is_held_out(name)]
    train_names = [name for name in names if not _is_held_out(name)]
    held_out_max = None if bytes_max is None else int(bytes_max * HELD_OUT_BYTES_SHARE)
    train, train_files = _read(root, train_names, bytes_max)
    held_out, held_out_files = _read(root, held_out_names, held_out_max)
    if not train or not held_out:
        raise ConfigError(
            f"{root} has {len(names)} Python files with {len(train)} bytes for training and "
            f"{len(held_out)} held out: this Python has no library source; use a custom workload, "
            "written as 'module:function'"
        )
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        held_out=torch.frombuffer(held_out, dtype=torch.uint8),
        train_files=train_files,
        held_out_files=held_out_files,
        digest=hashlib.sha256(train + b"\0held-out\0" + held_out).hexdigest(),
    )


def region(count: int, part: int, parts: int) -> range:
    """Return one of `parts` adjacent ranges of `count` items, whose sizes differ by at most one.

    >>> [region(10, part, 3) for part in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    assert 0 <= part < parts, f"part {part} of {parts}"
    return range(count * part // parts, count * (part + 1) // parts)


def batch_at(
    text: Tensor, *, part: int, parts: int, step: int, batch_size: int, context: int, seed: int
) -> Tensor:
    """Return batch number `step` of a partition, int64 [B, T + 1]: random windows of its region.

    Inputs are `[:, :-1]`, targets `[:, 1:]`. This is a pure function of its arguments, so training
    can continue at any step without saved state.

    Raises:
        ConfigError: The region is smaller than one window.
    """
    mine = region(len(text), part, parts)
    starts = len(mine) - context
    if starts < 1:
        raise ConfigError(
            f"partition {part} of {parts} has {len(mine)} bytes of text, fewer than "
            f"context={context} + 1: lower learners or context, or raise corpus_bytes_max"
        )
    rng = np.random.default_rng([seed, part, step])
    offsets = torch.from_numpy(mine.start + rng.integers(starts, size=batch_size))
    return _windows(text, offsets, context)


def windows_of(text: Tensor, context: int) -> int:
    """Return the number of windows per epoch.

    Adjacent windows share one byte: the last target of one is the first input of the next. A
    remainder that is smaller than a window is left out.

    Raises:
        ConfigError: The text is smaller than one window.
    """
    count = (len(text) - 1) // context
    if count < 1:
        raise ConfigError(
            f"the text has {len(text)} bytes, fewer than context={context} + 1: lower context or "
            "raise corpus_bytes_max"
        )
    return count


@lru_cache(maxsize=2)
def pass_order(count: int, seed: int, turn: int) -> np.ndarray[Any, Any]:
    """Return the order of the items in epoch `turn`: int64 [count], different in each epoch."""
    return np.random.default_rng([seed, turn]).permutation(count)


def pass_batch_at(
    text: Tensor, *, turn: int, index: int, batch_size: int, context: int, seed: int
) -> Tensor:
    """Return batch number `index` of an epoch in which every window of the text comes once.

    int64 [B, T + 1]; the last batch of an epoch may be smaller.
    """
    order = pass_order(windows_of(text, context), seed, turn)
    mine = order[index * batch_size : (index + 1) * batch_size]
    return _windows(text, torch.from_numpy(mine * context), context)


def held_out_batches(text: Tensor, *, count: int, batch_size: int, context: int) -> list[Tensor]:
    """Return `count` fixed batches of windows, evenly spread over a text: int64 [B, T + 1]."""
    starts = len(text) - context
    if starts < 1:
        raise ConfigError(
            f"the held-out text has {len(text)} bytes, fewer than context={context} + 1: "
            "lower context or raise corpus_bytes_max"
        )
    several = count * batch_size
    offsets = torch.linspace(0, starts - 1, several, dtype=torch.float64, device="cpu").long()
    return [_windows(text, some, context) for some in offsets.view(count, batch_size).unbind()]


def _windows(text: Tensor, offsets: Tensor, context: int) -> Tensor:
    places = torch.arange(context + 1, dtype=torch.int64, device="cpu")
    return text[offsets[:, None] + places].long()


def _source_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in FOLDERS_LEFT_OUT and not name.startswith("config-")
        ]
        for name in files:
            if name.endswith(".py") and not name.startswith(FILES_LEFT_OUT):
                yield Path(folder, name).relative_to(root).as_posix()


def _digest_of_name(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _is_held_out(name: str) -> bool:
    # The last bytes are used because the first ones determine the order. Otherwise all held-out
    # files would come first or last.
    return int.from_bytes(_digest_of_name(name)[-8:], "big") % HELD_OUT_ONE_IN == 0


def _read(root: Path, names: list[str], bytes_max: int | None) -> tuple[bytearray, tuple[str, ...]]:
    """Return the text of the first files up to the limit, and the names of these files."""
    text, read = bytearray(), []
    for name in names:
        if bytes_max is not None and len(text) >= bytes_max:
            break
        content = (root / name).read_bytes()
        if content:
            text += content + SEPARATOR
            read.append(name)
    return text[:bytes_max], tuple(read)
