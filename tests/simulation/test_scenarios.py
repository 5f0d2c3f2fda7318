"""Scenarios from end to end: the command in real processes, and faults in virtual runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from cases import long_after
from decoupled_diloco.export.run_weights import fill, find_weights
from decoupled_diloco.monitor.values import run_values
from decoupled_diloco.protocol.messages import CopyState, Done
from decoupled_diloco.run_model import RunModel, read_run
from decoupled_diloco.run_model.facts import GAP_MEDIANS, TOOK_PART
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.status import status_of
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record
from decoupled_diloco.workloads import load_workload, workload_of
from decoupled_diloco_lab.commands import simulate
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation
from decoupled_diloco_lab.simulate.stage import Recorder
from replay_check import assert_replays

RUN = """
[run]
max_steps = {steps}
evaluate_interval_seconds = 20.0

[sync]
fragments = 4
sync_every = 8
overlap_steps = 2

[syncer]
shards = 2

[workload]
name = "paced"

[workload.options]
layers = 1
width = 32
heads = 2
context = 16
batch_size = 2
corpus_bytes_max = 200_000
warmup_steps = 0
"""

STORY = """
[[learners]]
name = "near"
count = 2
variance = 0.1

[[learners]]
name = "far"
step_seconds = 1.5
variance = 0.1
link = "sea"

[[links]]
name = "sea"
latency_seconds = 0.1
jitter_seconds = 0.05
up = "1Mbit/s"
down = "2Mbit/s"
shared = true

[[events]]
at_step = 15
kind = "kill"
target = "learner-1"
for_seconds = 6.0

[[events]]
at_seconds = 30.0
kind = "pause"
target = "shard-1"
for_seconds = 2.0

[[random]]
kind = "cut"
targets = ["sea"]
mean_seconds_between = 15.0
repair_seconds = 3.0
"""

KILLS = """
[[random]]
kind = "kill"
targets = ["learner-0", "learner-1"]
mean_seconds_between = 4.0
repair_seconds = 1.0
"""

UNSEEN = ["run.evaluator=false", "run.evaluate_interval_seconds="]
"""Overrides for tests that do not check the loss."""


def write(folder: Path, story: str, steps: int = 50, **run: str) -> Path:
    path = folder / "story.toml"
    path.write_text(RUN.format(steps=steps) + story)
    return path


def simulated(folder: Path, story: str, steps: int = 50, **arguments: Any) -> RunModel:
    """Simulate a scenario to its end in this process and return its run model."""
    simulation = Simulation(load_scenario(write(folder, story, steps), **arguments), folder)
    while simulation.advance():
        pass
    assert simulation.finished, simulation.reason
    simulation.finish()
    simulation.close()
    return read_run(folder)


def command(*arguments: str, hash_seed: str = "0", cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "decoupled_diloco.cli", "simulate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "80",
            "PYTHONHASHSEED": hash_seed,
        },
    )


def finished(*arguments: str, cwd: Path, hash_seed: str = "0") -> tuple[int, str]:
    process = command(*arguments, cwd=cwd, hash_seed=hash_seed)
    output, _ = process.communicate(timeout=100)
    return process.returncode, output


def bits(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files that must be equal for the same seed."""
    tapes = [path for path in (folder / "tape").rglob("*") if path.is_file()]
    files = [folder / "weights.safetensors", *tapes]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def of_type(folder: Path, *names: str) -> list[Record]:
    return [record for record in TapeReader(folder) if record.type in names]


def gaps(history: RunModel, name: str) -> list[float]:
    """Return gaps of more than three median steps between two steps of one incarnation."""
    learner = history.learners[name]
    median = learner.step_seconds_median
    assert median is not None
    every = [b - a for life in learner.lives for a, b in pairwise(life.steps_at)]
    return [gap for gap in every if gap > GAP_MEDIANS * median]


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """The same scenario in two processes with different hash seeds and folder names."""
    runs = []
    for hash_seed, name in (("1", "one"), ("2", "another-folder")):
        folder = tmp_path_factory.mktemp(name)
        path = write(folder, STORY)
        code, output = finished(str(path), "--seed", "7", cwd=folder, hash_seed=hash_seed)
        assert code == 0, output
        runs.append((folder / "runs" / "story", output))
    return runs


