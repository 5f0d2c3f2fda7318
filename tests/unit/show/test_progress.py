import io
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Accept,
    ClockAdvanced,
    Connected,
    Hello,
    Ready,
    Received,
    RoundOpened,
    ShardAdmitted,
    StepFinished,
    StepReport,
    Tick,
    Version,
)
from decoupled_diloco.run_model import FollowedRun, RunModel, read_run, run_of
from decoupled_diloco.run_model.facts import TOOK_PART, LearnerLog, Rate, ShardLog
from decoupled_diloco.run_model.phrases import note_in_words
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.page.document import state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.terminal import ProgressDisplay, render_status
from decoupled_diloco.tape import TapeReader, TapeWriter
from decoupled_diloco.tape.samples import (
    Evaluated,
    FaultEnded,
    FaultInjected,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    WentBack,
)
from unit.show.show_worlds import A, B, write_world
from worlds.faults import Fault

WALL = 1_780_000_000.0


def console(width=80, terminal=False):
    return SteadyConsole(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system=None
    )


def text_of(renderable, width=80):
    out = console(width)
    out.print(renderable)
    return out.file.getvalue()


def until(run_folder, at):
    """The display at this second of the synthetic run."""
    progress = ProgressDisplay(run_folder, max_steps=120, console=console())
    for record in TapeReader(run_folder):
        if record.wall - WALL <= at:
            progress.run.take(record)
    return progress


def test_display_in_the_middle_of_the_outage(run_folder):
    progress = until(run_folder, 32.0)
    text = text_of(progress.render())
    assert "step 56/120" in text
    assert "47 %" in text
    row = next(line for line in text.splitlines() if line.startswith("learner-1"))
    assert row.split()[1:4] == ["joining", "52", "–"]
    row = next(line for line in text.splitlines() if line.startswith("learner-0"))
    assert row.split()[1:4] == ["stepping", "56", "1.02k"]
    row = next(line for line in text.splitlines() if line.startswith("shard-1"))
    assert row.split() == ["shard-1", "running", "56", "54", "1", "0", "120", "ms"]
    assert "evaluation loss 2.9700 (step 40)" in text


def test_the_loss_of_the_average_is_beside_that_of_the_weights(run_folder):
    progress = until(run_folder, 32.0)
    (last,) = progress.run.evaluations[-1:]
    progress.run.evaluations.append(replace(last, metrics=(("average_loss", 2.95),)))
    shown = text_of(progress.render())
    assert "evaluation loss 2.9700, average 2.9500 (step 40)" in shown
    status = status_of(progress.run, progress.run.latest)
    assert "evaluation loss 2.9700, average 2.9500" in text_of(render_status(status))
    cards = state_of_page(progress.run, status, PageHistory())["cards"]
    where = "of the global weights at step 40; of their average: 2.9500"
    assert ["evaluation loss", "2.9700", where] in cards


def test_display_fits_eighty_columns(run_folder):
    for at in (0.6, 20.0, 30.5, 66.0):
        lines = text_of(until(run_folder, at).render(), width=200).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= 80


def test_remaining_time(run_folder):
    progress = until(run_folder, 34.0)
    assert progress.status().seconds_left == pytest.approx(30.0, rel=0.01)
    progress.budget = (120, progress.run.tokens + 3600)
    assert progress.status().seconds_left == pytest.approx(1.0, rel=0.1)
    assert "left" not in until(run_folder, 66.0).line()


def test_remaining_time_of_a_simulation_is_real_time(run_folder):
    seconds = [100.0]
    real = ProgressDisplay(run_folder, 120, console=console(), clock=lambda: seconds[0])
    virtual = ProgressDisplay(
        run_folder, 120, console=console(), clock=lambda: seconds[0], virtual=True
    )
    for record in TapeReader(run_folder):
        if record.wall - WALL <= 34.0:
            real.run.take(record)
            virtual.run.take(record)
    seconds[0] += virtual.run.duration / 10
    assert "30 s left" in real.line()
    assert "3 s left in real time" in virtual.line()
    assert "left in real time" in text_of(virtual.render())


