"""Weights on disk: safetensors files that are either whole or not there.

A file is written beside its place, forced to disk, and renamed into place, so that neither a crash
nor a full disk leaves a torn one. safetensors holds tensors and text, never code.

A safetensors file tells a torn end by itself, but not bytes that a disk has changed. In a *sealed*
one the metadata holds the digest of each tensor, and one over all texts and digests.
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

from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import digest, place_of
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON

ALIASES_KEY = "decoupled_diloco.aliases"
"""Metadata entry, JSON: {name of a tied tensor: name of the tensor that holds its values}."""


def save_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a safetensors file, all of it or nothing.

    Tied weights (names for the same memory) are written once, under the first name; the other
    names are kept in the metadata and come back by `load_weights`.

    Raises:
        StorageError: The file cannot be written. A file that was there before is untouched.
    """
    assert ALIASES_KEY not in (metadata or {}), f"{ALIASES_KEY} is ours"
    path = Path(path)
    unique, aliases = _drop_aliases(tensors)
    texts = dict(metadata or {})
    if aliases:
        texts[ALIASES_KEY] = json.dumps(aliases, sort_keys=True)
    disk, torn = runtime().disk, path.with_name(f".{path.name}.{runtime().process_id()}.part")

    def fill(torn: Path) -> None:
        torn.touch()
        mode = torn.stat().st_mode & 0o777  # as the user's umask has it; safetensors: 0600
        save_file(unique, torn, metadata=texts)
        torn.chmod(mode)

    try:
        disk.make_folder(path.parent)
        disk.fill(torn, fill)
        disk.sync(torn)
        disk.rename(torn, path)
        disk.sync(path.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # what matters is the first error
            disk.remove(torn)
        raise StorageError(f"{path} cannot be written: {error}") from error


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file to the CPU, tied ones under each of their names.

    Raises:
        StorageError: The file is missing, torn, or no safetensors file.
    """
    with opened(path) as file:
        # Cloned, because the tensors of safetensors live in the mapped file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        aliases = _parse_aliases(file.metadata() or {})
        return tensors | {name: tensors[kept] for name, kept in aliases.items()}


def load_metadata(path: str | Path) -> dict[str, str]:
    """Read the text kept in a safetensors file, without its tensors.

    Raises:
        StorageError: The file is missing, torn, or no safetensors file.
    """
    with opened(path) as file:
        texts = dict(file.metadata() or {})
    texts.pop(ALIASES_KEY, None)
    return texts


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """A safetensors file to read from.

    Raises:
        StorageError: It is missing, torn, or no safetensors file.
    """
    try:
        # A slice of a file would otherwise be made on the process's default device.
        with torch.device("cpu"), safe_open(Path(path), framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist") from None
    except (OSError, SafetensorError, *NOT_JSON) as error:
        raise StorageError(f"{path} is torn or no safetensors file: {error}") from error


def _drop_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split names for the same memory from tensors, which come as separate contiguous copies."""
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
    """The tensor on the CPU; copied only if it is part of a larger storage, or not contiguous."""
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
    """Write tensors and texts to a safetensors file, all of it or nothing."""
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


def _checked(path: Path) -> dict[str, str]:
    texts = load_metadata(path)
    seal = texts.pop(SEAL_KEY, "")
    if DIGESTS_KEY not in texts or _seal(texts) != seal:
        raise StorageError(f"{path} is corrupt: its metadata is not what was written")
    return texts


def _seal(entries: Mapping[str, str]) -> str:
    return digest(json.dumps(entries, sort_keys=True).encode())