@pytest.mark.long
def test_the_same_seed_gives_the_same_bits_in_another_process(
    twice: list[tuple[Path, str]],
) -> None:
    one, another = (bits(folder) for folder, _ in twice)
    assert one.keys() == another.keys()
    assert not [name for name in one if one[name] != another[name]]


def test_reading_a_run_does_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses the same records, no matter how often its tape is read."""
    runs = []
    for name, seconds in (("often", 0.0), ("never", float("inf"))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setattr(simulate, "POLL_SECONDS", seconds)
        scenario = load_scenario(write(tmp_path / name, STORY + KILLS, steps=30))
        assert simulate.simulate_training(scenario, SteadyConsole()) == 0
        runs.append(bits(Path("runs/story").resolve()))
    assert runs[0].keys() == runs[1].keys()
    assert not [file for file in runs[0] if runs[0][file] != runs[1][file]]


def test_nothing_of_this_machine_is_on_the_tape(twice: list[tuple[Path, str]]) -> None:
    folder, _ = twice[0]
    assert not [r for r in TapeReader(folder) if str(folder) in str(r.data)]
    starts = of_type(folder, "start")
    assert min(record.wall for record in starts) == 946_684_800.0
    assert {record.data["pid"] for record in starts} <= set(range(20))
    versions = starts[0].data["header"]["versions"]
    assert versions["torch"] == torch.__version__
    assert versions["python"].count(".") == 1


def test_a_simulated_tape_replays(twice: list[tuple[Path, str]]) -> None:
    assert assert_replays(twice[0][0]) > 1000


def test_a_simulated_run_writes_the_files_of_a_real_run(twice: list[tuple[Path, str]]) -> None:
    folder, output = twice[0]
    assert (folder / "report.html").stat().st_size > 10_000
    history = read_run(folder)
    assert history.virtual
    assert history.problems == []
    assert history.global_step == 50
    assert len(history.evaluations) >= 3
    first, last = history.evaluations[0].loss, history.evaluations[-1].loss
    assert first is not None
    assert last is not None
    assert last < first - 0.5
    assert all(learner.losses for learner in history.learners.values())
    moved = history.bytes_total
    assert moved is not None
    assert min(moved.data_sent, moved.data_received, moved.control_sent) > 10_000
    assert history.sample_text
    assert history.corpus
    assert "evaluation loss" in output
    assert "of virtual time in" in output
    assert "Traceback" not in output


def test_the_weights_are_those_of_the_last_evaluation(
    twice: list[tuple[Path, str]],
) -> None:
    folder, _ = twice[0]
    config = load_scenario(folder / "scenario.toml").config
    workload = load_workload(config.workload.name, config.workload_options())
    model = workload.model()
    model.load_state_dict(load_weights(folder / "weights.safetensors"))
    last = read_run(folder).evaluations[-1].loss
    assert workload.evaluate(model)["loss"] == pytest.approx(last, abs=1e-6)


@pytest.mark.long
def test_the_scenario_in_the_run_folder_repeats_the_run(
    twice: list[tuple[Path, str]], tmp_path: Path
) -> None:
    folder, _ = twice[0]
    again = str(folder / "scenario.toml")
    code, output = finished(again, "--set", "run.folder=again", cwd=tmp_path)
    assert code == 0, output
    assert bits(tmp_path / "again") == bits(folder)


def test_a_scripted_kill_is_recorded_and_costs_the_others_nothing(
    twice: list[tuple[Path, str]],
) -> None:
    history = read_run(twice[0][0])
    (outage,) = [o for o in history.outages if o.process == "learner-1"]
    assert outage.global_step >= 15
    assert outage.restarted_at == pytest.approx(outage.down_at + 6.0, abs=0.5)
    assert outage.back_at is not None
    assert sum(outage.lost_steps.values()) == 0
    kinds = [(fault.kind, fault.target) for fault in history.faults]
    assert ("kill", "learner-1") in kinds
    assert ("pause", "shard-1") in kinds
    assert ("cut", "sea") in kinds


@pytest.mark.long
def test_the_evaluator_evaluates_the_average_of_the_weights(tmp_path: Path) -> None:
    """Also while a shard is down; the last evaluation is that of the exported average."""
    story = STORY.replace("pause", "kill")
    run = simulated(tmp_path, story, 40, overrides=["outer.average=0.5"])
    losses = [each.average_loss for each in run.evaluations]
    assert losses[-1] is not None
    assert losses[-1] != run.evaluations[-1].loss
    assert "evaluation/average_loss" in run_values(status_of(run, run.latest))
    config = load_scenario(tmp_path / "story.toml", overrides=["outer.average=0.5"]).config
    found = find_weights(tmp_path, config, average=True)
    workload = workload_of(config)
    model = workload.model()
    fill(model, found.tensors, found.source)
    assert workload.evaluate(model)["loss"] == losses[-1]


def test_another_seed_draws_other_failures(tmp_path: Path) -> None:
    def cuts(seed: int) -> list[float]:
        folder = tmp_path / str(seed)
        folder.mkdir()
        history = simulated(folder, STORY, 30, seed=seed, overrides=UNSEEN)
        return [fault.begin for fault in history.faults if fault.kind == "cut"]

    assert cuts(1) != cuts(2)


@pytest.mark.long
def test_ctrl_c_ends_with_a_report_of_the_partial_run(tmp_path: Path) -> None:
    process = command(str(write(tmp_path, STORY, 100_000)), cwd=tmp_path)
    folder = tmp_path / "runs" / "story"
    tape, deadline = folder / "tape" / "shard-0.jsonl", time.monotonic() + 60
    while not (tape.exists() and '"RoundFinished"' in tape.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "the run did not finish: interrupted" in output
    assert "Traceback" not in output
    assert (folder / "report.html").exists()
    assert not (folder / "weights.safetensors").exists()
    assert_replays(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    long_after(
        2,
        [
            (["none.toml"], "none.toml does not exist"),
            (["mixed-speed"], "is neither a file nor a shipped scenario"),
            (["mixed-speeds", "--tape", "x"], "--tape requires --protocol-only"),
            (["thousands"], "parameters=1000000000 in the scenario would be ignored"),
            (["mixed-speeds", "--set", "sync.sync_evry=3"], "did you mean 'sync_every'?"),
            (["mixed-speeds", "--config", "nonesuch"], "is neither a file nor a shipped recipe"),
            (["mixed-speeds", "--set", "workload.name=gtp"], "workload 'gtp' is not known"),
        ],
    ),
)
def test_bad_usage_is_reported_in_one_sentence(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, output = finished(*arguments, cwd=tmp_path)
    assert code == 2, output
    assert message in " ".join(output.split())
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


REGIONS = """
[[learners]]
name = "here"
count = 2
variance = 0.05

