"""A scenario that has been read and checked: a run, its learners and links, and what befalls them.

```python
scenario = load_scenario("scenarios/mixed-speeds.toml", seed=3)
scenario.config        # the run, as for real processes
scenario.happenings    # what happens at a known time or step, each with the processes it strikes
```

Nothing here knows of virtual time; what carries a scenario out is in `script`.
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
from decoupled_diloco.config.files import (
    dump_tables,
    find_shipped,
    override_key,
    read_run_tables,
    read_tables,
)
from decoupled_diloco.config.plugins import load_plugins
from decoupled_diloco.config.settings import shown
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.scenario_file import (
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
EVERYBODY = "learners"
SHARDS = "shards"
_TAKEN = re.compile(
    r"(learner|shard)-\d+(-standby)?|coordinator|evaluator|launcher|learners|shards"
)

RESTART_SECONDS = 0.5
"""How long a process is away that is started again at once: the launcher's first pause."""

_ENDS_PRESENCE = ("kill", "vanish", "leave")
_OF_LEARNERS = ("slow", "join", "leave")
_OF_SHARDS = ("disk-full", "disk-lost")
_OF_LINKS = ("cut", "break", "throttle", "delay", "loss", "corrupt")
_OF_LEARNERS_LINKS = ("throttle", "delay", "loss", "corrupt")


