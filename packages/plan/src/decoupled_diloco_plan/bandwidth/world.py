"""Event simulation of Decoupled DiLoCo's rounds: steps, uploads, merges, downloads, shared links.

Theory of operation. The clock has the pace of the K-th fastest learner. At a tick, each fragment
that is due opens a round at its shard. At most ⌈τ·P/H⌉ rounds are open at once; the others queue in
order. If the fragment's last round is still open, the next one opens after it has merged. It is
skipped if the fragment is due again by then. A round takes six one-way latencies and two transfers:

| event | time |
|---|---|
| the round opens | when the K-th report arrives, one latency after the step |
| a learner receives the request | one latency later, if it qualifies: it finished a step since the
|
|   | last tick, or does so within the grace window, or missed this fragment's last round. Its
upload |
|   | shares the links. It contributes once from each copy that it holds, so it needs a newer copy.
|
| its contribution arrives | one latency after the last byte has left; the shard folds it in |
| the round merges | when all requested contributions are folded in, or K are and τ steps of the |
|   | fastest learner are over, and the shard's core is done. Later ones join the next round. |
| a learner fetches the copy | after a notice and a request (two latencies); the download shares the
|
|   | links. At most ⌈τ·P/H⌉ come from a shard at once, in order, each in its newest version. |
| the copy is applied | one latency after the last byte, at the next boundary; a learner that waits
|
|   | applies it τ steps after the snapshot |

Each payload also costs its processes `handling_seconds`, in addition to transfer and merge.

A site with a relay uses its link once per payload (rule 22). Its contributions go to the relay,
which adds one as soon as the shard has decided about it: one round trip later. The protocol's own
machine (`protocol/relay_machine.py`) decides when the relay sends the sum. The relay fetches each
copy for the first request, and then serves it to all learners of its site.

The window's length comes from the protocol's formula (`protocol/clock.py`) with simulated times.
All learners of a site behave alike. If the links cannot carry all rounds, a round of the simulation
has the contributions of a whole site or none of them. A round of the protocol may have some of
them. `tests/simulation/test_plan_against_protocol.py` compares both on the same links.
`benchmarks/plan_real.py` compares the simulation with real runs.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil, floor, gcd
from typing import Any

from decoupled_diloco.protocol.clock import Timing
from decoupled_diloco.protocol.messages import (
    Asking,
    Collect,
    Collected,
    Connected,
    Done,
    Expect,
    Fold,
    FoldSum,
    Received,
    RelayEvent,
    SendSum,
    SumArrived,
    Tick,
    shard_peer,
)
from decoupled_diloco.protocol.relay_machine import RelayMachine
from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.case import Case
from decoupled_diloco_plan.bandwidth.flows import Flow, Flows
from decoupled_diloco_plan.bandwidth.steady_state import Rounds, Traffic

ROUNDS_WARM = 48
ROUNDS_MEASURED = 96
"""Minimum number of due rounds in warm-up and measurement.