[[learners]]
name = "there"
count = 2
variance = 0.05
link = "cable"

[[links]]
name = "cable"
latency_seconds = 0.1

[[events]]
at_step = 20
kind = "cut"
target = "cable"
for_seconds = 25.0
"""


def test_a_region_drops_out_and_rejoins(tmp_path: Path) -> None:
    history = simulated(tmp_path, REGIONS, 80)
    assert all(not gaps(history, name) for name in history.learners), "no learner loses a step"
    (cut_at,) = [fault.begin for fault in history.faults]
    assert history.global_step_by(cut_at) == 20
    rounds = [r for shard in history.shards.values() for r in shard.rounds]

    def folded(name: str, since: float, until: float) -> int:
        return sum(
            participant.learner == name and participant.state == "folded"
            for r in rounds
            if since < r.finished_at < until
            for participant in r.result.participants
        )

    for name in ("learner-2", "learner-3"):
        assert folded(name, 0.0, cut_at) > 5
        assert folded(name, cut_at + 2.0, cut_at + 25.0) == 0
        assert folded(name, cut_at + 30.0, history.duration) > 5
    for name in ("learner-0", "learner-1"):
        assert folded(name, cut_at + 2.0, cut_at + 25.0) > 5


JOINS = """
[[learners]]
variance = 0.05

[[learners]]
name = "late"
variance = 0.05
present = false

[[events]]
at_step = 20
kind = "join"
target = "late"

