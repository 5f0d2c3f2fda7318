"""The commands of `ddiloco` and their options. What they do is elsewhere."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from decoupled_diloco import __version__
from decoupled_diloco.cli.added import add_command
from decoupled_diloco.cli.chaos import chaos
from decoupled_diloco.cli.checkpoint import checkpoint
from decoupled_diloco.cli.doctor import doctor
from decoupled_diloco.cli.explain import explain
from decoupled_diloco.cli.export import export
from decoupled_diloco.cli.ledger import ledger
from decoupled_diloco.cli.options import (
    INTERRUPTED,
    CutToGoBackTo,
    Resume,
    RunFile,
    RunOrFolder,
    Sets,
    StopWithParent,
    SyncerAddresses,
    TokenFile,
    exit_with,
    fail,
    listed,
    make_console,
)
from decoupled_diloco.cli.recipes import recipes, scenarios
from decoupled_diloco.cli.replay import replay
from decoupled_diloco.cli.report import report
from decoupled_diloco.cli.simulate import simulate
from decoupled_diloco.cli.status import status
from decoupled_diloco.cli.timing import timing
from decoupled_diloco.cli.usage import Commands
from decoupled_diloco.cli.watch import watch
from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.addresses import advertised, on_this_machine
from decoupled_diloco.config.shipped import find_shipped
from decoupled_diloco.errors import Error

app = Commands(
    name="ddiloco",
    help="Train on machines that fail, differ and sit far apart (Decoupled DiLoCo).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 2 wrong configuration or usage, 3 protocol, 4 transport, 5 access "
    "refused, 6 storage, 7 merge, 8 another process acts for the shard, 130 interrupted, 1 "
    "anything else.",
)


@app.command()
def train(
    run: RunOrFolder, settings: Sets = None, resume: Resume = False, cut: CutToGoBackTo = ""
) -> None:
    """Everything on this machine: shards, learners, evaluator, supervised; then the report."""
    from decoupled_diloco.cli.train import train_locally

    config = _run_of(run, settings, resume=resume, cut=cut)
    exit_with(train_locally(config, make_console(), resume=resume, cut=cut))


@app.command()
def syncer(
    run: RunOrFolder,
    settings: Sets = None,
    resume: Resume = False,
    cut: CutToGoBackTo = "",
    new: Annotated[
        bool,
        typer.Option("--new", help="Begin a new run although the one in the folder has not ended."),
    ] = False,
    shard: Annotated[
        int | None, typer.Option(help="Serve this one shard only; default: all, supervised.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of this one shard, or of the first of all.")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Stand by for this shard, until it is needed.")
    ] = False,
    addresses: Annotated[
        str, typer.Option(metavar="URL[,URL…]", help="Where learners reach the shards.")
    ] = "",
    token_file: TokenFile = None,
    stop_with_parent: StopWithParent = False,
) -> None:
    """The syncer: all its shards on this machine, or one of them."""
    given = _as_settings(addresses, token_file, port if shard is None else None)
    config = _run_of(run, [*(settings or ()), *given], resume=resume, cut=cut)
    if new and (resume or shard is not None):
        fail("--new begins a run of all shards: leave it out, or --resume and --shard")
    if standby and not (config.syncer.standbys and shard is not None):
        fail("--standby is for one shard (--shard) of a run with syncer.standbys=1")
    if shard is None:
        from decoupled_diloco.cli.train import serve_locally

        exit_with(serve_locally(config, make_console(), resume=resume, cut=cut, new=new))
    if resume:
        fail(f"--shard {shard} goes on by itself with what is in its folder: leave --resume out")
    from decoupled_diloco.launch.folder import enter_run_folder, read_token
    from decoupled_diloco.launch.secrets import own_token
    from decoupled_diloco.launch.shard_role import run_shard

    _prepare(stop_with_parent)
    if not 0 <= shard < config.syncer.shards:
        fail(f"--shard {shard} is no shard of this run: 0 to {config.syncer.shards - 1}")
    if not (port or config.syncer.port):
        fail("port=0 means any free port, so nobody would find this shard: give --port")
    shards, told = config.syncer.shards, config.syncer.addresses
    in_settings = config.syncer.port + shard + shards * standby
    own_port = port or in_settings
    alone = shards == 1 and not config.syncer.standbys
    if not told and not alone and own_port != in_settings:
        fail(
            f"--port {own_port} is not the settings' port of shard {shard}, so the others would "
            "not be found: give the addresses of all shards with --addresses"
        )
    run_shard(
        config,
        shard,
        port=own_port,
        standby=standby,
        addresses=told or advertised(config, (own_port,) if alone else ()),
        folder=enter_run_folder(config),
        token=own_token(config, f"shard-{shard}")
        if shard
        else read_token(config.syncer.token_file),
    )


@app.command()
def learner(
    run: RunFile,
    index: Annotated[int, typer.Option(help="Which learner: 0 to learners - 1.")],
    settings: Sets = None,
    syncer: SyncerAddresses = "",
    token_file: TokenFile = None,
    stop_with_parent: StopWithParent = False,
) -> None:
    """One learner that trains the run's workload; start it again and it goes on."""
    from decoupled_diloco.launch.termination import Termination

    termination = Termination()  # First: what follows imports torch, which takes seconds.
    from decoupled_diloco.launch import roles
    from decoupled_diloco.launch.folder import enter_run_folder
    from decoupled_diloco.launch.secrets import own_token

    _prepare(stop_with_parent)
    config = load_config(run, settings or ())
    roles.run_learner(
        config,
        index,
        syncer=_addresses(syncer, config),
        folder=enter_run_folder(config),
        token=own_token(config, f"learner-{index}", token_file),
        termination=termination,
    )


