"""A whole run in virtual time: the real processes on virtual machines and links.

The same code as in `launch` runs here: the roles of the processes, and the supervisor that restarts
them. One seed determines every random choice, so a run can be repeated exactly.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import reopen_claims
from decoupled_diloco.launch.resume_run import LEARNERS
from decoupled_diloco.launch.supervisor import Supervisor
from decoupled_diloco.runtime import CURRENT
from decoupled_diloco.storage.files import open_files_allowed
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.workloads import Workload
from decoupled_diloco_lab.simulate.drift import Drift
from decoupled_diloco_lab.simulate.host_tape import HostTape
from decoupled_diloco_lab.simulate.hosts import (
    EvaluatorHost,
    Host,
    LearnerHost,
    ParticipantHost,
    RelayHost,
    ShardHost,
)
from decoupled_diloco_lab.simulate.rank_hosts import RankedHost
from decoupled_diloco_lab.simulate.run_stage import RunStage
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.virtual_disk import Loss
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualProcess, VirtualRuntime

LAUNCHER = "launcher"

_T = TypeVar("_T")


class VirtualLife:
    """One incarnation of a host, as the supervisor sees it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.pid = host.pid

    def poll(self) -> int | None:
        """See `PlacedProcess`."""
        return None if self.host.alive and self.host.pid == self.pid else self.host.code

    def send_signal(self, sig: int) -> None:
        """See `PlacedProcess`: SIGKILL or SIGTERM."""
        if sig == signal.SIGKILL:
            self.kill()
        elif self.poll() is None:
            self.host.terminate()

    def kill(self) -> None:
        """See `PlacedProcess`."""
        if self.poll() is None:
            self.host.kill()

    def wait(self) -> int:
        """See `PlacedProcess`: a killed virtual process has ended at once."""
        code = self.poll()
        assert code is not None
        return code


