"""Standbys in virtual worlds: scripted takeovers, and two processes that act at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import DenyShard, Done, Merge
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from deliberate_breaks import Break
from simulation.breaks import CLAIMS
from worlds.bounds import Bounds
from worlds.checkers import Checker
from worlds.claim_checker import ClaimChecker, takeover_seconds_max
from worlds.drawn import Standbys
from worlds.faults import Fault, Kind, strike
from worlds.scene import ENDLESS_STEPS, config_of

OPTIONS = Options(fragments=4, period=4, overlap=1, shards=2, max_steps=ENDLESS_STEPS)
LEARNERS = (LearnerSpec("learner-0", step_seconds=0.5), LearnerSpec("learner-1", step_seconds=0.7))
LEASE_SECONDS = 2.0
PERIOD_SECONDS = OPTIONS.period * 0.5


class Seen:
    """A run with standbys, its checkers, and a record of all commits."""

    def __init__(
        self,
        folder: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        clocks_leap: bool = False,
        options: Options = OPTIONS,
    ) -> None:
        standbys = Standbys(lease_seconds, storage_seconds=0.005, storage_fails=0.0)
        config = config_of(options, folder, learners=2, standbys=standbys)
        self.system = System(config, LEARNERS, folder, seed=5)
        self.system.claim_seconds = standbys.storage_seconds
        self.checker, self.bounds = Checker(self.system), Bounds(self.system)
        self.claims = ClaimChecker(self.system, clocks_leap=clocks_leap)
        self.commits: list[tuple[float, str]] = []
        self.denied: list[tuple[int, int]] = []
        self.system.recorders.append(self._note)

    def _note(self, process: str, now: float, event: Any, effects: Any) -> None:
        if isinstance(event, Done) and isinstance(event.order, Merge):
            self.commits.append((self.system.now, process))
        if any(isinstance(effect, DenyShard) for effect in effects):
            self.denied.append((event.greeting.shard, event.greeting.claim))

    def next_commit(self, process: str, after: float) -> float:
        return next(at for at, name in self.commits if name == process and at > after)


Begin = Callable[..., Seen]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start runs, and close them after the test."""
    with ExitStack() as stack:

        def begun(**arguments: Any) -> Seen:
            folder = stack.enter_context(TemporaryDirectory(dir=tmp_path))
            seen = Seen(Path(folder), **arguments)
            stack.callback(seen.system.close)
            return seen

        yield begun


@pytest.mark.parametrize("kind", ["crash", "vanish", "pause", "unmount"])
def test_a_standby_takes_over_the_published_versions_within_a_known_time(
    begin: Begin, kind: Kind
) -> None:
    seen = begin()
    system = seen.system
    strike(system, [Fault(20.0, kind, "shard-0", 40.0)])
    system.run(until=20.0)
    before = dict(seen.checker.newest)
    system.run(until=100.0)
    allowed = takeover_seconds_max(system) + 2 * PERIOD_SECONDS
    assert seen.next_commit("shard-0-standby", 20.0) - 20.0 <= allowed
    assert system.acting(0).name == "shard-0-standby", "the process that comes back waits"
    assert seen.commits[-1][0] > 98.0
    for fragment in OPTIONS.owned(0):
        assert seen.checker.newest[fragment].term > before[fragment].term
        assert seen.checker.newest[fragment].counter > before[fragment].counter
    last = max(at for at, process in seen.commits if process == "shard-0")
    assert last <= 20.0 + LEASE_SECONDS, "its lease has expired"


def test_without_faults_no_standby_takes_over(begin: Begin) -> None:
    seen = begin(lease_seconds=0.5)
    seen.system.run(until=100.0)
    assert seen.claims.takeovers == 0
    assert not [process for _, process in seen.commits if process.endswith("-standby")]


def test_a_standby_that_is_cut_off_from_the_storage_does_not_take_over(begin: Begin) -> None:
    seen = begin()
    strike(seen.system, [Fault(10.0, "unmount", "shard-0-standby", 50.0)])
    seen.system.run(until=100.0)
    assert seen.claims.takeovers == 0


def test_a_standby_that_takes_over_after_the_end_ends_too(begin: Begin) -> None:
    """The run is over, but its shard has not ended: no coordinator can admit the standby."""
    seen = begin(lease_seconds=30.0, options=replace(OPTIONS, max_steps=20))
    system = seen.system
    system.run(until=1.0)
    system.run(until=30.0, stop=lambda: system.coordinator.state.phase == "finished")
    system.crash(system.shards[1])
    system.run(until=60.0)
    assert (system.shards[0].over, seen.claims.takeovers) == (True, 1)
    system.run(until=120.0, stop=lambda: system.finished)
    assert system.standbys[1].over


def test_a_shard_that_is_cut_off_from_the_coordinator_at_the_end_ends_too(
    begin: Begin,
) -> None:
    seen = begin(lease_seconds=30.0, options=replace(OPTIONS, max_steps=20))
    system = seen.system
    system.run(until=1.0)
    system.run(until=30.0, stop=lambda: system.coordinator.state.phase == "finished")
    strike(system, [Fault(system.now, "cut", "shard-1", 500.0, peer="shard-0")])
    system.run(until=120.0, stop=lambda: system.finished)
    assert (system.shards[0].over, system.shards[1].over) == (True, True)


def two_act_at_once(begin: Begin, period: int) -> Seen:
    """Let a standby's clock jump while the acting process cannot reach the coordinator.

    The acting process merges meanwhile. With a long period, it greets the coordinator first.
    """
    options = replace(OPTIONS, period=period)
    seen = begin(lease_seconds=80.0, clocks_leap=True, options=options)
    system = seen.system
    faults = [
        Fault(22.0, "leap", "shard-1-standby", 200.0),
        Fault(21.9, "cut", "shard-1", 2.1, peer="shard-0"),  # where the coordinator is
    ]
    strike(system, faults)
    system.run(until=200.0)
    return seen


def test_two_that_act_at_once_do_no_harm(begin: Begin) -> None:
    seen = two_act_at_once(begin, 40)
    assert seen.claims.takeovers == 1
    assert seen.denied == [(1, 1)], "the replaced process"
    assert {process for at, process in seen.commits if at > 100.0} == {"shard-0", "shard-1-standby"}


@pytest.mark.parametrize("each", CLAIMS, ids=[each.mark for each in CLAIMS])
def test_without_its_safeguards_two_acting_processes_do_harm(begin: Begin, each: Break) -> None:
    with each.broken(), pytest.raises(AssertionError, match=r"was replaced, but|admitted after"):
        [two_act_at_once(begin, period) for period in (4, 40)]
