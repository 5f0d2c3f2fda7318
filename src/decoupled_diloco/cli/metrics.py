"""`ddiloco metrics`: print the files that Prometheus and Grafana need for a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    Sets,
    complete_config_or_run,
    fail,
)
from decoupled_diloco.config import load_config
from decoupled_diloco.config.toml_files import RECIPES

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.transport.tls import TLSConfig

SCRAPER = "prometheus"
"""The name for which the syncer admits Prometheus."""


class File(StrEnum):
    """The files that can be printed."""

    rules = "rules"
    dashboard = "dashboard"
    config = "config"


class MetricsOptions(ConnectOptions):
    """Options of `ddiloco metrics`."""

    what: Annotated[
        File,
        typer.Argument(
            metavar="rules|dashboard|config",
            help="rules: alert rules for Prometheus. dashboard: dashboard for Grafana. config: "
            "configuration of Prometheus that scrapes a run.",
        ),
    ]
    run: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="For config: run folder, TOML file of a run, or name of a shipped recipe. "
            "Default: the newest run in runs/.",
            autocompletion=complete_config_or_run,
            show_default=False,
        ),
    ] = ""
    settings: Sets = None


@command(MetricsOptions)
def metrics(options: MetricsOptions) -> None:
    """Print a file for Prometheus or Grafana.

    Example: ddiloco metrics config runs/quickstart > prometheus.yml
    """
    what, run = options.what, options.run
    from decoupled_diloco.monitor.scraping import shipped_file

    tls = options.certificates()
    if what is not File.config and (run or options.settings or options.auth_token_file or tls):
        fail(f"{what.value} is the same for all runs: omit RUN and the options")
    match what:
        case File.rules:
            typer.echo(shipped_file("alerts.yml"), nl=False)
        case File.dashboard:
            typer.echo(shipped_file("dashboard.json"), nl=False)
        case File.config:
            run = chosen_run(run, "ddiloco metrics config runs/quickstart", or_config=True)
            typer.echo(_config(run, options.settings or [], options.auth_token_file, tls), nl=False)


def _config(run: str, settings: list[str], token_file: Path | None, given: TLSConfig | None) -> str:
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
        config = load_config(RECIPES.find(run), settings)
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
    """The file with an auth token for Prometheus; ``None``: a certificate is enough."""
    from decoupled_diloco.launch.secrets import needs_token

    principals = config.syncer.principals_file
    if principals is not None:
        fail(
            f"{principals} holds the auth tokens as TOML, which Prometheus does not read: add a "
            'line prometheus = "…" to it, write that token to a file, and give '
            "--auth-token-file FILE"
        )
    return config.syncer.token_file or (folder / "token" if needs_token(config) else None)


def _note(config: RunConfig) -> str:
    lines = [f"Configuration of Prometheus for the run {config.run.name}."]
    address = config.learner.metrics_address
    if not address:
        lines += [
            "Only the shards are scraped. To scrape learners, set metrics_address in [learner]."
        ]
    elif address.endswith(":0"):
        lines += ["Learners pick free ports: replace port 0 by the ports in their logs."]
    else:
        lines += ["Learners are expected on this machine: replace the hosts of other learners."]
    return "\n".join(lines)
