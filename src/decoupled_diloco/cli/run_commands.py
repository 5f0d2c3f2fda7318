"""`ddiloco train`, `syncer`, `learner` and `evaluator`: start a run, or one of its processes."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from decoupled_diloco.cli.command_line import (
    CommandOptions,
    command,
    option_of,
    overrides,
    setting,
)
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import (
    CheckpointToGoBackTo,
    ConfigOrResumed,
    ConnectOptions,
    Resume,
    RunConfigFile,
    Sets,
    StopWithParent,
    SyncerAddresses,
    exit_with,
    fail,
    listed,
    make_console,
    prepare,
    require_urls,
)
from decoupled_diloco.config import RunConfig, SyncerSettings, load_config
from decoupled_diloco.config.addresses import alternatives, is_store, on_this_machine, url_of
from decoupled_diloco.config.run import LearnerSettings, advertised
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.units import format_duration

if TYPE_CHECKING:
    from decoupled_diloco.launch.termination import Termination
    from decoupled_diloco.transport.tls import TLSConfig


RESUME_EXAMPLE = "ddiloco train --resume runs/quickstart"


def changed_methods(folder: Path) -> list[str]:
    """Return a sentence for each module of a run's methods that is not as at its last start."""
    from decoupled_diloco.config.plugins import plugin_versions

    present = plugin_versions()
    if not present:
        return []
    from decoupled_diloco.tape import TapeReader

    before: dict[str, str] = {}
    for record in TapeReader(folder):
        if record.kind == "start":
            before |= record.data["header"].get("plugins", {})
    return [
        f"module {name!r} has changed since the last start of the run ({before[name]} before, "
        f"{version} now): the run continues with the new one, and its earlier part needs the other "
        "one for a replay"
        for name, version in present.items()
        if before.get(name, version) != version
    ]


class TrainOptions(CommandOptions):
    """Options of `ddiloco train`."""

    config: ConfigOrResumed = ""
    settings: Sets = None
    resume: Resume = False
    checkpoint: CheckpointToGoBackTo = ""

    def load(self, *more: str) -> RunConfig:
        """Return the run's settings; ``more`` adds overrides to those of --set."""
        settings = [*(self.settings or ()), *more]
        if self.checkpoint and not self.resume:
            fail("--checkpoint requires --resume: ddiloco train --resume RUN --checkpoint last")
        if self.resume:
            from decoupled_diloco.config.resume import load_resumed  # torch takes seconds

            run = chosen_run(self.config, RESUME_EXAMPLE)
            if is_store(run):
                from decoupled_diloco.launch.run_mirror import restored_run

                folder, settings, state = restored_run(run, settings)
                when = format_duration(round(max(0.0, time.time() - state.wall)))
                typer.echo(
                    f"copied state {state.number}, taken {when} ago on {state.host}: {folder}"
                )
                run = str(folder)
            config = load_resumed(Path(run), settings)
            for line in changed_methods(Path(run)):
                typer.echo(line)
            return config
        if is_store(self.config):
            fail(f"{self.config} is an object store: add --resume to continue the run in it")
        if not self.config:
            fail("CONFIG is missing: give a TOML file or a recipe, as in ddiloco train quickstart")
        return load_config(RECIPES.find(self.config), settings)


@command(TrainOptions)
def train(options: TrainOptions) -> None:
    """Run shards, learners and an evaluator on this machine, then write a report."""
    from decoupled_diloco.cli.local_training import train_locally

    config = options.load()
    code = train_locally(
        config, make_console(), resume=options.resume, checkpoint=options.checkpoint
    )
    exit_with(code)


class SyncerOptions(TrainOptions):
    """Options of `ddiloco syncer`."""

    new: Annotated[bool, typer.Option("--new")] = False
    """Start a new run although the run in the folder has not ended; the old folder is renamed."""

    shard: Annotated[int | None, typer.Option(metavar="NUMBER")] = None
    """Serve only this shard, 0 to shards - 1, at --port. Default: start and restart all shards."""

    port: Annotated[int | None, setting(SyncerSettings, "port")] = None
    standby: Annotated[bool, typer.Option("--standby")] = False
    """With --shard: wait as the standby of this shard."""

    linger: Annotated[bool, typer.Option("--linger")] = False
    """With --shard: keep serving after the run has ended, until SIGTERM (for Kubernetes)."""

    addresses: Annotated[
        tuple[str, ...], setting(SyncerSettings, "addresses", metavar="URL[,URL…]", parser=listed)
    ] = ()
    token_file: Annotated[
        Path | None,
        setting(SyncerSettings, "token_file", "--auth-token-file", metavar="FILE"),
    ] = None
    stop_with_parent: StopWithParent = False

    def run_config(self) -> RunConfig:
        """Return the run's settings with these options, but without the port of a single shard."""
        names = ["addresses", "token_file", *(["port"] if self.shard is None else [])]
        return self.load(*overrides(self, SyncerSettings, *names))


