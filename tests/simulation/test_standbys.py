"""Standbys in virtual worlds: takeovers by hand, and two that act at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decoupled_diloco.protocol.effects import DenyShard
from decoupled_diloco.protocol.events import Merged
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.bounds import Bounds
from decoupled_diloco.simulate.checkers import Checker
from decoupled_diloco.simulate.claim_checker import ClaimChecker, takeover_seconds_max
from decoupled_diloco.simulate.claims import Standbys
from decoupled_diloco.simulate.faults import Fault, Kind, strike
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.world import World
from simulation.breaks import CLAIMS, Break

OPTIONS = Options(fragments=4, period=4, overlap=1, shards=2)
LEARNERS = (LearnerSpec("a", step_seconds=0.5), LearnerSpec("b", step_seconds=0.7))
PERIOD_SECONDS = OPTIONS.period * 0.5


class Seen:
    """A world with standbys, its checkers, and who has committed when."""

    def __init__(
        self,
        *,
        lease_seconds: float = 2.0,
        clocks_leap: bool = False,
        options: Options = OPTIONS,
    ) -> None:
        self.world = World(options, LEARNERS, seed=5, standbys=Standbys(lease_seconds))
        self.checker, self.bounds = Checker(self.world), Bounds(self.world)
        self.claims = ClaimChecker(self.world, clocks_leap=clocks_leap)
        self.commits: list[tuple[float, str]] = []
        self.denied: list[str] = []
        self.world.recorders.append(self._note)

    def _note(self, who: str, now: float, event: Any, effects: Any) -> None:
        if isinstance(event, Merged):
            self.commits.append((self.world.now, who))
        self.denied += [effect.nonce for effect in effects if isinstance(effect, DenyShard)]

    def next_commit(self, who: str, after: float) -> float:
        return next(at for at, name in self.commits if name == who and at > after)


@pytest.mark.parametrize("kind", ["crash", "vanish", "pause", "unmount"])
def test_a_standby_goes_on_with_what_was_told_within_a_known_time(kind: Kind) -> None:
    seen = Seen()
    world = seen.world
    strike(world, [Fault(20.0, kind, "shard-0", 40.0)])
    world.run(until=20.0)
    before = dict(seen.checker.newest)
    world.run(until=100.0)
    allowed = takeover_seconds_max(world, 0) + 2 * PERIOD_SECONDS
    assert seen.next_commit("shard-0-standby", 20.0) - 20.0 <= allowed
    assert world.acting(0).name == "shard-0-standby", "who comes back waits"
    assert seen.commits[-1][0] > 98.0
    for fragment in OPTIONS.owned(0):
        assert seen.checker.newest[fragment].term > before[fragment].term
        assert seen.checker.newest[fragment].counter > before[fragment].counter
    assert max(at for at, who in seen.commits if who == "shard-0") <= 21.0


def test_without_faults_nobody_takes_over() -> None:
    seen = Seen(lease_seconds=0.5)
    seen.world.run(until=100.0)
    assert seen.claims.takeovers == 0
    assert not [who for _, who in seen.commits if who.endswith("-standby")]


def test_a_standby_that_is_cut_off_from_the_storage_takes_nothing_over() -> None:
    seen = Seen()
    strike(seen.world, [Fault(10.0, "unmount", "shard-0-standby", 50.0)])
    seen.world.run(until=100.0)
    assert seen.claims.takeovers == 0


def two_act_at_once(period: int) -> Seen:
    """The clock of who waits leaps ahead; who acts greets again before it renews, or merges."""
    options = replace(OPTIONS, period=period)
    seen = Seen(lease_seconds=80.0, clocks_leap=True, options=options)
    world = seen.world
    faults = [
        Fault(22.0, "leap", "shard-0-standby", 200.0),
        Fault(22.2, "break", "shard-0", peer="coordinator"),
    ]
    strike(world, faults)
    world.run(until=200.0)
    return seen


def test_two_that_act_at_once_do_no_harm() -> None:
    seen = two_act_at_once(40)
    assert seen.claims.takeovers == 1
    assert seen.denied == ["shard-0-1"]
    assert {who for at, who in seen.commits if at > 100.0} == {"shard-0-standby", "shard-1"}


@pytest.mark.parametrize("each", CLAIMS, ids=[each.what for each in CLAIMS])
def test_what_keeps_them_from_harm_is_missed(each: Break) -> None:
    with each.broken(), pytest.raises(AssertionError, match=r"was replaced, and|is let in after"):
        [two_act_at_once(period) for period in (4, 40)]
