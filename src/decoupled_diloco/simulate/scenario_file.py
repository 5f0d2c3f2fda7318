"""The tables of a scenario file: who trains, over which links, and what befalls them.

A scenario says which run it is about, and tells its story in tables that know nothing of virtual
time: targets are names of processes or groups, triggers are seconds or global steps. The same file
drives the virtual world and real processes; what real ones cannot do, `chaos.real` says.
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
"""What can strike at random: everything but the comings and jumps that are told one by one."""

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
"""How much of it: the key that a kind needs, and no other kind takes."""

_EXAMPLES = {
    "factor": "how many times slower, for example 4",
    "delay_seconds": "how much longer one way takes, for example 0.2",
    "share": "how much of what the link carries, for example 0.01",
    "jump_seconds": "how far the clock leaps, for example 30",
}

AT_ONCE = ("break", "restart", "clock-jump")
"""What happens and is over: it has no duration."""


class LearnerGroup(Settings):
    """One entry of `[[learners]]`: some learners that are alike.

    All groups together, in the order of the file, are the run's learner-0, learner-1, and so on.
    """

    table: ClassVar[str] = "[[learners]]"

    name: str | None = Field(default=None, pattern=NAME)
    """What events call this group, for example a region. Its learners have names of their own."""

    count: int = Field(default=1, ge=1, le=LEARNERS_MAX)
    """How many learners, 1 to 100,000."""

    step_seconds: float = Field(default=1.0, gt=0)
    """Mean length of one inner step, seconds, greater than 0."""

    variance: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of a step's length as a share of the mean, 0 to less than 1."""

    link: str | None = None
    """The `[[links]]` entry by which these learners reach the syncer. Default: one of their own
    with 1 ms and no limit."""

    tokens: int | None = Field(default=None, ge=1)
    """Tokens of one inner step, at least 1, where there are no tensors (--protocol-only; default
    there: 1). With tensors they are the workload's."""

    present: bool = True
    """Whether they are there from the start; false: each joins by an event."""