class VirtualMachines:
    """A `Placement` that runs each process on its own virtual machine."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = hosts

    def start(self, name: str, arguments: list[str]) -> VirtualLife:
        """See `Placement`."""
        host = self._hosts[name]
        host.begin()
        return VirtualLife(host)

    def close(self) -> None:
        """See `Placement`."""

    def last_words(self, name: str) -> str:
        """See `Placement`."""
        return self._hosts[name].last_words


class System(RunStage):
    """One virtual run.

    Attributes:
        finished: Whether every shard has ended by itself.

    Args:
        config: The run's settings.
        learners: The learners, with ids from ``config.learner_ids``, and observers.
        folder: The run folder.
        seed: Determines every random choice.
        workload: Returns the workload of a process; default: `Drift`.
        sizes: Elements of each fragment of the default workload's model.
        tapes: The folder whose ``tape/`` receives the event tape; ``None``: no tape is written.
        bytes_factor: The real model's size over the simulated model's size. Reported payload bytes
            are multiplied by it.
        power: Decides which unsynced data a machine loses with its power; ``None``: none.
        checks: Assert every invariant of a state machine after each of its events.
        relays: The relays, each before those that are behind it; default: those of
            ``config.sites``.
        device: The device of all learners and the evaluator. Shards always merge on the CPU.

    Raises:
        ConfigError: The operating system does not allow one open file per tape, or the settings
            contain multi-rank learners or metrics endpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        learners: Iterable[LearnerSpec],
        folder: Path,
        *,
        seed: int | str = 0,
        workload: Callable[[ParticipantHost], Workload] | None = None,
        sizes: Sequence[int] | None = None,
        tapes: Path | None = None,
        bytes_factor: float = 1.0,
        power: Loss | None = None,
        checks: bool = True,
        device: str | torch.device = "cpu",
        relays: Sequence[RelaySpec] = (),
    ) -> None:
        _require_single_rank(config)
        _require_no_metrics(config)
        relays = relays or [RelaySpec(site.name, site.upstream) for site in config.sites]
        super().__init__(config, folder, seed, tapes, bytes_factor, relays)
        self.limits = Limits()
        self.sizes = list(sizes or [8] * config.sync.fragments)
        self.workload = workload or self._drift
        self.power = power
        self.device = torch.device(device)
        self.checks = checks
        self.options = options_of(config)
        self.finished = False
        self.relays = [RelayHost(self, spec) for spec in relays]
        learners = [_at_its_site(config, spec) for spec in learners]
        self._make_hosts(learners)
        if tapes is not None:
            _allow_open_files(len(self.hosts))
        self._launch()

    def _drift(self, host: ParticipantHost) -> Workload:
        return Drift(self.sizes, host.spec.tokens_per_step)

    def _make_hosts(self, learners: Iterable[LearnerSpec]) -> None:
        count, standbys = self.config.syncer.shards, self.config.syncer.standby
        shards = range(count)
        self.shards = [ShardHost(self, shard) for shard in shards]
        self.standbys = [ShardHost(self, s, standby=True) for s in shards if standbys]
        self.participants: dict[str, ParticipantHost] = {
            spec.name: _kind_of(spec)(self, spec) for spec in learners
        }
        self.learners = {
            name: host for name, host in self.participants.items() if isinstance(host, LearnerHost)
        }
        """The participants that train."""

    def _launch(self) -> None:
        launcher = VirtualProcess(LAUNCHER, self.clockwork, self.choices.fork(LAUNCHER))
        self._context = Context()
        self._context.run(CURRENT.set, VirtualRuntime(launcher.new_loop(), self.choices, None))
        self.launcher(self._open_tape)
        reopen_claims(self.folder, self.config)
        self.supervisor = Supervisor(
            VirtualMachines({host.name: host for host in self.hosts}), self.tape
        )
        for host in self.hosts:
            at = host.spec.joins_at if isinstance(host, ParticipantHost) else 0.0
            if at > 0.0:
                self.launcher(self.supervisor.start, host.name, [], held=True)
            if at < float("inf"):
                self.clockwork.at(at, self._begin, host)

    def _open_tape(self) -> None:
        header = {"machine": LAUNCHER, "settings": self.config.public()}
        writer = self.tape_writer(LAUNCHER, header, LAUNCHER)
        self.tape = HostTape(lambda now, event, effects: None, writer, 1.0)

    def _begin(self, host: Host) -> None:
        if host.name in self.supervisor.children:
            self.restart(host)
        else:
            self.launcher(self.supervisor.start, host.name, [])

    def launcher(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """Call a function in the launcher's process context."""
        return self._context.copy().run(function, *arguments, **named)

    def ended(self, host: Host) -> None:
        """Handle the end of a process: the supervisor polls next."""
        shards = range(len(self.shards))
        self.finished = all(any(each.over for each in self.hosts_of(shard)) for shard in shards)
        # Not at once: this is called from the dying process, which the supervisor might restart.
        self.clockwork.after(0.0, self._poll)

    def _poll(self) -> None:
        self.launcher(self.supervisor.poll)
        for child in self.supervisor.children.values():
            if child.restart_at is not None:
                self.clockwork.at(child.restart_at, self._poll)
        if any(self.supervisor.children[p.name].done for p in self.hosts_of(0)):
            self.supervisor.retire()  # the coordinator ends last: no process is needed any more

    def sample(self, sample: Any) -> None:
        """Write a sample to the launcher's tape."""
        self.tape.sample(self.now, sample)

    @property
    def shard_processes(self) -> list[ShardHost]:
        """Every process of every shard."""
        return [*self.shards, *self.standbys]

    @property
    def hosts(self) -> list[Host]:
        """Every process, running or not."""
        return [*self.shard_processes, *self.relays, *self.participants.values()]

    def hosts_of(self, shard: int) -> list[ShardHost]:
        """Return the processes of a shard: one, or two if it has a standby."""
        return self.shard_processes[shard :: len(self.shards)]

    def acting(self, shard: int) -> ShardHost:
        """Return the process that acts for a shard, or was the last to do so."""
        return max(self.hosts_of(shard), key=lambda host: host.claim)

    @property
    def coordinator(self) -> Any:
        """The state machine of the coordinator that acts, or acted last."""
        return self.acting(0).coordinator

    def is_replaced(self, host: ShardHost) -> bool:
        """Whether another process of the shard holds a newer leadership lease."""
        return host is not self.acting(host.shard)

    @property
    def model_bytes(self) -> int:
        """Size of an fp32 copy of the default workload's model."""
        return 4 * sum(self.sizes)

    def crash(self, host: Host, *, silent: bool = False) -> None:
        """Kill a process with SIGKILL and keep it down until `restart`.

        Args:
            host: The process.
            silent: Its machine dies with it, so its peers receive no reset.
        """
        host.is_silent = silent
        self._take_down(host)
        host.is_silent = False

    def _take_down(self, host: Host, *signals: Any) -> None:
        if host.name in self.supervisor.children:
            self.launcher(self.supervisor.take_down, host.name, *signals)
            self._poll()

    def request_stop(self, host: Host, seconds: float, number: Any) -> None:
        """Send SIGTERM, kill the process if it runs on, and keep it down until `restart`.

        Args:
            host: The process.
            seconds: Time until it is killed.
            number: The signal to send.
        """
        life = host.pid
        self._take_down(host, number)
        self.clockwork.after(seconds, self._insist, host, life)

    def _insist(self, host: Host, life: int) -> None:
        # Kill only: taking it down would also undo a restart that was requested meanwhile.
        if host.alive and host.pid == life:
            host.kill()

    def lose_disk(self, host: Host) -> None:
        """Delete the durable files of a stopped process: a shard's versions, or checkpoints."""
        folder = self.folder / (LEARNERS if isinstance(host, ParticipantHost) else DURABLE)
        shutil.rmtree(folder / host.name.removesuffix("-standby"), ignore_errors=True)

    def restart(self, host: Host) -> None:
        """Start a stopped process again, unless it has ended well.

        A process that is still stopping starts again once it has ended.
        """
        child = self.supervisor.children.get(host.name)
        if child is None or child.done or child.restart_at is not None:
            return
        child.failures = 0
        if host.alive:
            child.held = False
            return
        self.launcher(self.supervisor.bring_back, host.name)

    def close(self) -> None:
        """Release the resources of all processes and close the launcher's tape."""
        for host in (*self.hosts, *self.rank_hosts):
            if host.alive:
                host.close_tapes()
            for loop in host.graves:
                loop.discard_tasks()
        self.tape.close()


def _at_its_site(config: RunConfig, spec: LearnerSpec) -> LearnerSpec:
    """Return the learner behind the relay of its site in the settings, if it has one."""
    for site in config.sites:
        if not spec.relay and spec.name in {f"learner-{number}" for number in site.learners}:
            return replace(spec, relay=site.name)
    return spec


def _require_single_rank(config: RunConfig) -> None:
    # A `LearnerSpec` may have ranks, but those do not divide the workload's computation.
    if any(config.learner.ranks_of(index) > 1 for index in range(config.run.learners)):
        raise ConfigError(
            f"ranks={config.learner.ranks!r} in [learner] would be ignored, because in virtual "
            "time a learner trains in one process: remove ranks, parallelism and sync_ranks"
        )


def _require_no_metrics(config: RunConfig) -> None:
    if config.learner.metrics_address:
        raise ConfigError(
            f"metrics_address={config.learner.metrics_address!r} in [learner] would be ignored, "
            "because a run in virtual time has no metrics endpoint: remove it"
        )


def _kind_of(spec: LearnerSpec) -> type[ParticipantHost]:
    if spec.role == "observer":
        return EvaluatorHost
    return RankedHost if spec.ranks > 1 else LearnerHost


def _allow_open_files(tapes: int) -> None:
    # Every process has its own tape file, as in a real run.
    allowed = open_files_allowed(tapes)
    if allowed is not None:
        raise ConfigError(
            f"the tapes of {tapes} processes need as many open files, but this system allows "
            f"{allowed}: raise the limit with `ulimit -Hn`, or write no tape"
        )
