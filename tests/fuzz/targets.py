"""All targets, by name."""

from __future__ import annotations

from pathlib import Path

from fuzz.file_targets import of_files
from fuzz.harness import Target
from fuzz.sockets import of_sockets
from fuzz.sum_texts import of_sums
from fuzz.words import of_wire


def all_targets(folder: Path) -> dict[str, Target]:
    """Return every target by name. They write files into this folder."""
    found = (*of_wire(), *of_sums(), *of_files(folder), *of_sockets(folder / "sockets"))
    return {target.name: target for target in found}