@command(SyncerOptions)
def syncer(options: SyncerOptions) -> None:
    """Serve the syncer: all its shards on this machine, or one of them."""
    config = options.run_config()
    if options.new and (options.resume or options.shard is not None):
        fail("--new cannot be combined with --resume or --shard: it starts a run with all shards")
    if options.standby and not (config.syncer.standby and options.shard is not None):
        lacking = "--shard" if options.shard is None else "syncer.standby=true"
        fail(
            "--standby requires --shard, and a run with syncer.standby=true: add "
            f"{'' if options.shard is None else '--set '}{lacking}"
        )
    if options.shard is not None:
        _serve_shard(config, options.shard, options)
        return
    if options.linger:
        fail("--linger requires --shard")
    from decoupled_diloco.cli.local_training import serve_locally

    console, resume = make_console(), options.resume
    exit_with(
        serve_locally(
            config, console, resume=resume, checkpoint=options.checkpoint, new=options.new
        )
    )


def _serve_shard(config: RunConfig, shard: int, options: SyncerOptions) -> None:
    if options.resume:
        fail(
            f"--resume cannot be combined with --shard {shard}: a shard always continues from its "
            "folder"
        )
    prepare(options.stop_with_parent)
    from decoupled_diloco.launch.ports import free_ports
    from decoupled_diloco.launch.run_folder import enter_run_folder, read_token
    from decoupled_diloco.launch.secrets import own_token
    from decoupled_diloco.launch.shard_role import run_shard

    if shard == 0:
        from decoupled_diloco.monitor.sinks import require_places

        require_places(config.run.trackers)
    port, addresses = _place_of(config, shard, options)
    if not config.syncer.standby:  # a standby listens only when it is its turn
        free_ports(config.syncer.host, [port], "Choose another one with --port")
    if shard:
        token = own_token(config, f"shard-{shard}")
    else:
        token = read_token(config.syncer.token_file)  # it connects to no other process
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
    """Return the port of one shard, and the addresses at which the processes find all shards."""
    shards, addresses = config.syncer.shards, config.syncer.addresses
    if not 0 <= shard < shards:
        fail(f"--shard {shard} is out of range: 0 to {shards - 1}")
    if not (options.port or config.syncer.port):
        fail("port=0 picks a free port, so no learner would find this shard: give --port")
    in_settings = config.syncer.port + shard + shards * options.standby
    port = options.port or in_settings
    alone = shards == 1 and not config.syncer.standby
    if not addresses and not alone and port != in_settings:
        fail(
            f"--port {port} is not the port of shard {shard} in the settings ({in_settings}), so "
            "processes would not find it: give the addresses of all shards with --addresses"
        )
    return port, addresses or advertised(config, (port,) if alone else ())


def shared_relay(config: RunConfig, relay: str) -> tuple[str, ...]:
    """Return the address of a relay for processes that share its run folder; empty without one."""
    from decoupled_diloco.storage.shared_folder import relay_address

    return (relay_address(relay, config.tls.scheme),) if relay else ()


