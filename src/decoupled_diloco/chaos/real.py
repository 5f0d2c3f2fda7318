"""A scenario on real processes of this machine, from the first to the verdict's last tape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decoupled_diloco.chaos import spaces
from decoupled_diloco.chaos.engine import Engine
from decoupled_diloco.chaos.proxy import Links
from decoupled_diloco.chaos.spaces import Disks, Shaper
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.local import LocalRun, RunOutcome
from decoupled_diloco.observe.run_data import LINK_FAULTS
from decoupled_diloco.simulate.scenario import COORDINATOR, Scenario, Target

HOST = "127.0.0.1"


def require_real(scenario: Scenario) -> Scenario:
    """The scenario as real processes can carry it out.

    Raises:
        ConfigError: it tells something that only the virtual world can do; the message says what,
            why, and the way out.
    """
    for happening in scenario.happenings:
        _require_kind(happening.kind, happening.target)
    for recurrence in scenario.recurrences:
        _require_kind(recurrence.settings.kind, recurrence.target)
    if _limited(scenario) and (why := spaces.unavailable("ip", "tc")):
        raise ConfigError(
            f"a link of the scenario has a rate, which takes a network namespace, but {why}: run "
            "it as root, take up and down out of [[links]], or use --virtual"
        )
    if "disk-full" in _kinds(scenario) and (why := spaces.unavailable("mount", "umount")):
        raise ConfigError(
            f"a disk-full of the scenario takes a small file system of its own, but {why}: run it "
            "as root, take it out, or use --virtual"
        )
    if needs_links(scenario) and scenario.config.syncer.host != HOST:
        raise ConfigError(
            f"syncer.host={scenario.config.syncer.host!r}, but the links of a scenario lead to "
            f"{HOST}: leave syncer.host out, or use --virtual"
        )
    certificate = scenario.config.tls.certificate
    if needs_links(scenario) and certificate is not None:
        raise ConfigError(
            f"certificate={str(certificate)!r} in [tls] is not for the addresses at which the "
            "links of a scenario listen: take cuts, spoilt and slow links out of it, or run it "
            "without [tls]"
        )
    _require_no_sizes(scenario)
    return scenario


def _require_kind(kind: str, target: Target) -> None:
    if kind == "clock-jump":
        raise ConfigError(
            f"kind='clock-jump' of {target.name} cannot be done to a real process, because "
            "nobody can set the clock that it reads: use --virtual, or take it out"
        )
    if target.processes == (COORDINATOR,):
        raise ConfigError(
            f"kind={kind!r} of the coordinator alone cannot be done to a real process, because "
            "shard-0 hosts it: name shard-0, or use --virtual"
        )


def _require_no_sizes(scenario: Scenario) -> None:
    file = scenario.file
    tokens = next((g.tokens for g in file.learners if g.tokens is not None), None)
    for name, value in (("parameters", file.parameters), ("tokens", tokens)):
        if value is not None:
            raise ConfigError(
                f"{name}={value} in the scenario would be ignored, because real processes have it "
                f"of themselves: take {name} out, or use --virtual --protocol-only"
            )
    paced = scenario.config.required_workload.name == "paced"
    varied = next((g for g in file.learners if g.variance), None)
    if varied is not None:
        raise ConfigError(
            f"variance={varied.variance:g} in [[learners]] would be ignored, because real steps "
            "vary as they do: take it out, or use --virtual"
        )
    if not paced and any(g.step_seconds != 1.0 for g in file.learners):
        raise ConfigError(
            "step_seconds in [[learners]] would be ignored, because a real step takes what it "
            'takes: use workload.name="paced", take it out, or use --virtual'
        )


def needs_links(scenario: Scenario) -> bool:
    """Whether processes must be joined by wires that something can befall."""
    return bool(scenario.links) or any(kind in LINK_FAULTS for kind in _kinds(scenario))


def _kinds(scenario: Scenario) -> set[str]:
    return {h.kind for h in scenario.happenings} | {r.settings.kind for r in scenario.recurrences}


def _limited(scenario: Scenario) -> bool:
    return any(link.up is not None or link.down is not None for link in scenario.links.values())


def paced_config(scenario: Scenario) -> RunConfig:
    """The scenario's run, with the pace of its learners where the workload has one."""
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
        """Lets the scenario happen until the run, or the scenario's own time, is over."""

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
        """Undoes everything and ends what still runs."""
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
    """The shards whose disks are full at some time."""
    told = [h.target for h in scenario.happenings if h.kind == "disk-full"]
    told += [r.target for r in scenario.recurrences if r.settings.kind == "disk-full"]
    return {name for target in told for name in target.processes if name != COORDINATOR}
