"""A validated scenario: a run, its learners and links, and its events.

```python
scenario = load_scenario(SCENARIOS.find("mixed-speeds"), seed=3)
scenario.config        # the run, as for real processes
scenario.happenings    # events at a known time or step, each with the processes that it hits
```

This module does not depend on virtual time. `script` carries a scenario out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig, dump_config, suggestion
from decoupled_diloco.config.parties import read_members
from decoupled_diloco.config.plugins import load_plugins
from decoupled_diloco.config.settings import shown
from decoupled_diloco.config.toml_files import (
    RECIPES,
    dump_tables,
    override_key,
    read_run_tables,
)
from decoupled_diloco.config.toml_tables import read_tables
from decoupled_diloco.errors import ConfigError
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.scenario_file import (
    AT_ONCE,
    RUN_TABLES,
    Choose,
    Direction,
    EventSettings,
    LearnerGroup,
    LinkSettings,
    RandomSettings,
    ScenarioFile,
)

COORDINATOR = "coordinator"
EVALUATOR = "evaluator"
ALL_LEARNERS = "learners"
SHARDS = "shards"
_TAKEN = re.compile(
    r"(learner|shard)-\d+(-standby)?|coordinator|evaluator|launcher|learners|shards"
)

RESTART_SECONDS = 0.5
"""Downtime of a process that is restarted at once: the launcher's first delay."""

_ENDS_PRESENCE = ("kill", "vanish", "leave")
_OF_LEARNERS = ("slow", "join", "leave")
_OF_SHARDS = ("disk-full", "disk-lost")
_OF_LINKS = ("cut", "break", "throttle", "delay", "loss", "corrupt")
_OF_LEARNERS_LINKS = ("throttle", "delay", "loss", "corrupt")


@dataclass(frozen=True, slots=True)
class Target:
    """The target of an event.

    Attributes:
        name: Its name in the file.
        processes: Names of all its processes.
        link: Name of the link, if the target is one.
    """

    name: str
    processes: tuple[str, ...]
    link: str | None = None

    @property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """Its processes, with the coordinator next to shard 0, which hosts it."""
        hosts = "shard-0" in self.processes
        own = [p for p in self.processes if not (hosts and p == COORDINATOR)]
        return tuple((p, COORDINATOR) if hosts and p == "shard-0" else (p,) for p in own)

    def some(self, choose: Choose, choices: Choices) -> Target:
        """Draw some of its members at random."""
        left = list(self.members)
        count = HOW_MANY[choose](len(left))
        if count >= len(left):
            return self
        struck = []
        for _ in range(count):
            member = choices.pick(left)
            left.remove(member)
            struck.append(member)
        processes = tuple(p for member in self.members if member in struck for p in member)
        return replace(self, processes=processes)


