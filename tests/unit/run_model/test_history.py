import io
import random
from itertools import accumulate, pairwise

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.protocol.messages import (
    Accept,
    Ready,
    Received,
    Reported,
    StepFinished,
    StepReport,
    Tick,
)
from decoupled_diloco.run_model import read_run, run_of
from decoupled_diloco.run_model.accounts import account_for
from decoupled_diloco.run_model.facts import TOOK_PART, LearnerLog, ProcessLife
from decoupled_diloco.run_model.phrases import ending_in_words
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.tables import absences
from decoupled_diloco.show.terminal import print_summary
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.samples import (
    EndRequested,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
)
from unit.show.show_worlds import A, B, C, D, lines_of, write_world
from worlds.faults import Fault


@pytest.fixture(scope="module")
def history(run_folder):
    return read_run(run_folder)


def test_run_totals(history):
    assert history.duration == pytest.approx(66.0)
    assert history.global_step == 120
    assert history.global_step_by(30.2) == 52
    assert (history.rounds_merged, history.rounds_abandoned) == (234, 6)
    assert history.tokens == (120 + 52 + 56 + 120 + 80) * 512
    assert history.evaluations[0].global_step == 0
    assert len(history.evaluations) == 7
    assert history.corpus["name"] == "standard library"
    assert "weights saved: weights.safetensors" in [remark.text for remark in history.remarks]
    assert history.headers["launcher"]["versions"]["torch"] == "2.13.0"
    assert history.problems == []


@pytest.mark.parametrize(
    ("name", "steps", "median"),
    [
        ("learner-0", 120, 0.5),
        ("learner-1", 108, 0.5),
        ("learner-2", 120, 0.5),
        ("learner-3", 80, 0.75),
    ],
)
def test_learner_numbers(history, name, steps, median):
    learner = history.learners[name]
    assert learner.steps == steps
    assert learner.tokens == steps * 512
    assert len(learner.losses) == steps
    assert learner.step_seconds_median == pytest.approx(median)
    assert learner.gap_seconds_longest == pytest.approx(median)
    applied = 13 + 14 if name == "learner-1" else steps // 4
    assert history.fragments == 24
    assert learner.discarded_fragment_tokens == 128 * applied


def test_participation_counts_merged_rounds_only(history):
    assert history.participation_of(history.learners["learner-0"]) == 1.0
    # Of 120 ticks every third has no learner-3; 40, 80 and 120 are abandoned on both shards.
    assert history.learners["learner-3"].reasons[TOOK_PART] == 2 * (80 - 2)
    # learner-1 misses the ticks from 30.0 s to 36.0 s, 13 of them, none a multiple of 40.
    assert history.learners["learner-1"].reasons[TOOK_PART] == 2 * (117 - 13)


def test_outage(history):
    (outage,) = history.outages
    assert outage.process == "learner-1"
    assert outage.how == "killed (SIGKILL)"
    assert outage.down_at == pytest.approx(30.2)
    assert outage.restarted_at == pytest.approx(31.2)
    assert outage.back_at == pytest.approx(36.0)
    assert outage.seconds == pytest.approx(5.8)
    assert outage.global_step == 52
    assert outage.lost_steps == {"learner-0": 0, "learner-2": 0, "learner-3": 0}
    joined = [life.ready_at for life in history.learners["learner-1"].lives]
    assert joined == pytest.approx([4.0, 36.0])


def test_bytes_are_summed_over_lives(history):
    assert history.bytes_moved["learner-1"].data_sent == 6_000_000
    assert history.bytes_moved["learner-0"].data_sent == 3_000_000
    assert history.bytes_total.control_sent == 5000


def test_a_merged_tape_gives_the_same_model(run_folder, history, tmp_path):
    printed = CliRunner().invoke(app, ["events", str(run_folder)])
    assert (printed.exit_code, printed.stderr) == (0, "")
    (tmp_path / "tape.jsonl").write_bytes(printed.stdout_bytes)
    again = read_run(tmp_path)
    assert again.outages == history.outages
    assert again.tokens == history.tokens