@app.command()
def evaluator(
    run: RunFile,
    settings: Sets = None,
    syncer: SyncerAddresses = "",
    token_file: TokenFile = None,
    result: Annotated[
        bool, typer.Option("--result", help="Score the weights of a run that is over, and end.")
    ] = False,
    stop_with_parent: StopWithParent = False,
) -> None:
    """An observer that scores the published weights on held-out data."""
    from decoupled_diloco.launch import roles
    from decoupled_diloco.launch.folder import enter_run_folder, require_ours_or_unused
    from decoupled_diloco.launch.processes import EVALUATOR
    from decoupled_diloco.launch.secrets import own_token

    _prepare(stop_with_parent)
    config = load_config(run, settings or ())
    if result:
        require_ours_or_unused(config.run.folder)
        roles.evaluate_result(config, folder=config.run.folder)
        return
    roles.run_evaluator(
        config,
        syncer=_addresses(syncer, config),
        folder=enter_run_folder(config),
        token=own_token(config, EVALUATOR, token_file),
    )


app.command()(recipes)
app.command()(scenarios)
app.command()(simulate)
add_command(app, "plan")
app.command()(chaos)
app.command()(export)
app.command()(doctor)
app.command()(status)
app.command()(watch)
app.command()(timing)
app.command()(explain)
app.command()(report)
app.command()(replay)
add_command(app, "goodput")
app.command()(ledger)
app.command()(checkpoint)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """The entry point: every operating error is one sentence and an exit code."""
    try:
        app(standalone_mode=True)
    except Error as error:
        fail(str(error), error.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:  # typer makes the one of the other
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        # At once: taking torch and its threads down can cost seconds on a busy machine, and whoever
        # interrupts a run waits for each of its processes.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(0)


def _run_of(run: str, settings: list[str] | None, *, resume: bool, cut: str) -> RunConfig:
    """The settings of a new run, or of one that goes on in its folder."""
    if cut and not resume:
        fail("--cut says where to go back to: give --resume and the folder of the run, too")
    if resume:
        from decoupled_diloco.config.resume import load_resumed  # torch takes seconds

        return load_resumed(Path(run), settings or ())
    return load_config(find_shipped("recipes", run), settings or ())


def _prepare(parent_matters: bool) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    if parent_matters:
        from decoupled_diloco.launch.processes import stop_with_parent

        stop_with_parent()


def _addresses(given: str, config: RunConfig) -> tuple[str, ...]:
    """Where a learner or observer finds the shards: as given, or on this machine."""
    return listed(given) or tuple(map(on_this_machine, advertised(config)))


def _as_settings(addresses: str, token_file: Path | None, port: int | None) -> list[str]:
    """Options of the syncer as the settings that they stand for."""
    given = []
    if port is not None:
        given.append(f"syncer.port={port}")
    if addresses:
        given.append(f"syncer.addresses={json.dumps(listed(addresses))}")
    if token_file is not None:
        given.append(f"syncer.token_file={json.dumps(str(token_file))}")
    return given
