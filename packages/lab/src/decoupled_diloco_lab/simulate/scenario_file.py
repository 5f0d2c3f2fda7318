"""The tables of a scenario file: learners, links and events.

A scenario names a run and describes events in tables that do not depend on virtual time. Targets
are names of processes or groups. Triggers are seconds or global steps. The same file works in
virtual time and on real processes; `chaos.real` lists what real processes cannot do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from decoupled_diloco.config.run import LEARNERS_MAX
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import parse_rate

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Kind = Literal[
    "kill",
    "vanish",
    "restart",
    "pause",
    "slow",
    "clock-jump",
    "disk-full",
    "disk-lost",
    "cut",
    "break",
    "throttle",
    "delay",
    "loss",
    "corrupt",
    "join",
    "leave",
]
RandomKind = Literal[
    "kill",
    "vanish",
    "restart",
    "pause",
    "slow",
    "disk-full",
    "disk-lost",
    "cut",
    "break",
    "throttle",
    "delay",
    "loss",
    "corrupt",
    "leave",
]
"""Kinds that can happen at random: all except "join" and "clock-jump"."""

Direction = Literal["both", "up", "down"]
Choose = Literal["one", "minority", "majority", "all"]

AMOUNTS = {
    "slow": "factor",
    "throttle": "factor",
    "delay": "delay_seconds",
    "loss": "share",
    "corrupt": "share",
    "clock-jump": "jump_seconds",
}
"""The key for the strength of a fault. These kinds require it, and other kinds reject it."""

_EXAMPLES = {
    "factor": "factor = 4 for 4 times slower",
    "delay_seconds": "delay_seconds = 0.2 for 0.2 s more in each direction",
    "share": "share = 0.01 for 1 % of the link's traffic",
    "jump_seconds": "jump_seconds = 30 for a jump of 30 s",
}

AT_ONCE = ("break", "restart", "clock-jump")
"""Kinds that are over at once, so they have no duration."""


class LearnerGroup(Settings):
    """One entry of `[[learners]]`: a group of identical learners.

    All groups together, in the order of the file, form the run's learner-0, learner-1, and so on.
    """

    table: ClassVar[str] = "[[learners]]"

    name: str | None = Field(default=None, pattern=NAME)
    """Name of the group in events, for example a region. Its learners keep their own names."""

    count: int = Field(default=1, ge=1, le=LEARNERS_MAX)
    """Number of learners, 1 to 100,000."""

    step_seconds: float = Field(default=1.0, gt=0)
    """Mean duration of one inner step, in seconds, greater than 0."""

    variance: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of a step's duration as a share of the mean, 0 to less than 1."""

    link: str | None = None
    """The `[[links]]` entry that connects these learners to the syncer. Default: a separate link
    for each learner, with 1 ms latency and no bandwidth limit."""

    tokens: int | None = Field(default=None, ge=1)
    """Tokens per inner step, at least 1, only with --protocol-only. Default: 1. A run with real
    tensors takes the workload's number."""

    present: bool = True
    """Whether they take part from the start. If false, each of them joins by an event."""


class LinkSettings(Settings):
    """One entry of `[[links]]`: a link between learners and the syncer."""

    table: ClassVar[str] = "[[links]]"

    name: str = Field(pattern=NAME)
    """Name of the link in learners and events."""

    latency_seconds: float = Field(default=0.001, ge=0)
    """One-way delay, in seconds, at least 0."""

    jitter_seconds: float = Field(default=0.0, ge=0)
    """Additional delay of each message, uniform between 0 and this, in seconds."""

    up: str | None = None
    """Bandwidth from the learners to the syncer, such as "10Mbit/s". Default: no limit."""

    down: str | None = None
    """Bandwidth from the syncer to the learners, such as "10Mbit/s". Default: no limit."""

    shared: bool = False
    """Whether all its learners share its bandwidth, as a region's uplink. If false, each learner
    has the full bandwidth."""

    @property
    def up_bytes_per_second(self) -> float:
        """`up` in bytes per second."""
        return float("inf") if self.up is None else parse_rate(self.up)

    @property
    def down_bytes_per_second(self) -> float:
        """`down` in bytes per second."""
        return float("inf") if self.down is None else parse_rate(self.down)

    def inapplicable(self) -> Mapping[str, str]:
        """Reject `shared` without a bandwidth limit."""
        limited = self.up is not None or self.down is not None
        return {} if limited else {"shared": "without up and down"}

    @field_validator("up", "down")
    @classmethod
    def _check_rate(cls, text: str | None) -> str | None:
        return None if text is None else _check_rate(cls, text)


