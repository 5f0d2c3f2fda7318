"""`ddiloco train`, `syncer`, `learner`, `evaluator`: a run, or one of its processes."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command, overrides, setting
from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    CheckpointToGoBackTo,
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
    tls_of,
)
from decoupled_diloco.config import RunConfig, SyncerSettings, load_config
from decoupled_diloco.config.addresses import on_this_machine
from decoupled_diloco.config.files import find_shipped
from decoupled_diloco.config.run import advertised

if TYPE_CHECKING:
    from decoupled_diloco.launch.termination import Termination
    from decoupled_diloco.transport.tls import Tls


class TrainOptions(CommandOptions):
    """Options of `ddiloco train`."""

    run: RunOrFolder
    settings: Sets = None
    resume: Resume = False
    checkpoint: CheckpointToGoBackTo = ""

    def config(self, *more: str) -> RunConfig:
        settings = [*(self.settings or ()), *more]
        if self.checkpoint and not self.resume:
            fail("--checkpoint names where to go back to: also give --resume and the run's folder")
        if self.resume:
            from decoupled_diloco.config.resume import load_resumed  # torch takes seconds

            return load_resumed(Path(self.run), settings)
        return load_config(find_shipped("recipes", self.run), settings)


@command(TrainOptions)
def train(options: TrainOptions) -> None:
    """Everything on this machine: shards, learners, evaluator, supervised; then the report."""
    from decoupled_diloco.cli.train import train_locally

    config = options.config()
    code = train_locally(
        config, make_console(), resume=options.resume, checkpoint=options.checkpoint
    )
    exit_with(code)


class SyncerOptions(TrainOptions):
    """Options of `ddiloco syncer`."""

    new: Annotated[bool, typer.Option("--new")] = False
    """Begin a new run although the one in the folder has not ended."""

    shard: Annotated[int | None, typer.Option()] = None
    """Serve this one shard only, at --port; default: all, supervised."""

    port: Annotated[int | None, setting(SyncerSettings, "port")] = None
    standby: Annotated[bool, typer.Option("--standby")] = False
    """Stand by for this shard, until it is needed."""

    linger: Annotated[bool, typer.Option("--linger")] = False
    """Serve on when the run is over, until SIGTERM: for what would start it again (Kubernetes)."""

    addresses: Annotated[
        tuple[str, ...], setting(SyncerSettings, "addresses", metavar="URL[,URL…]", parser=listed)
    ] = ()
    token_file: Annotated[Path | None, setting(SyncerSettings, "token_file")] = None
    stop_with_parent: StopWithParent = False

    def run_config(self) -> RunConfig:
        """The run's settings with these options; the port of one shard alone is none."""
        names = ["addresses", "token_file", *(["port"] if self.shard is None else [])]
        return self.config(*overrides(self, SyncerSettings, *names))


@command(SyncerOptions)
def syncer(options: SyncerOptions) -> None:
    """The syncer: all its shards on this machine, or one of them."""
    config = options.run_config()
    if options.new and (options.resume or options.shard is not None):
        fail("--new begins a run of all shards: leave it out, or --resume and --shard")
    if options.standby and not (config.syncer.standbys and options.shard is not None):
        fail("--standby is for one shard (--shard) of a run with syncer.standbys=1")
    if options.shard is not None:
        _serve_shard(config, options.shard, options)
        return
    if options.linger:
        fail("--linger is for one shard that others start again: give --shard, too")
    from decoupled_diloco.cli.train import serve_locally

    console, resume = make_console(), options.resume
    exit_with(
        serve_locally(
            config, console, resume=resume, checkpoint=options.checkpoint, new=options.new
        )
    )


def _serve_shard(config: RunConfig, shard: int, options: SyncerOptions) -> None:
    if options.resume:
        fail(f"--shard {shard} goes on by itself with what is in its folder: leave --resume out")
    _prepare(options.stop_with_parent)
    from decoupled_diloco.launch.folder import enter_run_folder, read_token
    from decoupled_diloco.launch.ports import free_ports
    from decoupled_diloco.launch.secrets import own_token
    from decoupled_diloco.launch.shard_role import run_shard

    if shard == 0:
        from decoupled_diloco.monitor.sinks import require_places

        require_places(config.run.log)
    port, addresses = _place_of(config, shard, options)
    if not config.syncer.standbys:  # a standby listens only when it is its turn
        free_ports(config.syncer.host, [port], "Choose another one with --port")
    if shard:
        token = own_token(config, f"shard-{shard}")
    else:
        token = read_token(config.syncer.token_file)  # it dials no other process
    run_shard(
        config,
        shard,
        port=port,
        standby=options.standby,
        linger=options.linger,
        addresses=addresses,
        folder=enter_run_folder(config),
        token=token,
    )


