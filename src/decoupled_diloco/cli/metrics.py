"""`ddiloco metrics`: what Prometheus and Grafana need to watch a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    Sets,
    TokenFile,
    complete_recipe,
    fail,
    tls_of,
)
from decoupled_diloco.config import load_config
from decoupled_diloco.config.files import find_shipped

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.transport.tls import Tls

SCRAPER = "prometheus"
"""The id by which it is let in."""


class Wanted(StrEnum):
    """What can be printed."""

    rules = "rules"
    dashboard = "dashboard"
    config = "config"


def metrics(
    what: Annotated[
        Wanted,
        typer.Argument(
            metavar="WHAT",
            help="rules: alert rules for Prometheus; dashboard: one for Grafana; config: a "
            "configuration of Prometheus that scrapes a run.",
        ),
    ],
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="For config: the folder of a run on this machine, the run's TOML file, or the "
            "name of a shipped recipe.",
            autocompletion=complete_recipe,
        ),
    ] = "",
    settings: Sets = None,
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
) -> None:
    """Files for Prometheus and Grafana, to standard output.

    `ddiloco metrics config runs/quickstart > prometheus.yml`
    """
    from decoupled_diloco.monitor.scraping import shipped_file

    tls = tls_of(authority, certificate, key)
    if what is not Wanted.config and (run or settings or token_file or tls):
        fail(f"{what.value} is the same for all runs: leave out RUN and the options")
    match what:
        case Wanted.rules:
            typer.echo(shipped_file("alerts.yml"), nl=False)
        case Wanted.dashboard:
            typer.echo(shipped_file("dashboard.json"), nl=False)
        case Wanted.config:
            if not run:
                fail("say which run is scraped, as in ddiloco metrics config runs/quickstart")
            typer.echo(_config(run, settings or [], token_file, tls), nl=False)


def _config(run: str, settings: list[str], token_file: Path | None, given: Tls | None) -> str:
    from decoupled_diloco.config.addresses import on_this_machine
    from decoupled_diloco.config.resume import RUN_FILE
    from decoupled_diloco.config.run import advertised
    from decoupled_diloco.launch.secrets import own_tls
    from decoupled_diloco.monitor.scraping import scrape_config, targets_of
    from decoupled_diloco.storage.shared_folder import read_addresses
    from decoupled_diloco.transport.tls import require_used

    folder = Path(run)
    if (folder / RUN_FILE).is_file():
        config = load_config(folder / RUN_FILE, settings, plugins=False)
        addresses = read_addresses(folder)
    else:
        config = load_config(find_shipped("recipes", run), settings)
        folder, addresses = config.run.folder, advertised(config)
    require_used(given, addresses[0])
    targets = targets_of(config, map(on_this_machine, addresses))
    token_file = token_file or _token_file(config, folder)
    return scrape_config(
        targets,
        token_file and token_file.absolute(),
        _note(config),
        own_tls(config, SCRAPER, given),
    )


def _token_file(config: RunConfig, folder: Path) -> Path | None:
    """The file with a secret that scrapers can show; ``None``: a certificate is enough."""
    from decoupled_diloco.launch.secrets import needs_token

    told = config.syncer.principals_file
    if told is not None:
        fail(
            f"{told} holds the secrets as TOML, which Prometheus does not read: add a line "
            'prometheus = "…" to it, put that secret alone into a file, and give --token-file FILE'
        )
    return config.syncer.token_file or (folder / "token" if needs_token(config) else None)


def _note(config: RunConfig) -> str:
    lines = [f"Prometheus' configuration for the run {config.run.name}."]
    told = config.learner.metrics
    if not told:
        lines += ["Only the shards are scraped: learners have metrics in [learner] for that."]
    elif told.endswith(":0"):
        lines += ["Learners have any free port: put in what their logs tell, or choose ports."]
    else:
        lines += ["Learners are looked for on this machine: correct the hosts of others."]
    return "\n".join(lines)