[[events]]
at_step = 40
kind = "leave"
target = "late"
"""


def test_a_learner_joins_for_a_while_and_leaves(tmp_path: Path) -> None:
    history = simulated(tmp_path, JOINS, 60)
    late = history.learners["learner-1"]
    assert late.outages == [], "a learner that leaves has not failed"
    (life,) = late.lives
    assert history.global_step_by(life.steps_at[0]) in range(20, 24)
    assert history.global_step_by(life.steps_at[-1]) in range(37, 42)
    assert late.reasons[TOOK_PART] > 3
    assert late.lost_steps(0.0, history.duration) == 0, "a learner that has left loses no steps"
    reasons = [r.data["reason"] for r in of_type(tmp_path, "Evict")]
    assert "left: it was asked to stop" in reasons
    assert (late.preemptions, late.failures) == (0, 0), "the launcher has asked it"
    assert not gaps(history, "learner-0")
    assert_replays(tmp_path)


def test_a_slowdown_and_a_silent_death(tmp_path: Path) -> None:
    story = "[[learners]]\ncount = 3\n" + "".join(
        f'[[events]]\nkind = "{kind}"\ntarget = "{target}"\n{rest}\n'
        for kind, target, rest in (
            ("slow", "learner-1", "factor = 2.5\nat_seconds = 10.0\nuntil_step = 30"),
            ("vanish", "learner-2", "at_step = 12"),
            ("break", "learners", "at_step = 14"),
        )
    )
    history = simulated(tmp_path, story, 50)
    steps = history.learners["learner-1"].lives[0].steps_at
    inside = [b - a for a, b in pairwise(steps) if a > 12 and b < 29]
    outside = [b - a for a, b in pairwise(steps) if b < 10 or a > 36]
    assert inside
    assert all(gap == pytest.approx(2.5, abs=0.01) for gap in inside)
    assert all(gap == pytest.approx(1.0, abs=0.01) for gap in outside)
    (outage,) = history.outages
    assert (outage.process, outage.restarted_at, sum(outage.lost_steps.values())) == (
        "learner-2",
        None,
        0,
    )
    # The death is silent, so the shard notices only ten seconds of silence.
    (evicted,) = [r for r in of_type(tmp_path, "Evict") if r.data["learner"] == "learner-2"][:1]
    assert evicted.wall - 946_684_800.0 > outage.down_at + 8.0


def test_processes_come_back_after_random_failures(tmp_path: Path) -> None:
    story = "[[learners]]\ncount = 3\n" + (
        '[[random]]\nkind = "kill"\ntargets = ["learners"]\nmean_seconds_between = 20.0\n'
        'repair_seconds = 4.0\nrepair = "fixed"\nuntil_seconds = 60.0\n'
    )
    history = simulated(tmp_path, story, 90)
    assert len(history.outages) >= 4
    assert {outage.process for outage in history.outages} > {"learner-0"}
    assert all(o.restarted_at is not None for o in history.outages)
    assert all(outage.down_at <= 60.0 for outage in history.outages)
    assert_replays(tmp_path)


LINKS = """
[[learners]]
name = "pair"
count = 2
link = "line"

