"""Scenarios carried out: what overlaps, and what befalls a process that is not there."""

from __future__ import annotations

from pathlib import Path

from decoupled_diloco.observe.tape import read_tape
from decoupled_diloco.simulate.learner_process import LearnerProcess
from decoupled_diloco.simulate.protocol_run import ProtocolRun
from decoupled_diloco.simulate.scenario import load_scenario

HEAD = """
parameters = 1000
until_seconds = 60
run = { budget_steps = 10000 }
sync = { fragments = 2, period = 4, overlap = 1 }
[[learners]]
count = 3
"""


def begun(folder: Path, *events: str) -> tuple[ProtocolRun, LearnerProcess]:
    """The run of a scenario with these events, each "kind from seconds"; and its learner-1."""
    text = HEAD
    for event in events:
        kind, at, seconds = event.split()
        text += f'[[events]]\nkind = "{kind}"\ntarget = "learner-1"\nat_seconds = {at}\n'
        text += f"for_seconds = {seconds}\n" if seconds != "inf" else ""
    path = folder / "scenario.toml"
    path.write_text(text)
    run = ProtocolRun(load_scenario(path))
    return run, run.world.learners["learner-1"]


def test_a_pause_ends_with_its_process(tmp_path: Path) -> None:
    """A new process does not stand, and stands no longer than its own pause lasts."""
    run, learner = begun(tmp_path, "pause 10 20", "kill 12 1", "pause 15 2")
    seen = []
    for instant in (11.0, 14.0, 16.0, 18.0, 31.0):
        run.world.run(until=instant)
        seen.append(learner.paused)
    assert seen == [True, False, True, False, False]
    assert learner.life == 2


def test_pauses_that_overlap_end_with_the_last(tmp_path: Path) -> None:
    run, learner = begun(tmp_path, "pause 10 20", "pause 12 2")
    run.world.run(until=15.0)
    assert learner.paused
    run.world.run(until=31.0)
    assert not learner.paused


def test_what_lasts_is_told_when_it_begins_and_when_it_is_undone(tmp_path: Path) -> None:
    text = HEAD
    for kind, at in (("cut", 10), ("kill", 15)):
        text += f'[[events]]\nkind = "{kind}"\ntarget = "learner-1"\nat_seconds = {at}\n'
        text += "for_seconds = 20\n"
    (tmp_path / "scenario.toml").write_text(text)
    run = ProtocolRun(load_scenario(tmp_path / "scenario.toml"), tmp_path / "run")
    run.world.run(until=50.0)
    run.close()
    told = [
        (record.at, record.type, record.data["kind"])
        for record in read_tape(tmp_path / "run")
        if record.type in ("FaultInjected", "FaultEnded")
    ]
    assert told == [
        (10.0, "FaultInjected", "cut"),
        (15.0, "FaultInjected", "kill"),
        (30.0, "FaultEnded", "cut"),
    ]


def test_who_is_killed_for_good_is_not_started_by_its_supervisor(tmp_path: Path) -> None:
    run, learner = begun(tmp_path, "kill 10.5 inf")
    run.world.run(until=10.0)
    run.world.expelled(learner, "another process bears its id")
    run.world.run(until=20.0)
    assert not learner.alive
    run, learner = begun(tmp_path, "kill 10.5 5")
    run.world.run(until=10.0)
    run.world.expelled(learner, "another process bears its id")
    run.world.run(until=20.0)
    assert learner.alive


def test_who_left_and_had_become_slower_leaves_no_step_time_behind(tmp_path: Path) -> None:
    """A storm in which the fastest goes while nobody else has reported a step's length."""
    text = HEAD.replace("count = 3", "count = 2\n[[learners]]\ncount = 3\nstep_seconds = 1.3")
    for kind, mean in (("kill", 60), ("vanish", 80), ("leave", 30)):
        text += f'[[random]]\nkind = "{kind}"\ntargets = ["learners"]\n'
        text += f"mean_seconds_between = {mean}\nrepair_seconds = 6\n"
    path = tmp_path / "storm.toml"
    path.write_text(text.replace("until_seconds = 60", "until_seconds = 200"))
    for seed in range(5):
        run = ProtocolRun(load_scenario(path, seed=seed))
        while run.advance():
            pass
        assert "until_seconds" in run.reason