HOW_MANY: dict[str, Callable[[int], int]] = {
    "one": lambda count: 1,
    "minority": lambda count: max(1, (count - 1) // 2),
    "majority": lambda count: count // 2 + 1,
    "all": lambda count: count,
}
"""For each value of `choose`: the number of members to hit, given the number of all members."""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that happens once. Exactly one of the three triggers is set.

    Attributes:
        kind: See `EventSettings.kind`.
        target: The processes that it hits.
        at_seconds: Trigger: seconds since the run's start.
        at_step: Trigger: this global step.
        at_share: Trigger: this share of the budget, 0 to 1.
        for_seconds: Duration in seconds; ``None``: see `until_step`.
        until_step: The event is undone at this global step. If both are ``None``, it is never
            undone.
        factor: How many times slower.
        delay_seconds: Additional one-way delay.
        share: Share of a link's traffic that is lost or corrupted.
        jump_seconds: How far the clock jumps ahead.
        direction: Silent direction of a cut.
        choose: How many of the target's members it hits.
    """

    kind: str
    target: Target
    at_seconds: float | None = None
    at_step: int | None = None
    at_share: float | None = None
    for_seconds: float | None = None
    until_step: int | None = None
    factor: float = 1.0
    delay_seconds: float = 0.0
    share: float = 0.0
    jump_seconds: float = 0.0
    direction: Direction = "both"
    choose: Choose = "all"


@dataclass(frozen=True, slots=True)
class Recurrence:
    """An event that hits one target again and again, at random times.

    Attributes:
        target: The processes that it hits.
        settings: Kind, frequency and duration.
        stream: Name of its random stream.
    """

    target: Target
    settings: RandomSettings
    stream: str

    def choices(self, seed: int) -> Choices:
        """Return its random stream for a scenario's seed."""
        own = self.settings.seed
        return Choices(f"{seed if own is None else own}/{self.stream}")

    def next(self, choices: Choices, since: float) -> tuple[float, float, Happening] | None:
        """Draw the next event after an instant.

        Returns:
            Its start, its end and the event, or ``None`` if there are no more.
        """
        settings = self.settings
        at = since + choices.exponential(settings.mean_seconds_between)
        lasts = self._repair_seconds(choices)
        if settings.until_seconds is not None and at > settings.until_seconds:
            return None
        happening = Happening(
            settings.kind,
            self.target.some(settings.choose or "all", choices),
            for_seconds=lasts,
            factor=settings.factor or 1.0,
            delay_seconds=settings.delay_seconds or 0.0,
            share=settings.share or 0.0,
            direction=settings.direction or "both",
        )
        return at, at + (lasts or 0.0), happening

    def _repair_seconds(self, choices: Choices) -> float | None:
        settings = self.settings
        if settings.kind in AT_ONCE:
            return RESTART_SECONDS if settings.kind == "restart" else None
        assert settings.repair_seconds is not None
        match settings.repair:
            case "exponential" | None:
                return choices.exponential(settings.repair_seconds)
            case "exponentiated-weibull":
                assert settings.repair_shapes is not None
                return choices.exponentiated_weibull(
                    *settings.repair_shapes, settings.repair_seconds
                )
            case "fixed":
                return settings.repair_seconds


@dataclass(frozen=True)
class Scenario:
    """A validated scenario with its run.

    Attributes:
        config: The run's settings. Their name and folder are the scenario's.
        file: The contents of the scenario file.
        seed: Seed of all random choices.
        members: The group settings of each learner, by its name.
        links: All links by name.
        happenings: Events that happen once.
        recurrences: Events that happen again and again.
    """

    config: RunConfig
    file: ScenarioFile
    seed: int
    members: dict[str, LearnerGroup]
    links: dict[str, LinkSettings]
    happenings: tuple[Happening, ...]
    recurrences: tuple[Recurrence, ...]


def load_scenario(
    path: str | Path,
    *,
    run: str | Path | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
) -> Scenario:
    """Read a scenario and its run, and validate both.

    Args:
        path: The scenario's TOML file.
        run: TOML file of another run, instead of the scenario's.
        overrides: Settings of the run, see `load_config`.
        seed: Replaces the seeds of the scenario and the run.

    Raises:
        ConfigError: A file cannot be read, or its contents are not valid.
    """
    path = Path(path)
    file = ScenarioFile(**_read(path))
    config = _config(file, path, run, overrides, seed)
    _check_devices(file, config)
    targets = _Targets(file, config)
    happenings = _happenings(file, config, targets)
    _check_presence(happenings, targets.members)
    return Scenario(
        config=config,
        file=file,
        seed=next(s for s in (seed, file.seed, config.run.seed) if s is not None),
        members=targets.members,
        links=targets.links,
        happenings=happenings,
        recurrences=tuple(_recurrences(file, targets)),
    )


def dump_scenario(scenario: Scenario) -> str:
    """Return the whole scenario as equivalent TOML that refers to no other file."""
    own = {name for name in ScenarioFile.model_fields if name not in (*RUN_TABLES, "set")}
    tables = {
        k: v for k, v in scenario.file.model_dump(mode="json").items() if k in own and v != []
    }
    tables |= {"name": scenario.config.run.name, "seed": scenario.seed}
    return dump_tables(tables | tomllib.loads(dump_config(scenario.config)))


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: pass the path of a scenario's TOML file")
    return read_tables(path)


def _config(
    file: ScenarioFile,
    path: Path,
    run: str | Path | None,
    overrides: Sequence[str],
    seed: int | None,
) -> RunConfig:
    if run is None and file.run is None:
        raise ConfigError(
            f"{path} names no run: pass one on the command line, or add run with the name of a "
            "shipped recipe or the path of a TOML file"
        )
    if run is None and isinstance(file.run, dict):
        tables = {t: getattr(file, t) for t in RUN_TABLES if getattr(file, t) is not None}
        tables["run"] = {"name": file.name or path.stem, **file.run}
        folder = path.parent
    else:
        run_file = Path(run) if run is not None else _run_path(str(file.run), path)
        tables, folder = read_run_tables(run_file), run_file.parent
        own = dict(tables.get("run", {}))
        own.pop("folder", None)  # A simulation must not overwrite the files of the real run.
        own.pop("learners", None) if file.learners else None
        tables["run"] = {**own, "name": file.name or path.stem}
        for text in file.set:
            override_key(tables, text)
    for text in overrides:
        override_key(tables, text)
    if seed is not None:
        override_key(tables, f"run.seed={seed}")
    _set_learners(tables, file.learners)
    read_members(tables)
    load_plugins(tables, folder)
    return RunConfig(**tables)


def _check_devices(file: ScenarioFile, config: RunConfig) -> None:
    devices = file.devices
    if devices is None:
        return
    if config.sync.devices is None:
        raise ConfigError(
            "the scenario has [devices], but its run has no [sync.devices], so contributions from "
            "older versions would be lost: add [sync.devices] to the run, or remove [devices]"
        )
    if config.run.max_steps is not None:
        raise ConfigError(
            f"max_steps={config.run.max_steps} cannot be combined with [devices], because devices "
            "have no common step: set max_tokens instead"
        )
    limited = next((link.name for link in file.links if _limited(link)), None)
    if devices.link is not None and limited is not None:
        raise ConfigError(
            f"up and down of the link {limited!r} would be ignored, because [devices] has link: "
            "remove one of them"
        )
    if file.events or file.random or config.faults:
        raise ConfigError(
            "[devices] cannot be combined with [[events]], [[random]] or [[faults]]: devices come "
            "and go by themselves"
        )


def _run_path(name: str, path: Path) -> Path:
    """Return the path of a run: relative to the scenario's file, or that of a shipped recipe."""
    beside = path.parent / name
    return beside if Path(name).suffix == ".toml" or beside.exists() else RECIPES.find(name)


def _set_learners(tables: dict[str, Any], groups: Sequence[LearnerGroup]) -> None:
    count = sum(group.count for group in groups)
    configured = tables["run"].get("learners", count)
    if groups and configured != count:
        raise ConfigError(
            f"run.learners={configured}, but the [[learners]] of the scenario add up to {count}: "
            "remove run.learners, or change the counts"
        )
    if groups:
        tables["run"]["learners"] = count


class _Targets:
    """All names that a scenario may use as targets, and their processes."""

    def __init__(self, file: ScenarioFile, config: RunConfig) -> None:
        self.members = _members(file.learners, config)
        self.links = {link.name: link for link in file.links}
        self.shards = [f"shard-{shard}" for shard in range(config.syncer.shards)]
        self._groups: dict[str, tuple[str, ...]] = {
            ALL_LEARNERS: tuple(self.members),
            SHARDS: ("shard-0", COORDINATOR, *self.shards[1:]),
        }
        standbys = [f"{shard}-standby" for shard in self.shards if config.syncer.standby]
        self._single = [COORDINATOR, *([EVALUATOR] if config.run.evaluator else []), *standbys]
        for name, of_that_name in groupby(sorted(_names(file))):
            if len(list(of_that_name)) > 1:
                raise ConfigError(
                    f"two [[learners]] or [[links]] have the name {name!r}: rename one of them"
                )
            if _TAKEN.fullmatch(name):
                raise ConfigError(f"the name {name!r} is reserved: choose another")
        for member, group in self.members.items():
            self._check_link(group)
            if group.name is not None:
                self._groups[group.name] = (*self._groups.get(group.name, ()), member)

    def _check_link(self, group: LearnerGroup) -> None:
        if group.link is not None and group.link not in self.links:
            fix = suggestion(group.link, self.links) if self.links else "add it to [[links]]"
            raise ConfigError(f"link={group.link!r} in [[learners]] is not a valid link: {fix}")

    def target(self, name: str, where: str) -> Target:
        """Return the target with a name; ``where`` describes its place in the file."""
        if name in self.members or name in self.shards:
            hosted = (COORDINATOR,) if name == "shard-0" else ()
            return Target(name, (name, *hosted))
        if name in self._single:
            return Target(name, (name,))
        if name in self._groups:
            return Target(name, self._groups[name])
        if name in self.links:
            on_it = tuple(m for m, group in self.members.items() if group.link == name)
            if not on_it:
                raise ConfigError(
                    f"{where} is a link that no learner uses: set link={name!r} in [[learners]], "
                    "or remove the entry"
                )
            return Target(name, on_it, link=name)
        known = [*self.members, *self.shards, *self._single, *self._groups, *self.links]
        shown = known if len(known) <= 12 else [*known[:3], *self._groups, *self.links]
        near = suggestion(name, known)
        fix = near if near.startswith("did you") else suggestion(name, shown)
        raise ConfigError(f"{where} is not a valid target: {fix}")

    def each(self, target: Target, settings: RandomSettings) -> Iterable[Target]:
        """Split a target into those that fail at their own times: a link fault hits all at once."""
        together = target.link is not None and settings.kind in _OF_LINKS
        if len(target.members) == 1 or settings.choose is not None or together:
            return [target]
        return [Target(member[0], member) for member in target.members]


def _names(file: ScenarioFile) -> Iterable[str]:
    yield from (group.name for group in file.learners if group.name is not None)
    yield from (link.name for link in file.links)


def _members(groups: Sequence[LearnerGroup], config: RunConfig) -> dict[str, LearnerGroup]:
    if groups:
        each = [group for group in groups for _ in range(group.count)]
    else:
        each = [LearnerGroup(step_seconds=s) for s in _paces(config)]
    return dict(zip(config.learner_ids, each, strict=True))


def _paces(config: RunConfig) -> list[float]:
    """Return the default step time of each learner: that of a paced workload, otherwise 1 s."""
    pace = config.required_workload.options.get("step_seconds", 1.0)
    if config.required_workload.name == "paced" and isinstance(pace, list | tuple):
        if len(pace) != config.run.learners:
            raise ConfigError(
                f"step_seconds in [workload.options] has {len(pace)} entries for "
                f"{config.run.learners} learners: write one number for all, or one per learner"
            )
        return [_seconds(each) for each in pace]
    return [
        _seconds(pace) if config.required_workload.name == "paced" else 1.0
    ] * config.run.learners


def _seconds(pace: Any) -> float:
    if isinstance(pace, int | float) and 0 < pace < math.inf:
        return float(pace)
    raise ConfigError(
        f"step_seconds={shown(pace)} in [workload.options] is not a valid duration: write seconds, "
        "such as 0.5"
    )


def _happenings(file: ScenarioFile, config: RunConfig, targets: _Targets) -> tuple[Happening, ...]:
    found = [_happening(event, file, config, targets) for event in file.events]
    for fault in config.faults:
        found.append(
            Happening(
                kind="kill",
                target=Target(fault.kill, (fault.kill,)),
                at_share=fault.at,
                for_seconds=RESTART_SECONDS if fault.restart else None,
            )
        )
    return tuple(found)


def _happening(
    event: EventSettings, file: ScenarioFile, config: RunConfig, targets: _Targets
) -> Happening:
    where = f"target={event.target!r} of kind={event.kind!r} in [[events]]"
    target = targets.target(event.target, where)
    _check_kind(event.kind, target, targets, where)
    _check_end(event, file, config)
    return Happening(
        kind=event.kind,
        target=target,
        at_seconds=event.at_seconds,
        at_step=event.at_step,
        for_seconds=RESTART_SECONDS if event.kind == "restart" else event.for_seconds,
        until_step=event.until_step,
        factor=event.factor or 1.0,
        delay_seconds=event.delay_seconds or 0.0,
        share=event.share or 0.0,
        jump_seconds=event.jump_seconds or 0.0,
        direction=event.direction or "both",
        choose=event.choose,
    )


def _check_kind(kind: str, target: Target, targets: _Targets, where: str) -> None:
    learners = all(process in targets.members for process in target.processes)
    if kind in (*_OF_LEARNERS, *_OF_LEARNERS_LINKS) and not learners:
        raise ConfigError(f"{where} is not a learner: use a learner or a group of learners")
    if kind in _OF_SHARDS and not all(member[0] in targets.shards for member in target.members):
        raise ConfigError(f"{where} has no separate disk: use a shard, or 'shards' for all")
    if kind == "throttle":
        links = [targets.members[p].link for p in target.processes] if learners else [None]
        if any(link is None or not _limited(targets.links[link]) for link in links):
            raise ConfigError(
                f"{where} has no bandwidth limit: set link for its learners to an entry of "
                "[[links]] with up or down"
            )


def _limited(link: LinkSettings) -> bool:
    return link.up is not None or link.down is not None


def _check_end(event: EventSettings, file: ScenarioFile, config: RunConfig) -> None:
    budget, end = config.run.max_steps, file.until_seconds
    for key in ("at_step", "until_step"):
        step = getattr(event, key)
        if step is not None and budget is not None and step >= budget:
            raise ConfigError(
                f"{key}={step} in [[events]] must be below max_steps={budget}: lower {key}, or "
                "raise max_steps"
            )
    if end is not None and event.at_seconds is not None and event.at_seconds >= end:
        raise ConfigError(
            f"at_seconds={event.at_seconds:g} in [[events]] must be below until_seconds={end:g}: "
            "lower at_seconds, or raise until_seconds"
        )


def _recurrences(file: ScenarioFile, targets: _Targets) -> Iterable[Recurrence]:
    for number, settings in enumerate(file.random):
        for name in settings.targets:
            where = f"{name!r} in targets of kind={settings.kind!r} in [[random]]"
            target = targets.target(name, where)
            _check_kind(settings.kind, target, targets, where)
            for each in targets.each(target, settings):
                yield Recurrence(each, settings, f"random/{number}/{each.name}")


def _check_presence(happenings: Sequence[Happening], members: dict[str, LearnerGroup]) -> None:
    """Check that each join and leave of a learner changes its presence.

    Only events with the same kind of trigger can be ordered. Events that choose members of a group
    at random are not checked.
    """
    for name, group in members.items():
        known = [h for h in happenings if h.choose == "all" or len(h.target.members) == 1]
        own = [h for h in known if name in h.target.processes]
        own = [h for h in own if h.kind == "join" or h.kind in _ENDS_PRESENCE]
        joins = any(h.kind == "join" for h in own)
        if not group.present and not joins:
            raise ConfigError(
                f"{name} is not present at the start and never joins: add an event with "
                "kind='join' for it to [[events]], or remove present=false"
            )
        by_time = [h for h in own if h.at_seconds is not None]
        by_step = [h for h in own if h.at_step is not None]
        if len(by_time) == len(own) or len(by_step) == len(own):
            _follow(name, group.present, own)
        elif joins and group.present and not any(h.kind in _ENDS_PRESENCE for h in own):
            raise ConfigError(_already_present(name))


def _follow(name: str, present: bool | None, own: Sequence[Happening]) -> None:
    """Check a learner's joins and leaves in order.

    ``present`` becomes ``None`` (unknown) after an event that ends on the other scale: one that
    starts at a time and ends at a step, or the reverse.
    """
    turns_at: float | None = None
    for happening in sorted(own, key=_begins):
        begins = _begins(happening)
        if turns_at is not None and turns_at <= begins:
            present = None if turns_at == _OPEN else not present
        if happening.kind == "join" and present is True:
            raise ConfigError(_already_present(name))
        if happening.kind != "join" and present is False:
            raise ConfigError(
                f"kind={happening.kind!r} of {name} at {begins:g} in [[events]] would be ignored, "
                "because it is not present then: let it join before, or remove the event"
            )
        present = happening.kind == "join"
        turns_at = _undone(happening)


def _already_present(name: str) -> str:
    return (
        f"kind='join' of {name} in [[events]] would be ignored, because it is present already: "
        "set present=false in its group of [[learners]], or let it leave before"
    )


def _begins(happening: Happening) -> float:
    at = happening.at_seconds if happening.at_step is None else happening.at_step
    assert at is not None
    return at


_OPEN = float("-inf")


def _undone(happening: Happening) -> float | None:
    """Return when an event is undone, on the scale of its trigger.

    ``None`` means never. `_OPEN` means that its end is on the other scale, so it is unknown.
    """
    if happening.at_seconds is not None and happening.for_seconds is not None:
        return happening.at_seconds + happening.for_seconds
    if happening.at_step is not None and happening.until_step is not None:
        return happening.until_step
    lasting = happening.for_seconds is None and happening.until_step is None
    return None if lasting else _OPEN