[[links]]
name = "line"
up = "256kbit/s"
shared = {shared}
"""


def uploads(folder: Path) -> list[float]:
    """Return the transfer time of each payload in rounds with two requests."""
    return [
        participant["delivered_seconds"] - participant["asked_seconds"]
        for record in of_type(folder, "RoundFinished")
        for participant in record.data["participants"]
        if len(record.data["participants"]) == 2 and participant["delivered_seconds"] is not None
    ]


ONE_BODY = [*UNSEEN, "syncer.shards=1", "sync.overlap_steps=1", "sync.codec.uplink=bf16"]
"""Each learner has one payload in flight at a time, except in the closing sweep; all are equal."""


def test_learners_on_a_shared_link_take_turns(tmp_path: Path) -> None:
    """Two payloads at a time share it, so each takes about twice as long as alone."""
    times = {}
    for shared in ("true", "false"):
        folder = tmp_path / shared
        folder.mkdir()
        simulated(folder, LINKS.format(shared=shared), 24, overrides=ONE_BODY)
        times[shared] = median(uploads(folder))
    assert times["true"] == pytest.approx(2 * times["false"], rel=0.15)


def test_a_throttled_link_is_slower_by_its_factor(tmp_path: Path) -> None:
    throttle = '[[events]]\nat_seconds = 12.0\nkind = "throttle"\ntarget = "line"\nfactor = 2.0\n'
    times = []
    for number, events in enumerate(("", throttle)):
        folder = tmp_path / str(number)
        folder.mkdir()
        simulated(folder, LINKS.format(shared="false") + events, 24, overrides=ONE_BODY)
        times.append(median(uploads(folder)))
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)


@pytest.mark.long
def test_a_stalled_simulation_ends_and_reports_why(tmp_path: Path) -> None:
    story = "[[learners]]\ncount = 2\n" + (
        '[[events]]\nat_step = 10\nkind = "kill"\ntarget = "learner-1"\n'
    )
    path = write(tmp_path, story)
    code, output = finished(str(path), "--set", "sync.quorum=2", cwd=tmp_path)
    assert code == 1, output
    assert "the clock has not moved for" in " ".join(output.split())
    assert "1 live learners and quorum=2" in " ".join(output.split())


def test_a_long_repair_is_not_a_stall(tmp_path: Path) -> None:
    story = "[[learners]]\ncount = 2\n" + (
        '[[events]]\nat_step = 10\nkind = "kill"\ntarget = "learner-1"\nfor_seconds = 400.0\n'
    )
    history = simulated(tmp_path, story, 30, overrides=[*UNSEEN, "sync.quorum=2"])
    assert history.duration > 400.0


@pytest.mark.long
def test_until_seconds_ends_a_simulation(tmp_path: Path) -> None:
    path = write(tmp_path, JOINS.replace("at_step = 40", "at_step = 49"))
    path.write_text("until_seconds = 12.0\n" + path.read_text())
    code, output = finished(str(path), cwd=tmp_path)
    assert code == 0, output
    assert "until_seconds=12 of the scenario is reached" in " ".join(output.split())
    assert "did not happen: join late at step 20" in output
    assert read_run(tmp_path / "runs" / "story").duration <= 12.0


CROWD = """
[[learners]]
name = "crowd"
count = 40
variance = 0.2

[[random]]
kind = "vanish"
targets = ["crowd"]
mean_seconds_between = 100.0
repair_seconds = 5.0
"""


def crowd(folder: Path, tape: Path | None = None, recorder: Recorder | None = None) -> ProtocolRun:
    path = write(folder, CROWD, 40)
    path.write_text("parameters = 1_000_000\n" + path.read_text())
    run = ProtocolRun(load_scenario(path, overrides=["sync.quorum=8"]), tape)
    if recorder is not None:
        run.system.recorders.append(recorder)
    while run.advance():
        pass
    run.close()
    return run


@pytest.mark.long
def test_a_protocol_run_counts_the_outcomes_of_its_rounds(tmp_path: Path) -> None:
    copied = []

    def on_event(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        copied.extend([process] * (isinstance(event, Done) and isinstance(event.order, CopyState)))

    run = crowd(tmp_path, recorder=on_event)
    assert run.finished
    assert run.script.clock == 40
    assert run.tally.merged >= 40 / 8 * 4
    assert 0.5 < run.tally.folded / run.tally.asked <= 1.0
    contributed = run.tally.folded * 1_000_000 / 4 * 2
    copies = (
        (1 + len(copied)) * 1_000_000 * 4
    )  # for the first weights and for learners that are back
    assert len(copied) > 5
    assert run.data_sent == pytest.approx(contributed + copies, rel=0.02)


@pytest.mark.long
def test_the_tape_of_a_protocol_run_replays(tmp_path: Path) -> None:
    run = crowd(tmp_path, tmp_path)
    assert assert_replays(tmp_path) > 0.9 * run.system.events
    history = read_run(tmp_path)
    assert history.virtual
    moved = history.bytes_total
    assert moved is not None
    assert 0.9 * run.data_sent < moved.data_sent <= run.data_sent, "killed learners report less"


@pytest.mark.long
def test_protocol_only_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, CROWD, 20)
    path.write_text("parameters = 1_000_000\n" + path.read_text())
    code, output = finished(str(path), "--protocol-only", "--tape", "here", cwd=tmp_path)
    assert code == 0, output
    for row in ("global step", "rounds merged", "took part", "waited for quorum", "events"):
        assert row in output
    starts = of_type(tmp_path / "here", "start")
    assert sum(r.data["header"]["machine"] == "learner" for r in starts) >= 40
