"""Rounds of Decoupled DiLoCo as events: steps, uploads, merges, downloads, on links they share.

Theory of operation. All learners have the same step time. At a tick every fragment that is due
opens a round at its shard, at most ⌈τ·P/H⌉ at once, the others in order; a fragment that is still
on its way skips its turn. A round is six one-way latencies and two transfers long:

| what | when |
|---|---|
| the round opens | the K-th report is there: one latency after the step |
| a learner is pulled | one latency later; its upload begins and shares the links |
| its contribution is there | one latency after the last byte has left; it is folded in |
| merged | when the last one is folded in, and the shard's core has done the merge |
| a learner fetches | it is told, and asks: two latencies; the download shares the links |
| applied | one latency after the last byte, at the next boundary; or, if it waits, τ steps on |

Each body also costs its processes some time besides moving and merging it: `handling_seconds`.

Who takes part in a real round, and until when it waits, the protocol core decides; here everybody
does, since all learners step alike. `tests/simulation/test_plan_against_protocol.py` compares the
two on the same links, `benchmarks/plan_real.py` with real runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.plan import measured
from decoupled_diloco.plan.flows import Flow, Flows
from decoupled_diloco.plan.network import Network
from decoupled_diloco.plan.setting import Model, Setting

ROUNDS_WARM = 48
ROUNDS_MEASURED = 96
"""In whole periods, so that at least so many rounds are due."""

ROUNDS_ENOUGH = 0.5
"""With a smaller share of the due rounds more periods are simulated, to see enough rounds."""

ROUNDS_MAX = 400
"""No more rounds than about these."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a place's link carries in one direction.

    Attributes:
        place: a site's name, or "hub".
        direction: "up": away from the place.
        mean: bytes a second over the measured periods.
        peak: the largest mean over one inner step's time, bytes a second.
        capacity: bytes a second that bodies may fill.
    """

    place: str
    direction: str
    mean: float
    peak: float
    capacity: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """The steady state.

    Attributes:
        compute: share of the time in which learners step; what `Learner.step` costs is taken off.
        kept: share of the due rounds that took place.
        delay_steps: steps from a snapshot to the boundary at which its merge is applied, mean.
        delay_steps_max: the same, largest.
        merge_seconds: from a round's opening to its merged fragment, mean.
        broadcast_seconds: from there until the last learner holds it, mean.
        quorum_seconds: from a round's first report to its opening, mean.
        shard_busy: largest share of the time in which a shard's core folds and merges.
        traffic: of each place and direction.
        step_seconds: mean wall-clock of a step.
    """

    compute: float
    kept: float
    delay_steps: float
    delay_steps_max: float
    merge_seconds: float
    broadcast_seconds: float
    quorum_seconds: float
    shard_busy: float
    traffic: tuple[Traffic, ...]
    step_seconds: float

    @property
    def utilization(self) -> float:
        """Steps that are taken, times rounds that take place: what the setting promises is 1."""
        return self.compute * self.kept


def simulate(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    link_share: float = measured.LINK_SHARE,
    step_overhead: float = measured.STEP_OVERHEAD,
    handling_seconds: float = measured.HANDLING_SECONDS,
) -> Rounds:
    """Some periods of rounds.

    Args:
        model: what is trained.
        setting: how; with `wait="at_overlap"` learners stop for what is late.
        network: where, and over which links.
        link_share: share of a link's rate that bodies fill, above 0, at most 1.
        step_overhead: share of a step that the exchange costs the training loop.
        handling_seconds: what processes take for a body besides moving and merging it.

    Raises:
        ConfigError: the setting could be no run's.
    """
    setting.check(network.learners)
    if not 0 < link_share <= 1:
        raise ConfigError(f"link-share={link_share:g} is out of range: above 0, at most 1")
    losses = _Losses(link_share, step_overhead, handling_seconds)
    most = max(1, ROUNDS_MAX // (ROUNDS_WARM + ROUNDS_MEASURED + setting.options.fragments))
    more = 1
    while True:
        found = _World(model, setting, network, losses, more).run()
        if found.kept * more >= ROUNDS_ENOUGH or more == most:
            return found
        more = min(most, ceil(2 * ROUNDS_ENOUGH / max(found.kept, 0.05)))


def demands(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    link_share: float = measured.LINK_SHARE,
) -> dict[tuple[str, str], float]:
    """All rounds' bytes over what a link carries meanwhile, by place and direction.

    Above 1 some do not fit. Args: as those of `simulate`.
    """
    o = setting.options
    moved: dict[tuple[int, str], float] = {}
    for shard in range(o.shards):
        host = network.host(shard, o.shards)
        numel = len(o.owned(shard)) * model.params / o.fragments * (1 + measured.TRAFFIC_OVERHEAD)
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
    seconds = o.period * model.step_seconds
    names = network.names()
    return {
        (names[place], direction): nbytes
        / seconds
        / (link_share * network.capacity(place, up=direction == "up"))
        for (place, direction), nbytes in moved.items()
    }


def demand(
    model: Model,
    setting: Setting,
    network: Network,
    *,
    link_share: float = measured.LINK_SHARE,
) -> float:
    """The largest of `demands`; 0 where nothing crosses a link."""
    return max(demands(model, setting, network, link_share=link_share).values(), default=0.0)


@dataclass(frozen=True, slots=True)
class _Losses:
    """What real links and processes fall short by."""

    link_share: float
    step_overhead: float
    handling_seconds: float


@dataclass(slots=True, eq=False)
class _Round:
    fragment: int
    tick: int
    reported: list[float]
    opened_at: float = 0.0
    merged_at: float = 0.0
    uploads: int = 0
    downloads: int = 0


@dataclass(slots=True)
class _Shard:
    open: int = 0
    queue: list[_Round] = field(default_factory=list)
    core_free_at: float = 0.0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Site:
    step: int = 0
    at: float = 0.0
    owed: dict[int, int] = field(default_factory=dict)
    holding: bool = False
    marks: list[float] = field(default_factory=list)


class _World:
    """One simulation."""

    def __init__(
        self,
        model: Model,
        setting: Setting,
        network: Network,
        losses: _Losses,
        more: int,
    ) -> None:
        self.handling = losses.handling_seconds
        self.model, self.setting, self.network = model, setting, network
        self.options = setting.options
        self.step = model.step_seconds * (1 + losses.step_overhead)
        self.numel = model.params / self.options.fragments
        places = range(len(network.places))
        capacities = [
            network.capacity(place, up=up) * losses.link_share
            for place in places
            for up in (True, False)
        ]
        self.flows = Flows(capacities)
        self.sites = [_Site() for _ in network.sites]
        self.shards = [_Shard() for _ in range(self.options.shards)]
        self.hosts = [network.host(s, self.options.shards) for s in range(self.options.shards)]
        self.under_way: dict[int, _Round] = {}
        self.reports: dict[int, dict[int, float]] = {}
        period, fragments = self.options.period, self.options.fragments
        self.first_step = ceil(ROUNDS_WARM / fragments) * more * period
        self.steps = ceil(ROUNDS_MEASURED / fragments) * more * period
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()
        self.due = self.skipped = 0
        self.delays: list[float] = []
        self.merges: list[float] = []
        self.broadcasts: list[float] = []
        self.quorums: list[float] = []

    def run(self) -> Rounds:
        for site in range(len(self.sites)):
            self._at(0.0, self._boundary, site, 0)
        while any(len(site.marks) < 2 for site in self.sites):
            soon = min(self.heap[0][0] if self.heap else float("inf"), self.flows.next_end())
            for flow in self.flows.advance(soon):
                self._moved(flow)
            while self.heap and self.heap[0][0] <= soon:
                _, _, function, arguments = heapq.heappop(self.heap)
                function(*arguments)
        return self._result()

    def _at(self, instant: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.heap, (instant, next(self.numbers), function, arguments))

    @property
    def now(self) -> float:
        return self.flows.now

    # ---- learners

    def _boundary(self, number: int, step: int) -> None:
        """A site's learners have finished a step in which something happens."""
        site = self.sites[number]
        site.step, site.at = step, self.now
        if step in (self.first_step, self.first_step + self.steps):
            site.marks.append(self.now)
        if self.options.due(step):
            for fragment in self.options.due(step):
                if self.options.wait == "at_overlap":
                    site.owed[fragment] = step + self.options.overlap
            self._report(number, step)
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Waits for what is owed, or steps on to where something happens next."""
        site = self.sites[number]
        site.holding = any(due <= site.step for due in site.owed.values())
        if site.holding:
            return
        ahead = self._next_due(site.step)
        soon = min([ahead, *site.owed.values()])
        self._at(self.now + (soon - site.step) * self.step, self._boundary, number, soon)

    def _next_due(self, step: int) -> int:
        """The next step with a fragment due; the first step of a period always counts."""
        phases = self.options.due_by_phase
        period = self.options.period
        for ahead in range(step + 1, step + period + 1):
            if phases[ahead % period] or ahead % period == 0:
                return ahead
        raise AssertionError("a period has a first step")

    def _report(self, number: int, step: int) -> None:
        """When all sites have told a step, each shard's clock has reached it, K reports on."""
        reports = self.reports.setdefault(step, {})
        reports[number] = self.now
        if len(reports) < len(self.sites):
            return
        del self.reports[step]
        told = [reports[i] for i in range(len(self.sites))]
        for fragment in self.options.due(step):
            host = self.hosts[self.options.owner(fragment)]
            arrived = [at + self.network.latency(i, host) for i, at in enumerate(told)]
            self._at(max(self.now, self._quorum_at(arrived)), self._tick, fragment, step, arrived)

    def _quorum_at(self, arrived: list[float]) -> float:
        """When so many learners' reports are there as the quorum asks for."""
        learners = 0
        for at, site in sorted(zip(arrived, self.network.sites, strict=True), key=lambda x: x[0]):
            learners += site.learners
            if learners >= self.options.quorum:
                return at
        raise AssertionError("the quorum is at most M")

    # ---- rounds

    def _tick(self, fragment: int, step: int, reported: list[float]) -> None:
        measured_now = step >= self.first_step
        self.due += measured_now
        if fragment in self.under_way:
            self.skipped += measured_now
            return
        round = self.under_way[fragment] = _Round(fragment, step, reported)
        shard = self.options.owner(fragment)
        self.shards[shard].queue.append(round)
        self._open(shard)

    def _open(self, number: int) -> None:
        shard, host = self.shards[number], self.hosts[number]
        while shard.queue and shard.open < self.options.open_rounds_max:
            round = shard.queue.pop(0)
            shard.open += 1
            round.opened_at = self.now
            round.uploads = round.downloads = len(self.sites)
            self.quorums.append(max(0.0, self.now - min(round.reported)))
            for site, reported in enumerate(round.reported):
                pulled = max(self.now, reported) + self.network.latency(host, site)
                self._at(pulled, self._transfer, "up", round, site, host)

    def _transfer(self, kind: str, round: _Round, site: int, host: int) -> None:
        """A fragment begins to move between a site and a shard's host."""
        bits = self.setting.up.bits if kind == "up" else self.setting.down.bits
        away, towards = (site, host) if kind == "up" else (host, site)
        if site == host:
            self._at(self.now + self.handling, self._landed, kind, round, site)
            return
        links = (2 * away, 2 * towards + 1)
        learners = self.network.sites[site].learners
        nbytes = self.numel * bits / 8 * (1 + measured.TRAFFIC_OVERHEAD)
        self.flows.start(Flow((kind, round, site), links, learners, nbytes))

    def _moved(self, flow: Flow) -> None:
        kind, round, site = flow.key
        host = self.hosts[self.options.owner(round.fragment)]
        there = self.now + self.network.latency(site, host) + self.handling
        self._at(there, self._landed, kind, round, site)

    def _landed(self, kind: str, round: _Round, site: int) -> None:
        if kind == "down":
            self._arrived(round, site)
            return
        shard = self.shards[self.options.owner(round.fragment)]
        folds = self.network.sites[site].learners * measured.fold_seconds(self.numel)
        self._work(shard, folds)
        round.uploads -= 1
        if round.uploads == 0:
            self._work(shard, measured.merge_seconds(self.numel))
            self._at(shard.core_free_at, self._merged, round)

    def _work(self, shard: _Shard, seconds: float) -> None:
        """Occupies a shard's core."""
        shard.core_free_at = max(shard.core_free_at, self.now) + seconds
        if self.sites[0].marks:
            shard.busy_seconds += seconds

    def _merged(self, round: _Round) -> None:
        number = self.options.owner(round.fragment)
        host = self.hosts[number]
        round.merged_at = self.now
        self.merges.append(self.now - round.opened_at)
        for site in range(len(self.sites)):
            asked = self.now + 2 * self.network.latency(host, site)
            self._at(asked, self._transfer, "down", round, site, host)
        self.shards[number].open -= 1
        self._open(number)

    def _arrived(self, round: _Round, number: int) -> None:
        site = self.sites[number]
        round.downloads -= 1
        if round.downloads == 0:
            self.broadcasts.append(self.now - round.merged_at)
            del self.under_way[round.fragment]
        steps = site.step if site.holding else site.step + (self.now - site.at) / self.step
        whole = max(0, -int(-(steps - round.tick) // 1))
        waits = self.options.wait == "at_overlap" or self.options.apply == "at_tau"
        self.delays.append(max(whole, self.options.overlap) if waits else whole)
        if site.owed.pop(round.fragment, None) is not None and site.holding:
            site.at = self.now
            self._go_on(number)

    # ---- afterwards

    def _result(self) -> Rounds:
        begin = min(site.marks[0] for site in self.sites)
        end = max(site.marks[1] for site in self.sites)
        steps = self.steps
        taken = [steps * self.model.step_seconds / (s.marks[1] - s.marks[0]) for s in self.sites]
        return Rounds(
            compute=sum(taken) / len(taken),
            kept=1.0 - self.skipped / max(1, self.due),
            delay_steps=_mean(self.delays),
            delay_steps_max=max(self.delays, default=float("inf")),
            merge_seconds=_mean(self.merges),
            broadcast_seconds=_mean(self.broadcasts),
            quorum_seconds=_mean(self.quorums),
            shard_busy=max(s.busy_seconds for s in self.shards) / (end - begin),
            traffic=tuple(self._traffic(begin, end)),
            step_seconds=(end - begin) / steps,
        )

    def _traffic(self, begin: float, end: float) -> list[Traffic]:
        found = []
        for link, capacity in enumerate(self.flows.capacities):
            mean, peak = self.flows.mean_and_peak(link, begin, end, self.step)
            place, direction = self.network.names()[link // 2], ("up", "down")[link % 2]
            found.append(Traffic(place, direction, mean, peak, capacity))
        return found


def _mean(values: list[float]) -> float:
    """The mean; infinite where nothing ever came to an end."""
    return sum(values) / len(values) if values else float("inf")
