"""A case: a model on chips, the method with its wire formats, and a network.

`demands` gives the load that all of its rounds would put on the links.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from decoupled_diloco.config.settings import suggestion
from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import codec_names
from decoupled_diloco.protocol.adapt import FITS, body_seconds
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.network import Network
from decoupled_diloco_plan.checks import above, at_least

PUBLISHED_STEP_SECONDS_PER_PARAMETER = 0.8 / 10e9
"""Step time of Streaming DiLoCo's 10B model (0.8 s) per parameter, used if none is given."""

PUBLISHED_LAYERS = ((1e9, 24), (10e9, 48))
"""Its 1B and 10B models, parameters and layers: depth is assumed to grow with size to the 0.3."""

_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*-?bits?")


@dataclass(frozen=True, slots=True)
class Extra:
    """What a run sends and keeps per parameter in addition to the weights and their momentum."""

    # bits of merged moments per round and direction, on average; a round has all of them or none
    moment_bits: float = 0.0
    copy_bytes: float = 0.0  # in a whole copy
    shard_bytes: float = 0.0  # in the memory of the shards


@dataclass(frozen=True, slots=True)
class Model:
    """The model that each learner trains, and its step time."""

    params: float
    layers: int
    step_seconds: float
    extra: Extra = Extra()

    def __post_init__(self) -> None:
        above(0, params=self.params, step_seconds=self.step_seconds)
        at_least(1, layers=self.layers)


@dataclass(frozen=True, slots=True)
class Format:
    """Encoding of an element on the wire."""

    name: str  # a codec of the project, or for example "5bit" for a hypothetical format
    bits: float  # per element, including scales and other overhead


def wire_format(text: str) -> Format:
    """Return the format of a codec of the project, or of a number of bits.

    Raises:
        ConfigError: The codec does not exist, or the number of bits is out of range.

    >>> wire_format("bf16").bits, wire_format("4.5bit").bits, wire_format("int4")
    (16.0, 4.5, Format(name='int4', bits=4.125))
    """
    with contextlib.suppress(ConfigError):
        return Format(text, bits_of(text))
    match = _BITS.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"wire format {text!r} is unknown: {suggestion(text, codec_names())}; a "
            "hypothetical format is written as '4bit'"
        )
    bits = float(match[1])
    if not 0 < bits <= 32:
        raise ConfigError(f"a wire format of {bits:g} bits is out of range: above 0, at most 32")
    return Format(f"{bits:g}bit", bits)


def wire_formats(text: str) -> list[Format]:
    """Return the formats of a ladder, the most exact first.

    Raises:
        ConfigError: A format does not exist, or has no fewer bits than the one before it.
    """
    found = [wire_format(name) for name in text.split(",")]
    if any(finer.bits <= coarser.bits for finer, coarser in pairwise(found)):
        raise ConfigError(
            f"the formats {text!r} are not a ladder: put the most exact one first, and each "
            "following one with fewer bits"
        )
    return found


def assumed_step_seconds(params: float) -> float:
    """Return the assumed step time of a model for which none is given."""
    return params * PUBLISHED_STEP_SECONDS_PER_PARAMETER


def assumed_layers(params: float) -> int:
    """Return the assumed number of layers of a model for which none is given.

    >>> assumed_layers(1e9), assumed_layers(10e9)
    (24, 48)
    """
    size, layers = PUBLISHED_LAYERS[0]
    return max(1, round(layers * math.pow(params / size, 0.30103)))


def step_seconds_of(
    params: float, tokens_per_step: float, chips: float, flops_per_chip: float
) -> float:
    """Return the ideal step time 6·N·B / (R·Q): N parameters, B tokens, R chips of Q FLOP/s.

    Source:
        Scaling Laws for DiLoCo (arXiv 2503.09799), the wall-clock model.
    """
    above(0, tokens_per_step=tokens_per_step, chips=chips, flops=flops_per_chip)
    return 6 * params * tokens_per_step / (chips * flops_per_chip)


