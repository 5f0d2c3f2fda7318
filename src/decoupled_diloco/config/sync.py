"""`[sync]` and `[outer]`: the method's settings, the same for every learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from decoupled_diloco.config.settings import Settings, is_own, nearest, suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.revisions import AdaptLimits

EXACT_CODECS = ("fp32", "bf16")
"""What these leave out is too little to be sent later."""

BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "int8": 8.125,
    "int4": 4.125,
    "fp4-e3m0": 4.125,
    "int2": 2.125,
    "topk": 0.28125,
}
"""The built-in codecs, and their bits an element."""

MOMENTUM_DEFAULTS = {"nesterov": 0.5, "delayed-nesterov": 0.5, "sgd": 0.0}
"""Our own outer optimizers; every other name is a class of torch.optim."""

MERGE_RULES = ("rda", "mean")
"""The built-in merge rules."""

CHAIN_MAX = 16
"""A shard offers so many differences of a fragment at most, and one more."""

Names = Annotated[tuple[str, ...], Field(strict=False)]

_unchecked: ContextVar[bool] = ContextVar("unchecked", default=False)


@contextmanager
def methods_unchecked() -> Iterator[None]:
    """In this block any codec is valid: for readers that need other settings of a run's file."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


class AdaptSettings(Settings):
    """`[sync.adapt]`: H and τ follow the links, within these limits (rule 20 of the method)."""

    table: ClassVar[str] = "[sync.adapt]"

    period: tuple[int, int] | None = Field(default=None, strict=False)
    """The least and the greatest `period`; the run begins with that of [sync]. Then it is the
    least, twice, four times that and so on, or the greatest: the shortest that links carry in the
    last of `uplink_codecs`, and that is longer than the overlap. Default: it stays."""

    overlap: tuple[int, int] | None = Field(default=None, strict=False)
    """The least and the greatest `overlap`; the run begins with that of [sync]. Then it is the
    shortest in which bodies arrive, and with apply="at_tau" copies. Default: it stays."""

    carried_by: float = Field(default=0.75, gt=0, le=1)
    """The share of the learners whose links must carry the plan, greater than 0 to 1 (all). Who has
    a slower link is heard less often, and nobody waits for it (ours)."""

    @model_validator(mode="after")
    def _check_limits(self) -> AdaptSettings:
        if self.period is None and self.overlap is None:
            raise ConfigError(
                "[sync.adapt] lacks limits: give period = [least, greatest], overlap, or both"
            )
        for name, least in (("period", 1), ("overlap", 0)):
            limits = getattr(self, name)
            if limits is not None and not least <= limits[0] <= limits[1]:
                raise ConfigError(
                    f"{name}={list(limits)} in [sync.adapt] is out of range: give the least, "
                    f"{least} or more, and then the greatest"
                )
        return self


