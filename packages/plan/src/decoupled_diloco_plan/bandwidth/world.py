"""Rounds of Decoupled DiLoCo as events: steps, uploads, merges, downloads, on links they share.

Theory of operation. The clock has the pace of the K-th fastest learner. At a tick every fragment
that is due opens a round at its shard, at most ⌈τ·P/H⌉ at once, the others in order; a fragment
whose round is open opens the next one when that has merged, and skips its turn if it is due once
more by then. A round is six one-way latencies and two transfers long:

| what | when |
|---|---|
| the round opens | the K-th report is there: one latency after the step |
| a learner is pulled | one latency later, if it finished a step since the last tick, or does so |
|   | within the grace window, or missed this fragment's last round; its upload shares the links. |
|   | It contributes once from each copy that it holds: without a newer one it is not asked |
| its contribution is there | one latency after the last byte has left; it is folded in |
| merged | when the last one is folded in, or K are and τ steps of the fastest learner are over, |
|   | and the shard's core has done it. What comes later goes into the fragment's next round |
| a learner fetches | it is told, and asks: two latencies; the download shares the links. At most |
|   | ⌈τ·P/H⌉ come from a shard at a time, in order, each in its newest version |
| applied | one latency after the last byte, at the next boundary; or, if it waits, τ steps on |

Each body also costs its processes some time besides moving and merging it: `handling_seconds`.

How long the window is says the protocol's own formula (`protocol/grace.py`), fed with the simulated
times. Learners of a site do everything alike: where the links do not bear all rounds theirs have
everybody's contribution or nobody's, the protocol's some of them.
`tests/simulation/test_plan_against_protocol.py` compares the two on the same links,
`benchmarks/plan_real.py` with real runs.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil, floor, gcd
from typing import Any

from decoupled_diloco.protocol.grace import Timing
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case
from decoupled_diloco_plan.bandwidth.flows import Flow, Flows
from decoupled_diloco_plan.bandwidth.steady import Rounds, Traffic

ROUNDS_WARM = 48
ROUNDS_MEASURED = 96
"""At least so many rounds are due. Where the links bear everything in as many steps as
the pattern of dues repeats in, else in whole periods: what is still on its way skips its turn."""

ROUNDING = 1e-9
"""Steps that are so nearly over are."""


@dataclass(slots=True, eq=False)
class _Round:
    """`awaited`: sites that were asked in it; `delivered`: learners that are folded in."""

    fragment: int
    tick: int
    snapshots: list[float]
    reported: list[float]
    closed_at: float = 0.0
    merged_at: float = 0.0
    awaited: set[int] = field(default_factory=set)
    delivered: int = 0
    downloads: int = 0
    opened: bool = False
    holds_slot: bool = True
    delivery_over: bool = False
    settled: bool = False
    following: tuple[int, list[float], list[float]] | None = None


@dataclass(slots=True)
class _Shard:
    open: int = 0
    queue: list[_Round] = field(default_factory=list)
    core_free_at: float = 0.0
    busy_seconds: float = 0.0
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class _Site:
    """The learners of one place.

    `sending`: of these fragments an upload is under way; `spent`: they have contributed from the
    copy that they hold; `asked_for`: the round that would ask them, had they a newer one.
    `wanted`: copies that wait for their turn, by fragment; `fetching`: those that come.
    """

    step: int = 0
    at: float = 0.0
    owed: dict[int, int] = field(default_factory=dict)
    holding: bool = False
    marks: list[float] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)
    spent: set[int] = field(default_factory=set)
    asked_for: dict[int, _Round] = field(default_factory=dict)
    fetching: dict[int, _Round] = field(default_factory=dict)
    wanted: dict[int, _Round] = field(default_factory=dict)


class World:
    """One simulation.

    Args:
        case: of what.
        more: so many periods are measured; None: as few steps as the pattern of dues has.
    """

    def __init__(self, case: Case, more: int | None = None) -> None:
        self.case, self.network, self.options = case, case.network, case.options
        slower = 1 + case.step_overhead
        self.paces = [pace * slower for pace in self.network.paces(case.model.step_seconds)]
        self.tick = case.tick_seconds * slower
        self.waits = self.options.wait == "at_overlap"
        self.numel, self.hosts = case.fragment_params, case.hosts
        self.flows = Flows(
            [
                self.network.capacity(place, up=up) * case.link_share
                for place in range(len(self.network.places))
                for up in (True, False)
            ]
        )
        self.sites = [_Site() for _ in self.network.sites]
        self.shards = [_Shard() for _ in self.hosts]
        self.rounds: dict[int, _Round] = {}
        self.late = [0] * self.options.fragments
        self.published: dict[int, float] = {}
        self.window = self.options.overlap * min(self.paces)
        self.reports: dict[int, dict[int, float]] = {}
        period, fragments = self.options.period, self.options.fragments
        parts = gcd(period, fragments) if more is None else 1
        unit = (more or 1) * period // parts
        self.first_step = ceil(ROUNDS_WARM * parts / fragments) * unit
        self.steps = ceil(ROUNDS_MEASURED * parts / fragments) * unit
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()
        self.due = self.skipped = self.asked = self.unheard = 0
        self.delays: list[float] = []
        self.merges: list[float] = []
        self.broadcasts: list[float] = []
        self.quorums: list[float] = []
        self.taken_part = [0] * len(self.sites)

    def run(self) -> Rounds:
        """From the first step until every site has made those that are measured."""
        if self.waits:
            for site in range(len(self.sites)):
                self._at(0.0, self._boundary, site, 0)
        else:
            self._at(0.0, self._clock, 0)
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
        """Seconds from the beginning."""
        return self.flows.now

    # ---- learners that never wait

    def _clock(self, step: int) -> None:
        """The run's clock is at a step in which something happens."""
        if step in (self.first_step, self.first_step + self.steps):
            for site in self.sites:
                site.marks.append(self.now)
        for fragment in self.options.due(step):
            host = self.hosts[self.options.owner(fragment)]
            away = [self.network.latency(i, host) for i in range(len(self.sites))]
            told = [late if self._leads(i) else float("inf") for i, late in enumerate(away)]
            lead = self._quorum_at(told)
            ends = [self._first_end(i, step, lead - late) for i, late in enumerate(away)]
            arrived = list(map(operator.add, ends, away))
            self._at(self.now + lead, self._tick, fragment, step, ends, arrived)
        ahead = self._next_due(step)
        self._at(ahead * self.tick, self._clock, ahead)

    def _leads(self, site: int) -> bool:
        """Whether it is at least as fast as the clock."""
        return self.paces[site] <= self.tick

    def _first_end(self, site: int, step: int, nearer: float) -> float:
        """When a site's learners end the first step that is told of after the clock's last one.

        `nearer`: by how much reports come from there in less time than the one that is waited for.
        """
        pace = self.paces[site]
        if pace == self.tick:
            return step * pace
        return pace * (floor(((step - 1) * self.tick + nearer) / pace + ROUNDING) + 1)

    # ---- learners that wait

    def _boundary(self, number: int, step: int) -> None:
        """A site's learners have finished a step in which something happens."""
        site = self.sites[number]
        site.step, site.at = step, self.now
        if step in (self.first_step, self.first_step + self.steps):
            site.marks.append(self.now)
        for fragment in self.options.due(step):
            site.owed[fragment] = step + self.options.overlap
        if self.options.due(step):
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
        after = (soon - site.step) * self.paces[number]
        self._at(self.now + after, self._boundary, number, soon)

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
            opens = max(self.now, self._quorum_at(arrived))
            self._at(opens, self._tick, fragment, step, told, arrived)

    def _quorum_at(self, arrived: list[float]) -> float:
        """When so many learners' reports are there as the quorum asks for."""
        learners = 0
        for at, site in sorted(zip(arrived, self.network.sites, strict=True), key=lambda x: x[0]):
            learners += site.learners
            if learners >= self.options.quorum:
                return at
        raise AssertionError("the quorum is at most M")

    # ---- rounds

    def _tick(
        self, fragment: int, step: int, snapshots: list[float], reported: list[float]
    ) -> None:
        measured_now = step >= self.first_step
        self.due += measured_now
        open_now = self.rounds.get(fragment)
        if open_now is not None:
            self.skipped += measured_now and open_now.following is not None
            open_now.following = (step, snapshots, reported)
            return
        self._queue(fragment, step, snapshots, reported)

    def _queue(
        self, fragment: int, step: int, snapshots: list[float], reported: list[float]
    ) -> None:
        round = self.rounds[fragment] = _Round(fragment, step, snapshots, reported)
        shard = self.options.owner(fragment)
        self.shards[shard].queue.append(round)
        self._open(shard)

    def _open(self, number: int) -> None:
        shard, host = self.shards[number], self.hosts[number]
        while shard.queue and shard.open < self.options.open_rounds_max:
            round = shard.queue.pop(0)
            shard.open += 1
            self._pull(round, self.shards[number], host)

    def _pull(self, round: _Round, shard: _Shard, host: int) -> None:
        """Asks who has reported, and who will within the window."""
        round.opened = True
        first = min(at for site, at in enumerate(round.reported) if self.waits or self._leads(site))
        self.quorums.append(max(0.0, self.now - first))
        shard.timing.quorum.update(self.quorums[-1])
        o = self.options
        window = shard.timing.window(o.overlap, o.grace_margin, self.tick).seconds
        late = float("inf") if self.waits or self._alike() else self.now + window
        qualified = [
            self.now if round.fragment in self.sites[site].missed else at
            for site, at in enumerate(round.reported)
        ]
        asked = [site for site, at in enumerate(qualified) if at <= late]
        everybody = len(asked) == len(self.sites)
        round.closed_at = max(self.now, *qualified) if everybody else late
        round.downloads = len(self.sites)
        round.delivered, self.late[round.fragment] = self.late[round.fragment], 0
        for number, there in enumerate(self.sites):
            (there.missed.discard if number in asked else there.missed.add)(round.fragment)
        for site in asked:
            round.awaited.add(site)
            pulled = max(self.now, round.reported[site]) + self.network.latency(host, site)
            self._at(pulled, self._answer, round, site)
        self._at(self.now + self.window, self._delivery_over, round)

    def _answer(self, round: _Round, number: int) -> None:
        """A site hears the pull: what it sends already is its answer."""
        site, fragment = self.sites[number], round.fragment
        learners = self.network.sites[number].learners
        measured_now = round.tick >= self.first_step
        self.asked += measured_now * learners
        if fragment in site.sending:
            self.unheard += measured_now * learners
        elif fragment in site.spent:
            self._not_heard(site.asked_for.pop(fragment, None), number)
            site.asked_for[fragment] = round
            if self.now - self.published.get(fragment, 0.0) > self.window:
                round.awaited.discard(number)  # nobody waits for it who need not
                self._settle(round)
        else:
            self._send(round, number)

    def _not_heard(self, round: _Round | None, number: int) -> None:
        if round is not None and round.tick >= self.first_step:
            self.unheard += self.network.sites[number].learners

    def _holds(self, number: int, fragment: int) -> None:
        """A site has something to contribute from: it is asked, if its round has no quorum yet."""
        site = self.sites[number]
        site.spent.discard(fragment)
        round = site.asked_for.pop(fragment, None)
        if round is None:
            return
        if fragment in site.sending or (round.settled and number not in round.awaited):
            self._not_heard(round, number)
        else:
            round.awaited.add(number)
            self._send(round, number)

    def _send(self, round: _Round, number: int) -> None:
        self.taken_part[number] += 1
        self.sites[number].sending.add(round.fragment)
        self.sites[number].spent.add(round.fragment)
        self._transfer("up", round, number, self.hosts[self.options.owner(round.fragment)])

    def _delivery_over(self, round: _Round) -> None:
        """From here on the round waits for its quorum alone, and others may open meanwhile."""
        round.delivery_over = True
        self._settle(round)
        if not round.settled:
            self._free_slot(round)

    def _free_slot(self, round: _Round) -> None:
        if not round.holds_slot:
            return
        round.holds_slot = False
        shard = self.options.owner(round.fragment)
        self.shards[shard].open -= 1
        self._open(shard)

    def _alike(self) -> bool:
        """Whether all learners step alike: then everybody is in every round."""
        return len(set(self.paces)) == 1

    def _transfer(self, kind: str, round: _Round, site: int, host: int) -> None:
        """A fragment begins to move between a site and a shard's host."""
        bits = self.case.setting.up.bits if kind == "up" else self.case.setting.down.bits
        away, towards = (site, host) if kind == "up" else (host, site)
        if site == host:
            self._at(self.now + self.case.handling_seconds, self._landed, kind, round, site)
            return
        links = (2 * away, 2 * towards + 1)
        learners = self.network.sites[site].learners
        nbytes = self.numel * bits / 8 * (1 + measured.TRAFFIC_OVERHEAD)
        self.flows.start(Flow((kind, round, site), links, learners, nbytes))

    def _moved(self, flow: Flow) -> None:
        kind, round, site = flow.key
        host = self.hosts[self.options.owner(round.fragment)]
        there = self.now + self.network.latency(site, host) + self.case.handling_seconds
        self._at(there, self._landed, kind, round, site)

    def _landed(self, kind: str, round: _Round, site: int) -> None:
        if kind == "down":
            self._arrived(round, site)
            return
        shard = self.shards[self.options.owner(round.fragment)]
        learners = self.network.sites[site].learners
        self._work(shard, learners * measured.fold_seconds(self.numel))
        self.sites[site].sending.discard(round.fragment)
        current = self.rounds.get(round.fragment)
        if current is None or current.settled or not current.opened:
            self.late[round.fragment] += learners
            return
        current.awaited.discard(site)
        current.delivered += learners
        self._settle(current)

    def _settle(self, round: _Round) -> None:
        """Merges a round, if it need not wait for more."""
        enough = round.delivered >= self.options.quorum
        if round.settled or not enough or (round.awaited and not round.delivery_over):
            return
        round.settled = True
        shard = self.shards[self.options.owner(round.fragment)]
        self._work(shard, measured.merge_seconds(self.numel))
        self._at(max(shard.core_free_at, round.closed_at), self._merged, round)

    def _work(self, shard: _Shard, seconds: float) -> None:
        """Occupies a shard's core."""
        shard.core_free_at = max(shard.core_free_at, self.now) + seconds
        if self.sites[0].marks:
            shard.busy_seconds += seconds

    def _merged(self, round: _Round) -> None:
        number = self.options.owner(round.fragment)
        host = self.hosts[number]
        round.merged_at = self.published[round.fragment] = self.now
        self.merges.append(self.now - round.closed_at)
        self.shards[number].timing.merge.update(self.merges[-1])
        del self.rounds[round.fragment]
        for site in range(len(self.sites)):
            asked = self.now + 2 * self.network.latency(host, site)
            self._at(asked, self._fetch, round, site)
        self._free_slot(round)
        if round.following is not None:
            self._queue(round.fragment, *round.following)

    def _fetch(self, round: _Round, number: int) -> None:
        """A site wants a copy; an older one that waits for its turn is not needed any more."""
        wanted = self.sites[number].wanted
        if round.fragment in wanted:
            self._over(wanted[round.fragment])
        wanted[round.fragment] = round
        self._fetch_wanted(number, self.options.owner(round.fragment))

    def _fetch_wanted(self, number: int, shard: int) -> None:
        site, owner = self.sites[number], self.options.owner
        flying = sum(owner(fragment) == shard for fragment in site.fetching)
        for fragment in list(site.wanted):
            if flying >= self.options.open_rounds_max:
                return
            if owner(fragment) == shard and fragment not in site.fetching:
                site.fetching[fragment] = site.wanted.pop(fragment)
                self._transfer("down", site.fetching[fragment], number, self.hosts[shard])
                flying += 1

    def _over(self, round: _Round) -> None:
        """A site has a round's copy, or a newer one."""
        round.downloads -= 1
        if round.downloads == 0:
            self.broadcasts.append(self.now - round.merged_at)
            shard = self.shards[self.options.owner(round.fragment)]
            shard.timing.broadcast.update(self.broadcasts[-1])

    def _arrived(self, round: _Round, number: int) -> None:
        site, fragment = self.sites[number], round.fragment
        self._over(round)
        self.delays.append(self._delay(round, number))
        del site.fetching[fragment]
        self._fetch_wanted(number, self.options.owner(fragment))
        self._holds(number, fragment)
        if site.owed.pop(fragment, None) is not None and site.holding:
            site.at = self.now
            self._go_on(number)

    def _delay(self, round: _Round, number: int) -> int:
        """Steps from the snapshot to the boundary at which the merge is applied."""
        site, pace = self.sites[number], self.paces[number]
        if self.waits:
            steps = site.step if site.holding else site.step + (self.now - site.at) / pace
            steps -= round.tick
        else:
            steps = (self.now - round.snapshots[number]) / pace
        whole = max(0, ceil(steps))
        held = self.waits or self.options.apply == "at_tau"
        return max(whole, self.options.overlap) if held else whole

    # ---- afterwards

    def _result(self) -> Rounds:
        begin = min(site.marks[0] for site in self.sites)
        end = max(site.marks[1] for site in self.sites)
        seconds = [site.marks[1] - site.marks[0] for site in self.sites]
        alone = self.network.paces(self.case.model.step_seconds)
        if self.waits:
            each = [took / self.steps for took in seconds]
        else:
            each = self.paces
        learners = [site.learners for site in self.network.sites]
        rate = sum(count / pace for count, pace in zip(learners, each, strict=True))
        taken = [a / e for a, e in zip(alone, each, strict=True)]
        return Rounds(
            compute=sum(map(operator.mul, taken, learners)) / sum(learners),
            merged=(merged := 1.0 - self.skipped / max(1, self.due)),
            kept=merged * (1.0 - self.unheard / max(1, self.asked)),
            delay_steps=_mean(self.delays),
            delay_steps_max=max(self.delays, default=float("inf")),
            merge_seconds=_mean(self.merges),
            broadcast_seconds=_mean(self.broadcasts),
            quorum_seconds=_mean(self.quorums),
            shard_busy=max(s.busy_seconds for s in self.shards) / (end - begin),
            traffic=tuple(self._traffic(begin, end)),
            step_seconds=(end - begin) / self.steps,
            pace_seconds=sum(learners) / rate,
            participation=tuple(count / max(1, len(self.quorums)) for count in self.taken_part),
        )

    def _traffic(self, begin: float, end: float) -> list[Traffic]:
        found = []
        for link, capacity in enumerate(self.flows.capacities):
            mean, peak = self.flows.mean_and_peak(link, begin, end, self.tick)
            place, direction = self.network.names()[link // 2], ("up", "down")[link % 2]
            found.append(Traffic(place, direction, mean, peak, capacity))
        return found


def _mean(values: list[float]) -> float:
    """The mean; infinite where nothing ever came to an end."""
    return sum(values) / len(values) if values else float("inf")