def test_plain_lines_show_the_important_events(run_folder):
    seconds = [0.0]
    out = console()
    with ProgressDisplay(run_folder, 120, console=out, clock=lambda: seconds[0]) as progress:
        seconds[0] = 6.0
        progress.poll()
        progress.poll()
    lines = out.file.getvalue().splitlines()
    for line in (
        "00:04  learner-0 joined",
        "00:14  evaluation at step 20: loss 3.6446",
        "00:30  fault injected: kill learner-1",
        "00:30  learner-1 was killed (SIGKILL) at step 52",
        "00:30  learner-1 will restart in 1 s",
        "00:36  learner-1 is back, 5.8 s after it went down",
        "01:04  the budget is reached: the closing rounds start",
        "01:05  weights saved: weights.safetensors",
    ):
        assert lines.count(line) == 1
    gone = "00:30  learner-1 (incarnation 1) is no longer live: "
    gone += "its connection broke and its lease ran out"
    assert lines.count(gone) == 1
    assert [line for line in lines if "step 120/120" in line] == [
        "01:06  step 120/120, 219k tokens, 3.79k tok/s, loss 2.009, 0/4 learners, 234 rounds"
    ]


def test_learners_whose_tapes_are_elsewhere_are_known_from_the_shards(run_folder, tmp_path):
    """As with `ddiloco syncer`: only the shards and the coordinator write to this folder."""
    shutil.copytree(run_folder / "tape", tmp_path / "tape")
    for tape in (tmp_path / "tape").glob("learner-*.jsonl"):
        tape.unlink()
    (tmp_path / "tape" / "launcher.jsonl").unlink()
    out = console()
    with ProgressDisplay(tmp_path, 120, console=out) as progress:
        progress.poll()
    lines = out.file.getvalue().splitlines()
    assert sum(line.endswith("learner-0 joined") for line in lines) == 1
    assert any("learner-1 (incarnation 1) is no longer live: its conn" in line for line in lines)
    learner = progress.run.learners["learner-0"]
    assert learner.steps > 100
    assert learner.tokens == 512 * learner.steps


def test_remarks_are_shown_in_harmless_words():
    remarks = [
        ("learner-1 (incarnation 1) is no longer live", "left: the run is over"),
        ("learner-2 (incarnation 1) is no longer live", "left: goodbye"),
        ("version 1.6 of fragment 6 could not be fetched", "gone"),
        ("version 1.6 of fragment 6 could not be fetched", "http://h/9/1.13 was withdrawn (410)"),
        ("version 1.6 of fragment 6 could not be fetched", "its digest is wrong"),
        ("it starts with a fresh optimizer", "the run has only begun"),
        ("it starts with a fresh optimizer", "no other learner is training"),
    ]
    told = [line for note in remarks if (line := note_in_words("learner-0", *note))]
    assert told == [
        "learner-1 is done",
        "learner-2 left: goodbye",
        "learner-0 fetches a corrupted copy again: its digest is wrong",
        "learner-0 starts with a fresh optimizer: no other learner is training",
    ]


def test_a_run_that_went_back_shows_the_step_of_its_checkpoint(tmp_path):
    with writer(tmp_path, "shard-0") as tape:
        tape.effects(1.0, tape.event(1.0, Tick()), [ClockAdvanced(80, 1, "x")])
        tape.effects(3.0, tape.event(3.0, Tick()), [ClockAdvanced(40, 1, "x")])
    with writer(tmp_path, "launcher") as tape:
        tape.sample(2.0, WentBack("back to checkpoint 3"))
    view, lines = view_of(tmp_path)
    assert lines == ["back to checkpoint 3"]
    assert view.step == 40
    assert run_of(TapeReader(tmp_path)).step == 40