def _place_of(config: RunConfig, shard: int, options: SyncerOptions) -> tuple[int, tuple[str, ...]]:
    """The port of one shard, and the addresses of all, at which the others look for them."""
    shards, told = config.syncer.shards, config.syncer.addresses
    if not 0 <= shard < shards:
        fail(f"--shard {shard} is no shard of this run: 0 to {shards - 1}")
    if not (options.port or config.syncer.port):
        fail("port=0 means any free port, so no learner would find this shard: give --port")
    in_settings = config.syncer.port + shard + shards * options.standby
    port = options.port or in_settings
    alone = shards == 1 and not config.syncer.standbys
    if not told and not alone and port != in_settings:
        fail(
            f"--port {port} is not the settings' port of shard {shard}, so the others would "
            "not be found: give the addresses of all shards with --addresses"
        )
    return port, told or advertised(config, (port,) if alone else ())


class DialOptions(CommandOptions):
    """Options of a process that dials the shards."""

    run: RunFile
    settings: Sets = None
    syncer: SyncerAddresses = ""
    token_file: TokenFile = None
    authority: Authority = None
    certificate: Certificate = None
    key: CertificateKey = None
    supervised: Annotated[bool, typer.Option("--supervised")] = False
    """Start it again, here, when it fails: for a job of a cluster, or a machine without systemd."""

    stop_with_parent: StopWithParent = False

    def config(self) -> RunConfig:
        return load_config(self.run, self.settings or ())

    def addresses(self, config: RunConfig) -> tuple[str, ...]:
        """Where it finds the shards: as given, or on this machine."""
        told = listed(self.syncer)
        if self.shared_folder is not None:
            from decoupled_diloco.storage.shared_folder import shared_addresses

            return shared_addresses(self.shared_folder)
        return told or tuple(map(on_this_machine, advertised(config)))

    @property
    def shared_folder(self) -> Path | None:
        """The run folder that says where the shards are, if ``--syncer`` names one."""
        return Path(self.syncer) if self.syncer and "://" not in self.syncer else None

    def under_supervision(self, config: RunConfig, name: str, *arguments: str) -> NoReturn:
        """Runs the same command as a child, for as long as that makes sense."""
        from decoupled_diloco.launch.supervised import supervise

        self.addresses(config)  # once it is known where the shards are, the run folder is theirs
        told = [arguments[0], str(self.run), *arguments[1:]]
        for override in self.settings or ():
            told += ["--set", override]
        given = {"--syncer": self.syncer, "--token-file": self.token_file}
        given |= {"--authority": self.authority, "--certificate": self.certificate}
        for option, value in (given | {"--key": self.key}).items():
            told += [option, str(value)] if value else []
        exit_with(supervise(config, name, told))

    def tls(self, config: RunConfig, name: str) -> Tls | None:
        """What it trusts and shows."""
        from decoupled_diloco.launch.secrets import own_tls

        return own_tls(config, name, tls_of(self.authority, self.certificate, self.key))


class LearnerOptions(DialOptions):
    """Options of `ddiloco learner`."""

    index: Annotated[int, typer.Option()]
    """Which learner: 0 to learners - 1."""

    devices: Annotated[str, typer.Option(metavar="NAME=LIST")] = ""
    """Set this variable before PyTorch looks for devices, as CUDA_VISIBLE_DEVICES=2,3. `ddiloco
    train` divides a machine's GPUs with it. Default: all devices of the environment."""


