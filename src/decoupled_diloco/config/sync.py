"""`[sync]` and `[outer]`: the settings of the method, which are the same for every learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from decoupled_diloco.config.settings import OWN, Settings, is_own, nearest, suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.adapt import AdaptLimits

EXACT_CODECS = ("fp32", "bf16")
"""Codecs that leave out too little for error feedback to matter."""

BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "int8": 8.125,
    "int4": 4.125,
    "fp4-e3m0": 4.125,
    "int2": 2.125,
    "topk": 0.28125,
}
"""The built-in codecs, and their bits per element."""

UPLINK_LADDER = ("bf16", "int8", "int4", "int2")
"""The default ladder. "topk" is not in it, because its loss was above that of a learner that hardly
takes part."""

MOMENTUM_DEFAULTS = {"nesterov": 0.5, "delayed-nesterov": 0.5, "sgd": 0.0}
"""The built-in outer optimizers; every other name is a class of torch.optim."""

SUMMED_RULES = ("rda", "mean")
"""The built-in merge rules that need only sums, which a relay can send."""

ROBUST_RULES = ("median", "trimmed-mean", "geometric-median")
"""The built-in merge rules that need single contributions."""

CHAIN_MAX = 16
"""The longest chain of differences of a fragment that a learner applies instead of a whole copy."""

OwnName = Annotated[str, Field(pattern=OWN)]

Names = Annotated[tuple[str, ...], Field(strict=False)]

_unchecked: ContextVar[bool] = ContextVar("unchecked", default=False)


@contextmanager
def methods_unchecked() -> Iterator[None]:
    """Accept any codec in this block, for readers that need only other settings of a run's file."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


class AdaptSettings(Settings):
    """`[sync.adapt]`: H and τ follow the links, within these limits (rule 20 of the method)."""

    table: ClassVar[str] = "[sync.adapt]"

    sync_every: tuple[int, int] | None = Field(default=None, strict=False)
    """The smallest and the largest `sync_every`. The run starts with the value in [sync]. Then it
    uses 1, 2, 4, … times the smallest value, or the largest. It takes the shortest period that the
    links can carry in the last codec of `uplink` and that is longer than the overlap. Default: H
    does not change."""

    overlap_steps: tuple[int, int] | None = Field(default=None, strict=False)
    """The smallest and the largest `overlap_steps`. The run starts with the value in [sync]. Then
    it takes the shortest overlap in which contributions arrive. With when="at_overlap" in
    [sync.apply], merged fragments must arrive in it, too. Default: τ does not change."""

    learner_share: float = Field(default=0.75, gt=0, le=1)
    """Share of the learners whose links must carry the schedule, greater than 0 to 1 (all). A
    learner with a slower link contributes less often, and no learner waits for it (ours)."""

    @model_validator(mode="after")
    def _check_limits(self) -> AdaptSettings:
        if self.sync_every is None and self.overlap_steps is None:
            raise ConfigError(
                "[sync.adapt] has no limits: set sync_every = [smallest, largest], overlap_steps, "
                "or both"
            )
        for name, least in (("sync_every", 1), ("overlap_steps", 0)):
            limits = getattr(self, name)
            if limits is not None and not least <= limits[0] <= limits[1]:
                raise ConfigError(
                    f"{name}={list(limits)} in [sync.adapt] is out of range: write the smallest "
                    f"value, at least {least}, and then the largest"
                )
        return self


