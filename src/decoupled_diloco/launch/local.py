"""Run shards, learners and an evaluator on this machine, inject faults, and write the result."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.addresses import everywhere, on_this_machine, url_of
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.config.run import advertised
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.launch.fork_server import ForkServer
from decoupled_diloco.launch.placement import ThisMachine
from decoupled_diloco.launch.ports import free_ports
from decoupled_diloco.launch.processes import (
    EVALUATOR,
    LOGGER,
    MIRROR,
    MIRROR_INTERRUPTED_SECONDS,
    MIRROR_SECONDS,
    open_tape,
    process_of,
    relay_process,
    reopen_claims,
)
from decoupled_diloco.launch.run_folder import TOKEN, RunFolder, read_token
from decoupled_diloco.launch.run_mirror import require_store_usable
from decoupled_diloco.launch.secrets import (
    accepted_tokens,
    needs_token,
    own_tls,
    read_principals,
    require_principals,
    require_relay_certificates,
    served_tls,
)
from decoupled_diloco.launch.supervisor import Child, Restarts, Supervisor
from decoupled_diloco.launch.user_program import require_commands
from decoupled_diloco.run_model import FollowedRun, RunModel, read_run
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.storage.shared_folder import write_addresses
from decoupled_diloco.tape import pack_tapes
from decoupled_diloco.tape.samples import FaultInjected, Sample, WeightsSaved, WentBack
from decoupled_diloco.transport.tls import LiveTls, require_used

# Modules that need torch are imported late: the import takes seconds, and learners wait for a
# syncer.
if TYPE_CHECKING:
    from decoupled_diloco.launch.resume_run import RunStanding

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
EVALUATOR_SECONDS = 60.0
"""Time for the last evaluation after the end of the run."""

PROGRAM_SECONDS = 120.0
"""Time for users' programs to save and evaluate after the end of the run."""