class DialOptions(ConnectOptions):
    """Options of a process that connects to the shards."""

    config: RunConfigFile
    settings: Sets = None
    syncer: SyncerAddresses = ""
    supervised: Annotated[bool, typer.Option("--supervised")] = False
    """Restart the process on this machine when it fails (for a cluster job, or without systemd)."""

    stop_with_parent: StopWithParent = False

    def load(self) -> RunConfig:
        """Return the run's settings, after a check of the addresses."""
        folder, option = self.shared_folder, option_of(type(self), "syncer")
        if folder is None:
            require_urls(self.syncer, option=option)
        elif "/" not in self.syncer and not folder.is_dir():
            fail(
                f"{option} {self.syncer!r} is neither a URL nor a run folder: write "
                "http://HOST:PORT, or a path such as runs/quickstart"
            )
        return load_config(self.config, self.overrides)

    @property
    def overrides(self) -> list[str]:
        """The settings that are given on the command line, as arguments of --set."""
        return [*(self.settings or ())]

    def addresses(self, config: RunConfig, relay: str = "") -> tuple[str, ...]:
        """Return the addresses of the shards: as given, or on this machine.

        Args:
            config: The run's settings.
            relay: Name of the relay whose address precedes those in a run folder; empty: none.
        """
        if self.shared_folder is not None:
            from decoupled_diloco.storage.shared_folder import shared_addresses

            return (*shared_relay(config, relay), *shared_addresses(self.shared_folder))
        return listed(self.syncer) or tuple(map(on_this_machine, advertised(config)))

    @property
    def shared_folder(self) -> Path | None:
        """The run folder with the addresses of the shards, if the option names one."""
        return Path(self.syncer) if self.syncer and "://" not in self.syncer else None

    def under_supervision(self, config: RunConfig, name: str, *arguments: str) -> NoReturn:
        """Run the same command as a child, and restart it as long as that can help."""
        from decoupled_diloco.launch.supervised_process import supervise

        self.addresses(config)  # raises before the run folder is used
        command_line = [arguments[0], str(self.config), *arguments[1:]]
        for override in self.overrides:
            command_line += ["--set", override]
        for field in ("syncer", "auth_token_file", "ca_cert", "cert", "key"):
            if value := getattr(self, field):
                command_line += [option_of(type(self), field), str(value)]
        exit_with(supervise(config, name, command_line))

    def tls(self, config: RunConfig, name: str) -> TLSConfig | None:
        """Return the certificates that the process verifies with and presents."""
        from decoupled_diloco.launch.secrets import own_tls

        return own_tls(config, name, self.certificates())


class LearnerOptions(DialOptions):
    """Options of `ddiloco learner`."""

    index: Annotated[int, typer.Option(metavar="NUMBER")]
    """Number of the learner, 0 to learners - 1."""

    devices: Annotated[str, typer.Option(metavar="NAME=LIST")] = ""
    """Set this variable before PyTorch finds devices, such as CUDA_VISIBLE_DEVICES=2,3. `ddiloco
    train` divides the GPUs of a machine this way. Default: use all devices."""

    party_key: Annotated[Path | None, setting(LearnerSettings, "party_key", metavar="FILE")] = None

    @property
    def overrides(self) -> list[str]:
        """See `DialOptions`."""
        return [*super().overrides, *overrides(self, LearnerSettings, "party_key")]


@command(LearnerOptions)
def learner(options: LearnerOptions) -> None:
    """Train the run's workload as one learner.

    A learner that is started again continues from its checkpoint.
    """
    from decoupled_diloco.launch.processes import stop_with_parent
    from decoupled_diloco.launch.rank_processes import become_ranks, is_rank, take_place_in_step
    from decoupled_diloco.launch.termination import SignalledTermination

    if options.devices:
        name, equals, devices = options.devices.partition("=")
        if not (name.isidentifier() and equals):
            fail(
                f"--devices {options.devices!r} is not NAME=LIST: write a variable and its "
                "devices, such as CUDA_VISIBLE_DEVICES=2,3"
            )
        os.environ[name] = devices
    if options.supervised:
        at = str(options.index)
        options.under_supervision(options.load(), f"learner-{at}", "learner", "--index", at)
    termination = SignalledTermination()  # first, because the imports of torch take seconds
    config = options.load()
    if config.learner.command:
        exit_with(_run_program(options, config, termination))
    ranks = config.learner.ranks_of(options.index)
    if ranks > 1 and not is_rank() and not take_place_in_step(ranks):
        become_ranks(ranks, stop_with_parent if options.stop_with_parent else None)
    prepare(options.stop_with_parent, f"rank {os.environ['RANK']} " if ranks > 1 else "")
    from decoupled_diloco.launch import roles
    from decoupled_diloco.launch.run_folder import enter_run_folder
    from decoupled_diloco.launch.secrets import own_token

    roles.run_learner(
        config,
        options.index,
        syncer=options.addresses(config, config.relay_of(options.index)),
        folder=enter_run_folder(config),
        token=own_token(config, f"learner-{options.index}", options.auth_token_file),
        shared=options.shared_folder,
        tls=options.tls(config, f"learner-{options.index}"),
        termination=termination,
    )


def _run_program(
    options: LearnerOptions | EvaluatorOptions, config: RunConfig, termination: Termination
) -> int:
    """Run the user's program as a learner, or as the evaluator."""
    from decoupled_diloco.launch import user_program
    from decoupled_diloco.launch.processes import EVALUATOR
    from decoupled_diloco.launch.run_folder import enter_run_folder
    from decoupled_diloco.launch.secrets import own_token_file

    prepare(False, "launcher ")
    user_program.require_commands(config)
    index = options.index if isinstance(options, LearnerOptions) else None
    name = EVALUATOR if index is None else f"learner-{index}"
    folder, near = enter_run_folder(config), "" if index is None else config.relay_of(index)
    launched = user_program.launched(
        config,
        index,
        syncer=shared_relay(config, near) if options.shared_folder else options.addresses(config),
        folder=folder,
        token_file=own_token_file(config, name, options.auth_token_file, folder),
        shared=options.shared_folder,
        tls=options.tls(config, name),
    )
    return user_program.run_command(
        config.run.evaluate_command if index is None else config.learner.command,
        launched,
        environment=user_program.variables(config),
        patience_seconds=config.learner.leave_seconds_max,
        termination=termination,
        parent_matters=options.stop_with_parent,
    )