@command(LearnerOptions)
def learner(options: LearnerOptions) -> None:
    """One learner that trains the run's workload; start it again and it goes on."""
    from decoupled_diloco.launch.processes import stop_with_parent
    from decoupled_diloco.launch.rank_processes import become_ranks, is_rank, take_place_in_step
    from decoupled_diloco.launch.termination import SignalledTermination

    if options.devices:
        name, _, devices = options.devices.partition("=")
        os.environ[name] = devices
    if options.supervised:
        at = str(options.index)
        options.under_supervision(options.config(), f"learner-{at}", "learner", "--index", at)
    termination = SignalledTermination()  # First: what follows imports torch, which takes seconds.
    config = options.config()
    if config.learner.command:
        exit_with(_run_program(options, config, termination))
    ranks = config.learner.ranks_of(options.index)
    if ranks > 1 and not is_rank() and not take_place_in_step(ranks):
        become_ranks(ranks, stop_with_parent if options.stop_with_parent else None)
    _prepare(options.stop_with_parent, f"rank {os.environ['RANK']} " if ranks > 1 else "")
    from decoupled_diloco.launch import roles
    from decoupled_diloco.launch.folder import enter_run_folder
    from decoupled_diloco.launch.secrets import own_token

    roles.run_learner(
        config,
        options.index,
        syncer=options.addresses(config),
        folder=enter_run_folder(config),
        token=own_token(config, f"learner-{options.index}", options.token_file),
        shared=options.shared_folder,
        tls=options.tls(config, f"learner-{options.index}"),
        termination=termination,
    )


def _run_program(
    options: LearnerOptions | EvaluatorOptions, config: RunConfig, termination: Termination
) -> int:
    """Runs the user's own program as a learner, or as the evaluator."""
    from decoupled_diloco.launch import command
    from decoupled_diloco.launch.folder import enter_run_folder
    from decoupled_diloco.launch.processes import EVALUATOR
    from decoupled_diloco.launch.secrets import own_token_file

    _prepare(False, "launcher ")
    command.require_commands(config)
    index = options.index if isinstance(options, LearnerOptions) else None
    name = EVALUATOR if index is None else f"learner-{index}"
    folder = enter_run_folder(config)
    launched = command.launched(
        config,
        index,
        syncer=() if options.shared_folder else options.addresses(config),
        folder=folder,
        token_file=own_token_file(config, name, options.token_file, folder),
        shared=options.shared_folder,
        tls=options.tls(config, name),
    )
    return command.run_command(
        config.run.evaluate_command if index is None else config.learner.command,
        launched,
        environment=command.variables(config),
        patience_seconds=config.learner.leave_seconds_max,
        termination=termination,
        parent_matters=options.stop_with_parent,
    )


class EvaluatorOptions(DialOptions):
    """Options of `ddiloco evaluator`."""

    result: Annotated[bool, typer.Option("--result")] = False
    """Score the weights of a run that is over, and end."""


@command(EvaluatorOptions)
def evaluator(options: EvaluatorOptions) -> None:
    """An observer that scores the published weights on held-out data."""
    if options.supervised:
        options.under_supervision(options.config(), "evaluator", "evaluator")
    config = options.config()
    if config.run.evaluate_command and options.result:
        fail("--result scores a workload, but this run has an evaluate_command: run that by hand")
    if config.run.evaluate_command:
        from decoupled_diloco.launch.termination import SignalledTermination

        exit_with(_run_program(options, config, SignalledTermination()))
    _prepare(options.stop_with_parent)
    from decoupled_diloco.launch import roles
    from decoupled_diloco.launch.folder import enter_run_folder, require_ours_or_unused
    from decoupled_diloco.launch.processes import EVALUATOR
    from decoupled_diloco.launch.secrets import own_token

    if options.result:
        require_ours_or_unused(config.run.folder)
        roles.evaluate_result(config, folder=config.run.folder)
        return
    roles.run_evaluator(
        config,
        syncer=options.addresses(config),
        folder=enter_run_folder(config),
        token=own_token(config, EVALUATOR, options.token_file),
        shared=options.shared_folder,
        tls=options.tls(config, EVALUATOR),
    )


def _prepare(parent_matters: bool, who: str = "") -> None:
    """Sets up logging and the watch for the parent, before torch is imported."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {who}%(levelname)s %(message)s", stream=sys.stdout
    )
    if parent_matters:
        from decoupled_diloco.launch.processes import stop_with_parent

        stop_with_parent()