class CodecSettings(Settings):
    """`[sync.codec]`: the number formats on the network."""

    table: ClassVar[str] = "[sync.codec]"

    uplink: str | Names = UPLINK_LADDER
    """Number format of what learners send. "fp32" is exact, for baselines. "bf16" halves the
    traffic at the same quality (paper, text 55.4 against 55.3). "int8", "int4", "fp4-e3m0" and
    "int2" have 8, 4, 4 and 2 bits, and one scale per 128 elements. "topk" sends the largest 80 of
    each 4,096 elements in 2 bits each; "topk-40" sends the largest 40. "module:function" is your
    own codec, and so is a name that a module in `run.imports` registers. A list is a ladder, most
    exact first. Each learner starts with the first codec. It then uses the first one that its link
    carries within `overlap_steps`. With the default ladder (ours), a learner whose link carries
    bf16 sends nothing else. A single name is the same codec for all."""

    downlink: str = "bf16"
    """Number format of what the syncer sends, with the names of `uplink`. What the codec leaves out
    stays in the fp32 master copy and is sent with the next version."""

    error_feedback: bool = True
    """Whether a learner adds what an uplink codec left out to its next contribution. Once it sends
    in another codec than "fp32" and "bf16", which leave out too little, this costs 4 bytes of host
    memory per parameter."""

    feedback_decay: float = Field(default=1.0, gt=0, le=1)
    """β: share of what was left out that is added to the next contribution, greater than 0 to 1.
    Lower it to let old training fade, where a codec sends few elements. It needs error feedback."""

    @property
    def feedback(self) -> float | None:
        """β of the error feedback; None without error feedback."""
        wanted = self.error_feedback and not self._are_exact
        return self.feedback_decay if wanted else None

    @property
    def _are_exact(self) -> bool:
        return set(self.uplinks) <= set(EXACT_CODECS)

    @property
    def uplinks(self) -> tuple[str, ...]:
        """The codecs that learners may send in, most exact first."""
        return (self.uplink,) if isinstance(self.uplink, str) else self.uplink

    @property
    def ladder(self) -> tuple[tuple[str, float], ...]:
        """The codecs of a list, each with its bits per element; empty for a single codec."""
        names = () if isinstance(self.uplink, str) else self.uplink
        return tuple((name, bits_of(name)) for name in names)

    @property
    def chain(self) -> int:
        """How many differences together have fewer bits than a whole copy with 32 bits each."""
        return max(1, min(CHAIN_MAX, ceil(32 / bits_of(self.downlink)) - 1))

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of error feedback with exact codecs, and its decay without it."""
        if self._are_exact:
            because = f"with uplink={self.uplink!r}, which leaves out too little"
            return dict.fromkeys(("error_feedback", "feedback_decay"), because)
        return {} if self.error_feedback else {"feedback_decay": "without error feedback"}

    @field_validator("uplink", "downlink")
    @classmethod
    def _check_codecs(cls, told: str | tuple[str, ...], field: ValidationInfo) -> Any:
        names = (told,) if isinstance(told, str) else told
        if not names:
            raise ConfigError("uplink=[] in [sync.codec] is empty: name one codec or several")
        if _unchecked.get():
            return told
        bits = [_check_codec(name, field) for name in names]
        if any(finer <= coarser for finer, coarser in pairwise(bits)):
            shown = ", ".join(f"{name} ({each:g})" for name, each in zip(names, bits, strict=True))
            raise ConfigError(
                f"uplink={list(names)!r} in [sync.codec] has {shown} bits per element: put the "
                "most exact codec first, and each following one with fewer bits"
            )
        return told


class MergeSettings(Settings):
    """`[sync.merge]`: how contributions become one outer gradient."""

    table: ClassVar[str] = "[sync.merge]"

    rule: str = "rda"
    """How contributions become one outer gradient. "mean" averages them. "rda" averages norms and
    directions separately, because the plain mean of nearly orthogonal contributions shrinks by 1/√M
    (paper; here 1.6 % lower loss at H = 24). It also keeps noise: "mean" was 1.5 % better at H = 8,
    and 3.1 % better with Muon as the inner optimizer (benchmarks/results/schedule, longer).
    "median", "trimmed-mean" and "geometric-median" limit the harm of bad contributions
    (docs/how-to/harmful-learners.md). The first two work on each element, the third one on each
    piece of a tensor, and all use the weights. They keep all contributions of a fragment until its
    merge: 4 bytes per element and learner. "module:function" is your own rule."""

    trim: float = Field(default=0.2, gt=0, lt=0.5)
    """Share of the weight that "trimmed-mean" leaves out at each end of an element's values,
    greater than 0 to less than 0.5. It must be at least the share of bad learners, or their
    extreme values count."""

    weighting: Literal["tokens", "uniform"] = "tokens"
    """Weight of a contribution: "tokens" is tokens · (tokens / steps) since the last sync (paper,
    Alg. 2); "uniform" is the same weight for all."""

    counter_cap_periods: int = Field(default=4, ge=1)
    """Limit on the steps and tokens that count in one contribution, in periods of `sync_every`
    steps; at least 1. The limit keeps a learner that was disconnected for long from dominating a
    merge. Such a learner discards what it trained meanwhile and takes the newest copy, if as many
    versions were published. With missed="rebase" it keeps its training (ours)."""

    norm_gate: float = Field(default=10.0, ge=0)
    """k: a contribution is oversized if its norm exceeds median + k·MAD of the last 32
    contributions to its fragment, scaled to the same number of steps. MAD counts as at least a
    tenth of the median, so 10 means at least twice the median, and more for the first 8 norms. A
    learner that is always larger than the others, up to three times, may exceed its own usual norm
    by as much. 0 turns the gate off. Synchronous runs (`wait`) have no gate."""

    oversized: Literal["refuse", "clip"] = "clip"
    """What happens to an oversized contribution: "clip" scales it down to the limit; "refuse"
    leaves it out of the merge, and its learner discards it. An impossible contribution (not finite,
    or with steps that were never reported) is always refused."""

    buffers: Literal["mean", "one", "local"] = "mean"
    """What happens to the model's buffers, such as the running statistics of BatchNorm. "mean"
    sends them with the fragments and takes the weighted mean of the learners' values, so the
    published weights can be evaluated. "one" takes the buffers of the learner with the largest
    weight instead. With "local" each learner keeps its own, and the published weights have none."""

    def inapplicable(self) -> Mapping[str, str]:
        """`oversized` without a gate, and `trim` with other rules."""
        ignored = {"oversized": "with norm_gate=0"} if self.norm_gate == 0 else {}
        if self.rule != "trimmed-mean":
            ignored["trim"] = f"with rule={self.rule!r}"
        return ignored

    @field_validator("rule")
    @classmethod
    def _check_rule(cls, name: str) -> str:
        known = SUMMED_RULES + ROBUST_RULES
        if name not in known and not is_own(name):
            raise ConfigError(
                f"rule={name!r} in [sync.merge] is not known: {suggestion(name, known)} (A "
                "custom rule is written as 'module:function'.)"
            )
        return name


class LateSettings(Settings):
    """`[sync.late]`: contributions that arrive after their round has merged."""

    table: ClassVar[str] = "[sync.late]"

    policy: Literal["next", "drop"] = "next"
    """What happens to a contribution that is still in transfer when its round merges: "next" adds
    it to the fragment's next round, "drop" discards it. Rounds never wait for it. The loss was the
    same in our runs, so the default discards nothing."""

    max_versions: int = Field(default=32, ge=1)
    """A contribution that is late by more versions of its fragment is refused; at least 1. An
    upload that takes u steps is late by u / sync_every versions."""

    discount: float | Literal["polynomial"] = 1.0
    """Factor on the weight of a late contribution. A number, greater than 0 to 1 (no discount), is
    applied once per version that it is late. "polynomial" is (1 + s)^-0.5 for s versions (FedBuff,
    arXiv 2106.06639). Lower the number if late contributions harm the loss."""

    discount_of: Literal["weight", "change"] = "weight"
    """What the discount multiplies. "weight": a late contribution counts less than the others in
    its merge; if all are equally late, the merge is as large as without a discount. "change": the
    contribution itself shrinks, so that a merge of late contributions is a smaller step (FedBuff).
    Use it where most contributions are late, as those of devices."""

    @field_validator("discount", mode="before")
    @classmethod
    def _check_discount(cls, given: Any) -> Any:
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number and given != "polynomial":
            raise ConfigError(
                f"discount={given!r} in [sync.late] is not valid: write a number greater than 0 "
                "and at most 1, or 'polynomial'"
            )
        if number and not 0 < given <= 1:
            raise ConfigError(
                f"discount={given} in [sync.late] is out of range: it must be greater than 0 and "
                "at most 1, or 'polynomial'"
            )
        return given

    def inapplicable(self) -> Mapping[str, str]:
        """The limits of late contributions if they are dropped, and the use of no discount."""
        if self.policy == "drop":
            keys = ("max_versions", "discount", "discount_of")
            return dict.fromkeys(keys, "with policy='drop'")
        return {"discount_of": "with discount=1.0"} if self.discount == 1.0 else {}


class DeviceSettings(Settings):
    """`[sync.devices]`: learners that are disconnected most of the time (docs/how-to/devices.md).

    A device fetches what is new, trains alone, and contributes at its next visit.
    """

    table: ClassVar[str] = "[sync.devices]"

    history: int = Field(default=32, ge=1)
    """How many versions of a fragment the base of a contribution may be old, at least 1. An older
    contribution is dropped, and its device starts from the newest copy. It replaces `max_versions`
    in [sync.late]. For as long, a shard remembers which devices have contributed."""

    cohort: int | None = Field(default=None, ge=1)
    """The most devices that train at a time, 1 to `learners`. The coordinator draws the next ones
    among those present, see `draw`. With participation="async", contributions are up to cohort /
    quorum versions old on average. Default: each device that is present trains."""

    draw: Literal["fair", "uniform"] = "fair"
    """Which of the devices that wait gets a place. "fair": one of those that have trained least
    often. "uniform": any of them, as in FedAvg. `run.seed` determines the draw."""

    visit_seconds: float = Field(default=3600.0, gt=0)
    """Time after which a device loses its place in the cohort, whether or not it has come back,
    seconds, greater than 0. A device that is present then ends its visit, and a later contribution
    still counts within `history`."""

    def inapplicable(self) -> Mapping[str, str]:
        """`draw` and `visit_seconds` without a cohort."""
        return dict.fromkeys(("draw", "visit_seconds"), "without cohort") if not self.cohort else {}


SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""State keys of squares, by whose root an optimizer divides."""


