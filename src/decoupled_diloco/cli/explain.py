"""`ddiloco explain`: what a round, a learner or a step was, and why, in words."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    TokenFile,
    make_console,
    tls_of,
)
from decoupled_diloco.cli.status import newest_run, source_of
from decoupled_diloco.errors import ConfigError

WIDTH_MAX = 100
"""Longer lines are tiring to read."""


class What(StrEnum):
    """What is explained."""

    ROUND = "round"
    LEARNER = "learner"
    STEP = "step"


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="round|learner|step", help="What to explain.", autocompletion=lambda: list(What)
        ),
    ],
    which: Annotated[
        str, typer.Argument(metavar="WHICH", help="Its number, or the learner's name.")
    ],
    of: Annotated[
        str,
        typer.Option(
            "--of",
            metavar="SOURCE",
            help="A run folder, a tape, or a running syncer: http://HOST:PORT. Default: the newest "
            "run in runs/.",
        ),
    ] = "",
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    shard: Annotated[
        int | None, typer.Option(help="Of this shard only: each counts its own rounds.")
    ] = None,
) -> None:
    """Explains why a round closed when it did, what a learner did, or what happened at a step.

    ddiloco explain round 118 --of runs/quickstart
    """
    from decoupled_diloco.observe.explain import explain_round
    from decoupled_diloco.observe.explain_learner import explain_learner
    from decoupled_diloco.observe.explain_step import explain_step
    from decoupled_diloco.observe.run_model import run_of
    from decoupled_diloco.observe.words import wrapped

    if what not in list(What):
        raise ConfigError(f"{what!r} cannot be explained: choose one of {', '.join(What)}")
    of = of or newest_run(f"ddiloco explain {what} {which} --of runs/quickstart")
    source = source_of(of, token_file, tls_of(authority, certificate, key), detail=True)
    run = run_of(source.poll(), "details")
    if not run.records:
        raise ConfigError(f"nothing is on the tape of {of} yet: there is nothing to explain")
    if what == What.LEARNER:
        lines = explain_learner(run, which, live=source.live)
    elif what == What.ROUND:
        lines = explain_round(run, _number(which), shard)
    else:
        lines = explain_step(run, _number(which), shard)
    lines += [f"The tape is not whole: {problem}" for problem in source.problems()]
    console = make_console()
    typer.echo(wrapped(lines, min(WIDTH_MAX, console.width)))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{text!r} is no number: give the number of a round or step, 0 or above")
    return int(text)
