"""`ddiloco status`: how a run is doing, once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    RunSource,
    TokenFile,
    make_console,
    tls_of,
)
from decoupled_diloco.errors import ConfigError, Error

if TYPE_CHECKING:
    from decoupled_diloco.observe.sources import Source
    from decoupled_diloco.transport.tls import Tls


def status(
    source: RunSource = "",
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """How a run is doing: phase, clock, every learner and shard; live or from its tape."""
    import json

    from decoupled_diloco.observe.run_model import run_of
    from decoupled_diloco.observe.status import status_of
    from decoupled_diloco.observe.status_view import render_status

    told = _tell_jobs(Path(source)) if source and not as_json else False
    if told and not _has_tape(Path(source)):
        return
    tls = tls_of(authority, certificate, key)
    opened = source_of(source or newest_run("ddiloco status runs/quickstart"), token_file, tls)
    run = run_of(opened.poll(), "now" if opened.live else "run")
    account = None if opened.live else run.account
    found = status_of(run, opened.now(), opened.problems(), account)
    if as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False, allow_nan=False))
        return
    console = make_console()
    width = console.width
    console.print(render_status(found, width=width))


def _tell_jobs(run: Path) -> bool:
    """Tells the jobs of a run that was launched on a cluster; whether there are any.

    A run has a tape that says how it is, also while its cluster does not answer.
    """
    from decoupled_diloco.engines.base import JOBS
    from decoupled_diloco.engines.launch import Launch, launch_folder

    folder = launch_folder(run)
    if not (folder / JOBS).exists():
        return False
    try:
        jobs = Launch(folder).states()
    except Error as error:
        if not _has_tape(run):
            raise
        typer.echo(f"its jobs are not known: {error}", err=True)
        return False
    for job in jobs:
        typer.echo(f"{job.name}: job {job.id} {job.state} {job.where}".rstrip())
    return bool(jobs)


def source_of(
    text: str, token_file: Path | None, tls: Tls | None = None, *, detail: bool = False
) -> Source:
    """The source that a command line names, with its secret and certificates."""
    from decoupled_diloco.launch.folder import read_token
    from decoupled_diloco.observe.sources import open_source

    return open_source(text, read_token(token_file), tls, detail=detail)


def newest_run(example: str) -> str:
    """The run folder in runs/ that was begun last; says which it is.

    Raises:
        ConfigError: There is none; shows a command that names a run, as ``example`` does.
    """
    begun = {path.parent: path.stat().st_mtime for path in Path("runs").glob("*/run.toml")}
    if not begun:
        raise ConfigError(f"there is no run in runs/ here: say which one, as in {example}")
    newest = str(max(begun, key=lambda run: (_has_tape(run), begun[run])))
    typer.echo(f"of {newest}, the newest run here", err=True)
    return newest


def _has_tape(run: Path) -> bool:
    """Whether a shard has begun to write: a start that failed has left but a folder."""
    return (run / "tape.jsonl").exists() or any(run.glob("tape/shard-*.jsonl"))