@dataclass(frozen=True, slots=True)
class Case:
    """Input of a simulation.

    Raises:
        ConfigError: A value does not form a valid run; the message has the value, limit and fix.
    """

    model: Model
    # settings of the method; with `wait="at_overlap"` learners stop until late merges arrive
    options: Options
    network: Network
    # wire format of the uplink
    up: Format = field(default_factory=lambda: wire_format("bf16"))
    down: Format = field(default_factory=lambda: wire_format("bf16"))  # of the downlink
    # share of a link's rate that payloads fill, above 0, at most 1
    link_share: float = measured.LINK_SHARE
    # share of a step that the exchange costs the training loop
    step_overhead: float = measured.STEP_OVERHEAD
    # formats of learners whose link does not carry `up`, the most exact first
    coarser: tuple[Format, ...] = ()
    # processing time per payload, without transfer and merge
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
                f"quorum={o.quorum} exceeds learners={learners}: lower the quorum or plan for more "
                "learners"
            )
        if o.overlap >= o.period:
            raise ConfigError(
                f"overlap={o.overlap} must be below period={o.period}: lower overlap or raise "
                "period"
            )
        if o.shards > o.fragments:
            raise ConfigError(
                f"shards={o.shards} exceeds fragments={o.fragments}: each shard needs a fragment; "
                "lower shards or raise fragments"
            )

    @property
    def up_bits(self) -> float:
        """Bits per parameter of a contribution, on average."""
        return self.up.bits + self.model.extra.moment_bits

    @property
    def down_bits(self) -> float:
        """Bits per parameter of a published difference, on average."""
        return self.down.bits + self.model.extra.moment_bits

    @property
    def fragment_params(self) -> float:
        return self.model.params / self.options.fragments

    @property
    def hosts(self) -> list[int]:
        """The place of each shard, as an index into the network's places."""
        shards = self.options.shards
        return [self.network.host(shard, shards) for shard in range(shards)]

    @property
    def tick_seconds(self) -> float:
        """Step time of the K-th fastest learner, which is the pace of the run's clock."""
        return self.network.kth(self.network.paces(self.model.step_seconds), self.options.quorum)

    def up_of(self, site: int) -> Format:
        """Return the uplink format of a site's learners: the first one that their link carries.

        Learners behind a relay have `up`, as its sums.
        """
        network, o = self.network, self.options
        if not self.coarser or network.sites[site].relay:
            return self.up
        away = sum(host != site for host in self.hosts) / o.shards
        numel = network.sites[site].learners * self.fragment_params * away
        seconds_per_bit = (
            numel
            * (1 + measured.TRAFFIC_OVERHEAD)
            / (8 * self.link_share * network.capacity(site, up=True))
        )
        allowed = FITS * body_seconds(o.overlap, o.period, o.fragments, self.tick_seconds)
        ladder = (self.up, *self.coarser)
        return next((f for f in ladder if f.bits * seconds_per_bit <= allowed), ladder[-1])

    def up_bits_of(self, site: int) -> float:
        """Return the bits per element that a site's learners send, with merged moments."""
        return self.up_of(site).bits + self.model.extra.moment_bits

    def scaled(self, factor: float) -> Case:
        """Return the case with the bandwidth of the sites' links multiplied by `factor`."""
        return replace(self, network=self.network.scaled(factor))

    def without_relays(self) -> Case:
        """Return the case with learners that all dial the shards."""
        return replace(self, network=self.network.without_relays())

    def with_options(self, **changed: Any) -> Case:
        """Return the case with some settings of the method changed."""
        return replace(self, options=replace(self.options, **changed))


def loads(case: Case) -> dict[tuple[int, bool], float]:
    """Return the bytes of a period in which all rounds take place, by place and whether upwards.

    A relay sends one sum per round.
    """
    network, moved = case.network, defaultdict[tuple[int, bool], float](float)
    for shard, host in enumerate(case.hosts):
        numel = len(case.options.owned(shard)) * case.model.params / case.options.fragments
        for number, site in enumerate(network.sites):
            up, down = (
                numel * (1 + measured.TRAFFIC_OVERHEAD) * bits / 8
                for bits in (case.up_bits_of(number), case.down_bits)
            )
            above = network.next_relay(number)
            target = host if above is None else above
            count = 1 if site.relay else site.learners
            for link in network.route(number, target):
                moved[link] += count * up
            for link in network.route(target, number):
                moved[link] += count * down
            if site.relay:
                moved[network.inside(number), True] += site.learners * up
                moved[network.inside(number), False] += site.learners * down
    return moved


def demands(case: Case) -> dict[tuple[str, str], float]:
    """Return the bytes of all rounds over a link's capacity, by place and direction.

    Above 1 the link cannot carry all rounds.
    """
    network, names = case.network, case.network.names()
    seconds = case.options.period * case.tick_seconds
    return {
        (names[place], "up" if up else "down"): nbytes
        / seconds
        / (case.link_share * network.capacity(place, up=up))
        for (place, up), nbytes in loads(case).items()
    }


def demand(case: Case) -> float:
    """Return the largest of `demands`; 0 if no traffic crosses a link."""
    return max(demands(case).values(), default=0.0)