def test_a_line_comes_every_five_seconds(run_folder):
    seconds = [0.0]
    out = console()
    with ProgressDisplay(run_folder, console=out, clock=lambda: seconds[0]) as progress:
        for second in range(16):
            seconds[0] = float(second)
            progress.poll()
    assert out.file.getvalue().count("step 120,") == 3


def test_nothing_is_shown_before_the_tape_exists(tmp_path):
    seconds = [0.0]
    out = console()
    with ProgressDisplay(tmp_path / "later", 10, console=out, clock=lambda: seconds[0]) as progress:
        seconds[0] = 60.0
        progress.poll()
        text_of(progress.render())
    assert out.file.getvalue() == ""


def test_on_a_terminal_lines_are_above_the_display(run_folder):
    out = console(terminal=True)
    with ProgressDisplay(run_folder, 120, console=out) as progress:
        progress.poll()
    text = out.file.getvalue()
    assert "learner-1 is back, 5.8 s after it went down" in text
    assert text.index("is back") < text.index("step 120/120")


def test_an_unreadable_tape_is_reported_once_and_does_not_end_the_run(tmp_path):
    TapeWriter(tmp_path / "tape", "learner-0").close()
    path = tmp_path / "tape" / "learner-0.jsonl"
    path.write_text(path.read_text().replace('"v":4', '"v":9'))
    out = console(width=200)
    with ProgressDisplay(tmp_path, console=out) as progress:
        progress.poll()
        progress.poll()
    text = out.file.getvalue()
    assert text.count("progress is no longer shown; the run continues: ") == 1
    assert "schema 9" in text