class SyncSettings(Settings):
    """`[sync]`: the method itself; the same for every learner, told to them by the syncer."""

    table: ClassVar[str] = "[sync]"

    fragments: int = Field(default=24, ge=1)
    """P: disjoint parts of the parameters, synchronised one at a time; at least 1. With P = H one
    fragment leaves in every step, the smoothest traffic (paper, App. C: 24)."""

    period: int = Field(default=24, ge=1)
    """H: steps between two syncs of the same fragment, at least 1. Raise it for a slower link:
    traffic falls as 1/H, and quality a little (paper: 24)."""

    overlap: int = Field(default=2, ge=0)
    """τ: steps between sending a fragment and applying the merged one, 0 to period - 1. Raise it
    when a round trip takes longer than the steps; what is trained meanwhile is overwritten, see
    `alignment` (paper: 2)."""

    quorum: int = Field(default=1, ge=1)
    """K: learners whose reports the syncer needs before it may merge, 1 to learners. 1 never waits
    for another learner; learners = synchronous (paper: 1)."""

    grace_margin: float = Field(default=0.8, ge=0, lt=1)
    """γ: share of the slack within the overlap that the syncer may spend waiting for more learners
    than the quorum, 0 (no grace window) to less than 1 (paper, Eq. 3: below 1, unpublished; 0.8
    leaves a fifth of the slack for jitter)."""

    participants: Literal["reported", "all", "own"] = "reported"
    """The learners that a round asks: "reported": those that finished a step in this round's time
    (paper, Alg. 2); "all": all live ones that have trained the fragment, also much slower ones;
    "own": each learner alone, every `period` of its own steps, and what it sends is merged as soon
    as it is there (Async Local-SGD, recipes/async-local-sgd.toml). Every learner then gets each
    fragment once for each learner in a period, so much more comes down."""

    alignment: Literal["overwrite", "carry", "blend"] = "overwrite"
    """What applying a merged fragment does with the steps taken since it was sent: "overwrite"
    discards them (paper, Alg. 1), "carry" adds them to it, "blend" mixes by `blend_alpha`."""

    blend_alpha: float = Field(default=0.5, ge=0, le=1)
    """α: share of the learner's own weights in a blend, 0 (overwrite) to 1 (ignore the merged
    ones). Only with alignment="blend" (Streaming DiLoCo: 0.5)."""

    missed: Literal["overwrite", "rebase"] = "overwrite"
    """What a live learner does with a merged fragment that it did not contribute to: "overwrite"
    takes it (paper), "rebase" puts its own unsent progress on top of it. At speeds of 1, 1, 2 and 4
    "rebase" threw 7 % of the tokens away instead of 20 %, and ended with 2.3 % more loss
    (benchmarks/results/speeds)."""

    apply: Literal["on_arrival", "at_tau"] = "on_arrival"
    """When a merged fragment is applied: "on_arrival" at the next step (paper, Alg. 1); "at_tau"
    exactly `overlap` steps after it was sent, if it is there (Streaming DiLoCo)."""

    wait: Literal["never", "at_overlap"] = "never"
    """"never": learners never wait (paper). "at_overlap": a learner stops `overlap` steps after
    sending until the merged fragment is there; only for synchronous baselines."""

    partition: Literal["balanced", "tensor", "layer-strided", "layer-sequential"] = "balanced"
    """How parameters become fragments (paper, App. C; the same quality): "balanced" has the lowest
    peak of traffic, "tensor" is uneven, "layer-strided" and "layer-sequential" come in bursts."""

    fragment_map: tuple[Names, ...] = Field(default=(), strict=False)
    """Which modules are in which fragment, in the place of `partition`: a list of names for each
    fragment, as [["embedding", "blocks.[0-3]"], ["*"]]. A name stands for all that is below it, and
    the first list that has a tensor gets it. `fragments` is the number of lists then."""

    phases: tuple[int, ...] = Field(default=(), strict=False)
    """t_p: for each fragment the step within the period at which it is sent, 0 to period - 1.
    Default: evenly spread, ⌊p·H/P⌋. Fragments of the same step travel together."""

    uplink_codec: str = "bf16"
    """Number format of what learners send. "bf16" halves the traffic at the same quality (paper,
    text 55.4 against 55.3); "fp32" loses nothing, for baselines. "int8", "int4" and "fp4-e3m0", and
    "int2" have 8, 4 and 2 bits, with a scale for each 128 elements; "topk" sends the largest 80 of
    each 4,096 elements in 2 bits each, "topk-40" the largest 40. Or your own: "module:function", or
    the name under which a module in `run.imports` registers it."""

    uplink_codecs: Names = ()
    """Codecs, the most exact first, in the place of `uplink_codec`: each learner sends in the first
    that its link carries in time, within `overlap` steps. Who begins, begins with the first."""

    adapt: AdaptSettings | None = None
    """Limits within which `period` and `overlap` follow the links. Default: they stay."""

    error_feedback: bool | None = None
    """What the uplink codec leaves out of a contribution goes with the learner's next one. Costs 4
    bytes of host memory a parameter. Default: yes, but for "fp32" and "bf16"."""

    feedback_decay: float = Field(default=1.0, gt=0, le=1)
    """β: so much of what was left out goes with the next contribution, greater than 0 to 1. Less
    than 1 lets old training fade where a codec sends few elements."""

    downlink_codec: str = "bf16"
    """Number format of what the syncer sends, as `uplink_codec`. What it leaves out stays in the
    fp32 master and goes out next time."""

    buffers: Literal["mean", "one", "local"] = "mean"
    """What becomes of the model's buffers (BatchNorm's running statistics): "mean": they travel
    with the fragments, are the weighted mean of the learners' values, and are in the weights, which
    can be evaluated then; "one": as well, but those of the learner whose contribution has the
    largest weight; "local": every learner keeps its own, and the weights have none."""

    merge: str = "rda"
    """How outer gradients become one: "rda" averages norms and directions apart, because nearly
    orthogonal ones shrink a plain "mean" by 1/√M (paper; here 1.6 % lower loss at H = 24). But it
    keeps noise as well: the mean was 1.5 % lower at H = 8, and 3.1 % with Muon inside
    (benchmarks/results/schedule, longer). Or your own rule, as "module:function"."""

    weighting: Literal["tokens", "uniform"] = "tokens"
    """Weight of a contribution: "tokens": tokens · (tokens / steps) since the last sync (paper,
    Alg. 2); "uniform": all the same."""

    counter_cap_periods: int = Field(default=4, ge=1)
    """A learner's counters are capped at this many periods of steps, at least 1, so that one that
    was lost for long cannot dominate the merge. Whose link was down while it trained for more than
    that, and as many versions were made, drops what it has and takes the newest copy, unless missed
    = "rebase" (ours)."""

    late: Literal["next", "drop"] = "next"
    """What becomes of a contribution that is under way when its round merges: "next" folds it into
    the fragment's next round, "drop" throws it away. Rounds never wait for it. (Here the loss did
    not tell them apart: the default throws nothing away.)"""

    late_rounds_max: int = Field(default=32, ge=1)
    """A contribution that is late by more versions of its fragment than this is refused, at least
    1. An upload of u steps is late by u / period versions."""

    late_discount: float = Field(default=1.0, gt=0, le=1)
    """The weight of a late contribution is multiplied by this once for each version that it is
    late, greater than 0 to 1 (no discount)."""

    norm_gate: float = Field(default=10.0, ge=0)
    """k: a contribution whose norm exceeds median + k·MAD of its fragment's last 32, each brought
    to its number of steps, is larger than can be expected; MAD counts as at least a tenth of the
    median, so 10 is twice the median or more. A learner that is always larger than the others may
    exceed its own usual size by as much. 0: no gate; synchronous runs (`wait`) have none."""

    oversized: Literal["refuse", "clip"] = "clip"
    """What happens to a contribution above the limit: "clip" scales it down to the limit, "refuse"
    leaves it out of the merge, and its learner does not keep it. What cannot be true (not finite,
    or of steps that were never reported) is always refused."""

    initial_weights: Path | None = Field(default=None, strict=False)
    """safetensors file to start from, relative to where the command is started. Default: the
    workload's own, from the seed."""

    @property
    def grace(self) -> bool:
        """Whether there is a grace window at all."""
        return self.grace_margin > 0

    @property
    def feedback(self) -> float | None:
        """β of the error feedback; None: there is none."""
        wanted = self.error_feedback
        if wanted is None:
            wanted = not set(self.uplinks) <= set(EXACT_CODECS)
        return self.feedback_decay if wanted else None

    @property
    def limits(self) -> AdaptLimits | None:
        """Within what H and τ follow the links."""
        if self.adapt is None:
            return None
        return AdaptLimits(
            self.adapt.period or (self.period, self.period),
            self.adapt.overlap or (self.overlap, self.overlap),
            self.adapt.carried_by,
        )

    @property
    def uplinks(self) -> tuple[str, ...]:
        """The codecs that learners may send in, the most exact first."""
        return self.uplink_codecs or (self.uplink_codec,)

    def inapplicable(self) -> Mapping[str, str]:
        """`blend_alpha` without a blend, the cap of counters that are not looked at, and so on."""
        ignored = {}
        if self.fragment_map:
            ignored["partition"] = "with a fragment_map"
        if self.alignment != "blend":
            ignored["blend_alpha"] = f"with alignment={self.alignment!r}"
        if self.uplink_codecs:
            ignored["uplink_codec"] = "with uplink_codecs"
        if self.feedback is None:
            ignored["feedback_decay"] = "without error feedback"
        if self.weighting == "uniform" and self.missed == "rebase":
            ignored["counter_cap_periods"] = "with weighting='uniform' and missed='rebase'"
        if self.wait != "never":
            ignored["norm_gate"] = f"with wait={self.wait!r}"
            ignored["oversized"] = f"with wait={self.wait!r}"
        elif self.norm_gate == 0:
            ignored["oversized"] = "with norm_gate=0"
        if self.late == "drop":
            ignored["late_rounds_max"] = "with late='drop'"
            ignored["late_discount"] = "with late='drop'"
        return ignored

    @model_validator(mode="before")
    @classmethod
    def _count_the_map(cls, data: Any) -> Any:
        if not (isinstance(data, dict) and isinstance(data.get("fragment_map"), list | tuple)):
            return data
        lists = len(data["fragment_map"])
        if lists and data.get("fragments", lists) != lists:
            raise ConfigError(
                f"fragments={data['fragments']} in [sync], and fragment_map has {lists} lists: "
                "take fragments out"
            )
        return {"fragments": lists, **data} if lists else data

    @model_validator(mode="after")
    def _check_phases(self) -> SyncSettings:
        if not self.phases:
            return self
        if len(self.phases) != self.fragments:
            raise ConfigError(
                f"phases in [sync] has {len(self.phases)} entries, but fragments="
                f"{self.fragments}: give one for each fragment, or none"
            )
        for phase in self.phases:
            if not 0 <= phase < self.period:
                raise ConfigError(
                    f"phases in [sync] has {phase}, which is out of range: it must be from 0 to "
                    f"period - 1 = {self.period - 1}"
                )
        return self

    @property
    def chain(self) -> int:
        """Differences that together have fewer bits than a whole copy of 32 bits an element."""
        return max(1, min(CHAIN_MAX, ceil(32 / bits_of(self.downlink_codec)) - 1))

    @property
    def ladder(self) -> tuple[tuple[str, float], ...]:
        """`uplink_codecs`, each with its bits an element."""
        return tuple((name, bits_of(name)) for name in self.uplink_codecs)

    @field_validator("uplink_codec", "downlink_codec")
    @classmethod
    def _check_codec(cls, name: str, field: ValidationInfo) -> str:
        _check_codec(name, field)
        return name

    @field_validator("uplink_codecs")
    @classmethod
    def _check_codecs(cls, names: tuple[str, ...], field: ValidationInfo) -> tuple[str, ...]:
        for name in names:
            _check_codec(name, field)
        if _unchecked.get():
            return names
        bits = [bits_of(name) for name in names]
        if any(finer <= coarser for finer, coarser in pairwise(bits)):
            shown = ", ".join(f"{name} ({each:g})" for name, each in zip(names, bits, strict=True))
            raise ConfigError(
                f"uplink_codecs in [sync] have {shown} bits: put the most exact first, and each "
                "one after it with fewer bits"
            )
        return names

    @field_validator("merge")
    @classmethod
    def _check_merge(cls, name: str) -> str:
        if name not in MERGE_RULES and not is_own(name):
            raise ConfigError(
                f"merge={name!r} in [sync] is not known: {suggestion(name, MERGE_RULES)} (A "
                "custom rule is written as 'module:function'.)"
            )
        return name

    @model_validator(mode="after")
    def _check_own(self) -> SyncSettings:
        if self.participants != "own":
            return self
        wanted = {
            "quorum": 1,
            "grace_margin": 0.0,
            "wait": "never",
            "late": "next",
            "late_discount": 1.0,
            "missed": "rebase",
        }
        why = "does not go with participants='own', which merges each contribution as it comes"
        for name, value in wanted.items():
            given = getattr(self, name)
            if given != value:
                raise ConfigError(f"{name}={given!r} in [sync] {why}: set {name} = {value!r}")
        if self.adapt is not None:
            raise ConfigError(f"[sync.adapt] {why}: take it out")
        return self

    @model_validator(mode="after")
    def _check_adapt(self) -> SyncSettings:
        limits = self.limits
        if limits is None:
            return self
        if self.wait != "never":
            raise ConfigError(
                f"[sync.adapt] does not go with wait={self.wait!r}: who waits has H and τ as they "
                "are set; take one of them out"
            )
        if self.phases:
            raise ConfigError(
                "[sync.adapt] does not go with phases: with another period fragments are spread "
                "evenly; take one of them out"
            )
        for name in ("period", "overlap"):
            value, (least, most) = getattr(self, name), getattr(limits, name)
            if not least <= value <= most:
                raise ConfigError(
                    f"{name}={value} in [sync] is out of range: [sync.adapt] allows {least} to "
                    f"{most}, and the run begins with it"
                )
        if limits.overlap[0] >= limits.period[0]:
            raise ConfigError(
                f"overlap={list(limits.overlap)} in [sync.adapt] is not below "
                f"period={list(limits.period)}: a fragment would be sent again before its merged "
                "value is due: lower the least overlap or raise the least period"
            )
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> SyncSettings:
        if self.overlap >= self.period:
            raise ConfigError(
                f"overlap={self.overlap} is not below period={self.period}: a fragment would be "
                "sent again before its merged value is due: lower overlap or raise period"
            )
        return self


