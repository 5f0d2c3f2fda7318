"""`ddiloco doctor`: check whether a run works on this machine and with a syncer."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    Json,
    Sets,
    SyncerAddresses,
    complete_recipe,
    exit_with,
    fail,
    find_recipe,
    make_console,
    require_urls,
)

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.doctor.machine import Finding
    from decoupled_diloco.show.console import SteadyConsole
    from decoupled_diloco.transport.tls import TLSConfig

LEVEL_WIDTH = 9
CHECK_WIDTH = 12
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


class DoctorOptions(ConnectOptions):
    """Options of `ddiloco doctor`."""

    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="TOML file of the run, or name of a shipped recipe. Default: check this machine "
            "only.",
            parser=find_recipe,
            autocompletion=complete_recipe,
        ),
    ] = None
    settings: Sets = None
    syncer: SyncerAddresses = ""
    as_json: Json = False


@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check whether a run works on this machine and with a syncer.

    Exit code 1: at least one check has failed.
    """
    started = time.monotonic()
    from decoupled_diloco.config import load_config

    given = options.config
    config = None if given is None else load_config(given, options.settings or ())
    if config is None and options.settings:
        fail("--set requires a CONFIG: give a TOML file or a recipe, or omit --set")
    addresses = require_urls(options.syncer, standby=False)
    from decoupled_diloco.launch.doctor.examine import Examined, any_left_behind, examine

    tls = options.certificates()
    own = _tls(config, addresses, tls)
    case = Examined(
        config, addresses, _token(config, addresses, options.auth_token_file), started, own
    )
    findings = examine(case)
    code = _print_json(findings) if options.as_json else _print(findings, make_console())
    if any_left_behind():
        _exit_at_once(code)
    exit_with(code)


def _exit_at_once(code: int) -> NoReturn:
    """End without Python's shutdown, during which a thread inside torch would abort the process."""
    with contextlib.suppress(OSError):  # A closed pipe is not an error.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _token(
    config: RunConfig | None, addresses: tuple[str, ...], token_file: Path | None
) -> str | None:
    """Return the auth token of a learner on this machine, from the option or the run's settings."""
    from decoupled_diloco.launch.run_folder import read_token
    from decoupled_diloco.launch.secrets import own_token

    if not addresses or token_file is not None or config is None:
        return read_token(token_file)
    return own_token(config, config.learner_ids[0])


def _tls(
    config: RunConfig | None, addresses: tuple[str, ...], given: TLSConfig | None
) -> TLSConfig | None:
    """Return the certificates of a learner on this machine, from options or settings."""
    from decoupled_diloco.launch.secrets import own_tls
    from decoupled_diloco.transport.tls import require_used

    if not addresses or config is None:
        require_used(given, addresses[0] if addresses else "this machine alone")
        return given
    return own_tls(config, config.learner_ids[0], given)


def _print(findings: Iterable[Finding], console: SteadyConsole) -> int:
    worst = {"warning": 0, "error": 0}
    for finding in findings:
        if finding.level != "ok":
            worst[finding.level] += 1
        _print_line(finding, console)
    console.print(_verdict(**worst))
    return 1 if worst["error"] else 0


def _print_line(finding: Finding, console: SteadyConsole) -> None:
    """Print level and check in columns, the rest beside them; long words are not broken."""
    from rich.text import Text

    lines = _beside(finding.text, console.width)
    if finding.advice:
        lines += _beside(f"→ {finding.advice}", console.width)
    first = Text(f"{finding.level:{LEVEL_WIDTH}}", style=STYLES[finding.level])
    first.append(f"{finding.check:{CHECK_WIDTH}}{lines[0]}", style="default")
    console.print_text(first)
    for line in lines[1:]:
        console.print_text(Text(" " * (LEVEL_WIDTH + CHECK_WIDTH) + line))


def _beside(text: str, width: int) -> list[str]:
    room = max(20, width - LEVEL_WIDTH - CHECK_WIDTH)
    return wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _verdict(*, warning: int, error: int) -> str:
    from decoupled_diloco.run_model.phrases import many

    if error:
        more = f", {many(warning, 'warning')}" if warning else ""
        return f"\n{many(error, 'error')}{more}"
    return f"\nno error, {many(warning, 'warning')}" if warning else "\nall checks passed"


def _print_json(findings: Iterable[Finding]) -> int:
    found = list(findings)
    typer.echo(json.dumps([asdict(finding) for finding in found], indent=1, ensure_ascii=False))
    return 1 if any(finding.level == "error" for finding in found) else 0