class MomentSettings(Settings):
    """`[sync.moments]`: learners also merge the moments of their inner optimizers.

    A learner that joins or comes back receives them with the weights.
    """

    table: ClassVar[str] = "[sync.moments]"

    every: int = Field(default=1, ge=1)
    """How often moments are merged: with every n-th version of their fragment, at least 1. The
    other contributions contain only weights."""

    codec: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    """Number format of moments, uplink and downlink. "int8" halves their traffic, and "int4" halves
    it again. Both round small values to 0, so they cannot be used for second moments. With Muon,
    int8 raised the loss by 25 %, and training failed with int4."""

    names: Names = Field(default=("exp_avg|momentum_buffer", "exp_avg_sq"), min_length=1)
    """Keys of the moments in the optimizer's state, such as those of torch.optim. A bar separates
    keys of which each parameter has at most one: Muon and SGD have "momentum_buffer" where Adam has
    "exp_avg". Each moment must have its parameter's shape, and each entry must exist for at least
    one parameter. An entry costs 8 bytes per parameter at the shards, and 4 at each learner."""

    @model_validator(mode="after")
    def _check_names(self) -> MomentSettings:
        for name in self.names:
            keys = name.split("|")
            if "@" in name or not all(keys):
                raise ConfigError(
                    f"names has {name!r} in {self.table}, which is not a valid key of a state: "
                    "write keys, separated by '|'"
                )
            second = next((key for key in keys if key in SECOND_MOMENTS), None)
            if self.codec.startswith("int") and second is not None:
                raise ConfigError(
                    f"codec={self.codec!r} in {self.table} cannot be combined with {second!r} in "
                    "names, because a divisor that is rounded to 0 makes a step far too long: set "
                    "codec='bf16', or names=['exp_avg|momentum_buffer']"
                )
        return self


