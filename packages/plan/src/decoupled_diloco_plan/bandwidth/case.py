"""One case: a model on chips, the method with its wire formats, and a network.

And what all of its rounds would ask of the links.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import codec_names
from decoupled_diloco.protocol.options import Options
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.network import Network
from decoupled_diloco_plan.checks import above, at_least

PUBLISHED_STEP_SECONDS_PER_PARAMETER = 0.8 / 10e9
"""Streaming DiLoCo's 10B model takes 0.8 s a step: taken where no step time is given."""

PUBLISHED_LAYERS = ((1e9, 24), (10e9, 48))
"""Its models of 1B and 10B: depth is taken to go with a power of the size, the 0.3rd."""

_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*-?bits?")


@dataclass(frozen=True, slots=True)
class Model:
    """What one learner trains, and how fast."""

    params: float
    layers: int
    step_seconds: float

    def __post_init__(self) -> None:
        above(0, params=self.params, step_seconds=self.step_seconds)
        at_least(1, layers=self.layers)


@dataclass(frozen=True, slots=True)
class Format:
    """How an element travels."""

    name: str  # a codec of the project, or "5bit" for one that is only thought of
    bits: float  # of one element, scales and all else included


def wire_format(text: str) -> Format:
    """A codec of the project by its name, or a number of bits.

    Raises:
        ConfigError: there is no such codec.

    >>> wire_format("bf16").bits, wire_format("4.5bit").bits, wire_format("int4")
    (16.0, 4.5, Format(name='int4', bits=4.125))
    """
    with contextlib.suppress(ConfigError):
        return Format(text, bits_of(text))
    match = _BITS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"wire format {text!r} is unknown: {suggestion(text, codec_names())}; one that is "
            "only thought of is written as '4bit'"
        )
    bits = float(match[1])
    if not 0 < bits <= 32:
        raise ConfigError(f"a wire format of {bits:g} bits is out of range: above 0, at most 32")
    return Format(f"{bits:g}bit", bits)


def assumed_step_seconds(params: float) -> float:
    """The step of a model for which none is given."""
    return params * PUBLISHED_STEP_SECONDS_PER_PARAMETER


def assumed_layers(params: float) -> int:
    """The layers of a model for which none are given.

    >>> assumed_layers(1e9), assumed_layers(10e9)
    (24, 48)
    """
    size, layers = PUBLISHED_LAYERS[0]
    return max(1, round(layers * math.pow(params / size, 0.30103)))


def step_seconds_of(
    params: float, tokens_per_step: float, chips: float, flops_per_chip: float
) -> float:
    """A step's length by arithmetic, 6·N·B / (R·Q): N parameters, B tokens, R chips of Q FLOP/s.

    Source:
        Scaling Laws for DiLoCo (arXiv 2503.09799), its wall-clock model.
    """
    above(0, tokens_per_step=tokens_per_step, chips=chips, flops=flops_per_chip)
    return 6 * params * tokens_per_step / (chips * flops_per_chip)


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated.

    Raises:
        ConfigError: no run could be so; it says which number, its limit and the way out.
    """

    model: Model
    # the method's numbers; with `wait="at_overlap"` learners stop for what is late
    options: Options
    network: Network
    # how an element travels to the syncer
    up: Format = field(default_factory=lambda: wire_format("bf16"))
    down: Format = field(default_factory=lambda: wire_format("bf16"))  # how it travels back
    # share of a link's rate that bodies fill, above 0, at most 1
    link_share: float = measured.LINK_SHARE
    # share of a step that the exchange costs the training loop
    step_overhead: float = measured.STEP_OVERHEAD
    # what processes take for a body besides moving and merging it
    handling_seconds: float = measured.HANDLING_SECONDS

    def __post_init__(self) -> None:
        self._check_method(self.network.learners)
        if not 0 < self.link_share <= 1:
            raise ConfigError(f"link_share={self.link_share:g} is out of range: above 0, at most 1")

    def _check_method(self, learners: int) -> None:
        o = self.options
        at_least(1, fragments=o.fragments, period=o.period, quorum=o.quorum, shards=o.shards)
        at_least(0, overlap=o.overlap)
        if not 0 <= o.grace_margin < 1:
            raise ConfigError(f"grace_margin={o.grace_margin:g} is out of range: 0 to below 1")
        if o.quorum > learners:
            raise ConfigError(
                f"quorum={o.quorum} exceeds learners={learners}: lower the quorum or plan more "
                "learners"
            )
        if o.overlap >= o.period:
            raise ConfigError(
                f"overlap={o.overlap} is not below period={o.period}: lower it or raise the period"
            )
        if o.shards > o.fragments:
            raise ConfigError(
                f"shards={o.shards} exceeds fragments={o.fragments}: a shard needs a fragment"
            )

    @property
    def fragment_params(self) -> float:
        return self.model.params / self.options.fragments

    @property
    def hosts(self) -> list[int]:
        """The place of each shard."""
        shards = self.options.shards
        return [self.network.host(shard, shards) for shard in range(shards)]

    @property
    def tick_seconds(self) -> float:
        """A step of the K-th fastest learner: the pace of the run's clock."""
        return self.network.kth(self.network.paces(self.model.step_seconds), self.options.quorum)

    def scaled(self, factor: float) -> Case:
        """The same with more or less bandwidth on the sites' links."""
        return replace(self, network=self.network.scaled(factor))

    def with_options(self, **changed: Any) -> Case:
        """The same with other numbers of the method."""
        return replace(self, options=replace(self.options, **changed))


def demands(case: Case) -> dict[tuple[str, str], float]:
    """All rounds' bytes over what a link carries meanwhile, by place and direction.

    Above 1 some do not fit.
    """
    o, network = case.options, case.network
    moved: dict[tuple[int, str], float] = {}
    for shard, host in enumerate(case.hosts):
        numel = len(o.owned(shard)) * case.model.params / o.fragments
        numel *= 1 + measured.TRAFFIC_OVERHEAD
        for site, there in enumerate(network.sites):
            if site == host:
                continue
            for place, direction, bits in (
                (site, "up", case.up.bits),
                (host, "down", case.up.bits),
                (host, "up", case.down.bits),
                (site, "down", case.down.bits),
            ):
                nbytes = there.learners * numel * bits / 8
                moved[place, direction] = moved.get((place, direction), 0.0) + nbytes
    seconds, names = o.period * case.tick_seconds, network.names()
    return {
        (names[place], direction): nbytes
        / seconds
        / (case.link_share * network.capacity(place, up=direction == "up"))
        for (place, direction), nbytes in moved.items()
    }


def demand(case: Case) -> float:
    """The largest of `demands`; 0 where nothing crosses a link."""
    return max(demands(case).values(), default=0.0)