def write_steps(folder, name, instants):
    with TapeWriter(folder, name, clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        for at in instants:
            tape.event(at, StepFinished(1))


def test_gaps_of_survivors_count_as_lost_steps(tmp_path):
    steps = [float(at) for at in range(1, 31)]
    write_steps(tmp_path, "learner-0", [at for at in steps if not 10 < at < 16])
    write_steps(tmp_path, "learner-1", steps[:10])
    write_steps(tmp_path, "learner-2", steps)
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(10.5, ProcessEnded("learner-1", 3, None))
    (outage,) = read_run(tmp_path).outages
    assert outage.how == "ended with exit code 3"
    assert outage.back_at is None
    assert outage.seconds is None
    assert outage.lost_steps == {"learner-0": 5, "learner-2": 0}
    assert sum(outage.lost_steps.values()) == 5
    assert read_run(tmp_path).learners["learner-0"].gap_seconds_longest == 6.0


def test_lost_steps_include_every_long_gap_that_overlaps_the_interval():
    rng = random.Random(3)
    begin, lives = 0.0, []
    for _ in range(3):
        gaps = [rng.choice([1.0, 1.0, 1.0, 1.0, 4.5, 9.0]) for _ in range(60)]
        steps = list(accumulate(gaps, initial=begin))
        lives.append(ProcessLife(begin, steps[-1], steps))
        begin = steps[-1] + 20.0
    lives[-1].over = True
    learner = LearnerLog("learner-0", lives)
    every = [gap for life in lives for gap in pairwise(life.steps_at)]
    for _ in range(200):
        since = rng.uniform(-5.0, begin)
        until = since + rng.choice([0.0, 2.0, 30.0, 500.0])
        reaching = [b - a for a, b in every if b > since and a < until and b - a > 3.0]
        assert learner.lost_steps(since, until) == sum(round(gap) - 1 for gap in reaching)


def test_a_process_without_records_counts_as_restarted(tmp_path):
    write_steps(tmp_path, "learner-0", [float(at) for at in range(1, 11)])
    write_steps(tmp_path, "learner-1", [float(at) for at in range(1, 31)])
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(0.0, ProcessStarted("learner-0", 1))
        tape.sample(11.0, ProcessEnded("learner-0", None, 9))
        tape.sample(20.0, ProcessStarted("learner-0", 2))
        tape.sample(35.0, ProcessEnded("learner-0", None, 9))
    history = read_run(tmp_path)
    (outage,) = history.outages  # its end after the run is not an outage
    assert (outage.restarted_at, outage.back_at) == (20.0, None)
    time = account_for(history).learners["learner-0"].time
    assert [time.seconds(part) for part in ("down", "joining")] == [9.0, 10.0]


def test_a_process_asked_to_stop_has_not_crashed(tmp_path):
    """As after Ctrl-C, or when the launcher gives up on a run."""
    for name in ("learner-0", "learner-1", "learner-2", "shard-0"):
        write_steps(tmp_path, name, [float(at) for at in range(1, 11)])
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(10.1, ProcessEnded("learner-2", None, 9))
        tape.sample(10.5, EndRequested(("learner-0", "learner-1", "shard-0")))
        tape.sample(10.6, ProcessEnded("learner-0", 130, None))
        tape.sample(10.7, ProcessEnded("learner-1", None, 15))
        tape.sample(13.5, ProcessEnded("shard-0", None, 9))
    history = read_run(tmp_path)
    assert [outage.process for outage in history.outages] == ["learner-2"]
    assert [learner.lives[-1].crashed for learner in history.learners.values()] == [
        name == "learner-2" for name in history.learners
    ]
    tokens = account_for(history).learners["learner-1"].tokens
    assert (tokens.crashed, tokens.left_behind) == (0, 10 * tokens.fragments)
    assert any("asked to stop" in remark.text for remark in history.remarks)


def test_two_simultaneous_outages_cost_each_other_nothing(tmp_path):
    for name in ("learner-0", "learner-1"):
        write_steps(tmp_path, name, [float(at) for at in range(1, 11)])
    write_steps(tmp_path, "learner-2", [float(at) for at in range(1, 31)])
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(10.5, ProcessEnded("learner-1", None, 9))
        tape.sample(10.6, ProcessEnded("learner-0", None, 9))
    for outage in read_run(tmp_path).outages:
        assert outage.lost_steps == {"learner-2": 0}


def test_an_outage_is_down_only_until_the_next_process_is_started(tmp_path):
    """It takes a while to write its first record, and longer to take part."""
    write_steps(tmp_path, "learner-0", [1.0, 2.0, 3.0])
    write_steps(tmp_path, "learner-1", [float(at) for at in range(1, 31)])
    with TapeWriter(tmp_path, "learner-0", clock=lambda: 0.0, wall=lambda: 1012.0) as tape:
        tape.effects(3.0, tape.event(3.0, Tick()), [Ready("every fragment is held")])
        tape.event(4.0, StepFinished(1))
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(3.5, ProcessEnded("learner-0", None, 9))
        tape.sample(4.0, ProcessStarted("learner-0", 2))
    history = read_run(tmp_path)
    (outage,) = history.outages
    assert (outage.down_at, outage.restarted_at, outage.back_at) == (3.5, 4.0, 15.0)
    time = account_for(history).learners["learner-0"].time
    assert time.seconds("down") == pytest.approx(outage.down_seconds) == pytest.approx(0.5)
    assert "back after 11.5 s (down 500 ms, joining 11 s)" in absences(history)[0]


@pytest.fixture
def killed(tmp_path):
    """A learner's tape ends at step 3 of the 5 reported ones; its next incarnation makes 2 more."""
    write_steps_from(tmp_path, "learner-0", 0.0, [1.0, 2.0, 3.0])
    with TapeWriter(tmp_path, "shard-0", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.effects(0.5, tape.event(0.5, Tick()), [Accept(1, "learner-0", 1, "joined")])
        for step in (1, 2, 3, 4, 5):
            at = step + 0.01
            tape.event(at, Reported((("learner-0", StepReport(step, 10 * step, 1.0)),)))
        tape.event(12.01, Received("learner-0", StepReport(1, 10, 1.0)))
        tape.event(13.01, Received("learner-0", StepReport(2, 20, 1.0)))
    write_steps_from(tmp_path, "learner-0", 10.0, [12.0, 13.0])
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(5.5, ProcessEnded("learner-0", None, 9))
    return tmp_path


def write_steps_from(folder, name, began, instants):
    with TapeWriter(folder, name, clock=lambda: 0.0, wall=lambda: 1000.0 + began) as tape:
        for at in instants:
            tape.event(at - began, StepFinished(10))


def test_unrecorded_steps_of_a_killed_process_are_counted(killed):
    history = read_run(killed)
    learner = history.learners["learner-0"]
    assert (learner.steps, learner.steps_unrecorded) == (7, 2)
    assert learner.tokens == 50 + 20
    account = account_for(history).learners["learner-0"].tokens
    assert account.tokens("trained") == 70
    assert account.tokens("crashed") == 50
    console = SteadyConsole(file=io.StringIO(), width=200)
    print_summary(history, console=console)
    assert "2 steps of learner-0 known only from the shards" in console.file.getvalue()


def test_status_counts_the_steps_of_a_killed_process_as_the_summary_does(killed):
    (learner,) = status_of(run_of(TapeReader(killed)), 1014.0).learners
    assert (learner.steps, learner.tokens) == (7, 70)


def test_restart_without_a_launcher_is_an_outage_since_the_last_record(tmp_path):
    write_steps(tmp_path, "learner-0", [1.0, 2.0, 3.0])
    with TapeWriter(tmp_path, "learner-0", clock=lambda: 50.0, wall=lambda: 1010.0) as tape:
        tape.event(52.0, StepFinished(1))
    (outage,) = read_run(tmp_path).outages
    assert (outage.down_at, outage.restarted_at, outage.back_at) == (3.0, 10.0, 12.0)
    assert outage.how == "fell silent"


def test_a_run_that_ends_properly_has_no_outage(tmp_path):
    write_steps(tmp_path, "learner-0", [1.0, 2.0])
    with TapeWriter(tmp_path, "launcher", clock=lambda: 0.0, wall=lambda: 1000.0) as tape:
        tape.sample(3.0, ProcessEnded("learner-0", 0, None))
    assert read_run(tmp_path).outages == []


def test_losses_that_are_not_finite_are_counted_separately(tmp_path):
    with TapeWriter(tmp_path, "learner-0") as tape:
        tape.sample(1.0, LossMeasured(1, 1, 1, float("nan")))
        tape.sample(2.0, LossMeasured(2, 2, 2, 1.5))
    learner = read_run(tmp_path).learners["learner-0"]
    assert learner.losses_not_finite == 1
    assert [loss.loss for loss in learner.losses] == [1.5]


def test_records_of_another_version_are_skipped_and_reported(tmp_path):
    with TapeWriter(tmp_path, "learner-0") as tape:
        tape.event(1.0, StepFinished(1))
        tape.event(2.0, StepFinished(1))
    path = tmp_path / "learner-0.jsonl"
    path.write_text(path.read_text().replace('"tokens":1', '"words":1'))
    history = read_run(tmp_path)
    assert history.learners["learner-0"].steps == 0
    assert history.problems == [
        "2 records that this version cannot read were skipped: learner-0: StepFinished: unknown "
        "fields ['words'], missing ['tokens']"
    ]


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Learner `a` makes a step per second and is cut off from 50.3 s to 75.3 s."""
    folder = tmp_path_factory.mktemp("cut")
    write_world(folder, faults=[Fault(50.3, "cut", A, 25.0)])
    return folder, read_run(folder)


def test_a_learner_that_is_cut_off_continues_and_misses_rounds(cut):
    folder, history = cut
    [one] = history.cuts
    assert (one.learner, history.learners[A].outages) == (A, [])
    assert one.cut_at == pytest.approx(50.3, abs=1.5)  # the last ping
    back = [
        record["at"]
        for shard in (0, 1)
        for record in lines_of(folder / "tape" / f"shard-{shard}.jsonl")
        if record["type"] == "Accept" and record["data"]["learner"] == A and record["at"] > 60
    ]
    assert one.back_at == pytest.approx(max(back), abs=1e-5)
    assert one.steps == pytest.approx(one.seconds, abs=1)
    rounds = [
        record["data"]
        for shard in (0, 1)
        for record in lines_of(folder / "tape" / f"shard-{shard}.jsonl")
        if record["type"] == "RoundFinished" and one.cut_at < record["at"] <= one.back_at
    ]
    merged = [each for each in rounds if each["verdict"] == "merged"]
    missed = [each for each in merged if not folded(each, A)]
    assert (one.rounds_merged, one.rounds_missed) == (len(merged), len(missed))
    assert len(missed) > 0


def folded(result, name):
    states = {each["learner"]: each["state"] for each in result["participants"]}
    return states.get(name) == "folded"


def test_a_cut_is_described_in_one_sentence(cut):
    _, history = cut
    [one] = history.cuts
    step = history.global_step_by(one.cut_at)
    others = f"{sum(one.lost_steps.values())}"
    assert set(one.lost_steps) == {B, C, D}
    line = (
        f"{A} was cut off from {one.cut_at:.1f} s (step {step}) to {one.back_at:.1f} s, "
        f"trained alone for {one.steps} steps, and missed {one.rounds_missed} of "
        f"{one.rounds_merged} merged rounds; steps lost by the others: {others}"
    )
    assert next(text for text in absences(history) if "cut off" in text).startswith(line)


def test_endings_in_words():
    assert ending_in_words(None, 200) == "killed (signal 200)"
    assert ending_in_words(2, None) == "ended with exit code 2"