def test_a_failing_display_does_not_end_the_run(run_folder, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(RunModel, "take", broken)
    out = console()
    with ProgressDisplay(run_folder, console=out) as progress:
        progress.poll()
    assert out.file.getvalue().count("the run continues: ZeroDivisionError: oh") == 1


def test_a_console_that_is_gone_does_not_end_the_run(run_folder):
    class Gone(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError(32, "Broken pipe")

    console = SteadyConsole(file=Gone(), width=80)
    with ProgressDisplay(run_folder, console=console) as progress:
        progress.poll()
        assert progress.run.records, "it still follows the run"
    assert console.quiet


def test_torn_lines_are_reported_once(tmp_path, run_folder):
    shutil.copytree(run_folder / "tape", tmp_path / "tape")
    with (tmp_path / "tape" / "shard-1.jsonl").open("a") as file:
        file.write("torn\n")
    out = console(width=200)
    with ProgressDisplay(tmp_path, console=out) as progress:
        progress.poll()
        progress.poll()
    assert out.file.getvalue().count("is torn and was skipped") == 1


def test_many_learners_are_summarized(tmp_path):
    for number in range(20):
        TapeWriter(tmp_path / "tape", f"learner-{number}").close()
    progress = ProgressDisplay(tmp_path, console=console())
    progress.poll()
    lines = text_of(progress.render()).splitlines()
    names = [line.split()[0] for line in lines if line.startswith("learner-")]
    assert names == [f"learner-{number}" for number in range(16)]
    assert any(line.startswith("… 4 more") for line in lines)


def view_of(folder):
    view = RunModel()
    view.take_all(TapeReader(folder))
    return view, [remark.text for remark in view.remarks]


def states_of(run):
    return {learner.name: learner.state for learner in status_of(run, run.latest).learners}


def writer(folder, process):
    return TapeWriter(folder, process, clock=lambda: 0.0, wall=lambda: WALL)


def test_states_of_a_shard_that_dies_and_comes_back(tmp_path):
    with writer(tmp_path, "launcher") as tape:
        tape.sample(0.1, ProcessStarted("shard-0", 5))
        tape.sample(5.0, ProcessEnded("shard-0", 1, None))
        tape.sample(5.1, RestartScheduled("shard-0", 2.0))
    with writer(tmp_path, "shard-0") as tape:
        tape.event(1.0, Received(COORDINATOR, ShardAdmitted(1, False)))
        opened = RoundOpened(7, 3, 4, Version(1, 0), False, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0, "due", 1)
        effects = [opened, ClockAdvanced(4, 1, "x")]
        tape.effects(1.0, 1, effects)
    view, lines = view_of(tmp_path)
    assert view.shards["shard-0"].phase == "restarting"
    assert list(view.shards["shard-0"].open) == [7]
    assert lines == [
        "shard-0 ended with exit code 1 at step 4",
        "shard-0 will restart in 2 s",
    ]


def test_a_learner_without_recent_steps_is_quiet(tmp_path):
    with writer(tmp_path, "learner-0") as tape:
        tape.effects(1.0, tape.event(1.0, Tick()), [Ready("held")])
        tape.event(2.0, StepFinished(1))
    with writer(tmp_path, "evaluator") as tape:
        tape.sample(30.0, Evaluated(1, None, 1))
    view, lines = view_of(tmp_path)
    assert states_of(view) == {"learner-0": "quiet"}
    assert lines == ["learner-0 joined", "evaluation at step 1: loss not finite"]


def test_a_cut_off_learner_that_steps_is_visible(tmp_path):
    write_world(tmp_path, faults=[Fault(50.0, "cut", A, 25.0)])
    view, states = RunModel(), {}
    for record in TapeReader(tmp_path):
        view.take(record)
        states[int(view.duration)] = states_of(view)
    assert (states[49][A], states[70][A], states[80][A]) == (
        "stepping",
        "cut off",
        "stepping",
    )
    assert states[70][B] == "stepping"
    again = [r.text for r in view.remarks if "is live again" in r.text]
    assert len(again) == 1
    assert again[0].startswith(f"{A} is live again after ")


def test_the_step_at_which_a_process_ends_is_that_of_the_furthest_shard(tmp_path):
    """The same step as in the summary."""
    for shard, clock in ((0, 7), (1, 8)):
        with writer(tmp_path, f"shard-{shard}") as tape:
            tape.effects(1.0, tape.event(1.0, Tick()), [ClockAdvanced(clock, 1, "x")])
    with writer(tmp_path, "learner-0") as tape:
        tape.event(1.0, StepFinished(1))
    with writer(tmp_path, "launcher") as tape:
        tape.sample(5.0, ProcessEnded("learner-0", None, 9))
    _, lines = view_of(tmp_path)
    assert lines == ["learner-0 was killed (SIGKILL) at step 8"]
    (outage,) = read_run(tmp_path).outages
    assert outage.global_step == 8


def test_a_confirmed_term_is_not_counted_twice(tmp_path):
    """A standby that becomes active while the coordinator admits the existing shards."""
    with writer(tmp_path, "shard-1") as tape:
        for at, term in ((1.0, 1), (2.0, 1), (3.0, 2)):
            tape.event(at, Received(COORDINATOR, ShardAdmitted(term, True)))
    (shard,) = read_run(tmp_path).shards.values()
    assert shard.terms == [1, 2]


def test_nearly_full_participation_is_not_rounded_to_100_percent(run_folder):
    progress = ProgressDisplay(run_folder, console=console())
    progress.run.learners["learner-0"] = LearnerLog("learner-0", reasons=Counter({TOOK_PART: 999}))
    progress.run.shards["shard-0"] = ShardLog("shard-0", merged=1000)
    assert "99.9 %" in text_of(progress.render())


def test_lasting_injected_faults_have_an_end(tmp_path):
    with writer(tmp_path, "launcher") as tape:
        tape.sample(1.0, FaultInjected("cut", "pacific", ()))
        tape.sample(61.0, FaultEnded("cut", "pacific", ()))
    _, lines = view_of(tmp_path)
    assert lines == ["fault injected: cut pacific", "fault removed: cut pacific"]


def test_a_diverged_loss_is_reported_occasionally(tmp_path):
    with writer(tmp_path, "learner-0") as tape:
        for step in range(4):
            tape.sample(float(step), LossMeasured(step, step, 1, None))
    assert view_of(tmp_path)[1] == ["the loss of learner-0 is not finite: it has diverged"]


def test_records_of_another_version_are_reported(tmp_path):
    with writer(tmp_path, "learner-0") as tape:
        tape.event(1.0, StepFinished(1))
    path = tmp_path / "learner-0.jsonl"
    path.write_text(path.read_text().replace('"tokens":1', '"words":1'))
    (line,) = view_of(tmp_path)[1]
    assert line.startswith("a record of learner-0 is skipped: StepFinished: unknown fields")


def test_a_rate_forgets_the_distant_past():
    rate = Rate()
    assert rate.per_second() is None
    for at in range(100):
        rate.add(float(at), 10.0 * at if at < 50 else 500.0 + 2 * (at - 50))
    assert rate.per_second() == pytest.approx(2.0)
    rate.clear()
    assert rate.per_second() is None


def test_no_storage_error_leaves_poll(tmp_path, monkeypatch):
    progress = ProgressDisplay(tmp_path, console=console(width=200))

    def full():
        raise StorageError("tape cannot be read: give it back")

    monkeypatch.setattr(progress._followed, "poll", full)
    progress.poll()
    assert "continues: tape cannot be read: give it back" in progress.console.file.getvalue()


def test_lines_are_in_the_order_of_events(tmp_path):
    """A process that flushes its tape late does not make the display go back in time."""
    seconds, out = [0.0], console()
    early, late = writer(tmp_path / "tape", "learner-0"), writer(tmp_path / "tape", "launcher")
    with ProgressDisplay(tmp_path, console=out, clock=lambda: seconds[0]) as progress:
        late.sample(8.0, FaultInjected("cut", "pacific", ()))
        late.flush()
        progress.poll()
        early.effects(7.5, early.event(7.5, Tick()), [Ready("held")])
        early.flush()
        seconds[0] = 0.3
        progress.poll()
        assert out.file.getvalue() == ""
        seconds[0] = 2.0
        progress.poll()
        lines = out.file.getvalue().splitlines()
    early.close()
    late.close()
    assert lines == ["00:07  learner-0 joined", "00:08  fault injected: cut pacific"]


def test_the_line_reports_a_stalled_run(tmp_path):
    """As after all processes were paused and continued: its numbers are old."""
    seconds, out = [0.0], console()
    with writer(tmp_path / "tape", "learner-0") as tape:
        tape.event(1.0, StepFinished(1))
    with ProgressDisplay(tmp_path, 100, console=out, clock=lambda: seconds[0]) as progress:
        progress.poll()
        seconds[0] = 30.0
        progress.poll()
        seconds[0] = 32.0
        progress.poll()
        assert out.file.getvalue().splitlines()[-1] == (
            "00:31  step 0/100, 1 tokens, 1/1 learners, 0 rounds, nothing new for 30 s"
        )


def test_a_display_shares_the_fold_of_another_reader(run_folder):
    followed = FollowedRun(run_folder)
    followed.poll()
    records = followed.run.records
    out = console()
    with ProgressDisplay(followed, 120, console=out) as progress:
        progress.poll()
    assert progress.run is followed.run
    assert followed.run.records == records
    assert "learner-1 was killed (SIGKILL) at step 52" in out.file.getvalue()


def test_the_first_slow_steps_give_no_estimate(tmp_path):
    """One step in 14 s, of a budget of a hundred thousand steps, would take 388 h."""
    with writer(tmp_path / "tape", "shard-0") as tape:
        for at, clock in ((1.0, 1), (15.0, 2), (15.1, 3), (15.2, 4), (15.3, 5)):
            tape.effects(at, tape.event(at, Tick()), [ClockAdvanced(clock, 1, "x")])
    display = ProgressDisplay(tmp_path, 100_000, console=console())
    for record in list(TapeReader(tmp_path))[:7]:
        display.run.take(record)
    assert display.run.step == 3
    assert "left" not in display.line()
    display.run.take_all(list(TapeReader(tmp_path))[7:])
    assert " left" in display.line()


def test_a_stalled_clock_gives_no_estimate(tmp_path):
    with writer(tmp_path / "tape", "shard-0") as tape:
        for at in range(1, 11):
            tape.effects(at, tape.event(at, Tick()), [ClockAdvanced(at, 1, "x")])
    run = run_of(TapeReader(tmp_path), "now")
    assert status_of(run, run.latest, budget=(100, None)).seconds_left == pytest.approx(90.0)
    run.duration = 60.0
    assert status_of(run, run.latest, budget=(100, None)).seconds_left is None


def test_a_learner_that_left_leaves_the_table(run_folder):
    progress = until(run_folder, 50.0)
    for name in ("learner-1", "learner-2"):
        progress.run.learners[name].left, progress.run.learners[name].process = "done", ""
    text = text_of(progress.render())
    assert "learner-0" in text
    assert "learner-1" not in text
    assert "… 2 left" in text
    assert ", 2/2 learners, " in progress.line()
    shown = text_of(render_status(progress.status()))
    assert "learner-2" not in shown
    assert "… 2 left" in shown


def joined_run(tmp_path, *steps: int):
    """A run of two joined learners, with this number of reported steps each."""
    with writer(tmp_path / "tape", "shard-0") as tape:
        for n, name in enumerate("ab"):
            hello = Hello(name, 1, "n", "learner", 0, 0, None, ())
            tape.effects(1.0, tape.event(1.0, Connected(name, hello, n)), [Accept(n, name, 1, "x")])
        for at, clock in enumerate(range(1, 8), start=2):
            tape.effects(at, tape.event(at, Tick()), [ClockAdvanced(clock, 1, "x")])
        for name, step in zip("ab", steps, strict=True):
            if step:
                tape.event(9.0, Received(name, StepReport(step, step, 0.5)))
    display = ProgressDisplay(tmp_path, 100_000, console=console())
    display.run.take_all(TapeReader(tmp_path))
    return display


def test_the_line_shows_joined_learners_while_models_compile(tmp_path):
    display = joined_run(tmp_path, 0, 0)
    assert {each.state for each in display.status().learners} == {"joined"}
    assert ", 2 joined, no step finished yet, " in display.line()
    assert " left" not in display.line(), "no learner steps, so there is no rate"


def test_stepping_and_joined_learners_are_distinguished(tmp_path):
    display = joined_run(tmp_path, 3, 0)
    assert ", 1/2 learners, " in display.line()
    assert " left" in display.line()


def test_there_is_no_estimate_after_all_have_left(tmp_path):
    display = joined_run(tmp_path, 3, 3)
    assert " left" in display.line()
    for name in "ab":
        display.run.learners[name].left = "done"
    display.run.shards["shard-0"].members.clear()
    assert ", no learners, " in display.line()
    assert " left" not in display.line()


def test_steps_during_a_pause_of_the_syncer_are_placed_correctly(tmp_path):
    """Its machine slept for 15 s: all reports of that time arrive at one instant."""
    with writer(tmp_path / "tape", "shard-0") as tape:
        hello = Hello("a", 1, "n", "learner", 0, 0, None, ())
        tape.effects(0.0, tape.event(0.0, Connected("a", hello, 1)), [Accept(1, "a", 1, "x")])
        for step in range(1, 201):
            made = 0.1 * step
            at = 18.0 + step * 1e-5 if 3.0 < made <= 18.0 else made
            tape.event(at, Received("a", StepReport(step, step, 0.1)))
    run = read_run(tmp_path)
    learner = run.learners["a"]
    assert learner.step_seconds_median == pytest.approx(0.1, rel=0.01)
    assert learner.gap_seconds_longest == pytest.approx(0.1, rel=0.1)
    assert run.account.time.stepping == pytest.approx(1.0, abs=0.02)
