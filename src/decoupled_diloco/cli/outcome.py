"""How a command that has run something ends: the report, the summary, a sample."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from decoupled_diloco.observe.report import write_report
from decoupled_diloco.observe.summary import print_summary
from decoupled_diloco.syncer.result import SHARES


def tell_outcome(folder: Path, weights: Path | None, console: Console) -> None:
    """Writes the report of what is on the tape, and prints the summary.

    Raises:
        StorageError: the report cannot be written.
    """
    files = [folder / "report.html", folder / "report.png"]
    history = write_report(folder, *files)
    if weights is not None:
        files.append(weights)
    print_summary(history, files, console)
    if history.sample_text:
        console.print("\nwhat the trained model writes:\n")
        console.print(history.sample_text, markup=False, highlight=False)


def what_remains(folder: Path, shards: int) -> str:
    """What a run that did not finish has left of its weights, and what can be done with it.

    Args:
        folder: The run folder.
        shards: How many shards the run has.
    """
    handed_in = [(folder / SHARES / f"shard-{n}.safetensors").exists() for n in range(shards)]
    if all(handed_in):
        return (
            "weights.safetensors was not written, but every shard has handed in its share: "
            f"ddiloco export {folder} puts them together"
        )
    return (
        "no weights were written, and none can be saved from its folder: shards hand theirs in "
        "when the budget is spent; the tape and the report remain"
    )


@contextlib.contextmanager
def reader_may_be_gone() -> Iterator[None]:
    """``ddiloco train … | head``: what nobody reads is not an error, also not at exit."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
