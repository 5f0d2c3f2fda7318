"""Objects that the processes of a virtual run share: settings, network, folder and hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import BETWEEN
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.observe.versions import versions_of_bits
from decoupled_diloco.simulate.disk import Loss
from decoupled_diloco.simulate.network import Link
from decoupled_diloco.simulate.runtime import WORK_SECONDS, VirtualProcess
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.stage import Recorder, Stage
from decoupled_diloco.simulate.transport import Streets
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.workloads import Workload

PORT = 7070


class RunStage(Stage):
    """The context of a run's virtual processes; `System` adds the processes themselves.

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
    ) -> None:
        super().__init__(seed)
        self.config = config
        self.folder = folder
        self.streets = Streets(self.network, self.choices.fork("bodies"))
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
        shards, standbys = range(config.syncer.shards), config.syncer.standbys
        names = [[f"shard-{s}", *([f"shard-{s}-standby"] if standbys else [])] for s in shards]
        self._addresses = {n: self.streets.address(n, PORT) for each in names for n in each}
        self.addresses = tuple(BETWEEN.join(map(self._addresses.__getitem__, n)) for n in names)

    def ended(self, host: Any) -> None:
        """A process has ended."""
        raise NotImplementedError

    def tape_writer(self, who: str, header: Mapping[str, Any], file: str) -> TapeWriter | None:
        """The tape of a process, if tapes are written."""
        if self._tapes is None:
            return None
        header = {**header, "virtual": True, "versions": versions_of_bits()}
        return TapeWriter(self._tapes / "tape" / f"{file}.jsonl", who, header)

    def address_of(self, host: VirtualProcess) -> str:
        """Where a process listens."""
        return self._addresses[host.name]

    def link_of(self, spec: LearnerSpec) -> Link:
        """What lies between a participant and the rest, which it may share."""
        own = Link(spec.latency, spec.jitter, spec.up_bytes_per_second, spec.down_bytes_per_second)
        return self._shared_links.setdefault(spec.shared_link, own) if spec.shared_link else own

    def record(
        self, host: VirtualProcess, who: str, now: float, event: Any, effects: Sequence[Any]
    ) -> None:
        """A machine has handled an event; a shard's tape is called after its process here."""
        self.events += 1
        who = host.name if who.startswith("shard-") and not who.endswith(".claims") else who
        try:
            if self.checks:
                self._check(host, who)
            for recorder in self.recorders:
                recorder(who, self.now, event, effects)
        except AssertionError as error:
            self.error = self.error or error

    def _check(self, host: VirtualProcess, who: str) -> None:
        machine: Any = getattr(host, "machine", None)
        if who == "coordinator":
            machine = getattr(host, "coordinator", None)
        elif who.endswith(".claims"):
            machine = host.shard_lease.machine  # type: ignore[attr-defined]
        if machine is not None:
            machine.check()

    def broken(self, host: VirtualProcess, error: BaseException) -> None:
        """The code of a process has failed in a way that it must not."""
        self.error = self.error or error