class ApplySettings(Settings):
    """`[sync.apply]`: how learners apply merged fragments."""

    table: ClassVar[str] = "[sync.apply]"

    when: Literal["on_arrival", "at_overlap"] = "on_arrival"
    """When a learner applies a merged fragment: "on_arrival" at the next step boundary (paper,
    Alg. 1); "at_overlap" exactly `overlap_steps` steps after sending, if it has arrived (Streaming
    DiLoCo)."""

    alignment: Literal["overwrite", "carry", "blend"] = "overwrite"
    """What happens to the steps that a learner took since it sent the fragment: "overwrite"
    discards them (paper, Alg. 1); "carry" adds them to the merged fragment; "blend" mixes both by
    `blend_alpha`."""

    blend_alpha: float = Field(default=0.5, ge=0, le=1)
    """α: share of the learner's own weights in a blend, 0 (as "overwrite") to 1 (ignore the merged
    fragment). Only with alignment="blend" (Streaming DiLoCo: 0.5)."""

    missed: Literal["overwrite", "rebase"] = "overwrite"
    """What a live learner does with a merged fragment to which it did not contribute: "overwrite"
    discards its own progress (paper); "rebase" adds its unsent progress to the merged fragment. At
    speeds of 1, 1, 2 and 4, "rebase" discarded 6.5 % of the tokens instead of 20.6 %, and ended
    with 2.2 % more loss (benchmarks/results/speeds)."""

    def inapplicable(self) -> Mapping[str, str]:
        """`blend_alpha` without a blend."""
        if self.alignment == "blend":
            return {}
        return {"blend_alpha": f"with alignment={self.alignment!r}"}


