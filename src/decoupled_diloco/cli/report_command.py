"""`ddiloco report`: write the report of a run, or of two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, folder_of
from decoupled_diloco.cli.shared_options import RunTape, fail, make_console
from decoupled_diloco.config.addresses import is_store

if TYPE_CHECKING:
    from decoupled_diloco.run_model import RunModel
    from decoupled_diloco.show.console import SteadyConsole

OF_A_REPORT = ("tape", "data.ledger")
"""The files of a run in an object store that its report shows."""


class ReportOptions(CommandOptions):
    """Options of `ddiloco report`."""

    run: RunTape = ""
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Second run folder, event tape or address in an object store: the page shows both "
            "side by side.",
            show_default=False,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Write the page here. Default: report.html in the run folder, or in the current "
            "folder for an event tape or an object store; comparison.html in the current folder "
            "for two runs.",
        ),
    ] = None


@command(ReportOptions)
def report(options: ReportOptions) -> None:
    """Write a report of a run as one HTML page, or of two runs side by side."""
    given = chosen_run(options.run, "ddiloco report runs/quickstart")
    tape, out = Path(given), options.out
    console = make_console()
    own = Path("report.html") if is_store(given) else _default_page(tape)
    page = out or (own if options.other is None else Path("comparison.html"))
    _check_page(page)
    tape = folder_of(given, *OF_A_REPORT)
    other = None if options.other is None else folder_of(options.other, *OF_A_REPORT)
    if other is None:
        from decoupled_diloco.show.report import write_report

        _print_problems(console, tape, write_report(tape, page))
    else:
        from decoupled_diloco.show.report import write_comparison

        for path, run in zip((tape, other), write_comparison(tape, other, page), strict=True):
            _print_problems(console, path, run)
    console.print_text(f"written: {page}")


def _default_page(tape: Path) -> Path:
    """Return the run's own report; for a tape outside a run folder, one in the current folder."""
    from decoupled_diloco.tape.reader import run_folder_of
    from decoupled_diloco.tape.records import FOLDER_NAME, MERGED_NAME

    run = run_folder_of(tape)
    has_run = (run / "run.toml").is_file() or (run / FOLDER_NAME).is_dir()
    bare = tape.is_file() and tape.parent == run and tape.name != MERGED_NAME
    return run / "report.html" if has_run and not bare else Path("report.html")


def _check_page(page: Path) -> None:
    """Refuse to overwrite any file but a page, above all a tape."""
    if page.suffix.lower() not in (".html", ".htm"):
        fail(f"--out {page} does not end in .html or .htm: give a file that does")
    if page.is_dir():
        fail(f"--out {page} is a folder: give a file in it")


def _print_problems(console: SteadyConsole, tape: Path, run: RunModel) -> None:
    """Print what the page lacks because the tape lacks it."""
    from decoupled_diloco.show.report import problems_of

    for problem in problems_of(run):
        console.print_text(f"note: {tape}: {problem}")
