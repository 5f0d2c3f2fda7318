"""Weights on disk: safetensors files that are either complete or absent.

A file is written under a temporary name, synced to disk, and renamed. So neither a crash nor a full
disk leaves a torn file. safetensors contains tensors and text, never code.

safetensors detects a truncated file but not bytes that a disk has changed. The metadata of a
*sealed* file holds the digest of each tensor, and a digest over all texts and digests.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decoupled_diloco.errors import DilocoError, StorageError
from decoupled_diloco.merge import digest, place_of
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON

ALIASES_KEY = "decoupled_diloco.aliases"
"""Metadata entry, JSON: {name of a tied tensor: name of the tensor that holds its values}."""


def save_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file atomically.

    Tied weights (names for the same memory) are written once, under the first name. The other names
    are stored in the metadata, and `load_weights` restores them.

    Raises:
        StorageError: The file cannot be written. An existing file is unchanged.
    """
    assert ALIASES_KEY not in (metadata or {}), f"{ALIASES_KEY} is reserved"
    path = Path(path)
    unique, aliases = _drop_aliases(tensors)
    texts = dict(metadata or {})
    if aliases:
        texts[ALIASES_KEY] = json.dumps(aliases, sort_keys=True)
    disk, torn = runtime().disk, path.with_name(f".{path.name}.{runtime().process_id()}.part")

    def fill(torn: Path) -> None:
        torn.touch()
        mode = torn.stat().st_mode & 0o777  # by the user's umask; safetensors would set 0600
        save_file(unique, torn, metadata=texts)
        torn.chmod(mode)

    try:
        disk.make_folder(path.parent)
        disk.fill(torn, fill)
        disk.sync(torn)
        disk.rename(torn, path)
        disk.sync(path.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # report the first error, not this one
            disk.remove(torn)
        raise StorageError(f"{path} cannot be written: {error}") from error


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file to the CPU, tied ones under each of their names.

    Raises:
        StorageError: The file is missing, torn, or not a safetensors file.
    """
    with opened(path) as file:
        # A clone, because safetensors returns views of the mapped file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        aliases = _parse_aliases(file.metadata() or {})
        return tensors | {name: tensors[kept] for name, kept in aliases.items()}


def load_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file, without its tensors.

    Raises:
        StorageError: The file is missing, torn, or not a safetensors file.
    """
    with opened(path) as file:
        texts = dict(file.metadata() or {})
    texts.pop(ALIASES_KEY, None)
    return texts


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """Open a safetensors file for reading.

    Raises:
        StorageError: The file is missing, torn, or not a safetensors file.
    """
    try:
        # Otherwise a slice of a file would be created on the process's default device.
        with torch.device("cpu"), safe_open(Path(path), framework="pt") as file:
            yield file
    except DilocoError:
        raise
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist") from None
    except (OSError, SafetensorError, *NOT_JSON) as error:
        raise StorageError(f"{path} is torn or not a safetensors file: {error}") from error


def _drop_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return contiguous tensors with separate memory, and the further names of tied ones."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor)
        if tensor.numel() and place in names:
            aliases[name] = names[place]
        else:
            names[place] = name
            unique[name] = _own_memory(tensor)
    return unique, aliases


def _own_memory(tensor: Tensor) -> Tensor:
    """Return a CPU tensor; a copy only if it is part of a larger storage or not contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _parse_aliases(metadata: Mapping[str, str]) -> dict[str, str]:
    aliases = json.loads(metadata.get(ALIASES_KEY, "{}"))
    if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in aliases.values()):
        raise ValueError(f"{ALIASES_KEY} is not a table of names")
    return aliases


DIGESTS_KEY = "decoupled_diloco.digests"
"""Metadata entry, JSON: {tensor: digest}."""

SEAL_KEY = "decoupled_diloco.seal"
"""Metadata entry: the digest over all other entries."""


def save_sealed(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write tensors and texts to a sealed safetensors file atomically."""
    digests = json.dumps({name: digest(tensor) for name, tensor in sorted(tensors.items())})
    entries = dict(texts) | {DIGESTS_KEY: digests}
    save_weights(path, tensors, entries | {SEAL_KEY: _seal(entries)})


def seal_of(path: Path) -> str:
    """Return the digest over the whole content of a file written by `save_sealed`.

    Raises:
        StorageError: The file is missing or torn, or its metadata is corrupt. Tensors are not read.
    """
    _checked(path)
    return load_metadata(path)[SEAL_KEY]


def load_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read and verify a file written by `save_sealed`.

    Raises:
        StorageError: The file is missing, torn, or not a safetensors file, or a digest in it does
            not match.
    """
    texts = _checked(path)
    digests = json.loads(texts.pop(DIGESTS_KEY))
    tensors = load_weights(path)
    wrong = [name for name, tensor in tensors.items() if digest(tensor) != digests.get(name)]
    if wrong or digests.keys() != tensors.keys():
        names = sorted(wrong) or sorted(digests.keys() ^ tensors.keys())
        raise StorageError(f"{path} is corrupt: {names[0]} does not match its digest")
    return tensors, texts


def _checked(path: Path) -> dict[str, str]:
    texts = load_metadata(path)
    seal = texts.pop(SEAL_KEY, "")
    if DIGESTS_KEY not in texts or _seal(texts) != seal:
        raise StorageError(f"{path} is corrupt: its metadata does not match its digest")
    return texts


def _seal(entries: Mapping[str, str]) -> str:
    return digest(json.dumps(entries, sort_keys=True).encode())
