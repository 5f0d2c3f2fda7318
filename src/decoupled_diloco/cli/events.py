"""`ddiloco events`: print the records of a run's event tape, for grep, jq and other programs."""

from __future__ import annotations

import sys

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, folder_of
from decoupled_diloco.cli.shared_options import RunTape


class EventsOptions(CommandOptions):
    """Options of `ddiloco events`."""

    run: RunTape = ""


@command(EventsOptions)
def events(options: EventsOptions) -> None:
    """Print every record of a run's event tape as a line of JSON, in order of time.

    The output is an event tape again. `ddiloco events RUN > tape.jsonl` makes one file of many, and
    other commands accept that file as RUN.
    """
    from decoupled_diloco.show.console import drop_output
    from decoupled_diloco.tape.reader import TapeReader
    from decoupled_diloco.tape.records import format_record

    reader = TapeReader(
        folder_of(chosen_run(options.run, "ddiloco events runs/quickstart"), "tape")
    )
    try:
        for record in reader:
            sys.stdout.buffer.write(format_record(record).encode(errors="backslashreplace"))
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output(sys.stdout)
    for problem in reader.problems:
        typer.echo(f"note: {problem}", err=True)