def bits_of(name: str) -> float:
    """The bits of an element in a codec, scales and all.

    >>> bits_of("int4"), bits_of("topk-160")
    (4.125, 0.5546875)
    """
    if name in BITS:
        return BITS[name]
    from decoupled_diloco.merge import codec  # Brings torch in, which others can do without.

    sample = 1 << 20
    return 8 * codec(name).nbytes(sample) / sample


def _check_codec(name: str, field: ValidationInfo) -> None:
    if _unchecked.get():
        return
    try:
        bits_of(name)
    except ConfigError as error:
        raise ConfigError(f"{field.field_name}={name!r} in [sync]: {error}") from None


class FragmentOuterSettings(Settings):
    """One entry of `[[outer.by_fragment]]`: what is different for some fragments."""

    table: ClassVar[str] = "[[outer.by_fragment]]"

    fragments: tuple[int, ...] = Field(strict=False, min_length=1)
    """Numbers of the fragments, 0 to fragments - 1; each in one entry at most."""

    optimizer: str | None = None
    """As in `[outer]`. Another one than there has its own defaults."""

    lr: float | None = Field(default=None, gt=0)
    """As in `[outer]`, greater than 0. Default: as there."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """As in `[outer]`, 0 to less than 1. Default: as there."""

    options: dict[str, Any] | None = None
    """As in `[outer]`. Default: as there."""


class OuterSettings(Settings):
    """`[outer]`: the optimizer that turns merged outer gradients into global weights."""

    table: ClassVar[str] = "[outer]"

    optimizer: str = "nesterov"
    """"nesterov": SGD with Nesterov momentum (paper, and all of its lineage); "delayed-nesterov":
    its momentum is refreshed at every N-th merge alone, options = { every = N } (Async Local-SGD);
    "sgd": with heavy-ball momentum, or none; or a class of torch.optim, such as "AdamW", its
    arguments in options. Or your own, as "module:function"."""

    lr: float = Field(default=0.7, gt=0)
    """η: outer learning rate, greater than 0. What counts is η / (1 - μρ), ρ being the likeness of
    successive outer gradients, so lower it when momentum rises (DiLoCo 0.7; paper: unpublished)."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """μ: outer momentum, 0 to less than 1. Default: 0.5, 0 for "sgd". 0.5 is ours:
    over 25 to 75 outer rounds the lineage's 0.9 ended with 5 to 28 % more loss, at every η
    (benchmarks/results/rounds). With H = 8, 0 was 3.5 % better than 0.5."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the torch.optim class or of your function, passed as they are; of
    "delayed-nesterov" every, the merges of a fragment from one refreshing of its momentum to the
    next, 1 or more."""

    by_fragment: tuple[FragmentOuterSettings, ...] = Field(default=(), strict=False)
    """Fragments with other settings, for example a smaller lr for the embedding."""

    def of_fragments(self) -> dict[int, OuterSettings]:
        """The settings of the fragments that have their own.

        Raises:
            ConfigError: a fragment is in two entries, or an entry does not fit.
        """
        found: dict[int, OuterSettings] = {}
        for entry in self.by_fragment:
            told = entry.model_dump(exclude={"fragments"})
            kept: dict[str, Any] = {"optimizer": self.optimizer, "lr": self.lr}
            if told.get("optimizer", self.optimizer) == self.optimizer:
                kept |= {n: getattr(self, n) for n in ("momentum", "options")}
                kept = {n: v for n, v in kept.items() if n not in self.inapplicable()}
            own = OuterSettings(**(kept | told))
            for fragment in entry.fragments:
                if fragment in found:
                    raise ConfigError(
                        f"fragment {fragment} is in two entries of [[outer.by_fragment]]: take it "
                        "out of one"
                    )
                found[fragment] = own
        return found

    def inapplicable(self) -> Mapping[str, str]:
        """Only our own optimizers take `momentum`; two of them take no `options`."""
        if self.optimizer == "delayed-nesterov":
            return {}
        ignored = "options" if self.optimizer in MOMENTUM_DEFAULTS else "momentum"
        return {ignored: f"with optimizer={self.optimizer!r}"}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_momentum(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        default = MOMENTUM_DEFAULTS.get(str(data.get("optimizer", "nesterov")))
        return data if default is None else {"momentum": default, **data}

    @field_validator("optimizer")
    @classmethod
    def _check_optimizer(cls, name: str) -> str:
        match = nearest(name, MOMENTUM_DEFAULTS)
        if match not in (None, name):
            raise ConfigError(
                f"optimizer={name!r} in [outer] is not known: did you mean {match!r}?"
            )
        return name

    @model_validator(mode="after")
    def _try_out(self) -> OuterSettings:
        """What has options is tried before a process starts; the others need no torch for that.

        A custom optimizer was tried when it was loaded, and only the syncer's processes load it.
        """
        if self.optimizer not in ("nesterov", "sgd") and not self._is_absent():
            from decoupled_diloco.merge import make_outer  # torch takes seconds

            try:
                make_outer(self.optimizer, self.lr, self.momentum, self.options)
            except ConfigError as error:
                raise ConfigError(f"[outer] cannot be used: {error}") from None
        self.of_fragments()
        return self

    def _is_absent(self) -> bool:
        """Whether this process has not loaded the custom optimizer, as learners have not."""
        if not is_own(self.optimizer):
            return False
        from decoupled_diloco.merge.outer import has_own_outer

        return not has_own_outer(self.optimizer)
