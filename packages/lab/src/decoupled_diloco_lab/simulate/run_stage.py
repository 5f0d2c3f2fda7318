"""The context that the processes of a virtual run share: settings, network, folder and hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import BETWEEN
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.records import versions_of_bits
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.workloads import Workload
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.stage import Recorder, Stage
from decoupled_diloco_lab.simulate.virtual_disk import Loss
from decoupled_diloco_lab.simulate.virtual_network import Link
from decoupled_diloco_lab.simulate.virtual_runtime import WORK_SECONDS, VirtualProcess
from decoupled_diloco_lab.simulate.virtual_transport import Directory

PORT = 7070


class RunStage(Stage):
    """The context of a run's virtual processes. `System` adds the processes themselves.

    Args:
        config, folder, seed, tapes, bytes_factor: See `System`.
    """

    workload: Callable[[Any], Workload]
    device: torch.device
    power: Loss | None
    limits: Limits
    checks: bool

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        seed: int | str,
        tapes: Path | None,
        bytes_factor: float,
        relays: Sequence[RelaySpec] = (),
    ) -> None:
        super().__init__(seed)
        self.config = config
        self.folder = folder
        self.directory = Directory(self.network, self.choices.fork("bodies"))
        self.stalls = self.storage_fails = self.preempted = self.plans_late = 0.0
        self.rank_hosts: list[Any] = []
        self.claim_seconds = WORK_SECONDS
        self.recorders: list[Recorder] = []
        self.on_checkpoint: Callable[[str, Any, int], None] = lambda *_: None
        self.on_capture: Callable[[Any, Any, Any], None] = lambda *_: None
        self.on_step: Callable[[Any], None] = lambda learner: None
        self.link_of_shards = Link()
        self._shared_links: dict[str, Link] = {}
        self._tapes = tapes
        self.bytes_factor = bytes_factor
        shards, standbys = range(config.syncer.shards), config.syncer.standby
        names = [[f"shard-{s}", *([f"shard-{s}-standby"] if standbys else [])] for s in shards]
        self._addresses = {n: self.directory.address(n, PORT) for each in names for n in each}
        self._addresses |= {spec.name: self.directory.address(spec.name, PORT) for spec in relays}
        self.addresses = tuple(BETWEEN.join(map(self._addresses.__getitem__, n)) for n in names)

    def ended(self, host: Any) -> None:
        """Handle the end of a process."""
        raise NotImplementedError

    def tape_writer(self, process: str, header: Mapping[str, Any], file: str) -> TapeWriter | None:
        """Create the tape of a process, or return ``None`` if no tapes are written."""
        if self._tapes is None:
            return None
        header = {**header, "virtual": True, "versions": versions_of_bits()}
        return TapeWriter(self._tapes / "tape" / f"{file}.jsonl", process, header)

    def address_of(self, host: VirtualProcess) -> str:
        """Return the address at which a process listens."""
        return self._addresses[host.name]

    def addresses_from(self, relay: str) -> tuple[str, ...]:
        """Return the addresses that a process dials: of the relay first, if it has one."""
        return (self._addresses[relay], *self.addresses) if relay else self.addresses

    def link_of(self, spec: LearnerSpec) -> Link:
        """Return the link of a participant, which it may share with others."""
        own = Link(spec.latency, spec.jitter, spec.up_bytes_per_second, spec.down_bytes_per_second)
        return self._shared_links.setdefault(spec.shared_link, own) if spec.shared_link else own

    def record(
        self, host: VirtualProcess, process: str, now: float, event: Any, effects: Sequence[Any]
    ) -> None:
        """Count an event that a state machine has handled, check it and pass it to recorders."""
        self.events += 1
        # A standby has the same tape name as its shard: use the name of the process instead.
        process = (
            host.name
            if process.startswith("shard-") and not process.endswith(".claims")
            else process
        )
        try:
            if self.checks:
                self._check(host, process)
            for recorder in self.recorders:
                recorder(process, self.now, event, effects)
        except AssertionError as error:
            self.error = self.error or error

    def _check(self, host: VirtualProcess, process: str) -> None:
        machine: Any = getattr(host, "machine", None)
        if process == "coordinator":
            machine = getattr(host, "coordinator", None)
        elif process.endswith(".claims"):
            machine = host.shard_lease.machine  # type: ignore[attr-defined]
        if machine is not None:
            machine.check()

    def broken(self, host: VirtualProcess, error: BaseException) -> None:
        """Keep an unexpected error of a process, which fails the run."""
        self.error = self.error or error