class DevicesSettings(Settings):
    """`[devices]`: all learners are devices, which visit the run and disconnect in between.

    The run needs `[sync.devices]` and a budget in tokens.
    """

    table: ClassVar[str] = "[devices]"

    online: float = Field(gt=0, le=1)
    """Share of the time that a device is connected, on average, greater than 0 to 1. A visit
    includes the wait for a place. The time until the next visit is exponential."""

    steps: int = Field(default=10, ge=1)
    """Inner steps per visit, at least 1."""

    alone: bool = False
    """Whether a device trains these steps after its visit, without a connection. Its next visit
    contributes them."""

    link: tuple[str, str] | None = Field(default=None, strict=False)
    """Lowest and highest bandwidth, such as ["1Mbit/s", "50Mbit/s"]. Each device draws one number
    in between for both directions; its logarithm is uniform. Default: that of its `[[links]]`
    entry."""

    @property
    def bytes_per_second(self) -> tuple[float, float]:
        """`link` in bytes per second."""
        assert self.link is not None
        low, high = map(parse_rate, self.link)
        return low, high

    @field_validator("link")
    @classmethod
    def _check_link(cls, link: tuple[str, str] | None) -> tuple[str, str] | None:
        if link is not None:
            low, high = (_check_rate(cls, text) for text in link)
            if parse_rate(low) > parse_rate(high):
                raise ConfigError(
                    f"link={list(link)} in {cls.table} is not a range: write the lower bandwidth "
                    "first"
                )
        return link


def _check_rate(table: type[Settings], text: str) -> str:
    try:
        parse_rate(text)
    except ValueError as error:
        raise ConfigError(f"in {table.table}, {error}") from None
    return text


class EventSettings(Settings):
    """One entry of `[[events]]`: an event at a known time or step."""

    table: ClassVar[str] = "[[events]]"

    kind: Kind
    """"kill": SIGKILL. "vanish": the host dies, and its peers receive no reset. "restart": SIGTERM,
    then an immediate new start. "pause": SIGSTOP. "slow": steps take `factor` times longer.
    "clock-jump": the process's clock jumps ahead by `jump_seconds`. "disk-full": a shard's disk has
    no space. "disk-lost": a shard is killed, and its disk is empty when it comes back. "cut": the
    link is silent in one or both directions. "break": all connections are lost once. "throttle": a
    link has 1/`factor` of its bandwidth. "delay": each direction takes `delay_seconds` longer.
    "loss": this `share` of the traffic must be sent again. "corrupt": this `share` of the traffic
    is corrupted. "join": a learner starts. "leave": a learner receives SIGTERM."""

    target: str
    """The target. A process: "learner-3", "shard-0" (which hosts the coordinator), "coordinator",
    "evaluator" or "shard-0-standby". Several processes: the name of a group, the name of a link
    (all its learners), "learners" or "shards"."""

    choose: Choose = "all"
    """How many of the members it hits, drawn from the seed when it happens. "one": a single member.
    "minority": the largest number below half, but at least one. "majority": the smallest number
    above half. "all": every member."""

    at_seconds: float | None = Field(default=None, ge=0)
    """Start of the event, in seconds since the run's start, at least 0."""

    at_step: int | None = Field(default=None, ge=1)
    """Start of the event: as soon as the run reaches this global step, at least 1."""

    for_seconds: float | None = Field(default=None, gt=0)
    """Duration in seconds, greater than 0. Then the event is undone: killed processes and learners
    that left start again, and learners that joined leave. Default: it is never undone."""

    until_step: int | None = Field(default=None, ge=1)
    """The event is undone as soon as the run reaches this global step. Default: never."""

    factor: float | None = Field(default=None, gt=1)
    """How many times slower, greater than 1, for "slow" and "throttle"."""

    delay_seconds: float | None = Field(default=None, gt=0)
    """Additional one-way delay, in seconds, greater than 0, for "delay"."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the link's traffic, greater than 0 and less than 1, for "loss" and "corrupt"."""

    jump_seconds: float | None = Field(default=None, gt=0)
    """How far the clock jumps ahead, in seconds, greater than 0, for "clock-jump"."""

    direction: Direction | None = None
    """The silent direction of a "cut". "up": from the target to others. "down": from others to the
    target. TCP needs both directions, so either one stops transfers. Messages still arrive in the
    other direction. Default: "both"."""

    def inapplicable(self) -> Mapping[str, str]:
        """Reject a duration for kinds that are over at once, and the keys of other kinds."""
        pointless = _pointless(self.kind, ("factor", "delay_seconds", "share", "jump_seconds"))
        if self.kind in AT_ONCE:
            pointless |= dict.fromkeys(("for_seconds", "until_step"), f"with kind={self.kind!r}")
        return pointless

    @model_validator(mode="after")
    def _check_times(self) -> EventSettings:
        what = f"kind={self.kind!r} target={self.target!r} in {self.table}"
        if (self.at_seconds is None) == (self.at_step is None):
            problem = "has no start" if self.at_step is None else "has two starts"
            raise ConfigError(f"{what} {problem}: set one of at_seconds and at_step")
        if self.for_seconds is not None and self.until_step is not None:
            raise ConfigError(f"{what} has two ends: set one of for_seconds and until_step")
        if self.at_step and self.until_step and self.until_step <= self.at_step:
            raise ConfigError(
                f"{what} would end at until_step={self.until_step}, before it begins at "
                f"at_step={self.at_step}: raise until_step"
            )
        _require_amount(self, self.kind, what)
        return self