class PartitionSettings(Settings):
    """`[sync.partition]`: how parameters become fragments, and when each fragment is sent."""

    table: ClassVar[str] = "[sync.partition]"

    scheme: Literal["balanced", "tensor", "layer-strided", "layer-sequential"] = "balanced"
    """How parameters become fragments (paper, App. C; the quality is the same). "balanced" has the
    lowest peak of traffic. "tensor" gives fragments of different sizes. "layer-strided" and
    "layer-sequential" send in bursts."""

    map: tuple[Names, ...] = Field(default=(), strict=False)
    """The modules in each fragment, instead of `scheme`: one list of names per fragment, such as
    [["embedding", "blocks.[0-3]"], ["*"]]. A name includes everything below it. The first list that
    matches a tensor gets it. `fragments` is then the number of lists."""

    phases: tuple[int, ...] = Field(default=(), strict=False)
    """t_p: for each fragment, the step within the period at which it is sent, 0 to sync_every - 1.
    Fragments with the same step are sent together. Default: evenly spread, ⌊p·H/P⌋."""

    def inapplicable(self) -> Mapping[str, str]:
        """`scheme` with a map."""
        return {"scheme": "with a map"} if self.map else {}


class SyncSettings(Settings):
    """`[sync]`: the schedule of the method. The syncer sends it to all learners."""

    table: ClassVar[str] = "[sync]"

    fragments: int = Field(default=24, ge=1)
    """P: number of disjoint parts of the parameters, which are synced one at a time; at least 1.
    With P = H one fragment is sent in every step, which gives the smoothest traffic (paper, App. C:
    24)."""

    sync_every: int = Field(default=24, ge=1)
    """H: steps between two syncs of the same fragment, at least 1. Raise it for a slower link: the
    traffic falls as 1/H, and the quality falls a little (paper: 24)."""

    schedule: OwnName | None = None
    """"module:function": your function `schedule(step, steps)`, which returns H during the run.
    `steps` is `max_steps`, or None. The run starts with `sync_every`, by default what the function
    returns for step 0. Default: H does not change."""

    overlap_steps: int = Field(default=2, ge=0)
    """τ: steps between sending a fragment and applying the merged one, 0 to sync_every - 1. Raise
    it if a round trip takes longer than these steps. `alignment` in [sync.apply] says what happens
    to the steps that are trained meanwhile (paper: 2)."""

    quorum: int = Field(default=1, ge=1)
    """K: number of learners that must report before the syncer may merge, 1 to `learners`. With 1
    no learner waits for another one. With all learners the run is synchronous (paper: 1)."""

    grace_margin: float = Field(default=0.8, ge=0, lt=1)
    """γ: share of the slack within the overlap in which the syncer may wait for more learners than
    the quorum, 0 (no grace window) to less than 1 (paper, Eq. 3: below 1, unpublished; 0.8 leaves a
    fifth of the slack for jitter)."""

    participation: Literal["active", "all", "async"] | OwnName = "active"
    """The learners that a round requests contributions from. "active": those that finished a step
    since the previous round (paper, Alg. 2). "all": all live learners that have trained the
    fragment, including much slower ones. "async": each learner alone, every `sync_every` of its own
    steps; its contribution is merged as soon as it arrives (Async Local-SGD,
    recipes/async-local-sgd.toml). With "async" the downlink traffic is larger: each learner
    receives each fragment once per learner and period. "module:function" is your own rule
    `rule(learner, round)`, which returns whether a learner takes part."""

    wait: Literal["never", "at_overlap"] = "never"
    """"never": learners never wait (paper). "at_overlap": a learner stops `overlap_steps` steps
    after sending until the merged fragment arrives; only for synchronous baselines."""

    initial_weights: Path | None = Field(default=None, strict=False)
    """safetensors file with the initial weights, relative to the folder where the command starts.
    Default: the workload's initial weights, from the seed."""

    adapt: AdaptSettings | None = None
    """Limits within which `sync_every` and `overlap_steps` follow the links. Default: both are
    fixed."""

    codec: CodecSettings = Field(default_factory=CodecSettings)
    """The number formats on the network."""

    merge: MergeSettings = Field(default_factory=MergeSettings)
    """How contributions become one outer gradient."""

    late: LateSettings = Field(default_factory=LateSettings)
    """What happens to late contributions."""

    apply: ApplySettings = Field(default_factory=ApplySettings)
    """How learners apply merged fragments."""

    partition: PartitionSettings = Field(default_factory=PartitionSettings)
    """How parameters become fragments."""

    moments: MomentSettings | None = None
    """How the moments of the inner optimizer are merged. It needs learners with one rank. Default:
    each learner keeps its own."""

    devices: DeviceSettings | None = None
    """Settings for devices, which are disconnected most of the time. It needs
    participation="async". Default: learners are expected to stay connected."""

    @property
    def history(self) -> int | None:
        """How old the base of a device's contribution may be; None without devices."""
        if self.devices is None:
            return None
        return 0 if self.late.policy == "drop" else self.devices.history

    @property
    def grace(self) -> bool:
        """Whether there is a grace window."""
        return self.grace_margin > 0

    @property
    def limits(self) -> AdaptLimits | None:
        """The limits within which H and τ follow the links; None if they are fixed."""
        if self.adapt is None:
            return None
        return AdaptLimits(
            self.adapt.sync_every or (self.sync_every, self.sync_every),
            self.adapt.overlap_steps or (self.overlap_steps, self.overlap_steps),
            self.adapt.learner_share,
        )

    def inapplicable(self) -> Mapping[str, str]:
        """What depends on more than one table: the cap of unused counters, and unused gates."""
        ignored = {}
        if self.merge.weighting == "uniform" and self.apply.missed == "rebase":
            because = "with weighting='uniform' and missed='rebase'"
            ignored["merge.counter_cap_periods"] = because
        if self.wait != "never":
            gate = ("merge.norm_gate", "merge.oversized")
            ignored |= dict.fromkeys(gate, f"with wait={self.wait!r}")
        if self.devices is not None and self.late.policy == "next":
            ignored["late.max_versions"] = "with [sync.devices], whose history replaces it"
        elif self.devices is not None:
            because = "with policy='drop', which merges only what is based on the newest version"
            ignored["devices.history"] = because
        return ignored

    @model_validator(mode="before")
    @classmethod
    def _count_the_map(cls, data: Any) -> Any:
        partition = data.get("partition") if isinstance(data, dict) else None
        told = partition.get("map") if isinstance(partition, dict) else None
        if isinstance(partition, PartitionSettings):
            told = partition.map
        if not told or not isinstance(told, list | tuple):
            return data
        if data.get("fragments", len(told)) != len(told):
            raise ConfigError(
                f"fragments={data['fragments']} in [sync] differs from the {len(told)} lists of "
                "map in [sync.partition]: take fragments out"
            )
        return {"fragments": len(told), **data}

    @model_validator(mode="after")
    def _check_phases(self) -> SyncSettings:
        phases = self.partition.phases
        if not phases:
            return self
        if len(phases) != self.fragments:
            raise ConfigError(
                f"phases in [sync.partition] has {len(phases)} entries, but fragments="
                f"{self.fragments}: write one for each fragment, or none"
            )
        for phase in phases:
            if not 0 <= phase < self.sync_every:
                raise ConfigError(
                    f"phases in [sync.partition] has {phase}, which is out of range: it must be "
                    f"from 0 to sync_every - 1 = {self.sync_every - 1}"
                )
        return self

    @model_validator(mode="after")
    def _check_async(self) -> SyncSettings:
        if self.participation != "async":
            if self.devices is not None:
                raise ConfigError(
                    f"[sync.devices] cannot be combined with participation={self.participation!r}, "
                    "because a device is not there at each round: set participation='async'"
                )
            return self
        wanted = {
            "grace_margin": 0.0,
            "wait": "never",
            "late.policy": "next",
            "apply.missed": "rebase",
        }
        if self.devices is not None:
            del wanted["late.policy"]
        why = "cannot be combined with participation='async', which merges what has arrived"
        for name, value in wanted.items():
            *tables, key = name.split(".")
            settings: Settings = reduce(getattr, tables, self)
            given = getattr(settings, key)
            if given != value:
                raise ConfigError(f"{key}={given!r} in {settings.table} {why}: set {key}={value!r}")
        if self.adapt is not None:
            raise ConfigError(f"[sync.adapt] {why}: take it out")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> SyncSettings:
        devices = self.devices
        if devices is None or devices.cohort is None:
            return self
        if self.late.policy == "drop" and devices.cohort < self.quorum:
            raise ConfigError(
                f"cohort={devices.cohort} in [sync.devices] is below quorum={self.quorum} with "
                "policy='drop', so no version would ever be merged: raise cohort or lower quorum"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> SyncSettings:
        if self.schedule is None:
            return self
        reasons = {
            "[sync.adapt]": (self.adapt is not None, "which determines H, too"),
            f"wait={self.wait!r}": (self.wait != "never", "which keeps H and τ fixed"),
            "participation='async'": (
                self.participation == "async",
                "where each learner counts its own steps",
            ),
            "phases in [sync.partition]": (
                bool(self.partition.phases),
                "because another period spreads the fragments evenly",
            ),
        }
        for name, (is_set, why) in reasons.items():
            if is_set:
                raise ConfigError(
                    f"schedule={self.schedule!r} in [sync] cannot be combined with {name}, {why}: "
                    "take one of them out"
                )
        return self

    @model_validator(mode="after")
    def _check_adapt(self) -> SyncSettings:
        limits = self.limits
        if limits is None:
            return self
        if self.wait != "never":
            raise ConfigError(
                f"[sync.adapt] cannot be combined with wait={self.wait!r} in [sync], which keeps H "
                "and τ fixed: take one of them out"
            )
        if self.partition.phases:
            raise ConfigError(
                "[sync.adapt] cannot be combined with phases in [sync.partition], because another "
                "period spreads the fragments evenly: take one of them out"
            )
        for name, allowed in (("sync_every", limits.period), ("overlap_steps", limits.overlap)):
            value, (least, most) = getattr(self, name), allowed
            if not least <= value <= most:
                raise ConfigError(
                    f"{name}={value} in [sync] is out of range: [sync.adapt] allows {least} to "
                    f"{most}, and the run starts with this value: change one of them"
                )
        if limits.overlap[0] >= limits.period[0]:
            raise ConfigError(
                f"overlap_steps={list(limits.overlap)} in [sync.adapt] is not below "
                f"sync_every={list(limits.period)}: a fragment would be sent again before its "
                "merged value is due: lower the smallest overlap_steps or raise the smallest "
                "sync_every"
            )
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> SyncSettings:
        if self.overlap_steps >= self.sync_every:
            raise ConfigError(
                f"overlap_steps={self.overlap_steps} in [sync] is not below sync_every="
                f"{self.sync_every}: a fragment would be sent again before its merged value is "
                "due: lower overlap_steps or raise sync_every"
            )
        return self


def bits_of(name: str) -> float:
    """The bits per element of a codec, including its scales.

    >>> bits_of("int4"), bits_of("topk-160")
    (4.125, 0.5546875)
    """
    if name in BITS:
        return BITS[name]
    from decoupled_diloco.merge import codec  # Imports torch, which takes seconds.

    sample = 1 << 20
    return 8 * codec(name).nbytes(sample) / sample


def _check_codec(name: str, field: ValidationInfo) -> float:
    """Return the codec's bits per element."""
    try:
        return bits_of(name)
    except ConfigError as error:
        raise ConfigError(f"{field.field_name}={name!r} in [sync.codec]: {error}") from None


class FragmentOuterSettings(Settings):
    """One entry of `[[outer.by_fragment]]`: different outer settings for some fragments."""

    table: ClassVar[str] = "[[outer.by_fragment]]"

    fragments: tuple[int, ...] = Field(strict=False, min_length=1)
    """Numbers of the fragments, 0 to fragments - 1. A fragment may be in one entry only."""

    optimizer: str | None = None
    """As in `[outer]`. A different optimizer has its own defaults for the other settings. Default:
    the optimizer of `[outer]`."""

    lr: float | None = Field(default=None, gt=0)
    """As in `[outer]`, greater than 0. Default: the value in `[outer]`."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """As in `[outer]`, 0 to less than 1. Default: the value in `[outer]`."""

    options: dict[str, Any] | None = None
    """As in `[outer]`. Default: the options in `[outer]`."""


class OuterSettings(Settings):
    """`[outer]`: the optimizer that applies merged outer gradients to the global weights."""

    table: ClassVar[str] = "[outer]"

    optimizer: str = "nesterov"
    """"nesterov": SGD with Nesterov momentum (the paper and its predecessors). "delayed-nesterov":
    the momentum is updated only at every N-th merge, with options = { every = N } (Async
    Local-SGD). "sgd": SGD with heavy-ball momentum, or without. A class of torch.optim, such as
    "AdamW", takes its arguments from `options`. "module:function" is your own optimizer."""

    lr: float = Field(default=0.7, gt=0)
    """η: outer learning rate, greater than 0. The effective rate is η / (1 - μρ), where ρ is the
    similarity of successive outer gradients. Lower η when you raise the momentum (DiLoCo: 0.7;
    paper: unpublished)."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """μ: outer momentum, 0 to less than 1. Default: 0.5, and 0 for "sgd". 0.5 is ours: over 25 to
    75 outer rounds, the 0.9 of earlier papers ended with 5 to 28 % more loss, at every η
    (benchmarks/results/rounds). With H = 8, 0 was 3.5 % better than 0.5."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the torch.optim class or for your function, passed unchanged. For
    "delayed-nesterov": `every`, the number of merges of a fragment per update of its momentum, at
    least 1."""

    average: float | None = Field(default=None, gt=0, lt=1)
    """β: decay per version of a fragment, for an average of the global weights, greater than 0 to
    less than 1. The average is the plain mean of a fragment's first 1 / (1 - β) versions, and then
    an exponential moving average. The evaluator evaluates it, and `ddiloco export --average` writes
    it; training does not use it. It costs 4 bytes per parameter at the shards, and learners receive
    nothing more (docs/how-to/export.md). Default: no average."""

    by_fragment: tuple[FragmentOuterSettings, ...] = Field(default=(), strict=False)
    """Fragments with different settings, for example a smaller lr for the embedding."""

    def of_fragments(self) -> dict[int, OuterSettings]:
        """The settings of the fragments that differ from `[outer]`.

        Raises:
            ConfigError: A fragment is in two entries, or an entry is not valid.
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
                        f"fragment {fragment} is in two entries of [[outer.by_fragment]]: remove "
                        "it from one"
                    )
                found[fragment] = own
        return found

    def inapplicable(self) -> Mapping[str, str]:
        """Only the built-in optimizers take `momentum`; two of them take no `options`."""
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
        """Creates an optimizer with options, so that a mistake shows before a process starts.

        The others need no trial, and so no torch. Loading a custom optimizer tries it, and only the
        syncer's processes load it.
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
        """Whether this process has not loaded the custom optimizer. Learners never load it."""
        if not is_own(self.optimizer):
            return False
        from decoupled_diloco.merge.outer import has_own_outer

        return not has_own_outer(self.optimizer)
