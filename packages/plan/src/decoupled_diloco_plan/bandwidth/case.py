"""One case: a model, a setting and a network, and what all of its rounds would ask of the links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.protocol.options import Options
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.network import Network
from decoupled_diloco_plan.bandwidth.setting import Model, Setting


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated.

    Attributes:
        model: what is trained.
        setting: how; with `wait="at_overlap"` learners stop for what is late.
        network: where, and over which links.
        link_share: share of a link's rate that bodies fill, above 0, at most 1.
        step_overhead: share of a step that the exchange costs the training loop.
        handling_seconds: what processes take for a body besides moving and merging it.

    Raises:
        ConfigError: no run could be so.
    """

    model: Model
    setting: Setting
    network: Network
    link_share: float = measured.LINK_SHARE
    step_overhead: float = measured.STEP_OVERHEAD
    handling_seconds: float = measured.HANDLING_SECONDS

    def __post_init__(self) -> None:
        self.setting.check(self.network.learners)
        if not 0 < self.link_share <= 1:
            raise ConfigError(f"link_share={self.link_share:g} is out of range: above 0, at most 1")

    @property
    def options(self) -> Options:
        """The method's numbers."""
        return self.setting.options

    @property
    def fragment_params(self) -> float:
        """Parameters of one fragment."""
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
        return replace(
            self, setting=replace(self.setting, options=replace(self.options, **changed))
        )


def demands(case: Case) -> dict[tuple[str, str], float]:
    """All rounds' bytes over what a link carries meanwhile, by place and direction.

    Above 1 some do not fit.
    """
    o, network, setting = case.options, case.network, case.setting
    moved: dict[tuple[int, str], float] = {}
    for shard, host in enumerate(case.hosts):
        numel = len(o.owned(shard)) * case.model.params / o.fragments
        numel *= 1 + measured.TRAFFIC_OVERHEAD
        for site, there in enumerate(network.sites):
            if site == host:
                continue
            for place, direction, bits in (
                (site, "up", setting.up.bits),
                (host, "down", setting.up.bits),
                (host, "up", setting.down.bits),
                (site, "down", setting.down.bits),
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