class RandomSettings(Settings):
    """One entry of `[[random]]`: a recurring event, drawn from the seed.

    Each target has its own Poisson process, like real machines. More targets cause more failures.
    """

    table: ClassVar[str] = "[[random]]"

    kind: RandomKind
    """The kind of event, see `[[events]]`. "join" and "clock-jump" are not possible here."""

    targets: tuple[str, ...] = Field(min_length=1, strict=False)
    """Names as in `[[events]]`. Each member of a group fails at its own random times. A link fault
    hits all learners on a link together."""

    choose: Choose | None = None
    """Hit several members of a group together instead: how many of them, see `[[events]]`. Default:
    each member fails at its own times."""

    mean_seconds_between: float = Field(gt=0)
    """Mean time from the start or a repair to the next failure of the same target, in seconds."""

    repair_seconds: float | None = Field(default=None, gt=0)
    """Mean duration in seconds, greater than 0. With repair="exponentiated-weibull" it is the scale
    λ. Not for "break" and "restart", which are over at once."""

    repair: Literal["fixed", "exponential", "exponentiated-weibull"] | None = None
    """Distribution of the time to repair. "fixed": always the mean. "exponential": the exponential
    distribution. "exponentiated-weibull": heavy-tailed, like repairs of real machines. Default:
    "exponential"."""

    repair_shapes: tuple[float, float] | None = Field(default=None, strict=False)
    """α and k of the exponentiated Weibull distribution, F(x) = (1 − exp(−(x/λ)^k))^α, each greater
    than 0. k below 1 makes the tail heavy."""

    from_seconds: float = Field(default=0.0, ge=0)
    """No failure begins before this, in seconds since the run's start."""

    until_seconds: float | None = Field(default=None, gt=0)
    """No failure begins after this, in seconds since the run's start. Default: the run's end."""

    factor: float | None = Field(default=None, gt=1)
    """How many times slower, greater than 1, for "slow" and "throttle"."""

    delay_seconds: float | None = Field(default=None, gt=0)
    """Additional one-way delay, in seconds, greater than 0, for "delay"."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the link's traffic, greater than 0 and less than 1, for "loss" and "corrupt"."""

    direction: Direction | None = None
    """The silent direction of a "cut". "up": from the target to others. "down": from others to the
    target. TCP needs both directions, so either one stops transfers. Messages still arrive in the
    other direction. Default: "both"."""

    seed: int | None = Field(default=None, ge=0)
    """Seed of these failures alone, so that they stay the same when other settings change. Default:
    derived from the scenario's seed."""

    def inapplicable(self) -> Mapping[str, str]:
        """Reject repair keys for kinds that are over at once, and the keys of other kinds."""
        pointless = _pointless(self.kind, ("factor", "delay_seconds", "share"))
        if self.kind in AT_ONCE:
            keys = ("repair_seconds", "repair", "repair_shapes")
            pointless |= dict.fromkeys(keys, f"with kind={self.kind!r}")
        elif self.repair != "exponentiated-weibull":
            pointless["repair_shapes"] = f"with repair={self.repair!r}"
        return pointless

    @model_validator(mode="after")
    def _check_times(self) -> RandomSettings:
        what = f"kind={self.kind!r} in {self.table}"
        if self.until_seconds is not None and self.until_seconds <= self.from_seconds:
            raise ConfigError(
                f"{what} would end at until_seconds={self.until_seconds:g}, before it begins at "
                f"from_seconds={self.from_seconds:g}: raise until_seconds"
            )
        if self.kind not in AT_ONCE and self.repair_seconds is None:
            raise ConfigError(
                f"{what} lacks 'repair_seconds': add its mean duration, for example "
                "repair_seconds = 5.0"
            )
        self._check_shapes(what)
        _require_amount(self, self.kind, what)
        return self

    def _check_shapes(self, what: str) -> None:
        if self.repair != "exponentiated-weibull" or self.kind in AT_ONCE:
            return
        if self.repair_shapes is None:
            raise ConfigError(
                f"{what} lacks 'repair_shapes': add α and k, for example repair_shapes = [2.0, 0.5]"
            )
        if min(self.repair_shapes) <= 0:
            raise ConfigError(
                f"repair_shapes={list(self.repair_shapes)} of {what} is out of range: both must be "
                "greater than 0"
            )