If the links carry all rounds, the steps are a multiple of the pattern's length. Otherwise they are
a multiple of the period, because a fragment whose round is still open skips its turn.
"""

SHARD = shard_peer(0)
"""The name under which every shard is known to relays: it has no influence on their decisions."""

ROUNDING = 1e-9
"""A step counts as over if at most this share of it is left."""


@dataclass(frozen=True, slots=True)
class _Tick:
    """A fragment is due. Per site: when it took its snapshot, and when its report arrives."""

    fragment: int
    step: int
    snapshots: list[float]
    reported: list[float]
    counts: bool


@dataclass(slots=True, eq=False)
class _Shard:
    host: int
    open: int = 0
    queue: list[_Round] = field(default_factory=list)
    core_free_at: float = 0.0
    busy_seconds: float = 0.0
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True, eq=False)
class _Round:
    """A round; `awaited` are sites with an open request, `delivered` counts folded learners.

    `behind` has the sites behind each relay whose contributions have not arrived there in a sum.
    """

    tick: _Tick
    shard: _Shard
    closed_at: float = 0.0
    merged_at: float = 0.0
    awaited: set[_Site] = field(default_factory=set)
    delivered: int = 0
    downloads: int = 0
    opened: bool = False
    holds_slot: bool = True
    delivery_over: bool = False
    settled: bool = False
    behind: dict[int, set[int]] = field(default_factory=dict)
    following: _Tick | None = None

    @property
    def fragment(self) -> int:
        return self.tick.fragment


@dataclass(slots=True, eq=False)
class _Site:
    """The learners of one place.

    Per fragment:

    - `sending`: an upload is in transit.
    - `spent`: they have contributed from the copy that they hold.
    - `deferred`: the round whose request waits until they hold a newer copy.
    - `wanted`: a copy that they will fetch later.
    - `fetching`: a copy in transit.
    """

    number: int
    learners: int
    pace: float
    step: int = 0
    at: float = 0.0
    rounds: int = 0
    owed: dict[int, int] = field(default_factory=dict)
    holding: bool = False
    marks: list[float] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)
    sending: set[int] = field(default_factory=set)
    spent: set[int] = field(default_factory=set)
    deferred: dict[int, _Round] = field(default_factory=dict)
    fetching: dict[int, _Round] = field(default_factory=dict)
    wanted: dict[int, _Round] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Relay:
    """The relay of a site: the protocol's machine for each fragment, and the newest copies.

    `waiting` has the copies that are on their way, with the next steps. One thread adds the
    contributions.
    """

    site: _Site
    machines: dict[int, RelayMachine] = field(default_factory=dict)
    copies: dict[int, _Round] = field(default_factory=dict)
    waiting: dict[_Round, list[Callable[[], None]]] = field(default_factory=dict)
    core_free_at: float = 0.0
    busy_seconds: float = 0.0

    def machine(self, fragment: int) -> RelayMachine:
        """Return a fragment's machine. One per fragment is fast, and fragments are independent."""
        if fragment not in self.machines:
            self.machines[fragment] = RelayMachine()
            self.machines[fragment].handle(0.0, Connected(SHARD))
        return self.machines[fragment]