class LinkSettings(Settings):
    """One entry of `[[links]]`: a way between learners and the syncer."""

    table: ClassVar[str] = "[[links]]"

    name: str = Field(pattern=NAME)
    """What learners and events call it."""

    latency_seconds: float = Field(default=0.001, ge=0)
    """One way, seconds, 0 and up."""

    jitter_seconds: float = Field(default=0.0, ge=0)
    """Further delay of each message, uniform between 0 and this, seconds."""

    up: str | None = None
    """Bandwidth from the learners to the syncer, such as "10Mbit/s". Default: no limit."""

    down: str | None = None
    """Bandwidth from the syncer to the learners, such as "10Mbit/s". Default: no limit."""

    shared: bool = False
    """Whether all learners on it share its bandwidth, as a region's uplink; false: each has so
    much of its own."""

    @property
    def up_bytes_per_second(self) -> float:
        """`up` as a number."""
        return float("inf") if self.up is None else parse_rate(self.up)

    @property
    def down_bytes_per_second(self) -> float:
        """`down` as a number."""
        return float("inf") if self.down is None else parse_rate(self.down)

    def inapplicable(self) -> Mapping[str, str]:
        """There is nothing to share without a limit."""
        limited = self.up is not None or self.down is not None
        return {} if limited else {"shared": "without up and down"}

    @field_validator("up", "down")
    @classmethod
    def _check_rate(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                parse_rate(text)
            except ValueError as error:
                raise ConfigError(f"in {cls.table}, {error}") from None
        return text


class EventSettings(Settings):
    """One entry of `[[events]]`: something that happens at a known time or step."""

    table: ClassVar[str] = "[[events]]"

    kind: Kind
    """"kill": SIGKILL; "vanish": the host is gone and nobody is told; "restart": told to end, and
    started again at once; "pause": SIGSTOP; "slow": steps take `factor` times longer;
    "clock-jump": the process's clock leaps ahead by `jump_seconds`; "disk-full": a shard's disk
    has no space; "disk-lost": a shard is killed and its disk is empty when it comes back; "cut":
    the link is silent, in one or both directions; "break": connections are lost, once;
    "throttle": a link has 1/`factor` of its bandwidth; "delay": it takes `delay_seconds` longer;
    "loss": this `share` of what it carries has to be sent again; "corrupt": this `share` of it is
    spoilt; "join", "leave": a learner comes, or goes and says so."""

    target: str
    """Whom: "learner-3", "shard-0" (which hosts the coordinator), "coordinator", "evaluator",
    "shard-0-standby", the name of a group, all learners on a link by its name, "learners" or
    "shards": all of them."""

    choose: Choose = "all"
    """How many of the target, drawn from the seed when it happens: "one", "minority" (the most that
    are less than half, but one at least), "majority" (the fewest that are more than half),
    "all"."""

    at_seconds: float | None = Field(default=None, ge=0)
    """When: seconds since the run's start, 0 and up."""

    at_step: int | None = Field(default=None, ge=1)
    """When: as soon as the global step is reached, at least 1."""

    for_seconds: float | None = Field(default=None, gt=0)
    """How long, seconds, greater than 0; then it is undone: what was killed or has left starts
    again, what has joined leaves. Default: for good."""

    until_step: int | None = Field(default=None, ge=1)
    """It is undone as soon as this global step is reached. Default: for good."""

    factor: float | None = Field(default=None, gt=1)
    """How many times slower, greater than 1; for "slow" and "throttle"."""

    delay_seconds: float | None = Field(default=None, gt=0)
    """How much longer one way takes, seconds, greater than 0; for "delay"."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of what the link carries, greater than 0 and less than 1; for "loss" and "corrupt"."""

    jump_seconds: float | None = Field(default=None, gt=0)
    """How far the clock leaps ahead, seconds, greater than 0; for "clock-jump"."""

    direction: Direction | None = None
    """Where nothing passes, for "cut": "up": from the target to others; "down": from others to it.
    TCP needs both ways, so either stops transfers; messages still arrive in the other direction.
    Default: "both"."""

    def inapplicable(self) -> Mapping[str, str]:
        """What happens at once has no duration, and each amount is of its own kinds."""
        pointless = _pointless(self.kind, ("factor", "delay_seconds", "share", "jump_seconds"))
        if self.kind in AT_ONCE:
            pointless |= dict.fromkeys(("for_seconds", "until_step"), f"with kind={self.kind!r}")
        return pointless

    @model_validator(mode="after")
    def _check_times(self) -> EventSettings:
        what = f"kind={self.kind!r} target={self.target!r} in {self.table}"
        if (self.at_seconds is None) == (self.at_step is None):
            problem = "has no time" if self.at_step is None else "has two times"
            raise ConfigError(f"{what} {problem}: give one of at_seconds and at_step")
        if self.for_seconds is not None and self.until_step is not None:
            raise ConfigError(f"{what} has two ends: give one of for_seconds and until_step")
        if self.at_step and self.until_step and self.until_step <= self.at_step:
            raise ConfigError(
                f"{what} would end at until_step={self.until_step}, before it begins at "
                f"at_step={self.at_step}: raise until_step"
            )
        _require_amount(self, self.kind, what)
        return self


class RandomSettings(Settings):
    """One entry of `[[random]]`: something that happens again and again, drawn from the seed.

    Each target has a Poisson process of its own, as machines have: more targets, more failures.
    """

    table: ClassVar[str] = "[[random]]"

    kind: RandomKind
    """What: see `[[events]]`; those that pass."""

    targets: tuple[str, ...] = Field(min_length=1, strict=False)
    """Whom: names as in `[[events]]`. A group stands for each of its members, every one struck in
    its own time; a link that is cut or throttled is struck as a whole."""

    choose: Choose | None = None
    """Strike a group together instead: so many of it at a time, see `[[events]]`. Default: each
    member in its own time."""

    mean_seconds_between: float = Field(gt=0)
    """Mean time from a repair, or the start, to the next failure of the same target, seconds."""

    repair_seconds: float | None = Field(default=None, gt=0)
    """How long it lasts, in the mean, seconds, greater than 0; with
    repair="exponentiated-weibull" the scale λ. Not for "break" and "restart", which are over at
    once."""

    repair: Literal["fixed", "exponential", "exponentiated-weibull"] | None = None
    """How the time to repair is distributed: "fixed": always the mean; "exponential";
    "exponentiated-weibull": heavy-tailed, as repairs of machines are. Default: "exponential"."""

    repair_shapes: tuple[float, float] | None = Field(default=None, strict=False)
    """α and k of the exponentiated Weibull distribution, F(x) = (1 − exp(−(x/λ)^k))^α, each greater
    than 0. k below 1 makes the tail heavy."""

    from_seconds: float = Field(default=0.0, ge=0)
    """No failure before this, seconds since the run's start."""

    until_seconds: float | None = Field(default=None, gt=0)
    """No failure begins after this, seconds since the run's start. Default: the run's end."""

    factor: float | None = Field(default=None, gt=1)
    """How many times slower, greater than 1; for "slow" and "throttle"."""

    delay_seconds: float | None = Field(default=None, gt=0)
    """How much longer one way takes, seconds, greater than 0; for "delay"."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """Share of what the link carries, greater than 0 and less than 1; for "loss" and "corrupt"."""

    direction: Direction | None = None
    """Where nothing passes, for "cut": "up": from the target to others; "down": from others to it.
    TCP needs both ways, so either stops transfers; messages still arrive in the other direction.
    Default: "both"."""

    seed: int | None = Field(default=None, ge=0)
    """Of these failures alone, so that they stay when other things change. Default: follows from
    the scenario's."""

    def inapplicable(self) -> Mapping[str, str]:
        """What happens at once is never repaired, and each amount is of its own kinds."""
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
            raise ConfigError(f"{what} lacks 'repair_seconds': say how long it lasts")
        self._check_shapes(what)
        _require_amount(self, self.kind, what)
        return self

    def _check_shapes(self, what: str) -> None:
        if self.repair != "exponentiated-weibull" or self.kind in AT_ONCE:
            return
        if self.repair_shapes is None:
            raise ConfigError(f"{what} lacks 'repair_shapes': give α and k, for example [2.0, 0.5]")
        if min(self.repair_shapes) <= 0:
            raise ConfigError(
                f"repair_shapes={list(self.repair_shapes)} of {what} is out of range: both must be "
                "greater than 0"
            )


class ScenarioFile(Settings):
    """A whole scenario file. Beside these keys: the tables of a RUN.toml, if `run` names none."""

    table: ClassVar[str] = ""

    name: str | None = Field(default=None, pattern=NAME)
    """Name of the run that is simulated. Default: the file's."""

    run: str | dict[str, Any] | None = None
    """The run: the path of its TOML file, relative to this one, or the name of a shipped recipe;
    or the table `[run]` itself, with `[sync]` and the others beside it. Default: the one that the
    command line names."""

    set: tuple[str, ...] = Field(default=(), strict=False)
    """Settings of that run to override, "sync.period=48" each; for a `run` that is a path. They
    stay when the command line names another run."""

    seed: int | None = Field(default=None, ge=0)
    """Of everything that the virtual world draws: lengths of steps, jitter, random failures.
    Default: run.seed."""

    until_seconds: float | None = Field(default=None, gt=0)
    """The simulation ends at this virtual time at the latest, seconds. Default: with the run."""

    parameters: int | None = Field(default=None, ge=1)
    """Parameters of the model where there are no tensors (--protocol-only). Default there: those
    of the workload's model."""

    learners: tuple[LearnerGroup, ...] = Field(default=(), strict=False)
    """Who trains. Default: run.learners learners that are alike."""

    links: tuple[LinkSettings, ...] = Field(default=(), strict=False)
    """The ways between learners and the syncer."""

    events: tuple[EventSettings, ...] = Field(default=(), strict=False)
    """What happens at a known time or step."""

    random: tuple[RandomSettings, ...] = Field(default=(), strict=False)
    """What happens at random."""

    sync: dict[str, Any] | None = None
    """As in a RUN.toml; likewise the following ones."""

    outer: dict[str, Any] | None = None
    """See `sync`."""

    syncer: dict[str, Any] | None = None
    """See `sync`."""

    tls: dict[str, Any] | None = None
    """As in a RUN.toml; nothing travels in virtual time that could be read."""

    learner: dict[str, Any] | None = None
    """See `sync`."""

    data: dict[str, Any] | None = None
    """See `sync`."""

    workload: dict[str, Any] | None = None
    """See `sync`."""

    faults: list[dict[str, Any]] | None = None
    """As in a RUN.toml: learners to kill at a share of the budget."""

    where: dict[str, Any] | None = None
    """As in a RUN.toml; `ddiloco launch` alone looks at it."""

    @model_validator(mode="after")
    def _check_run_is_in_one_place(self) -> ScenarioFile:
        if isinstance(self.run, dict):
            if self.set:
                raise ConfigError(
                    "set beside the run's own tables says the same twice: change the tables, and "
                    "take set out"
                )
            return self
        for table in RUN_TABLES[1:]:
            if getattr(self, table) is not None:
                where = "without [run]" if self.run is None else f"beside run={self.run!r}"
                raise ConfigError(
                    f"[{table}] {where} would be ignored: write what differs from "
                    f'that file as set = ["{table}.key=value"], and take [{table}] out'
                )
        return self

    @field_validator("run", mode="before")
    @classmethod
    def _check_run(cls, run: Any) -> Any:
        if not isinstance(run, str | dict):
            raise ConfigError(
                f'run={run!r} is neither a path in quotes nor a table: write run = "recipe.toml", '
                "or a table [run]"
            )
        return run


RUN_TABLES = (
    "run",
    "sync",
    "outer",
    "syncer",
    "tls",
    "learner",
    "data",
    "workload",
    "faults",
    "where",
)
"""The tables of a RUN.toml."""


def _pointless(kind: str, amounts: Iterable[str]) -> dict[str, str]:
    """The keys that another kind has."""
    others = (key for key in amounts if key != AMOUNTS.get(kind))
    pointless = dict.fromkeys(others, f"with kind={kind!r}")
    return pointless if kind == "cut" else pointless | {"direction": f"with kind={kind!r}"}


def _require_amount(settings: EventSettings | RandomSettings, kind: str, what: str) -> None:
    key = AMOUNTS.get(kind)
    if key is not None and getattr(settings, key) is None:
        raise ConfigError(f"{what} lacks {key!r}: say {_EXAMPLES[key]}")