class ScenarioFile(Settings):
    """A whole scenario file, with the tables of a RUN.toml unless `run` names a file."""

    table: ClassVar[str] = ""

    name: str | None = Field(default=None, pattern=NAME)
    """Name of the simulated run. Default: the name of this file."""

    run: str | dict[str, Any] | None = None
    """The run. Either the path of its TOML file, relative to this file, or the name of a shipped
    recipe, or the table `[run]` itself, followed by `[sync]` and other tables. Default: the run on
    the command line."""

    set: tuple[str, ...] = Field(default=(), strict=False)
    """Overrides of that run's settings, such as "sync.sync_every=48", if `run` is a path or a
    recipe. They also apply to another run on the command line."""

    seed: int | None = Field(default=None, ge=0)
    """Seed of all random choices in the simulation: step durations, jitter, random failures.
    Default: run.seed."""

    until_seconds: float | None = Field(default=None, gt=0)
    """Time limit of the simulation in virtual seconds. Default: it ends with the run."""

    parameters: int | None = Field(default=None, ge=1)
    """Number of the model's parameters, only with --protocol-only. Default: that of the workload's
    model."""

    learners: tuple[LearnerGroup, ...] = Field(default=(), strict=False)
    """The learners. Default: run.learners identical learners."""

    links: tuple[LinkSettings, ...] = Field(default=(), strict=False)
    """The links between learners and the syncer."""

    devices: DevicesSettings | None = None
    """If present, the learners are devices. Default: they stay connected."""

    events: tuple[EventSettings, ...] = Field(default=(), strict=False)
    """Events at a known time or step."""

    random: tuple[RandomSettings, ...] = Field(default=(), strict=False)
    """Events at random times."""

    sync: dict[str, Any] | None = None
    """As in a RUN.toml, like all following tables."""

    outer: dict[str, Any] | None = None
    """See `sync`."""

    syncer: dict[str, Any] | None = None
    """See `sync`."""

    privacy: dict[str, Any] | None = None
    """See `sync`."""

    tls: dict[str, Any] | None = None
    """As in a RUN.toml. It has no effect in virtual time."""

    learner: dict[str, Any] | None = None
    """See `sync`."""

    data: dict[str, Any] | None = None
    """See `sync`."""

    workload: dict[str, Any] | None = None
    """See `sync`."""

    faults: list[dict[str, Any]] | None = None
    """As in a RUN.toml: learners to kill at a share of the budget."""

    sites: list[dict[str, Any]] | None = None
    """Sites, each with learners behind a relay."""

    trust: dict[str, Any] | None = None
    """See `sync`."""

    launch: dict[str, Any] | None = None
    """As in a RUN.toml. Only `ddiloco launch` uses it."""

    @model_validator(mode="after")
    def _check_run_is_in_one_place(self) -> ScenarioFile:
        if isinstance(self.run, dict):
            if self.set:
                raise ConfigError(
                    "set cannot be combined with a [run] table in the same file: change the "
                    "tables and remove set"
                )
            return self
        for table in RUN_TABLES[1:]:
            if getattr(self, table) is not None:
                where = "without [run]" if self.run is None else f"with run={self.run!r}"
                raise ConfigError(
                    f"[{table}] {where} would be ignored: write changes to "
                    f'that file as set = ["{table}.key=value"] and remove [{table}]'
                )
        return self

    @field_validator("run", mode="before")
    @classmethod
    def _check_run(cls, run: Any) -> Any:
        if not isinstance(run, str | dict):
            raise ConfigError(
                f'run={run!r} is neither a quoted path nor a table: write run = "recipe.toml", '
                "or a table [run]"
            )
        return run


RUN_TABLES = (
    "run",
    "sync",
    "outer",
    "syncer",
    "privacy",
    "tls",
    "learner",
    "data",
    "workload",
    "faults",
    "sites",
    "trust",
    "launch",
)
"""The tables of a RUN.toml."""


def _pointless(kind: str, amounts: Iterable[str]) -> dict[str, str]:
    """Return the keys that only other kinds accept, each with the reason."""
    others = (key for key in amounts if key != AMOUNTS.get(kind))
    pointless = dict.fromkeys(others, f"with kind={kind!r}")
    return pointless if kind == "cut" else pointless | {"direction": f"with kind={kind!r}"}


def _require_amount(settings: EventSettings | RandomSettings, kind: str, what: str) -> None:
    key = AMOUNTS.get(kind)
    if key is not None and getattr(settings, key) is None:
        raise ConfigError(f"{what} lacks {key!r}: add it, for example {_EXAMPLES[key]}")