class World:
    """One simulation.

    Args:
        case: The input.
        more: Number of periods to measure. None measures as few steps as the pattern of due
            fragments allows.
    """

    def __init__(self, case: Case, more: int | None = None) -> None:
        self.case, self.network, self.options = case, case.network, case.options
        self.up = [case.up_bits_of(number) for number in range(len(case.network.sites))]
        slower, network = 1 + case.step_overhead, case.network
        alone = zip(network.sites, network.paces(case.model.step_seconds), strict=True)
        self.sites = [
            _Site(number, site.learners, pace * slower) for number, (site, pace) in enumerate(alone)
        ]
        self.tick = case.tick_seconds * slower
        self.waits = self.options.wait == "at_overlap"
        self.alike = len({site.pace for site in self.sites}) == 1
        self.window = self.options.overlap * min(site.pace for site in self.sites)
        self.flows = Flows(
            [
                network.capacity(place, up=up) * case.link_share
                for place in range(len(network.places))
                for up in (True, False)
            ]
        )
        self.shards = [_Shard(host) for host in case.hosts]
        self.relays = {
            site.number: _Relay(site) for site in self.sites if network.sites[site.number].relay
        }
        self.latencies = [place.latency_seconds for place in network.places]
        self.away = {
            (site.number, host): network.latency(site.number, host)
            for site in self.sites
            for host in case.hosts
        }
        self.rounds: dict[int, _Round] = {}
        self.late = [0] * self.options.fragments
        self.published: dict[int, float] = {}
        self.reports: dict[int, dict[int, float]] = {}
        period, fragments = self.options.period, self.options.fragments
        parts = gcd(period, fragments) if more is None else 1
        unit = (more or 1) * period // parts
        self.first_step = ceil(ROUNDS_WARM * parts / fragments) * unit
        self.steps = ceil(ROUNDS_MEASURED * parts / fragments) * unit
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()
        self.due = self.skipped = self.asked = self.unanswered = 0
        self.delays: list[float] = []
        self.merges: list[float] = []
        self.broadcasts: list[float] = []
        self.quorums: list[float] = []

    def run(self) -> Rounds:
        """Simulate until every site has finished the measured steps."""
        if self.waits:
            for site in self.sites:
                self._at(0.0, self._boundary, site, 0)
        else:
            self._at(0.0, self._clock, 0)
        while any(len(site.marks) < 2 for site in self.sites):
            # Finished transfers leave their links before events at the same instant start others.
            soon = min(self.heap[0][0] if self.heap else float("inf"), self.flows.next_end())
            for flow in self.flows.advance(soon):
                self._land(*flow.key)
            while self.heap and self.heap[0][0] <= soon:
                _, _, function, arguments = heapq.heappop(self.heap)
                function(*arguments)
        return self._result()

    def _at(self, instant: float, function: Callable[..., None], *arguments: Any) -> None:
        # The number keeps simultaneous events in order; functions cannot be compared.
        heapq.heappush(self.heap, (instant, next(self.numbers), function, arguments))

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.flows.now

    def _away(self, site: _Site, shard: _Shard) -> float:
        """Return the one-way latency between a site and a shard, seconds."""
        return self.away[site.number, shard.host]

    def _shard_of(self, fragment: int) -> _Shard:
        return self.shards[self.options.owner(fragment)]

    def _tick_of(self, fragment: int, step: int, ends: list[float], arrived: list[float]) -> _Tick:
        return _Tick(fragment, step, ends, arrived, counts=step >= self.first_step)

    def _clock(self, step: int) -> None:
        """Advance the run's clock to a step in which a fragment is due or a period starts."""
        if step in (self.first_step, self.first_step + self.steps):
            for site in self.sites:
                site.marks.append(self.now)
        for fragment in self.options.due(step):
            away = [self._away(site, self._shard_of(fragment)) for site in self.sites]
            notice = [
                late if self._leads(site) else float("inf")
                for site, late in zip(self.sites, away, strict=True)
            ]
            lead = self.network.kth(notice, self.options.quorum)
            ends = [
                self._first_end(site.pace, step, lead - late)
                for site, late in zip(self.sites, away, strict=True)
            ]
            arrived = list(map(operator.add, ends, away))
            tick = self._tick_of(fragment, step, ends, arrived)
            self._at(self.now + lead, self._is_due, tick)
        ahead = self._next_due(step)
        self._at(ahead * self.tick, self._clock, ahead)

    def _leads(self, site: _Site) -> bool:
        """Whether the site is at least as fast as the clock."""
        return site.pace <= self.tick

    def _first_end(self, pace: float, step: int, nearer: float) -> float:
        """Return when a site's learners end their first step reported after the clock's last tick.

        `nearer` is how much less time reports from this site take than the K-th report, seconds.
        """
        if pace == self.tick:
            return step * pace
        return pace * (floor(((step - 1) * self.tick + nearer) / pace + ROUNDING) + 1)

    def _boundary(self, site: _Site, step: int) -> None:
        """End a step of a site's learners in which a fragment is due or applied."""
        site.step, site.at = step, self.now
        if step in (self.first_step, self.first_step + self.steps):
            site.marks.append(self.now)
        for fragment in self.options.due(step):
            site.owed[fragment] = step + self.options.overlap
        if self.options.due(step):
            self._report(site, step)
        self._continue(site)

    def _continue(self, site: _Site) -> None:
        """Wait for an overdue merge, or step to the next boundary with an event."""
        site.holding = any(due <= site.step for due in site.owed.values())
        if site.holding:
            return
        soon = min([self._next_due(site.step), *site.owed.values()])
        self._at(self.now + (soon - site.step) * site.pace, self._boundary, site, soon)

    def _next_due(self, step: int) -> int:
        """Return the next step with a due fragment; the first step of a period always counts."""
        phases, period = self.options.due_by_phase, self.options.period
        ahead = range(step + 1, step + period + 1)
        return next(each for each in ahead if phases[each % period] or each % period == 0)

    def _report(self, site: _Site, step: int) -> None:
        """Record a site's report; after all sites' reports, open the step's rounds on K reports."""
        reports = self.reports.setdefault(step, {})
        reports[site.number] = self.now
        if len(reports) < len(self.sites):
            return
        del self.reports[step]
        ends = [reports[each.number] for each in self.sites]
        for fragment in self.options.due(step):
            shard = self._shard_of(fragment)
            away = [self._away(each, shard) for each in self.sites]
            arrived = list(map(operator.add, ends, away))
            opens = max(self.now, self.network.kth(arrived, self.options.quorum))
            self._at(opens, self._is_due, self._tick_of(fragment, step, ends, arrived))

    def _is_due(self, tick: _Tick) -> None:
        self.due += tick.counts
        open_now = self.rounds.get(tick.fragment)
        if open_now is None:
            self._queue(tick)
            return
        # Only the newest turn waits for the open round; the turn that it replaces is skipped.
        self.skipped += tick.counts and open_now.following is not None
        open_now.following = tick

    def _queue(self, tick: _Tick) -> None:
        shard = self._shard_of(tick.fragment)
        self.rounds[tick.fragment] = _Round(tick, shard)
        shard.queue.append(self.rounds[tick.fragment])
        self._open(shard)

    def _open(self, shard: _Shard) -> None:
        while shard.queue and shard.open < self.options.open_rounds_max:
            shard.open += 1
            self._pull(shard.queue.pop(0))

    def _pull(self, round: _Round) -> None:
        """Request contributions from sites that have reported, or will within the window."""
        fragment, reported, timing = round.fragment, round.tick.reported, round.shard.timing
        round.opened = True
        first = min(reported[s.number] for s in self.sites if self.waits or self._leads(s))
        self.quorums.append(max(0.0, self.now - first))
        timing.quorum.update(self.quorums[-1])
        window = timing.window(self.options.overlap, self.options.grace_margin, self.tick).seconds
        late = float("inf") if self.waits or self.alike else self.now + window
        # A site that was not asked in the fragment's previous round is asked in any case.
        qualified = [
            self.now if fragment in site.missed else reported[site.number] for site in self.sites
        ]
        asked = [site for site in self.sites if qualified[site.number] <= late]
        all_asked = len(asked) == len(self.sites)
        round.closed_at = max(self.now, *qualified) if all_asked else late
        round.downloads, round.awaited = len(self.sites), set(asked)
        round.delivered, self.late[fragment] = self.late[fragment], 0
        for site in self.sites:
            (site.missed.discard if site in round.awaited else site.missed.add)(fragment)
        for site in asked:
            above = self.network.next_relay(site.number)
            while above is not None:
                round.behind.setdefault(above, set()).add(site.number)
                above = self.network.next_relay(above)
            pulled = max(self.now, reported[site.number]) + self._away(site, round.shard)
            self._at(pulled, self._answer, round, site)
        for relay in self.relays.values():
            away = self._away(relay.site, round.shard)
            opened = Collect(fragment, round.tick.step + 1, self.window)
            self._at(self.now + away, self._receive, relay, opened)
            self._at(round.closed_at, self._collected, round, relay)
        self._at(self.now + self.window, self._delivery_over, round)

    def _answer(self, round: _Round, site: _Site) -> None:
        """Handle a request at a site; an upload in transit is already the answer."""
        fragment = round.fragment
        self.asked += round.tick.counts * site.learners
        if fragment in site.sending:
            self._count_unanswered(round, site)
            return
        if (relay := self.relays.get(site.number)) is not None:
            self._receive(relay, Expect("", "", 0, 0, fragment, _name_of(site), "", ""))
        if fragment in site.spent:
            self._count_unanswered(site.deferred.pop(fragment, None), site)
            site.deferred[fragment] = round
            if self.now - self.published.get(fragment, 0.0) > self.window:
                # It had a whole window to fetch the last merge, so the round does not wait for it.
                round.awaited.discard(site)
                self._settle(round)
        else:
            self._send(round, site)

    def _count_unanswered(self, round: _Round | None, site: _Site) -> None:
        if round is not None:
            self.unanswered += round.tick.counts * site.learners

    def _holds(self, site: _Site, fragment: int) -> None:
        """Answer the deferred request from the newer copy, unless its round has settled."""
        site.spent.discard(fragment)
        round = site.deferred.pop(fragment, None)
        if round is None:
            return
        if fragment in site.sending or (round.settled and site not in round.awaited):
            self._count_unanswered(round, site)
        else:
            round.awaited.add(site)
            self._send(round, site)

    def _send(self, round: _Round, site: _Site) -> None:
        site.rounds += 1
        site.sending.add(round.fragment)
        site.spent.add(round.fragment)
        here, relay = site.number, self.relays.get(site.number)
        if relay is None:
            route, count = self.network.route(here, round.shard.host), site.learners
            arguments = (round.fragment, [site], count)
            self._transfer(route, count, self.up[here], self._delivered, *arguments)
        else:
            inside = [(self.network.inside(here), True)]
            self._transfer(inside, site.learners, self.up[here], self._at_relay, round, relay)

    def _delivery_over(self, round: _Round) -> None:
        """End the delivery window: the round waits only for its quorum, and frees its slot."""
        round.delivery_over = True
        self._settle(round)
        if not round.settled:
            self._free_slot(round)

    def _free_slot(self, round: _Round) -> None:
        if round.holds_slot:
            round.holds_slot = False
            round.shard.open -= 1
            self._open(round.shard)

    def _transfer(
        self,
        route: Sequence[tuple[int, bool]],
        count: int,
        bits: float,
        landed: Callable[..., None],
        *arguments: Any,
    ) -> None:
        """Start to move `count` payloads of a fragment over links; then call `landed`.

        Args:
            bits: Their bits per parameter.
        """
        latency = sum(self.latencies[place] for place, _ in route)
        if not route:
            self._land(latency, landed, arguments)
            return
        nbytes = self.case.fragment_params * bits / 8 * (1 + measured.TRAFFIC_OVERHEAD)
        links = tuple(2 * place + (not up) for place, up in route)  # of each place first its upload
        self.flows.start(Flow((latency, landed, arguments), links, count, nbytes))

    def _land(
        self, latency: float, landed: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """Schedule the arrival after the last byte has left."""
        self._at(self.now + latency + self.case.handling_seconds, landed, *arguments)

    # Relays

    def _receive(self, relay: _Relay, order: Expect | Fold | FoldSum | Collect | Collected) -> None:
        """Let a relay receive an order of a shard."""
        self._handle(relay, order.fragment, Received(SHARD, order))

    def _handle(self, relay: _Relay, fragment: int, event: RelayEvent) -> None:
        machine = relay.machine(fragment)
        for order in machine.handle(self.now, event):
            if isinstance(order, SendSum):
                ready = self._occupy(relay, measured.fold_seconds(self.case.fragment_params))
                self._at(ready, self._send_sum, relay, order)
        if (deadline := machine.deadline()) is not None:
            self._at(max(self.now, deadline), self._handle, relay, fragment, Tick())

    def _at_relay(self, round: _Round, relay: _Relay) -> None:
        """Add contributions as soon as their shard has decided about them."""
        seconds = relay.site.learners * measured.fold_seconds(self.case.fragment_params)
        self._occupy(relay, seconds)
        fold = Fold(round.fragment, "", _name_of(relay.site), 1.0, 1.0, "")
        decided = self.now + 2 * self._away(relay.site, round.shard)
        self._at(decided, self._receive, relay, fold)

    def _collected(self, round: _Round, relay: _Relay) -> None:
        """Notify a relay once nothing more of a round will reach it."""
        if self.now >= round.closed_at and not round.behind.get(relay.site.number):
            closed = Collected(round.fragment, round.tick.step + 1)
            away = self._away(relay.site, round.shard)
            self._at(self.now + away, self._receive, relay, closed)

    def _occupy(self, relay: _Relay, seconds: float) -> float:
        """Occupy a relay's thread; return when it is done."""
        relay.core_free_at = max(relay.core_free_at, self.now) + seconds
        if self.sites[0].marks:
            relay.busy_seconds += seconds
        return relay.core_free_at

    def _send_sum(self, relay: _Relay, order: SendSum) -> None:
        here, shard = relay.site.number, self._shard_of(order.fragment)
        above = self.network.next_relay(here)
        target = shard.host if above is None else above
        route = self.network.route(here, target)
        self._transfer(route, 1, self.up[here], self._sum_arrived, relay, order, above)

    def _sum_arrived(self, relay: _Relay, order: SendSum, above: int | None) -> None:
        """Fold a sum: at its shard, or at the next relay, as soon as the shard has decided."""
        fragment, number, here = order.fragment, order.number, relay.site.number
        name, shard = f"{here}", self._shard_of(fragment)
        answered = self.now + self.network.latency(here, shard.host if above is None else above)
        self._at(answered, self._handle, relay, fragment, Done(order))
        if above is None:
            self._delivered(fragment, [self.sites[ask.number] for ask in order.asks], 1)
            return
        next_one = self.relays[above]
        self._occupy(next_one, measured.fold_seconds(self.case.fragment_params))
        self._handle(next_one, fragment, SumArrived(name, fragment, number, order.asks, 0))
        away = self._away(next_one.site, shard)
        fold = FoldSum(fragment, name, number, "", "")
        self._at(self.now + 2 * away, self._receive, next_one, fold)
        if (round := self.rounds.get(fragment)) is not None:
            round.behind.get(above, set()).difference_update(ask.number for ask in order.asks)
            self._at(self.now + away, self._collected, round, next_one)

    def _obtain(self, relay: _Relay, round: _Round, then: Callable[[], None]) -> None:
        """Call `then` once a relay has a copy, which it fetches for the first request."""
        newest = relay.copies.get(round.fragment)
        if newest is not None and newest.merged_at >= round.merged_at:
            then()
            return
        if round in relay.waiting:
            relay.waiting[round].append(then)
            return
        relay.waiting[round] = [then]
        here, above = relay.site.number, self.network.next_relay(relay.site.number)

        def fetch(source: int) -> None:
            route = self.network.route(source, here)
            self._transfer(route, 1, self.case.down_bits, self._obtained, relay, round)

        if above is None:
            fetch(round.shard.host)
        else:
            self._obtain(self.relays[above], round, partial(fetch, above))

    def _obtained(self, relay: _Relay, round: _Round) -> None:
        relay.copies[round.fragment] = round
        for then in relay.waiting.pop(round):
            then()

    # Merges and copies

    def _delivered(self, fragment: int, sites: Sequence[_Site], payloads: int) -> None:
        """Fold contributions into the fragment's current round, which may be a later one."""
        shard = self._shard_of(fragment)
        self._work(shard, payloads * measured.fold_seconds(self.case.fragment_params))
        current, learners = self.rounds.get(fragment), sum(site.learners for site in sites)
        for site in sites:
            site.sending.discard(fragment)
        if current is None or current.settled or not current.opened:
            self.late[fragment] += learners
            return
        current.awaited.difference_update(sites)
        current.delivered += learners
        self._settle(current)

    def _settle(self, round: _Round) -> None:
        """Merge a round that does not need to wait for more contributions."""
        enough = round.delivered >= self.options.quorum
        if round.settled or not enough or (round.awaited and not round.delivery_over):
            return
        round.settled = True
        self._work(round.shard, measured.merge_seconds(self.case.fragment_params))
        self._at(max(round.shard.core_free_at, round.closed_at), self._merged, round)

    def _work(self, shard: _Shard, seconds: float) -> None:
        """Occupy a shard's core."""
        shard.core_free_at = max(shard.core_free_at, self.now) + seconds
        if self.sites[0].marks:
            shard.busy_seconds += seconds

    def _merged(self, round: _Round) -> None:
        round.merged_at = self.published[round.fragment] = self.now
        self.merges.append(self.now - round.closed_at)
        round.shard.timing.merge.update(self.merges[-1])
        del self.rounds[round.fragment]
        for site in self.sites:
            self._at(self.now + 2 * self._away(site, round.shard), self._fetch, round, site)
        self._free_slot(round)
        if round.following is not None:
            self._queue(round.following)

    def _fetch(self, round: _Round, site: _Site) -> None:
        """Queue a copy for a site; it replaces an older one in the queue."""
        if round.fragment in site.wanted:
            self._over(site.wanted[round.fragment])
        site.wanted[round.fragment] = round
        self._fetch_wanted(site, round.shard)

    def _fetch_wanted(self, site: _Site, shard: _Shard) -> None:
        flying = sum(round.shard is shard for round in site.fetching.values())
        for fragment, round in list(site.wanted.items()):
            if flying >= self.options.open_rounds_max:
                return
            if round.shard is shard and fragment not in site.fetching:
                site.fetching[fragment] = site.wanted.pop(fragment)
                self._download(round, site)
                flying += 1

    def _download(self, round: _Round, site: _Site) -> None:
        here, relay, down = site.number, self.relays.get(site.number), self.case.down_bits
        arguments = (site.learners, down, self._arrived, round, site)
        if relay is None:
            self._transfer(self.network.route(round.shard.host, here), *arguments)
        else:
            inside = [(self.network.inside(here), False)]
            self._obtain(relay, round, partial(self._transfer, inside, *arguments))

    def _over(self, round: _Round) -> None:
        """Record that a site has a round's copy, or a newer one."""
        round.downloads -= 1
        if round.downloads == 0:
            self.broadcasts.append(self.now - round.merged_at)
            round.shard.timing.broadcast.update(self.broadcasts[-1])

    def _arrived(self, round: _Round, site: _Site) -> None:
        fragment = round.fragment
        self._over(round)
        self.delays.append(self._delay(round, site))
        del site.fetching[fragment]
        self._fetch_wanted(site, round.shard)
        self._holds(site, fragment)
        if site.owed.pop(fragment, None) is not None and site.holding:
            site.at = self.now
            self._continue(site)

    def _delay(self, round: _Round, site: _Site) -> int:
        """Return the steps from the snapshot to the boundary at which the merge is applied."""
        if self.waits:
            steps = site.step if site.holding else site.step + (self.now - site.at) / site.pace
            steps -= round.tick.step
        else:
            steps = (self.now - round.tick.snapshots[site.number]) / site.pace
        whole = max(0, ceil(steps))
        held = self.waits or self.options.apply == "at_tau"
        return max(whole, self.options.overlap) if held else whole

    def _result(self) -> Rounds:
        begin = min(site.marks[0] for site in self.sites)
        end = max(site.marks[1] for site in self.sites)
        took = [
            (site.marks[1] - site.marks[0]) / self.steps if self.waits else site.pace
            for site in self.sites
        ]
        alone = self.network.paces(self.case.model.step_seconds)
        learners, all_learners = [site.learners for site in self.sites], self.network.learners
        taken = map(operator.truediv, alone, took)
        merged = 1.0 - self.skipped / max(1, self.due)
        return Rounds(
            compute=sum(map(operator.mul, taken, learners)) / all_learners,
            merged=merged,
            kept=merged * (1.0 - self.unanswered / max(1, self.asked)),
            delay_steps=_mean(self.delays),
            delay_steps_max=max(self.delays, default=float("inf")),
            merge_seconds=_mean(self.merges),
            broadcast_seconds=_mean(self.broadcasts),
            quorum_seconds=_mean(self.quorums),
            shard_busy=max(s.busy_seconds for s in self.shards) / (end - begin),
            relay_busy=max((r.busy_seconds for r in self.relays.values()), default=0.0)
            / (end - begin),
            traffic=tuple(self._traffic(begin, end)),
            step_seconds=(end - begin) / self.steps,
            pace_seconds=all_learners / sum(map(operator.truediv, learners, took)),
            participation=tuple(s.rounds / max(1, len(self.quorums)) for s in self.sites),
        )

    def _traffic(self, begin: float, end: float) -> Iterator[Traffic]:
        for link, capacity in enumerate(self.flows.capacities):
            mean, peak = self.flows.mean_and_peak(link, begin, end, self.tick)
            place, direction = self.network.names()[link // 2], ("up", "down")[link % 2]
            inside = self.network.is_inside(link // 2)
            yield Traffic(place, direction, mean, peak, capacity, inside)


def _name_of(site: _Site) -> Asking:
    """Return the name of a site's requests: it has at most one for each fragment."""
    return Asking(0, site.number)


def _mean(values: list[float]) -> float:
    """Return the mean, or infinity if there are no values."""
    return sum(values) / len(values) if values else float("inf")