FAREWELL_SECONDS = 5.0
"""Time for learners and shards to end after the coordinator. The coordinator ends last, but a
learner that was restarted too late would search for the run forever."""


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run.

    Attributes:
        finished: Whether the budget is spent and the result is written.
        reason: Why the run ended.
        weights: The file with the result, if the run has finished.
    """

    finished: bool
    reason: str
    weights: Path | None


class LocalRun:
    """A supervised run on this machine.

    Args:
        config: The run's settings.
        learners: Whether to start learners and evaluator; otherwise only the syncer.
        resume: Continue the run in the run folder.
        checkpoint: Reset the run to this checkpoint first: ``"last"`` or its number. Only with
            ``resume``.
        may_replace: Whether an unfinished run in the folder may be moved aside.
        dial: Maps a process name and the addresses of shards to other addresses with the same
            ports, for example of a proxy. The shards then advertise no host, and each process uses
            the host that it has dialed itself.
        absent: Learners that are not started now; `Supervisor.bring_back` starts them later.
        hides_token: Whether the files with the run's token and with the addresses are created only
            by `invite`.
        server: An existing fork server, which is not ended. Default: a new one, if
            ``run.fork_server`` is true.

    Raises:
        ConfigError: The folder is in use or not a run folder, the run in it has not ended, the
            workload cannot be built, a learner has no batch, or a secret, a device or the initial
            weights are missing.
        TransportError: A configured port is taken, or the host is not an address of this machine.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        learners: bool = True,
        resume: bool = False,
        checkpoint: str = "",
        may_replace: bool = True,
        dial: Callable[[str, tuple[str, ...]], tuple[str, ...]] | None = None,
        absent: Collection[str] = (),
        hides_token: bool = False,
        server: ForkServer | None = None,
    ) -> None:
        self.config = config
        self._dial = dial or (lambda name, addresses: addresses)
        self._advertised = tuple if dial is None else everywhere
        self._absent = frozenset(absent)
        if learners:
            _require_work(config)
        self._with_learners = learners
        self._devices = self._divide_devices()
        if config.run.trackers:
            from decoupled_diloco.monitor.sinks import require_places

            require_places(config.run.trackers)
        self._require_syncer()  # before there is a folder, or an earlier run is moved aside
        require_store_usable(config, resume=resume)
        self.folder = RunFolder(
            config.run.folder,
            resume=resume,
            spare=(lambda folder: None) if may_replace else _require_over,
        )
        self.path = self.folder.path
        self.standing: RunStanding | None = None
        self.went_back = ""
        if resume:
            self._take_up(checkpoint)
        write_text(self.path / RUN_FILE, dump_config(config))
        self.folder.record_launcher()
        settings = config.syncer
        self._hides_token = hides_token
        self.secret_file: Path | None = settings.principals_file or settings.token_file
        self._given_secret = self.secret_file
        if self.secret_file is None and needs_token(config):
            self._given_secret = self.folder.token_file(shown=not hides_token)
            self.secret_file = self.path / TOKEN
        header = {"machine": "launcher", "settings": config.public()}
        self._tape = open_tape(self.path, "launcher", header)
        self.placement = ThisMachine(
            self.path, self.folder.descriptors, forks=config.run.fork_server, server=server
        )
        self.supervisor = Supervisor(self.placement, self._tape)
        if self.went_back:
            self.record(WentBack(self.went_back))
        self.followed = FollowedRun(self.path)
        self._faults = sorted(config.faults, key=lambda fault: fault.at)
        if self.standing is not None:
            del self._faults[: self.standing.faults]
        self.model: RunModel | None = None
        self.global_step = 0
        self.addresses: tuple[str, ...] = ()
        self._listen_on: list[int] = []
        self._left_at: float | None = None

    def _divide_devices(self) -> list[list[str]]:
        """Return the options that give each learner its own devices of this machine."""
        if not self._with_learners:
            return []
        from decoupled_diloco.launch.devices import environment_of

        config = self.config
        share = 0 if config.learner.command else None  # a command may start its ranks itself
        each = (environment_of(config, index, each=share) for index in range(config.run.learners))
        return [[f"--devices={name}={value}" for name, value in own.items()] for own in each]

    def _take_up(self, checkpoint: str) -> None:
        """Read the progress of the run in the folder, after a reset to a checkpoint if required."""
        from decoupled_diloco.launch.resume_run import go_back, half_way, require_whole, standing_of

        checkpoint = checkpoint or half_way(self.path)
        self.went_back = go_back(self.path, self.config, checkpoint) if checkpoint else ""
        require_whole(self.path, self.config)
        self.standing = standing_of(self.path, self.config)

    def _require_syncer(self) -> None:
        """Check what would keep the shards from starting: secrets, certificates, weights, ports."""
        settings, weights = self.config.syncer, self.config.sync.initial_weights
        if settings.principals_file is not None:
            self._require_principals(settings.principals_file)
        accepted_tokens(self.config, read_token(settings.token_file))
        self._require_certificates()
        if weights is not None and not weights.is_file():
            raise ConfigError(
                f"initial_weights={str(weights)!r} does not exist: correct the path, or remove "
                "initial_weights"
            )
        _ports(self.config)

    def _require_certificates(self) -> None:
        served = served_tls(self.config)
        if served is not None:
            LiveTls(served)
        if self._with_learners:
            require_relay_certificates(self.config)
        for name in self._dialling():
            tls = own_tls(self.config, name)
            if tls is not None:
                LiveTls(tls)
            for address in self.config.syncer.addresses or ("https://" if served else "http://",):
                require_used(tls, address)

    def _require_principals(self, path: Path) -> None:
        require_principals(path, read_principals(path), self._dialling())

    def _dialling(self) -> list[str]:
        """Return the names of the processes that connect to shards."""
        config = self.config
        names = [f"shard-{shard}" for shard in range(1, config.syncer.shards)]
        if self._with_learners:
            names += [site.name for site in config.sites]
            names += [*config.learner_ids, *([EVALUATOR] if config.run.evaluator else [])]
        return names

    def invite(self) -> None:
        """Write the token and then the addresses, for learners that are started elsewhere.

        Call it when the shards listen: a program that waits for the addresses can join at once.
        """
        self.folder.show_token()
        write_addresses(self.path, self.addresses)

    def start(self) -> None:
        """Start the shards, then the learners and the evaluator.

        Raises:
            TransportError: A configured port is taken.
        """
        config = self.config
        ports = self._listen_on = _ports(config)
        self.addresses = advertised(config, ports)
        if not self._hides_token:
            write_addresses(self.path, self.addresses)
        common = ["--stop-with-parent"]
        if config.syncer.principals_file is None and self._given_secret is not None:
            common += ["--auth-token-file", str(self._given_secret)]
        run_file = str(self.path / RUN_FILE)
        joined = ",".join(self._advertised(self.addresses))
        local = tuple(map(on_this_machine, self.addresses))
        reopen_claims(self.path, config)
        for number, port in enumerate(ports):
            turn, shard = divmod(number, config.syncer.shards)
            arguments = ["syncer", run_file, "--shard", str(shard), "--port", str(port)]
            arguments += ["--addresses", joined, *(["--standby"] if turn else [])]
            # This process starts the logger and the mirror, not shard 0.
            for setting in ("run.trackers=[]", "run.store=", "run.store_interval_seconds="):
                arguments += ["--set", setting]
            self.supervisor.start(process_of(shard, standby=turn > 0), [*arguments, *common])
        if config.run.trackers:
            places = [part for place in config.run.trackers for part in ("--to", place)]
            self.supervisor.start(LOGGER, ["track", str(self.path), *places, "--stop-with-parent"])
        if config.run.store:
            self.supervisor.start(MIRROR, ["mirror", str(self.path), "--stop-with-parent"])
        if not self._with_learners:
            return
        relays = self._start_relays(run_file, local, common)
        for index, name in enumerate(config.learner_ids):
            site = config.site_of(index)
            near = () if site is None else (relays[site.name],)
            own = ",".join((*near, *self._dial(name, local)))
            arguments = ["learner", run_file, "--index", str(index), "--syncer", own]
            arguments += self._devices[index]
            self.supervisor.start(
                name,
                [*arguments, *common],
                held=name in self._absent,
                limits=Restarts.of_learners(config),
            )
        if config.run.evaluator:
            own = ",".join(self._dial(EVALUATOR, local))
            self.supervisor.start(EVALUATOR, ["evaluator", run_file, "--syncer", own, *common])

    def _start_relays(
        self, run_file: str, shards: tuple[str, ...], common: list[str]
    ) -> dict[str, str]:
        """Start the relay of each site, and return their addresses."""
        config = self.config
        ports = free_ports(config.syncer.host, [site.port for site in config.sites])
        addresses: dict[str, str] = {}
        for site, port in zip(config.sites, ports, strict=True):
            name = relay_process(site.name)
            near = (addresses[site.upstream],) if site.upstream else ()
            upstream = ",".join((*near, *self._dial(name, shards)))
            arguments = ["relay", run_file, "--name", site.name, "--port", str(port)]
            self.supervisor.start(name, [*arguments, "--upstream", upstream, *common])
            addresses[site.name] = on_this_machine(
                url_of(config.syncer.host, port, config.tls.scheme)
            )
        return addresses

    def _evaluate_result(self, on_poll: Callable[[], None]) -> None:
        """Evaluate the result if the evaluator has not seen the end of the run."""
        evaluator = self.supervisor.children.get(EVALUATOR)
        if evaluator is None or evaluator.held or evaluator.code == 0:
            return
        if self.config.run.evaluate_command:
            logger.warning(
                "the final weights are not evaluated: evaluate_command has not seen the run's end"
            )
            return
        self.supervisor.stop([EVALUATOR])
        run_file = str(self.path / RUN_FILE)
        self.supervisor.start(EVALUATOR, ["evaluator", run_file, "--result", "--stop-with-parent"])
        self.supervisor.retire()
        deadline = time.monotonic() + EVALUATOR_SECONDS
        child = self.supervisor.children[EVALUATOR]
        while child.running and time.monotonic() < deadline:
            on_poll()
            time.sleep(POLL_SECONDS)
            self.supervisor.poll()
        if child.code != 0:
            logger.warning("the result is not evaluated: %s", self.supervisor.last_words(EVALUATOR))

    def wait_for_shards(self) -> None:
        """Wait until every shard listens, or one cannot: then `wait` returns the reason."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.syncer.host)
        host, shards = host or self.config.syncer.host, self.config.syncer.shards
        for shard in range(shards):
            while not any(_listens(host, port) for port in self._listen_on[shard::shards]):
                self.supervisor.poll()
                ended = any(child.done for child in self._processes_of(shard))
                if ended or self._hopeless() is not None:
                    return
                time.sleep(POLL_SECONDS)

    def wait(self, on_poll: Callable[[], None]) -> RunOutcome:
        """Supervise until the run has finished or cannot continue.

        Args:
            on_poll: Called every `POLL_SECONDS`.
        """
        over_at: float | None = None
        while True:
            self.supervisor.poll()
            self._follow()
            on_poll()
            if over_at is not None or any(child.done for child in self._processes_of(0)):
                # The coordinator ends last: every shard's part of the result is on disk.
                over_at = over_at or time.monotonic()
                self.supervisor.retire()
                if time.monotonic() > over_at + self._patience_seconds():
                    return self._finish(on_poll)
            elif (problem := self._hopeless()) is not None:
                return RunOutcome(False, problem, None)
            time.sleep(POLL_SECONDS)

    def _patience_seconds(self) -> float:
        """Return the time that the remaining processes have after the end of the run."""
        children = self.supervisor.children
        relays = {relay_process(site.name) for site in self.config.sites}
        running = {name for name, child in children.items() if child.running} - {MIRROR, *relays}
        if not running:
            return 0.0
        if self.config.learner.command and running & set(self.config.learner_ids):
            return PROGRAM_SECONDS
        return EVALUATOR_SECONDS if running & {EVALUATOR, LOGGER} else FAREWELL_SECONDS

    def _hopeless(self) -> str | None:
        """Return why the run cannot continue; `None` if it can."""
        children = self.supervisor.children
        down = [name for name, child in children.items() if child.down]
        learners = [name for name in self.config.learner_ids if name in children]
        for shard in range(self.config.syncer.shards):
            if all(child.down for child in self._processes_of(shard)):
                name = process_of(shard, standby=False)
                return f"{name} does not run: {self.supervisor.last_words(name)}"
        # Training does not depend on the mirror: it may be down.
        for name in (name for name in down if not name.startswith(("shard-", MIRROR))):
            if children[name].code == ConfigError.exit_code:
                return f"{name} was rejected: {self.supervisor.last_words(name)}"
        if learners and all(name in down for name in learners):
            return f"no learner runs: {self.supervisor.last_words(learners[0])}"
        return self._all_left([children[name] for name in learners])

    def _all_left(self, learners: list[Child]) -> str | None:
        """Return a message if all learners have left before the end of the run; else `None`."""
        if not any(child.done for child in learners) or self.followed.run.finished:
            self._left_at = None
        elif all(child.done or child.down for child in learners):
            # The shards end some moments after the last learner of a run that is over.
            self._left_at = self._left_at or time.monotonic()
            if time.monotonic() > self._left_at + FAREWELL_SECONDS:
                return (
                    f"every learner has left at step {self.global_step}, before the budget was "
                    "spent: their data or steps have ended: lower the budget, or let the program "
                    "train until learner.step() returns False"
                )
        return None

    def _processes_of(self, shard: int) -> list[Child]:
        """Return the process of a shard and its standby, if it has one."""
        names = [process_of(shard, standby=standby) for standby in (False, True)]
        return [child for name, child in self.supervisor.children.items() if name in names]

    def _follow(self) -> None:
        self.followed.poll()
        self.global_step = max(self.global_step, self.followed.run.global_step)
        while self._faults and self.used_budget() >= self._faults[0].at and self.global_step > 0:
            fault = self._faults.pop(0)
            if self.supervisor.kill(fault.kill, restart=fault.restart):
                self.record(FaultInjected("kill", fault.kill, (fault.kill,)))

    @property
    def ports(self) -> dict[int, str]:
        """The name of the shard's process for each port, after `start`."""
        shards = self.config.syncer.shards
        return {
            port: process_of(number % shards, standby=number >= shards)
            for number, port in enumerate(self._listen_on)
        }

    def record(self, sample: Sample) -> None:
        """Write a sample to the launcher's tape."""
        self._tape.sample(time.monotonic(), sample)
        self._tape.flush()

    def used_budget(self) -> float:
        """Return the share of the budget that is spent, 0 to 1."""
        run = self.config.run
        shares = [0.0]
        if run.max_steps:
            shares.append(self.global_step / run.max_steps)
        if run.max_tokens:
            shares.append(self.followed.run.tokens / run.max_tokens)
        return min(1.0, max(shares))

    def _finish(self, on_poll: Callable[[], None]) -> RunOutcome:
        from decoupled_diloco.syncer.result import assemble, read_layout

        try:
            layout = read_layout(self.path)
            plan = plan_of(layout, self.config)
            weights = assemble(self.path, plan, self.config.syncer.shards)
        except DilocoError as error:
            return RunOutcome(False, f"the result cannot be assembled: {error}", None)
        self._tape.sample(time.monotonic(), WeightsSaved(str(weights)))
        self._evaluate_result(on_poll)
        self._keep_the_rest(weights)
        by = self.followed.run.stopped_by
        reason = f"{by} has stopped the run" if by else "the budget is spent"
        return RunOutcome(True, reason, weights)

    def _keep_the_rest(self, weights: Path) -> None:
        from decoupled_diloco.launch.resume_run import keep_the_rest
        from decoupled_diloco.syncer.stored_weights import leave_to_result

        children, shards = self.supervisor.children, range(self.config.syncer.shards)
        ended = [n for n in self.config.learner_ids if n in children and not children[n].running]
        keep_the_rest(self.path, ended, weights)
        gone = [s for s in shards if not any(each.running for each in self._processes_of(s))]
        leave_to_result(self.path, self.config, gone)

    def stop(self) -> None:
        """End all processes; learners first, so that they can flush and leave the run."""
        learners = [n for n in self.supervisor.children if not n.startswith("shard-")]
        settings = self.config.learner
        # A user's program may be in a long step, and may save a checkpoint after the flush.
        self.supervisor.stop(
            [name for name in learners if name != MIRROR],
            settings.leave_seconds_max if settings.command else settings.flush_seconds,
        )
        mirror = self.supervisor.children.get(MIRROR)
        if mirror is not None and mirror.running:
            # After all others, so that the last state in the store has their last files.
            self.supervisor.stop([name for name in self.supervisor.children if name != MIRROR])
            self._tape.flush()
            over = self.followed.run.finished
            self.supervisor.stop([MIRROR], MIRROR_SECONDS if over else MIRROR_INTERRUPTED_SECONDS)
        if mirror is not None and mirror.code != 0:
            logger.warning(
                "the last state of the run is not in %s (%s): run ddiloco mirror %s",
                self.config.run.store,
                self.supervisor.last_words(MIRROR),
                self.path,
            )
        self.supervisor.stop()

    def close(self) -> None:
        """End the remaining processes, compress the tapes, and release the folder."""
        try:
            self.stop()
            self._tape.close()
            self.model = read_run(self.path)
            pack_tapes(self.path)
        except StorageError as error:
            logger.error("%s", error)
        finally:
            self.folder.release()


def _require_over(folder: Path) -> None:
    from decoupled_diloco.launch.resume_run import require_over

    require_over(folder)


def _require_work(config: RunConfig) -> None:
    """Check the programs or the workload of learners and evaluator."""
    require_commands(config)
    if config.workload is not None:
        from decoupled_diloco.launch.data_check import require_data
        from decoupled_diloco.workloads import workload_of

        require_data(workload_of(config), config)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _ports(config: RunConfig) -> list[int]:
    """Return one port per shard, then one per standby: the configured ones, or free ones."""
    first, count = config.syncer.port, config.syncer.shards * (1 + config.syncer.standby)
    wanted = [first + shard if first else 0 for shard in range(count)]
    return free_ports(config.syncer.host, wanted)