@dataclass(frozen=True, slots=True)
class Target:
    """Whom something strikes.

    Attributes:
        name: As the file says it.
        processes: Every process that it means.
        link: The link, if it is one.
    """

    name: str
    processes: tuple[str, ...]
    link: str | None = None

    @property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """Its processes, those together that are one: shard 0 hosts the coordinator."""
        hosts = "shard-0" in self.processes
        own = [p for p in self.processes if not (hosts and p == COORDINATOR)]
        return tuple((p, COORDINATOR) if hosts and p == "shard-0" else (p,) for p in own)

    def some(self, choose: Choose, choices: Choices) -> Target:
        """So many of its members, drawn at random."""
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
"""How many of so many members `choose` means."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that happens once, at one of three triggers.

    Attributes:
        kind: See `EventSettings.kind`.
        target: Whom it strikes.
        at_seconds: Trigger: seconds since the run's start.
        at_step: Trigger: this global step.
        at_share: Trigger: this share of the budget, 0 to 1.
        for_seconds: How long; ``None``: see `until_step`.
        until_step: Undone at this global step; ``None`` too: for good.
        factor: How many times slower.
        delay_seconds: How much longer one way takes.
        share: How much of what a link carries is lost, or spoilt.
        jump_seconds: How far the clock leaps.
        direction: Of a cut.
        choose: How many of the target.
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
    """Something that strikes one target again and again, at random.

    Attributes:
        target: Whom it strikes.
        settings: What, how often, for how long.
        stream: Name of its stream of random numbers.
    """

    target: Target
    settings: RandomSettings
    stream: str

    def choices(self, seed: int) -> Choices:
        """Where it is drawn from, given the scenario's seed."""
        own = self.settings.seed
        return Choices(f"{seed if own is None else own}/{self.stream}")

    def next(self, choices: Choices, since: float) -> tuple[float, float, Happening] | None:
        """When it strikes next, when that is over, and what it is; ``None``: never again."""
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
    """What a scenario file means, together with the run that it is about.

    Attributes:
        config: The run; its name and folder are the scenario's.
        file: What the scenario file says.
        seed: Of everything that is drawn.
        members: Every learner by its name, with its group's settings.
        links: Every link by its name.
        happenings: What happens once.
        recurrences: What happens again and again.
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
    """Reads a scenario and the run that it is about, and checks everything.

    Args:
        path: The scenario's TOML file.
        run: Another run's TOML file, instead of the scenario's.
        overrides: Settings of the run, see `load_config`.
        seed: Instead of the scenario's and the run's.

    Raises:
        ConfigError: a file cannot be read, or something in it does not fit.
    """
    path = Path(path)
    file = ScenarioFile(**_read(path))
    config = _config(file, path, run, overrides, seed)
    cast = _Cast(file, config)
    happenings = _happenings(file, config, cast)
    _check_presence(happenings, cast.members)
    return Scenario(
        config=config,
        file=file,
        seed=next(s for s in (seed, file.seed, config.run.seed) if s is not None),
        members=cast.members,
        links=cast.links,
        happenings=happenings,
        recurrences=tuple(_recurrences(file, cast)),
    )


def dump_scenario(scenario: Scenario) -> str:
    """The whole scenario as TOML that needs no other file and means the same."""
    own = {name for name in ScenarioFile.model_fields if name not in (*RUN_TABLES, "set")}
    tables = {
        k: v for k, v in scenario.file.model_dump(mode="json").items() if k in own and v != []
    }
    tables |= {"name": scenario.config.run.name, "seed": scenario.seed}
    return dump_tables(tables | tomllib.loads(dump_config(scenario.config)))


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the path of a scenario's TOML file")
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
            f"{path} names no run: give one on the command line, or add run, the name of a shipped "
            "recipe or the path of a TOML file"
        )
    if run is None and isinstance(file.run, dict):
        tables = {t: getattr(file, t) for t in RUN_TABLES if getattr(file, t) is not None}
        tables["run"] = {"name": file.name or path.stem, **file.run}
        folder = path.parent
    else:
        run_file = Path(run) if run is not None else _run_path(str(file.run), path)
        tables, folder = read_run_tables(run_file), run_file.parent
        own = dict(tables.get("run", {}))
        own.pop("folder", None)  # A simulation does not overwrite what the real run has written.
        own.pop("learners", None) if file.learners else None
        tables["run"] = {**own, "name": file.name or path.stem}
        for text in file.set:
            override_key(tables, text)
    for text in overrides:
        override_key(tables, text)
    if seed is not None:
        override_key(tables, f"run.seed={seed}")
    _set_learners(tables, file.learners)
    load_plugins(tables, folder)
    return RunConfig(**tables)


def _run_path(name: str, path: Path) -> Path:
    """Relative to the scenario's file; a bare name is a shipped recipe's."""
    beside = path.parent / name
    return (
        beside if Path(name).suffix == ".toml" or beside.exists() else find_shipped("recipes", name)
    )


def _set_learners(tables: dict[str, Any], groups: Sequence[LearnerGroup]) -> None:
    count = sum(group.count for group in groups)
    said = tables["run"].get("learners", count)
    if groups and said != count:
        raise ConfigError(
            f"run.learners={said}, but the [[learners]] of the scenario are {count}: take "
            "run.learners out, or change their count"
        )
    if groups:
        tables["run"]["learners"] = count


class _Cast:
    """Every name that a scenario may use, and what it stands for."""

    def __init__(self, file: ScenarioFile, config: RunConfig) -> None:
        self.members = _members(file.learners, config)
        self.links = {link.name: link for link in file.links}
        self.shards = [f"shard-{shard}" for shard in range(config.syncer.shards)]
        self._groups: dict[str, tuple[str, ...]] = {
            EVERYBODY: tuple(self.members),
            SHARDS: ("shard-0", COORDINATOR, *self.shards[1:]),
        }
        standbys = [f"{shard}-standby" for shard in self.shards if config.syncer.standbys]
        self._single = [COORDINATOR, *([EVALUATOR] if config.run.evaluator else []), *standbys]
        for name, of_that_name in groupby(sorted(_names(file))):
            if len(list(of_that_name)) > 1:
                raise ConfigError(
                    f"two [[learners]] or [[links]] are called {name!r}: rename one of them"
                )
            if _TAKEN.fullmatch(name):
                raise ConfigError(f"the name {name!r} is taken by the run itself: choose another")
        for member, group in self.members.items():
            self._check_link(group)
            if group.name is not None:
                self._groups[group.name] = (*self._groups.get(group.name, ()), member)

    def _check_link(self, group: LearnerGroup) -> None:
        if group.link is not None and group.link not in self.links:
            way_out = suggestion(group.link, self.links) if self.links else "add it to [[links]]"
            raise ConfigError(f"link={group.link!r} in [[learners]] names no link: {way_out}")

    def target(self, name: str, where: str) -> Target:
        """Whom a name means."""
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
                raise ConfigError(f"{where} names the link {name!r}, on which no learner is")
            return Target(name, on_it, link=name)
        known = [*self.members, *self.shards, *self._single, *self._groups, *self.links]
        shown = known if len(known) <= 12 else [*known[:3], *self._groups, *self.links]
        near = suggestion(name, known)
        way_out = near if near.startswith("did you") else suggestion(name, shown)
        raise ConfigError(f"{where} names nobody: {way_out}")

    def each(self, target: Target, settings: RandomSettings) -> Iterable[Target]:
        """The targets that are struck in their own time: members one by one, a link as one."""
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
    """Seconds of each learner's step, where the scenario does not say: the workload's, or one."""
    pace = config.required_workload.options.get("step_seconds", 1.0)
    if config.required_workload.name == "paced" and isinstance(pace, list | tuple):
        if len(pace) != config.run.learners:
            raise ConfigError(
                f"step_seconds in [workload.options] lists {len(pace)}, but there are "
                f"{config.run.learners} learners: give one number for all, or one for each"
            )
        return [_seconds(each) for each in pace]
    return [
        _seconds(pace) if config.required_workload.name == "paced" else 1.0
    ] * config.run.learners


def _seconds(pace: Any) -> float:
    if isinstance(pace, int | float) and 0 < pace < math.inf:
        return float(pace)
    raise ConfigError(
        f"step_seconds={shown(pace)} in [workload.options] is no time: write seconds, as 0.5"
    )


def _happenings(file: ScenarioFile, config: RunConfig, cast: _Cast) -> tuple[Happening, ...]:
    found = [_happening(event, file, config, cast) for event in file.events]
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
    event: EventSettings, file: ScenarioFile, config: RunConfig, cast: _Cast
) -> Happening:
    where = f"target={event.target!r} of kind={event.kind!r} in [[events]]"
    target = cast.target(event.target, where)
    _check_kind(event.kind, target, cast, where)
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


def _check_kind(kind: str, target: Target, cast: _Cast, where: str) -> None:
    learners = all(process in cast.members for process in target.processes)
    if kind in (*_OF_LEARNERS, *_OF_LEARNERS_LINKS) and not learners:
        raise ConfigError(f"{where} is no learner: name a learner or a group of them")
    if kind in _OF_SHARDS and not all(member[0] in cast.shards for member in target.members):
        raise ConfigError(f"{where} has no disk of its own: name a shard, or shards for all")
    if kind == "throttle":
        links = [cast.members[p].link for p in target.processes] if learners else [None]
        if any(link is None or not _limited(cast.links[link]) for link in links):
            raise ConfigError(
                f"{where} has no bandwidth to take from: give its learners a link of [[links]] "
                "with up or down"
            )


def _limited(link: LinkSettings) -> bool:
    return link.up is not None or link.down is not None


def _check_end(event: EventSettings, file: ScenarioFile, config: RunConfig) -> None:
    budget, end = config.run.budget_steps, file.until_seconds
    for key in ("at_step", "until_step"):
        step = getattr(event, key)
        if step is not None and budget is not None and step >= budget:
            raise ConfigError(
                f"{key}={step} in [[events]] is not before the run's end: lower it, or raise "
                f"budget_steps={budget}"
            )
    if end is not None and event.at_seconds is not None and event.at_seconds >= end:
        raise ConfigError(
            f"at_seconds={event.at_seconds:g} in [[events]] is not before the scenario's end: "
            f"lower it, or raise until_seconds={end:g}"
        )


def _recurrences(file: ScenarioFile, cast: _Cast) -> Iterable[Recurrence]:
    for number, settings in enumerate(file.random):
        for name in settings.targets:
            where = f"{name!r} in targets of kind={settings.kind!r} in [[random]]"
            target = cast.target(name, where)
            _check_kind(settings.kind, target, cast, where)
            for each in cast.each(target, settings):
                yield Recurrence(each, settings, f"random/{number}/{each.name}")


def _check_presence(happenings: Sequence[Happening], members: dict[str, LearnerGroup]) -> None:
    """Follows every learner's comings and goings, as far as one kind of trigger orders them.

    Whom chance chooses out of a group, nobody knows yet.
    """
    for name, group in members.items():
        known = [h for h in happenings if h.choose == "all" or len(h.target.members) == 1]
        own = [h for h in known if name in h.target.processes]
        own = [h for h in own if h.kind == "join" or h.kind in _ENDS_PRESENCE]
        joins = any(h.kind == "join" for h in own)
        if not group.present and not joins:
            raise ConfigError(
                f"{name} is not present at the start and never joins: add a join of it to "
                "[[events]], or take present=false out"
            )
        by_time = [h for h in own if h.at_seconds is not None]
        by_step = [h for h in own if h.at_step is not None]
        if len(by_time) == len(own) or len(by_step) == len(own):
            _follow(name, group.present, own)
        elif joins and group.present and not any(h.kind in _ENDS_PRESENCE for h in own):
            raise ConfigError(_there_already(name))


def _follow(name: str, present: bool | None, own: Sequence[Happening]) -> None:
    """``present`` is ``None`` where an end on the other scale leaves it open."""
    turns_at: float | None = None
    for happening in sorted(own, key=_begins):
        begins = _begins(happening)
        if turns_at is not None and turns_at <= begins:
            present = None if turns_at == _OPEN else not present
        if happening.kind == "join" and present is True:
            raise ConfigError(_there_already(name))
        if happening.kind != "join" and present is False:
            raise ConfigError(
                f"kind={happening.kind!r} of {name} at {begins:g} in [[events]] would be ignored, "
                "because it is not there then: let it join before, or take the event out"
            )
        present = happening.kind == "join"
        turns_at = _undone(happening)


def _there_already(name: str) -> str:
    return (
        f"kind='join' of {name} in [[events]] would be ignored, because it is there already: set "
        "present=false in its group of [[learners]], or let it leave before"
    )


def _begins(happening: Happening) -> float:
    at = happening.at_seconds if happening.at_step is None else happening.at_step
    assert at is not None
    return at


_OPEN = float("-inf")


def _undone(happening: Happening) -> float | None:
    """When it is undone, on the scale of its trigger: never, or open, if it is on the other."""
    if happening.at_seconds is not None and happening.for_seconds is not None:
        return happening.at_seconds + happening.for_seconds
    if happening.at_step is not None and happening.until_step is not None:
        return happening.until_step
    lasting = happening.for_seconds is None and happening.until_step is None
    return None if lasting else _OPEN
