"""Execution of scenarios: overlapping faults, and faults of processes that are down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.tape import TapeReader
from decoupled_diloco_lab.simulate.hosts import LearnerHost
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import load_scenario

HEAD = """
parameters = 1000
until_seconds = 60
run = { max_steps = 10000 }
sync = { fragments = 2, sync_every = 4, overlap_steps = 1 }
[[learners]]
count = 3
"""


Begin = Callable[..., ProtocolRun]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start runs of scenarios, and close them after the test."""
    with ExitStack() as stack:

        def begun(path: Path, tape: Path | None = None, **arguments: Any) -> ProtocolRun:
            run = ProtocolRun(load_scenario(path, **arguments), tape)
            stack.callback(run.close)
            return run

        yield begun


def begun(begin: Begin, folder: Path, *events: str) -> tuple[ProtocolRun, LearnerHost]:
    """Start a run with these events, each "kind start duration", and return its learner-1, too."""
    text = HEAD
    for event in events:
        kind, at, seconds = event.split()
        text += f'[[events]]\nkind = "{kind}"\ntarget = "learner-1"\nat_seconds = {at}\n'
        text += f"for_seconds = {seconds}\n" if seconds != "inf" else ""
    path = folder / "scenario.toml"
    path.write_text(text)
    run = begin(path)
    return run, run.system.learners["learner-1"]


def test_a_pause_ends_with_its_process(begin: Begin, tmp_path: Path) -> None:
    """A new process is not paused, and only its own pause affects it."""
    run, learner = begun(begin, tmp_path, "pause 10 20", "kill 12 1", "pause 15 2")
    seen = []
    for instant in (11.0, 14.0, 16.0, 18.0, 31.0):
        run.system.run(until=instant)
        seen.append(learner.paused)
    assert seen == [True, False, True, False, False]
    assert learner.life == 2


def test_pauses_that_overlap_end_with_the_last(begin: Begin, tmp_path: Path) -> None:
    run, learner = begun(begin, tmp_path, "pause 10 20", "pause 12 2")
    run.system.run(until=15.0)
    assert learner.paused
    run.system.run(until=31.0)
    assert not learner.paused


def test_a_lasting_fault_is_recorded_at_its_start_and_its_end(begin: Begin, tmp_path: Path) -> None:
    text = HEAD
    for kind, at in (("cut", 10), ("kill", 15)):
        text += f'[[events]]\nkind = "{kind}"\ntarget = "learner-1"\nat_seconds = {at}\n'
        text += "for_seconds = 20\n"
    (tmp_path / "scenario.toml").write_text(text)
    run = begin(tmp_path / "scenario.toml", tmp_path / "run")
    run.system.run(until=50.0)
    run.close()
    recorded = [
        (record.at, record.type, record.data["kind"])
        for record in TapeReader(tmp_path / "run")
        if record.type in ("FaultInjected", "FaultEnded")
    ]
    assert recorded == [
        (10.0, "FaultInjected", "cut"),
        (15.0, "FaultInjected", "kill"),
        (30.0, "FaultEnded", "cut"),
    ]


def crash_by_itself(run: ProtocolRun, learner: LearnerHost) -> None:
    """Let the learner's process fail, so that its supervisor is about to restart it."""
    run.system.run(until=10.2)
    learner._gone(ProtocolError.exit_code, silent=False)
    run.system.run(until=10.3)
    child = run.system.supervisor.children[learner.name]
    assert child.restart_at is not None
    assert child.restart_at > 10.5


def test_a_process_killed_for_good_is_not_restarted_by_its_supervisor(
    begin: Begin, tmp_path: Path
) -> None:
    run, learner = begun(begin, tmp_path, "kill 10.5 inf")
    crash_by_itself(run, learner)
    run.system.run(until=20.0)
    assert not learner.alive
    assert learner.life == 1
    run, learner = begun(begin, tmp_path, "kill 10.5 5")
    crash_by_itself(run, learner)
    run.system.run(until=20.0)
    assert learner.alive
    assert learner.life == 2


@pytest.mark.long
def test_the_step_time_of_a_learner_that_left_is_forgotten(begin: Begin, tmp_path: Path) -> None:
    """The fastest learner leaves before any other has reported its step time."""
    text = HEAD.replace("count = 3", "count = 2\n[[learners]]\ncount = 3\nstep_seconds = 1.3")
    for kind, mean in (("kill", 60), ("vanish", 80), ("leave", 30)):
        text += f'[[random]]\nkind = "{kind}"\ntargets = ["learners"]\n'
        text += f"mean_seconds_between = {mean}\nrepair_seconds = 6\n"
    path = tmp_path / "storm.toml"
    path.write_text(text.replace("until_seconds = 60", "until_seconds = 200"))
    for seed in range(5):
        run = begin(path, seed=seed)
        while run.advance():
            pass
        assert "until_seconds" in run.reason


STORM = """
[[events]]
kind = "{kind}"
target = "{target}"
at_seconds = 10.0
{keys}
"""


