"""`ddiloco doctor`: would a run work here, and with that syncer?"""

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

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    Sets,
    SyncerAddresses,
    TokenFile,
    complete_recipe,
    exit_with,
    fail,
    find_recipe,
    listed,
    make_console,
    tls_of,
)

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.doctor.machine import Finding
    from decoupled_diloco.observe.terminal import SteadyConsole
    from decoupled_diloco.transport.tls import Tls

LEVEL_WIDTH = 9
CHECK_WIDTH = 12
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="The run's TOML file, or the name of a shipped recipe.",
            parser=find_recipe,
            autocompletion=complete_recipe,
        ),
    ] = None,
    settings: Sets = None,
    syncer: SyncerAddresses = "",
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON list of check, level, text and advice.")
    ] = False,
) -> None:
    """Would a run work here, and with that syncer? Exit code 1 if anything is wrong."""
    started = time.monotonic()
    from decoupled_diloco.config import load_config

    config = None if run is None else load_config(run, settings or ())
    if config is None and settings:
        fail("--set overrides settings of a run's file: give one, or leave --set out")
    from decoupled_diloco.config.addresses import address_problem, without_password

    addresses = listed(syncer)
    if any(map(address_problem, addresses)):
        shown = without_password(str(syncer))
        fail(f"--syncer {shown!r} is not a URL: write it as http://host:port")
    from decoupled_diloco.launch.doctor.examine import Examined, any_left_behind, examine

    tls = tls_of(authority, certificate, key)
    own = _tls(config, addresses, tls)
    case = Examined(config, addresses, _token(config, addresses, token_file), started, own)
    findings = examine(case)
    code = _print_json(findings) if as_json else _print(findings, make_console())
    if any_left_behind():
        _exit_at_once(code)
    exit_with(code)


def _exit_at_once(code: int) -> NoReturn:
    """Without taking Python down: a thread that is within torch then would abort the process."""
    with contextlib.suppress(OSError):  # A reader that is gone is not an error.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _token(
    config: RunConfig | None, addresses: tuple[str, ...], token_file: Path | None
) -> str | None:
    """What a learner here would show: of the option, or of the run's settings."""
    from decoupled_diloco.launch.folder import read_token
    from decoupled_diloco.launch.secrets import own_token

    if not addresses or token_file is not None or config is None:
        return read_token(token_file)
    return own_token(config, config.learner_ids[0])


def _tls(config: RunConfig | None, addresses: tuple[str, ...], given: Tls | None) -> Tls | None:
    """What a learner here would trust and show: of the options, or of the run's settings."""
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
    """Level and check in columns, the rest beside them; long words are left whole."""
    from rich.text import Text

    lines = _beside(finding.text, console.width)
    if finding.advice:
        lines += _beside(f"→ {finding.advice}", console.width)
    first = Text(f"{finding.level:{LEVEL_WIDTH}}", style=STYLES[finding.level])
    first.append(f"{finding.check:{CHECK_WIDTH}}{lines[0]}", style="default")
    console.say(first)
    for line in lines[1:]:
        console.say(Text(" " * (LEVEL_WIDTH + CHECK_WIDTH) + line))


def _beside(text: str, width: int) -> list[str]:
    room = max(20, width - LEVEL_WIDTH - CHECK_WIDTH)
    return wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def _verdict(*, warning: int, error: int) -> str:
    if error:
        return f"\n{error} to correct" + (f", {warning} to know" if warning else "")
    return f"\nit should work; {warning} to know" if warning else "\nall is well"


def _print_json(findings: Iterable[Finding]) -> int:
    found = list(findings)
    typer.echo(json.dumps([asdict(finding) for finding in found], indent=1, ensure_ascii=False))
    return 1 if any(finding.level == "error" for finding in found) else 0
