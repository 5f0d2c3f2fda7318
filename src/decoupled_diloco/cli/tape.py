"""`ddiloco tape`: all that is on a run's tape, as text, for grep, jq and programs of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def tape(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, its tape folder, or a tape file.")
    ],
) -> None:
    """Every record on a run's tape, one line of JSON each, of all processes in the order of time.

    The lines are a tape again: `ddiloco tape RUN > tape.jsonl` makes one file of many, which the
    other commands read, too.
    """
    from decoupled_diloco.observe.reader import TapeReader
    from decoupled_diloco.observe.records import format_record
    from decoupled_diloco.observe.terminal import drop_output

    reader = TapeReader(run)
    try:
        for record in reader:
            sys.stdout.buffer.write(format_record(record).encode(errors="backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output(sys.stdout)
    for problem in reader.problems:
        typer.echo(f"note: {problem}", err=True)