def run_with_event(
    begin: Begin, folder: Path, kind: str, target: str, keys: str, seconds: float
) -> ProtocolRun:
    text = HEAD.replace("count = 3", "count = 3\nlink = 'wire'")
    text += "[[links]]\nname = 'wire'\nup = '8Mbit/s'\nlatency_seconds = 0.01\n"
    path = folder / "story.toml"
    path.write_text(text + STORM.format(kind=kind, target=target, keys=keys))
    run = begin(path)
    run.system.run(until=seconds)
    return run


def test_a_full_disk_costs_rounds_only(begin: Begin, tmp_path: Path) -> None:
    run = run_with_event(begin, tmp_path, "disk-full", "shard-0", "for_seconds = 20.0", 9.9)
    merged, clock = run.tally.merged, run.script.clock
    run.system.run(until=29.9)
    assert run.tally.merged == merged, "nothing is merged that cannot be written"
    assert run.script.clock > clock + 15, "training continues"
    run.system.run(until=60.0)
    assert run.tally.merged > merged, "merges continue after the pause of the last failure"


def test_a_lost_disk_is_empty_when_its_shard_comes_back(begin: Begin, tmp_path: Path) -> None:
    run = run_with_event(begin, tmp_path, "disk-lost", "shard-0", "for_seconds = 5.0", 9.9)
    disk = run.system.folder / DURABLE / "shard-0"
    assert any(disk.iterdir())
    run.system.run(until=12.0)
    assert not disk.exists()
    assert not run.system.shards[0].alive
    run.system.run(until=30.0)
    assert any(disk.iterdir()), "the learners' copies are written again"


def test_a_restart_ends_a_process_and_starts_it_again(begin: Begin, tmp_path: Path) -> None:
    run = run_with_event(begin, tmp_path, "restart", "learner-1", "", 20.0)
    learner = run.system.learners["learner-1"]
    assert learner.alive
    assert learner.life == 2
    run = run_with_event(begin, tmp_path, "restart", "shard-0", "", 20.0)
    assert run.system.shards[0].life == 2


def test_a_clock_jump_evicts_no_learner(begin: Begin, tmp_path: Path) -> None:
    run = run_with_event(begin, tmp_path, "clock-jump", "shard-0", "jump_seconds = 1000.0", 30.0)
    shard = run.system.shards[0]
    assert shard.loop is not None
    assert shard.loop.time() == 1030.0
    assert shard.life == 1
    assert sorted(shard.machine.state.members) == ["learner-0", "learner-1", "learner-2"]
    assert run.script.clock > 25


def test_delay_and_loss_of_a_link_are_temporary(begin: Begin, tmp_path: Path) -> None:
    for kind, keys in (("delay", "delay_seconds = 0.3"), ("loss", "share = 0.3")):
        run = run_with_event(
            begin, tmp_path, kind, "learner-1", f"{keys}\nfor_seconds = 15.0", 20.0
        )
        link = run.system.learners["learner-1"].link
        expected = (0.31, 0.0) if kind == "delay" else (0.01, 0.3)
        assert (link.latency, link.loss) == pytest.approx(expected)
        run.system.run(until=30.0)
        assert abs(link.latency - 0.01) < 1e-12
        assert link.loss == 0.0
        assert run.script.clock > 25


def test_corrupted_payloads_are_rejected(begin: Begin, tmp_path: Path) -> None:
    run = run_with_event(
        begin, tmp_path, "corrupt", "learners", "share = 0.9999\nfor_seconds = 15.0", 9.9
    )
    merged = run.tally.merged
    run.system.run(until=24.0)
    assert run.tally.merged <= merged + 2, "corrupted payloads are not merged"
    run.system.run(until=50.0)
    assert run.tally.merged > merged + 5


def test_a_cut_in_one_direction(begin: Begin, tmp_path: Path) -> None:
    """The shard receives nothing from the learner, but the learner still receives messages."""
    keys = 'direction = "up"\nfor_seconds = 60.0'
    run = run_with_event(begin, tmp_path, "cut", "learner-1", keys, 15.0)
    learner, shard = run.system.learners["learner-1"], run.system.shards[0]
    assert run.system.network.is_silent(learner, shard)
    assert not run.system.network.is_silent(shard, learner)
    run.system.run(until=35.0)
    assert "learner-1" not in shard.machine.state.members
    assert learner.alive


def test_an_event_may_hit_a_random_majority(begin: Begin, tmp_path: Path) -> None:
    run = run_with_event(begin, tmp_path, "kill", "learners", 'choose = "majority"', 12.0)
    assert sum(learner.alive for learner in run.system.learners.values()) == 1


def test_a_process_that_is_slow_to_stop_still_comes_back(begin: Begin, tmp_path: Path) -> None:
    """It is paused, so it must be killed. Its restart has been requested by then."""
    run, learner = begun(begin, tmp_path, "pause 10 40", "leave 11 1")
    run.system.run(until=13.0)
    assert learner.alive
    assert learner.life == 1
    run.system.run(until=45.0)
    assert learner.alive
    assert learner.life == 2
