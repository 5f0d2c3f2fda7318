"""`ddiloco report`: the report of a run again, or two runs side by side, from their tapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import fail, make_console

if TYPE_CHECKING:
    from decoupled_diloco.observe.run_model import RunModel
    from decoupled_diloco.observe.terminal import SteadyConsole

TapePath = Annotated[
    Path, typer.Argument(metavar="TAPE", help="A run folder, its tape folder, or a tape file.")
]
OtherPath = Annotated[
    Path | None, typer.Argument(metavar="OTHER", help="A second one, to be set beside the first.")
]
OutPath = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE.html",
        help="Where the page goes. Default: report.html in the run folder, or in the current "
        "folder for a bare tape; comparison.html in the current folder for two.",
    ),
]
PngPath = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE.png", help="Also write the plots of TAPE as an image."),
]


def report(
    tape: TapePath, other: OtherPath = None, out: OutPath = None, png: PngPath = None
) -> None:
    """What a run came to, from its event tape: one HTML page; with two tapes, side by side."""
    console = make_console()
    page = out or (_default_page(tape) if other is None else Path("comparison.html"))
    _check_ending(page, "--out", (".html", ".htm"))
    if png is not None:
        _check_ending(png, "--png", (".png",))
        if other is not None:
            fail("--png is the image of one run: leave OTHER out, or --png")
    if other is None:
        from decoupled_diloco.observe.report import write_report

        _say_problems(console, tape, write_report(tape, page, png))
    else:
        from decoupled_diloco.observe.comparison import write_comparison

        for path, run in zip((tape, other), write_comparison(tape, other, page), strict=True):
            _say_problems(console, path, run)
    for file in filter(None, (page, png)):
        console.say(f"written: {file}")


def _default_page(tape: Path) -> Path:
    """Beside the run's own report; a bare tape has none, so in the current folder."""
    from decoupled_diloco.observe.reader import run_folder_of
    from decoupled_diloco.observe.records import FOLDER_NAME, MERGED_NAME

    run = run_folder_of(tape)
    has_run = (run / "run.toml").is_file() or (run / FOLDER_NAME).is_dir()
    bare = tape.is_file() and tape.parent == run and tape.name != MERGED_NAME
    return run / "report.html" if has_run and not bare else Path("report.html")


def _check_ending(path: Path, option: str, endings: tuple[str, ...]) -> None:
    """Nothing but a page or an image is ever written over: a tape never."""
    if path.suffix.lower() not in endings:
        fail(f"{option} {path} does not end in {' or '.join(endings)}: give such a file")
    if path.is_dir():
        fail(f"{option} {path} is a folder: give a file in it")


def _say_problems(console: SteadyConsole, tape: Path, run: RunModel) -> None:
    """What is missing in the page because it is missing on the tape."""
    from decoupled_diloco.observe.report import problems_of

    for problem in problems_of(run):
        console.say(f"note: {tape}: {problem}")
