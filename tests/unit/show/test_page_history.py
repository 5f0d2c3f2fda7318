"""History of a run: its samples, and their charts on the live page."""

from __future__ import annotations

import re

import pytest

from decoupled_diloco.run_model.facts import Evaluation, LearnerLog
from decoupled_diloco.show.page.history import LINES_MAX, SAMPLES_MAX, PageHistory, charts_of
from unit.show.models import model_of


def sampled(learners: int, seconds: int) -> PageHistory:
    """A run in which learner m's loss is 4 + m at first and falls by 0.01 per second."""
    history, run = PageHistory(), model_of(tokens=1)
    for number in range(learners):
        run.learners[f"learner-{number}"] = LearnerLog(f"learner-{number}", process="down")
    for at in range(seconds):
        for number, learner in enumerate(run.learners.values()):
            learner.loss = 4.0 + number - 0.01 * at
        if at % 10 == 0:
            run.evaluations = [Evaluation(at, at, 3.5, 64)]
        history.follow(run, float(at))
    return history


def names(count: int) -> list[str]:
    return [f"learner-{number}" for number in range(count)]


def label(svg: str) -> str:
    [first, *_] = re.findall('aria-label="([^"]*)"', svg)
    return str(first)


def test_few_learners_have_a_line_each() -> None:
    charts = charts_of(sampled(3, 30), names(3))
    assert charts["keys"] == [
        *(["c0", "learner-0"], ["c1", "learner-1"], ["c2", "learner-2"]),
        ["ink", "global weights"],
    ]
    told = label(charts["loss"])
    assert re.search(r"now learner-0 3\.7\d\d, .* and global weights 3\.500", told)
    assert charts["loss"].count("<polyline") >= 2 * 4, "for a wide window, and for a phone"
    assert charts["counts"] == ""


def test_many_learners_share_a_line_in_a_band() -> None:
    charts = charts_of(sampled(LINES_MAX + 1, 30), names(LINES_MAX + 1))
    assert [css for css, _ in charts["keys"]] == ["c0", "ink", "band"]
    assert 'class="band"' in charts["loss"]
    assert label(charts["counts"]) == "Learners by state over time; now 13 down."
    assert 'class="down"' in charts["counts"]


def test_unknown_values_are_not_drawn() -> None:
    charts = charts_of(PageHistory(), [])
    assert charts == {"loss": "", "counts": "", "bytes": "", "speed": "", "keys": []}


@pytest.mark.parametrize("seconds", [SAMPLES_MAX + 1, 5 * SAMPLES_MAX])
def test_a_long_run_keeps_few_samples_and_its_newest_losses(seconds: int) -> None:
    history = sampled(2, seconds)
    assert len(history.samples) <= SAMPLES_MAX
    assert history.interval * len(history.samples) == pytest.approx(seconds, abs=history.interval)
    assert history.spans["learner-0"] == [[0, "down"]]
    charts = charts_of(history, names(2))
    assert len(charts["loss"]) < 60_000
    assert f"learner-0 {4 - 0.01 * seconds:.1f}"[:12] in label(charts["loss"])
