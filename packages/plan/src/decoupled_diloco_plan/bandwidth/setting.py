"""What is planned: a model on chips, a setting of the method, wire formats."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import codec, codec_names
from decoupled_diloco.protocol.options import Options
from decoupled_diloco_plan.checks import above, at_least

PUBLISHED_STEP_SECONDS_PER_PARAMETER = 0.8 / 10e9
"""Streaming DiLoCo's 10B model takes 0.8 s a step: taken where no step time is given."""

PUBLISHED_LAYERS = ((1e9, 24), (10e9, 48))
"""Its models of 1B and 10B: depth is taken to go with a power of the size, the 0.3rd."""

_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*-?bits?|int(2|4|8)")
_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What one learner trains, and how fast.

    Attributes:
        params: N, trainable parameters, greater than 0.
        layers: L, at least 1.
        step_seconds: length of one inner step of one learner, greater than 0.
    """

    params: float
    layers: int
    step_seconds: float

    def __post_init__(self) -> None:
        above(0, params=self.params, step_seconds=self.step_seconds)
        at_least(1, layers=self.layers)


@dataclass(frozen=True, slots=True)
class Format:
    """How an element travels.

    Attributes:
        name: a codec of the project, or "5bit" for one that is only thought of.
        bits: of one element, scales and all else included.
    """

    name: str
    bits: float


@dataclass(frozen=True, slots=True)
class Setting:
    """The method, as far as links and time feel it."""

    options: Options = field(default_factory=Options)
    up: Format = field(default_factory=lambda: wire_format("bf16"))
    down: Format = field(default_factory=lambda: wire_format("bf16"))

    def check(self, learners: int) -> None:
        """Refuses what no run could be.

        Raises:
            ConfigError: it says which number, its limit and the way out.
        """
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


def wire_format(text: str) -> Format:
    """A codec of the project by its name, or a number of bits.

    Raises:
        ConfigError: there is no such codec.

    >>> wire_format("bf16").bits, wire_format("4.5bit").bits, wire_format("int4")
    (16.0, 4.5, Format(name='4bit', bits=4.0))
    """
    match = _BITS.fullmatch(text.strip())
    if text in codec_names():
        return Format(text, 8 * codec(text).nbytes(_SAMPLE) / _SAMPLE)
    if match is None:
        raise ConfigError(
            f"wire format {text!r} is unknown: {suggestion(text, codec_names())}; one that is "
            "only thought of is written as '4bit'"
        )
    bits = float(match[1] or match[2])
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
    """A step's length by arithmetic: 6·N·B / (R·Q).

    Args:
        params: N.
        tokens_per_step: B, of all learners together, greater than 0.
        chips: R, of all learners together, greater than 0.
        flops_per_chip: Q, what a chip really does, FLOP/s, greater than 0.

    Raises:
        ConfigError: a number is out of its range.

    Source:
        Scaling Laws for DiLoCo (arXiv 2503.09799), its wall-clock model.
    """
    above(0, tokens_per_step=tokens_per_step, chips=chips, flops=flops_per_chip)
    return 6 * params * tokens_per_step / (chips * flops_per_chip)