class RelayOptions(DialOptions):
    """Options of `ddiloco relay`."""

    name: Annotated[str, typer.Option(metavar="NAME")]
    """Name of the relay, such as site-a. Its auth token or certificate is for this name."""

    syncer: Annotated[str, typer.Option("--upstream", metavar="URL[,URL…]|RUN")]
    """Addresses of the syncer's shards, or of another relay, in the order in which they are tried.
    Or a run folder that this machine shares with the syncer and with the site's learners."""

    port: Annotated[int, typer.Option()] = 7080
    """Port at which the site's learners reach the relay. 0: any free one, which the log shows, and
    which is recorded in the run folder of --upstream."""

    host: Annotated[str, typer.Option(metavar="HOST")] = ""
    """Host name or IP address that is recorded in the run folder of --upstream, for the site's
    learners. Default: the name of this machine."""


@command(RelayOptions)
def relay(options: RelayOptions) -> None:
    """Serve a site's learners: pass their messages on, and send one sum of what they train."""
    from decoupled_diloco.launch.processes import relay_process

    config, name, shared = options.load(), options.name, options.shared_folder
    sites = {site.name: site for site in config.sites}
    if sites and name not in sites:
        fail(f"--name {name} is not a site in {options.config}: use one of {', '.join(sites)}")
    if options.host and shared is None:
        fail("--host is recorded in a run folder, and --upstream is not one: omit --host")
    if options.supervised:
        place = ["--name", name, "--port", str(options.port)]
        place += ["--host", options.host] if options.host else []
        options.under_supervision(config, relay_process(name), "relay", *place)
    prepare(options.stop_with_parent)
    from decoupled_diloco.launch.ports import free_ports
    from decoupled_diloco.launch.relay_role import run_relay
    from decoupled_diloco.launch.run_folder import enter_run_folder
    from decoupled_diloco.launch.secrets import own_token
    from decoupled_diloco.storage.shared_folder import write_place

    (port,) = free_ports(config.syncer.host, [options.port], "Choose another one with --port")
    upstream = options.addresses(config, sites[name].upstream if sites else "")
    folder = enter_run_folder(config)
    if shared is not None:
        host = options.host or socket.gethostname()
        write_place(shared, relay_process(name), url_of(host, port, config.tls.scheme))
    run_relay(
        config,
        name,
        port=port,
        upstream=tuple(one for each in upstream for one in alternatives(each)),
        folder=folder,
        token=own_token(config, name, options.auth_token_file),
        shared=shared,
        tls=options.tls(config, name),
    )


class EvaluatorOptions(DialOptions):
    """Options of `ddiloco evaluator`."""

    result: Annotated[bool, typer.Option("--result")] = False
    """Evaluate the final weights of a run that has ended, then exit."""


@command(EvaluatorOptions)
def evaluator(options: EvaluatorOptions) -> None:
    """Evaluate the published weights of a run on held-out data, until the run ends."""
    if options.supervised:
        options.under_supervision(options.load(), "evaluator", "evaluator")
    config = options.load()
    if config.run.evaluate_command and options.result:
        fail("--result cannot be combined with evaluate_command: run that command by hand")
    if config.run.evaluate_command:
        from decoupled_diloco.launch.termination import SignalledTermination

        exit_with(_run_program(options, config, SignalledTermination()))
    prepare(options.stop_with_parent)
    from decoupled_diloco.launch import roles
    from decoupled_diloco.launch.processes import EVALUATOR
    from decoupled_diloco.launch.run_folder import enter_run_folder, require_ours_or_unused
    from decoupled_diloco.launch.secrets import own_token

    if options.result:
        require_ours_or_unused(config.run.folder)
        roles.evaluate_result(config, folder=config.run.folder)
        return
    roles.run_evaluator(
        config,
        syncer=options.addresses(config),
        folder=enter_run_folder(config),
        token=own_token(config, EVALUATOR, options.auth_token_file),
        shared=options.shared_folder,
        tls=options.tls(config, EVALUATOR),
    )
