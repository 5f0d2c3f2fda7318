"""Checkpoint files whose every byte is checked when they are read.

A safetensors file tells a torn end by itself, but not bytes that a disk has changed. Here the
metadata holds the digest of each tensor, and one over all texts and digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import digest
from decoupled_diloco.storage.weights import load_metadata, load_weights, save_weights

DIGESTS_KEY = "decoupled_diloco.digests"
"""Metadata entry, JSON: {tensor: digest}."""

SEAL_KEY = "decoupled_diloco.seal"
"""Metadata entry: the digest over all other entries."""


def save_sealed(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts to a safetensors file, all of it or nothing.

    Args:
        path: The file, replaced if it exists; its folder is made if it does not.
        tensors: Name to contiguous tensor on the host.
        texts: Name to text.

    Raises:
        StorageError: The file cannot be written. A file that was there before is untouched.
    """
    digests = json.dumps({name: digest(tensor) for name, tensor in sorted(tensors.items())})
    entries = dict(texts) | {DIGESTS_KEY: digests}
    save_weights(path, tensors, entries | {SEAL_KEY: _seal(entries)})


def seal_of(path: Path) -> str:
    """The digest over everything in a file of `save_sealed`.

    Raises:
        StorageError: The file is missing, torn or corrupt, as far as its texts tell.
    """
    _checked(path)
    return load_metadata(path)[SEAL_KEY]


def load_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of `save_sealed`.

    Returns:
        Tensors, in memory of their own on the CPU, and texts.

    Raises:
        StorageError: The file is missing or torn, no safetensors file, or anything in it has
            another digest than when it was written.
    """
    texts = _checked(path)
    digests = json.loads(texts.pop(DIGESTS_KEY))
    tensors = load_weights(path)
    wrong = [name for name, tensor in tensors.items() if digest(tensor) != digests.get(name)]
    if wrong or digests.keys() != tensors.keys():
        names = sorted(wrong) or sorted(digests.keys() ^ tensors.keys())
        raise StorageError(f"{path} is corrupt: {names[0]} is not what was written")
    return tensors, texts


def load_texts(path: Path) -> dict[str, str]:
    """Read the texts of a file of `save_sealed`, checked, without its tensors.

    Raises:
        StorageError: See `load_sealed`.
    """
    texts = _checked(path)
    del texts[DIGESTS_KEY]
    return texts


def _checked(path: Path) -> dict[str, str]:
    texts = load_metadata(path)
    seal = texts.pop(SEAL_KEY, "")
    if DIGESTS_KEY not in texts or _seal(texts) != seal:
        raise StorageError(f"{path} is corrupt: its metadata is not what was written")
    return texts


def _seal(entries: Mapping[str, str]) -> str:
    return digest(json.dumps(entries, sort_keys=True).encode())
