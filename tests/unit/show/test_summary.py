import io
import math

import pytest

from decoupled_diloco.run_model import read_run
from decoupled_diloco.run_model.facts import Evaluation, LearnerLog, Outage, ProcessLife
from decoupled_diloco.run_model.phrases import percent
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.tables import outage_line, totals
from decoupled_diloco.show.terminal import print_summary
from unit.show.models import model_of


@pytest.fixture(scope="module")
def history(run_folder):
    return read_run(run_folder)


def summary(history, files=(), width=80):
    console = SteadyConsole(file=io.StringIO(), width=width, color_system=None)
    print_summary(history, files, console)
    return console.file.getvalue()


def test_the_summary_describes_the_run(history):
    lines = [" ".join(line.split()) for line in summary(history, ["report.html"]).splitlines()]
    for line in (
        "duration 1 min 6 s",
        "global steps 120",
        "tokens 219k, 3.68k/s",
        "evaluation loss 4.8139 → 2.1519, steps 0 → 119",
        "rounds merged 234, 6 abandoned",
        "goodput 97 %, joining 2 %, discarded 0.5 %, down 0.4 %, other 0.1 %",
        "tokens discarded 1.08k, 0.5 %",
        "learners sent 14.3 MiB, received 19.1 MiB",
        "learner-1 108 55.3k 2.115 89 % 1 % 5.8 s 500 ms 500 ms 1",
        "learner-3 80 41k 2.162 67 % 0.3 % – 750 ms 750 ms 0",
        "shard-0 120 117 3 300 ms 120 ms 1",
        "learner-1 was killed at 30.2 s (step 52), back after 5.8 s (down 1 s, joining 4.8 s); "
        "steps lost by the others: 0",
        "written report.html",
    ):
        assert line in lines


def test_summary_fits_eighty_columns(history):
    lines = summary(history, width=200).splitlines()
    assert max(len(line.rstrip()) for line in lines if "was killed" not in line) <= 90
    lines = summary(history, width=80).splitlines()
    assert max(len(line.rstrip()) for line in lines if "was killed" not in line) <= 80


def test_summary_of_an_empty_run():
    text = summary(model_of(problems=["learner-0.jsonl: line 3 is torn"]))
    assert "no evaluation" in text
    assert "the tape is incomplete: learner-0.jsonl: line 3 is torn" in text


def test_the_summary_of_many_learners_is_shortened():
    history = model_of()
    for number in range(100):
        name = f"learner-{number}"
        history.learners[name] = LearnerLog(name, [ProcessLife(0.0, 0.0)], outages=[outage(name)])
    lines = summary(history).splitlines()
    assert "… and 76 more: see the report" in lines
    assert "… and 76 more absences: see the report" in lines
    assert len(lines) < 100


def outage(process="learner-0", **changes):
    fields = {"restarted_at": None, "back_at": None, "lost_steps": {}, "how": "fell silent"}
    return Outage(process=process, down_at=10.0, global_step=7, **(fields | changes))


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (outage(), "learner-0 fell silent at 10.0 s (step 7), not restarted"),
        (
            outage(restarted_at=12.0),
            "learner-0 fell silent at 10.0 s (step 7), restarted but not back before the end",
        ),
        (
            outage(how="ended with exit code 4", back_at=12.5, lost_steps={"learner-1": 3}),
            "learner-0 ended with exit code 4 at 10.0 s (step 7), back after 2.5 s; "
            "steps lost by the learners: 3 (learner-1 3)",
        ),
        (
            outage(restarted_at=10.5, back_at=21.5),
            "learner-0 fell silent at 10.0 s (step 7), back after 11.5 s (down 500 ms, "
            "joining 11 s)",
        ),
        (
            outage("shard-0", how="killed (SIGTERM)"),
            "shard-0 was killed (SIGTERM) at 10.0 s (step 7), not restarted",
        ),
    ],
)
def test_outages_as_text(what, line):
    assert outage_line(model_of(), what) == line


def evaluation_line(*losses):
    evaluations = [Evaluation(float(i), i, loss, 1) for i, loss in enumerate(losses)]
    history = model_of(evaluations=evaluations)
    total = totals(history)[3]
    return (total.text, total.detail)


def test_evaluations_as_text():
    assert evaluation_line() == ("–", "no evaluation")
    assert evaluation_line(None) == ("not finite", "it diverged")
    assert evaluation_line(2.5) == ("2.5000", "step 0")
    assert evaluation_line(2.5, None, 1.25) == ("2.5000 → 1.2500", "steps 0 → 2")


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_shown_as_such(value):
    evaluation = Evaluation(1.0, 1, 2.5, 1, (("accuracy", value),))
    history = model_of(evaluations=[evaluation])
    (total,) = [t for t in totals(history) if t.name == "accuracy"]
    assert (total.text, total.number) == ("not finite", None)


def test_a_share_just_below_one_is_not_rounded_up_to_it():
    assert [percent(share) for share in (1.0, 0.9999, 0.996, 0.5)] == [
        "100 %",
        "99.9 %",
        "99.6 %",
        "50 %",
    ]
