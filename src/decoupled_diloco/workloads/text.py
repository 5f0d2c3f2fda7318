"""Text to train on without a download: the source of Python's standard library, as bytes.

Each learner has a region of its own of the training text. Whole files are held out for evaluation,
so that no line of them is ever trained on.

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
"""Tests repeat themselves, and what is installed differs between machines."""

FILES_LEFT_OUT = "_sysconfigdata"
"""Prefix of generated files that hold the paths of one machine."""

HELD_OUT_ONE_IN = 20
"""One file in so many is held out."""

HELD_OUT_BYTES_SHARE = 0.1
"""The held-out text is at most this share of `bytes_max`."""

SEPARATOR = b"\0"
"""After each file, so that the model can tell where one ends."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, in two parts that share no file.

    Args:
        train: uint8 [N], the training files one after the other.
        held_out: uint8 [N'], the held-out files one after the other.
        digest: SHA-256 over both texts, in hex: learners with the same digest have the same data.
    """

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    digest: str


def load_corpus(bytes_max: int | None = None, root: Path | None = None) -> Corpus:
    """Read the standard library's source, without its tests.

    Files come in the order of the SHA-256 of their relative path: the same everywhere, and a limit
    or a learner's region holds a fair mixture instead of one corner of the alphabet.

    Args:
        bytes_max: Limit of the training text, bytes; the last file may be cut. None: all of it.

    Raises:
        ConfigError: There are no such files, or none on one side of the split.
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
            f"{root} has {len(names)} Python files with {len(train)} bytes to train on and "
            f"{len(held_out)} held out: this Python has no library source to train on; "
            "use a workload of your own as 'module:function'"
        )
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        held_out=torch.frombuffer(held_out, dtype=torch.uint8),
        train_files=train_files,
        held_out_files=held_out_files,
        digest=hashlib.sha256(train + b"\0held-out\0" + held_out).hexdigest(),
    )


def region(count: int, part: int, parts: int) -> range:
    """The bytes of one part: `parts` neighbouring regions, equal to within one byte.

    >>> [region(10, part, 3) for part in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    assert 0 <= part < parts, f"part {part} of {parts}"
    return range(count * part // parts, count * (part + 1) // parts)


def batch_at(
    text: Tensor, *, part: int, parts: int, step: int, batch_size: int, context: int, seed: int
) -> Tensor:
    """Batch number `step` of one part, int64 [B, T + 1]: random windows within its region.

    Inputs are `[:, :-1]`, targets `[:, 1:]`. A pure function of its arguments: nothing has to be
    remembered to go on at any step.

    Raises:
        ConfigError: The region is smaller than one window.
    """
    mine = region(len(text), part, parts)
    starts = len(mine) - context
    if starts < 1:
        raise ConfigError(
            f"part {part} of {parts} has {len(mine)} bytes of text, fewer than "
            f"context={context} + 1: lower learners or context, or raise corpus_bytes_max"
        )
    rng = np.random.default_rng([seed, part, step])
    offsets = torch.from_numpy(mine.start + rng.integers(starts, size=batch_size))
    return _windows(text, offsets, context)


def windows_of(text: Tensor, context: int) -> int:
    """Windows of a pass.

    Neighbours share one byte: the last target of one is the first input of the next. A rest that is
    smaller than a window is left out.

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
    """The order in which a pass goes through its items: int64 [count], drawn anew for each."""
    return np.random.default_rng([seed, turn]).permutation(count)


def pass_batch_at(
    text: Tensor, *, turn: int, index: int, batch_size: int, context: int, seed: int
) -> Tensor:
    """Batch number `index` of a pass in which every window of the text comes once.

    int64 [B, T + 1]; the last one of a pass may be smaller.
    """
    order = pass_order(windows_of(text, context), seed, turn)
    mine = order[index * batch_size : (index + 1) * batch_size]
    return _windows(text, torch.from_numpy(mine * context), context)


def held_out_batches(text: Tensor, *, count: int, batch_size: int, context: int) -> list[Tensor]:
    """`count` batches of windows spread evenly over a text: int64 [B, T + 1], always the same."""
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
    # The last bytes, because the first ones give the order: a limit must not empty one side.
    return int.from_bytes(_digest_of_name(name)[-8:], "big") % HELD_OUT_ONE_IN == 0


def _read(root: Path, names: list[str], bytes_max: int | None) -> tuple[bytearray, tuple[str, ...]]:
    """The text of the first files up to the limit, and which files those are."""
    text, read = bytearray(), []
    for name in names:
        if bytes_max is not None and len(text) >= bytes_max:
            break
        content = (root / name).read_bytes()
        if content:
            text += content + SEPARATOR
            read.append(name)
    return text[:bytes_max], tuple(read)
