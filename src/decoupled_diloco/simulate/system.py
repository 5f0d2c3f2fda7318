"""A whole run in virtual time: the product's own processes on virtual machines and links.

What `launch` does on a real machine is done here by the same code: the roles of the processes, and
the supervisor that starts them again. Everything random follows from one seed, so that a run can be
repeated exactly.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import reopen_claims
from decoupled_diloco.launch.resume import LEARNERS
from decoupled_diloco.launch.supervisor import Supervisor
from decoupled_diloco.observe.open_files import open_files_allowed
from decoupled_diloco.runtime import CURRENT
from decoupled_diloco.simulate.disk import Loss
from decoupled_diloco.simulate.drift import Drift
from decoupled_diloco.simulate.host_tape import HostTape
from decoupled_diloco.simulate.hosts import (
    EvaluatorHost,
    Host,
    LearnerHost,
    ParticipantHost,
    ShardHost,
)
from decoupled_diloco.simulate.rank_hosts import RankedHost
from decoupled_diloco.simulate.run_stage import RunStage
from decoupled_diloco.simulate.runtime import VirtualProcess, VirtualRuntime
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.workloads import Workload

LAUNCHER = "launcher"


_T = TypeVar("_T")


class VirtualLife:
    """One life of a host, as the supervisor sees it."""

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
        """See `PlacedProcess`: who was killed has ended at once."""
        code = self.poll()
        assert code is not None
        return code


class VirtualMachines:
    """A `Placement`: each process has a virtual machine of its own."""

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
        finished: Whether every shard has ended of itself.

    Args:
        config: The run's settings.
        learners: Its learners, by the ids of ``config.learner_ids``, and observers.
        folder: The run folder.
        seed: Every random choice follows from it.
        workload: What a process trains or evaluates; default: `Drift`.
        sizes: Elements of each fragment of the default's model.
        tapes: The folder in whose ``tape/`` the event tape is written; ``None``: it is not.
        bytes_factor: Bytes of bodies are told of as so many times more: of a model of which only a
            small part is there.
        power: What a machine that loses its power loses of what nobody waited for; ``None``:
            nothing.
        checks: Assert every invariant of a machine after each of its events.
        device: What all learners and the evaluator compute on; shards merge on the CPU.

    Raises:
        ConfigError: This system does not allow as many open files as there are tapes; or the
            settings cut a model over ranks.
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
    ) -> None:
        _require_one_process_each(config)
        _require_nobody_scrapes(config)
        super().__init__(config, folder, seed, tapes, bytes_factor)
        self.limits = Limits()
        self.sizes = list(sizes or [8] * config.sync.fragments)
        self.workload = workload or self._drift
        self.power = power
        self.device = torch.device(device)
        self.checks = checks
        self.options = options_of(config)
        self.finished = False
        self._make_hosts(learners)
        if tapes is not None:
            _allow_open_files(len(self.hosts))
        self._launch()

    def _drift(self, host: ParticipantHost) -> Workload:
        return Drift(self.sizes, host.spec.tokens_per_step)

    def _make_hosts(self, learners: Iterable[LearnerSpec]) -> None:
        count, standbys = self.config.syncer.shards, self.config.syncer.standbys
        shards = range(count)
        self.shards = [ShardHost(self, shard) for shard in shards]
        self.standbys = [ShardHost(self, s, standby=True) for s in shards if standbys]
        self.participants: dict[str, ParticipantHost] = {
            spec.name: _kind_of(spec)(self, spec) for spec in learners
        }
        self.learners = {
            name: host for name, host in self.participants.items() if isinstance(host, LearnerHost)
        }
        """Those who train."""

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
        """Runs something as the launcher."""
        return self._context.copy().run(function, *arguments, **named)

    def ended(self, host: Host) -> None:
        """A process has ended: the supervisor sees it next."""
        shards = range(len(self.shards))
        self.finished = all(any(each.over for each in self.hosts_of(shard)) for shard in shards)
        self.clockwork.after(0.0, self._poll)

    def _poll(self) -> None:
        self.launcher(self.supervisor.poll)
        for child in self.supervisor.children.values():
            if child.restart_at is not None:
                self.clockwork.at(child.restart_at, self._poll)
        if any(self.supervisor.children[p.name].done for p in self.hosts_of(0)):
            self.supervisor.retire()  # the coordinator ends last: nobody is needed any more

    def sample(self, sample: Any) -> None:
        """Puts something that the launcher knows on its tape."""
        self.tape.sample(self.now, sample)

    @property
    def shard_processes(self) -> list[ShardHost]:
        """Every process of every shard."""
        return [*self.shards, *self.standbys]

    @property
    def hosts(self) -> list[Host]:
        """Every process, dead or alive."""
        return [*self.shard_processes, *self.participants.values()]

    def hosts_of(self, shard: int) -> list[ShardHost]:
        """The processes of a shard: one, or two that may act in each other's place."""
        return self.shard_processes[shard :: len(self.shards)]

    def acting(self, shard: int) -> ShardHost:
        """Which of a shard's processes acts for it, or was the last to do so."""
        return max(self.hosts_of(shard), key=lambda host: host.claim)

    @property
    def coordinator(self) -> Any:
        """The coordinator's state machine, where it acts or acted last."""
        return self.acting(0).coordinator

    def is_replaced(self, host: ShardHost) -> bool:
        """Whether somebody has made a newer claim than the one by which a process acts."""
        return host is not self.acting(host.shard)

    @property
    def model_bytes(self) -> int:
        """Of a copy of the default workload's model, fp32."""
        return 4 * sum(self.sizes)

    def crash(self, host: Host, *, silent: bool = False) -> None:
        """SIGKILL, and it stays down; ``silent``: with its machine, so that nobody is told."""
        host.is_silent = silent
        self._take_down(host)
        host.is_silent = False

    def _take_down(self, host: Host, *signals: Any) -> None:
        if host.name in self.supervisor.children:
            self.launcher(self.supervisor.take_down, host.name, *signals)
            self._poll()

    def tell_to_go(self, host: Host, seconds: float, number: Any) -> None:
        """SIGTERM; who has not ended after so many seconds is killed. Down until `restart`."""
        life = host.pid
        self._take_down(host, number)
        self.clockwork.after(seconds, self._insist, host, life)

    def _insist(self, host: Host, life: int) -> None:
        if host.alive and host.pid == life:
            host.kill()  # and no more: it may have been told to come back meanwhile

    def lose_disk(self, host: Host) -> None:
        """What a process that is down has kept is gone: a shard's versions, or checkpoints."""
        folder = self.folder / (LEARNERS if isinstance(host, ParticipantHost) else DURABLE)
        shutil.rmtree(folder / host.name.removesuffix("-standby"), ignore_errors=True)

    def restart(self, host: Host) -> None:
        """What is down starts again, unless it has ended well; who is about to go, once it has."""
        child = self.supervisor.children.get(host.name)
        if child is None or child.done or child.restart_at is not None:
            return
        child.failures = 0
        if host.alive:
            child.held = False
            return
        self.launcher(self.supervisor.bring_back, host.name)

    def close(self) -> None:
        """Lets go of what the processes held, and ends the launcher's tape."""
        for host in (*self.hosts, *self.rank_hosts):
            if host.alive:
                host.close_tapes()
            for loop in host.graves:
                loop.bury()
        self.tape.close()


def _require_one_process_each(config: RunConfig) -> None:
    """A `LearnerSpec` may have ranks, which take no part of the workload's arithmetic."""
    if any(config.learner.ranks_of(index) > 1 for index in range(config.run.learners)):
        raise ConfigError(
            f"ranks={config.learner.ranks!r} in [learner] would be ignored: in virtual time a "
            "learner trains in one process. Leave out ranks, parallelism and carriers"
        )


def _require_nobody_scrapes(config: RunConfig) -> None:
    if config.learner.metrics:
        raise ConfigError(
            f"metrics={config.learner.metrics!r} in [learner] would be ignored: in virtual time "
            "nobody scrapes. Leave it out"
        )


def _kind_of(spec: LearnerSpec) -> type[ParticipantHost]:
    if spec.role == "observer":
        return EvaluatorHost
    return RankedHost if spec.ranks > 1 else LearnerHost


def _allow_open_files(tapes: int) -> None:
    """Every process has a file of its own, as in a real run."""
    allowed = open_files_allowed(tapes)
    if allowed is not None:
        raise ConfigError(
            f"the tapes of {tapes} processes need as many open files, but this system allows "
            f"{allowed}: raise the limit with `ulimit -Hn`, or write no tape"
        )
