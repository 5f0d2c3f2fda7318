"""Run a scenario on real processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.local import LocalRun, RunOutcome
from decoupled_diloco.run_model.facts import LINK_FAULTS
from decoupled_diloco_lab.chaos import spaces
from decoupled_diloco_lab.chaos.fault_runner import Engine
from decoupled_diloco_lab.chaos.proxy import Links
from decoupled_diloco_lab.chaos.spaces import Disks, Shaper
from decoupled_diloco_lab.simulate.scenario import COORDINATOR, Scenario, Target

HOST = "127.0.0.1"


def require_real(scenario: Scenario) -> Scenario:
    """Return the scenario if real processes can carry it out.

    Raises:
        ConfigError: Part of it works only in virtual time, or is not available on this machine.
            The message names that part, the reason and the fix.
    """
    for happening in scenario.happenings:
        _require_kind(happening.kind, happening.target)
    for recurrence in scenario.recurrences:
        _require_kind(recurrence.settings.kind, recurrence.target)
    if scenario.file.devices is not None:
        raise ConfigError(
            "[devices] would be ignored by real processes, which stay connected: simulate the "
            "scenario with ddiloco simulate, or remove [devices]"
        )
    if _limited(scenario) and (why := spaces.unavailable("ip", "tc")):
        raise ConfigError(
            f"a link of the scenario limits its rate, which requires a network namespace, but "
            f"{why}: run as root, remove up and down from [[links]], or use --virtual"
        )
    if "disk-full" in _kinds(scenario) and (why := spaces.unavailable("mount", "umount")):
        raise ConfigError(
            f"kind='disk-full' in the scenario requires a mount namespace, but {why}: run as root, "
            "remove the event, or use --virtual"
        )
    if needs_links(scenario) and scenario.config.syncer.host != HOST:
        raise ConfigError(
            f"syncer.host={scenario.config.syncer.host!r}, but the links of a scenario forward to "
            f"{HOST}: remove syncer.host, or use --virtual"
        )
    certificate = scenario.config.tls.cert
    if needs_links(scenario) and certificate is not None:
        raise ConfigError(
            f"cert={str(certificate)!r} in [tls] is not valid for the addresses at which "
            "the links of a scenario listen: remove all link faults and [[links]] from the "
            "scenario, or run it without [tls]"
        )
    _require_no_sizes(scenario)
    return scenario


def _require_kind(kind: str, target: Target) -> None:
    if kind == "clock-jump":
        raise ConfigError(
            f"kind='clock-jump' cannot be applied to {target.name}, a real process, because the "
            "clock that it reads cannot be set: use --virtual, or remove the event"
        )
    if target.processes == (COORDINATOR,):
        raise ConfigError(
            f"kind={kind!r} cannot be applied to the coordinator alone, because the real process "
            "shard-0 hosts it: use target='shard-0', or use --virtual"
        )


def _require_no_sizes(scenario: Scenario) -> None:
    file = scenario.file
    tokens = next((g.tokens for g in file.learners if g.tokens is not None), None)
    for name, value in (("parameters", file.parameters), ("tokens", tokens)):
        if value is not None:
            raise ConfigError(
                f"{name}={value} in the scenario would be ignored, because real processes train a "
                f"real model on real data: remove {name}, or use --virtual --protocol-only"
            )
    paced = scenario.config.required_workload.name == "paced"
    varied = next((g for g in file.learners if g.variance), None)
    if varied is not None:
        raise ConfigError(
            f"variance={varied.variance:g} in [[learners]] would be ignored, because the duration "
            "of a real step cannot be set: remove it, or use --virtual"
        )
    if not paced and any(g.step_seconds != 1.0 for g in file.learners):
        raise ConfigError(
            "step_seconds in [[learners]] would be ignored, because the duration of a real step "
            'cannot be set: use workload.name="paced", remove it, or use --virtual'
        )


def needs_links(scenario: Scenario) -> bool:
    """Whether the scenario needs proxy wires between the processes."""
    return bool(scenario.links) or any(kind in LINK_FAULTS for kind in _kinds(scenario))


def _kinds(scenario: Scenario) -> set[str]:
    return {h.kind for h in scenario.happenings} | {r.settings.kind for r in scenario.recurrences}


def _limited(scenario: Scenario) -> bool:
    return any(link.up is not None or link.down is not None for link in scenario.links.values())


def paced_config(scenario: Scenario) -> RunConfig:
    """Return the scenario's run settings, with each learner's step time for a paced workload."""
    config = scenario.config
    if config.required_workload.name != "paced" or not scenario.file.learners:
        return config
    paces = [group.step_seconds for group in scenario.members.values()]
    options = {**config.required_workload.options, "step_seconds": paces}
    workload = config.required_workload.model_copy(update={"options": options})
    return config.model_copy(update={"workload": workload})


class RealRun:
    """A scenario carried out on processes of this machine."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        # Namespaces come first: they apply to this thread and to what it starts, so the links'
        # thread and the processes must be started after them.
        full = sorted(_filled(scenario))
        if full:
            spaces.own_mounts()
        if _limited(scenario):
            spaces.own_network()
        self._links = Links(scenario.seed) if needs_links(scenario) else None
        absent = [name for name, group in scenario.members.items() if not group.present]
        dial = None if self._links is None else self._links.dial
        self.local = LocalRun(paced_config(scenario), dial=dial, absent=absent)
        self.path: Path = self.local.path
        self.followed = self.local.followed
        self._disks = Disks(self.path, full)
        shaper = None
        if _limited(scenario):
            assert self._links is not None
            shaper = Shaper(scenario, self._links.host)
        self.engine = Engine(self.local, scenario, self._links, self._disks, shaper)

    def start(self) -> None:
        self.local.start()
        if self._links is not None:
            for name, group in self.scenario.members.items():
                link = None if group.link is None else self.scenario.links[group.link]
                for wire in self._links.wires(name) if link is not None else ():
                    assert link is not None
                    wire.delay_seconds = link.latency_seconds
                    wire.jitter_seconds = link.jitter_seconds

    def wait(self, on_poll: Callable[[], None]) -> RunOutcome:
        """Carry out the scenario until the run ends or the scenario's time limit passes."""

        def poll() -> None:
            self.engine.poll()
            on_poll()
            if self.engine.is_over:
                raise _TimeIsUp

        try:
            return self.local.wait(poll)
        except _TimeIsUp:
            until = self.scenario.file.until_seconds
            return RunOutcome(False, f"until_seconds={until:g} of the scenario is reached", None)

    def close(self) -> None:
        """Undo all faults and stop all processes that still run."""
        try:
            self.engine.close()
        finally:
            try:
                self.local.close()
            finally:
                if self._links is not None:
                    self._links.close()
                self._disks.close()


class _TimeIsUp(Exception):
    """The scenario ends before the run's budget is spent."""


def _filled(scenario: Scenario) -> set[str]:
    """Return the shards whose disks the scenario fills at some time."""
    targets = [h.target for h in scenario.happenings if h.kind == "disk-full"]
    targets += [r.target for r in scenario.recurrences if r.settings.kind == "disk-full"]
    return {name for target in targets for name in target.processes if name != COORDINATOR}
