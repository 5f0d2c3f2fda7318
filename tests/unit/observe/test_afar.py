"""Learners whose tapes are elsewhere: what the shards heard of them is enough for a true report."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decoupled_diloco.observe.accounts import TOKEN_PARTS, account_for
from decoupled_diloco.observe.explain_learner import explain_learner
from decoupled_diloco.observe.progress import ProgressDisplay
from decoupled_diloco.observe.reader import TapeReader
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.report import problems_of, render_report
from decoupled_diloco.observe.run_model import RunModel, read_run, run_of
from decoupled_diloco.observe.status import status_of
from decoupled_diloco.observe.summary import learner_rows, totals
from decoupled_diloco.observe.terminal import SteadyConsole
from decoupled_diloco.observe.words import percent
from decoupled_diloco.protocol.messages import LOSS_MAX
from decoupled_diloco.simulate.faults import Fault
from unit.observe.worlds import BACK_AT, CUT_AT, HEALED_AT, KILLED_AT, A, B, C, D, write_world

LEARNERS = [A, B, C, D]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which every process has its tape in the folder."""
    folder = tmp_path_factory.mktemp("whole")
    write_world(folder)
    return folder


def without_learners_tapes(folder: Path) -> Path:
    for path in (folder / "tape").iterdir():
        if not path.name.startswith(("shard-", "coordinator")):
            path.unlink()
    return folder


@pytest.fixture(scope="module")
def syncers(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run as the syncer alone has it."""
    folder = tmp_path_factory.mktemp("syncers")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    return without_learners_tapes(folder)


def both(whole: Path, syncers: Path) -> tuple[RunModel, RunModel]:
    return read_run(whole), read_run(syncers)


def test_steps_tokens_and_participation_are_those_of_the_learners_tapes(
    whole: Path, syncers: Path
) -> None:
    near, far = both(whole, syncers)
    assert sorted(far.learners) == LEARNERS == sorted(far.afar)
    assert near.afar == []
    for name, learner in far.learners.items():
        own = near.learners[name]
        assert abs(learner.steps - own.steps) <= 1, name  # what it took last, nobody heard of
        assert learner.tokens == pytest.approx(own.tokens, rel=0.02)
        assert far.participation_of(learner) == near.participation_of(own)
        assert learner.step_seconds_median == pytest.approx(own.step_seconds_median, rel=0.05)
        assert len(learner.lives) == len(own.lives)
    assert far.global_step == near.global_step


def test_tokens_are_accounted_for_without_remainder(whole: Path, syncers: Path) -> None:
    near, far = map(account_for, both(whole, syncers))
    for account in (far.tokens, *(each.tokens for each in far.learners.values())):
        assert account.trained == sum(getattr(account, part) for part in TOKEN_PARTS)
        assert account.overwritten > 0
        assert account.in_flight == account.missed == account.given_up == 0
    assert far.tokens.merged == pytest.approx(near.tokens.merged, rel=0.01)
    assert far.tokens.discarded_share == pytest.approx(near.tokens.discarded_share, abs=0.01)
    assert near.tokens.overwritten == 0


def test_status_report_and_explanation_tell_the_same(syncers: Path) -> None:
    records = list(TapeReader(syncers))
    far, chronicle = run_of(records), run_of(records)
    account = account_for(far)
    status = status_of(chronicle, chronicle.latest, (), account)
    assert status.discarded_whole
    assert status.discarded_tokens == pytest.approx(account.tokens.tokens("discarded"))
    told = " ".join(explain_learner(chronicle, C))
    assert f"{percent(account.learners[C].time.share('down'))}: down" in told
    assert "overwritten: in flight, missed or given up" in told


def test_time_is_accounted_for(whole: Path, syncers: Path) -> None:
    near, far = map(account_for, both(whole, syncers))
    assert far.time.goodput == pytest.approx(near.time.goodput, abs=0.03)
    assert far.uptime == pytest.approx(near.uptime, abs=0.02)
    assert far.time.seconds("down") == pytest.approx(near.time.seconds("down"), abs=3.0)


def test_who_died_and_who_was_cut_off_is_told(syncers: Path) -> None:
    far = read_run(syncers)
    (outage,) = far.outages
    assert outage.who == C
    assert KILLED_AT - 2.0 < outage.down_at <= KILLED_AT
    assert outage.restarted_at == pytest.approx(BACK_AT, abs=1.0)
    own = far.learners[B]
    assert own.gap_seconds_longest is not None
    assert own.gap_seconds_longest < 2.0, "it stepped on while its link was cut"
    assert CUT_AT < own.lives[-1].steps_at[-1] > HEALED_AT


def test_the_report_says_whose_tapes_are_missing_and_shows_the_rest(syncers: Path) -> None:
    far = read_run(syncers)
    assert problems_of(far) == [
        f"The tapes of {A}, {B}, {C} and {D} are not here: what is told of them is what the syncer "
        "has heard."
    ]
    page = render_report(far)
    assert "4 learners, 2 syncer shards" in page
    assert [row[0] for row in learner_rows(far)] == ["", *LEARNERS]
    shown = {total.name: total.text for total in totals(far)}
    assert shown["tokens"] != "0"


def with_losses(records: Iterator[Record], loss: float) -> Iterator[Record]:
    """The tape of a run whose learners tell their losses."""
    for record in records:
        message = record.data.get("message")
        if record.type == "Received" and message.get("type") == "StepReport":
            yield replace(record, data={**record.data, "message": {**message, "loss": loss}})
        else:
            yield record


def test_losses_come_with_the_reports(syncers: Path) -> None:
    far = run_of(with_losses(iter(TapeReader(syncers)), 2.5))
    for learner in far.learners.values():
        assert {loss.loss for loss in learner.losses} == {2.5}
        assert len(learner.losses) == pytest.approx(learner.steps, abs=10)
        steps = [loss.global_step for loss in learner.losses]
        assert steps == sorted(steps)
        assert steps[-1] > 60
    view, chronicle = RunModel(), run_of(with_losses(iter(TapeReader(syncers)), 2.5))
    for record in with_losses(iter(TapeReader(syncers)), 2.5):
        view.take(record)
    assert {learner.loss for learner in view.learners.values()} == {2.5}
    assert {learner.loss for learner in status_of(chronicle, chronicle.latest).learners} == {2.5}


def test_a_loss_that_is_no_number_is_told_as_such(syncers: Path) -> None:
    spoilt = list(with_losses(iter(TapeReader(syncers)), LOSS_MAX))
    far = run_of(spoilt)
    assert all(learner.losses == [] for learner in far.learners.values())
    assert f"{A} had" in " ".join(problems_of(far))
    view = RunModel()
    view.take_all(spoilt)
    lines = [remark.text for remark in view.remarks]
    assert lines.count(f"the loss of {A} is not finite: it has diverged") == 1
    assert view.learners[A].loss is None


def test_reports_that_a_stopped_shard_read_late_make_no_gap(tmp_path: Path) -> None:
    """All shards stand still for 20 s, and then read everything at once."""
    write_world(tmp_path, until=60.0)
    for path in sorted((tmp_path / "tape").glob("shard-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        first = lines[0]["at"]
        for line in lines:
            if 10.0 < line["at"] - first < 30.0:
                line["at"] = first + 30.0
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    far = read_run(without_learners_tapes(tmp_path))
    for name in (A, D):
        gap = far.learners[name].gap_seconds_longest
        assert gap is not None
        assert gap < 3.0


def test_explain_invents_no_gap_while_the_syncer_stood_still(tmp_path: Path) -> None:
    """It heard of twenty steps by one report, in which their number is told."""
    write_world(tmp_path, until=60.0)
    for path in sorted((tmp_path / "tape").glob("shard-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        first = lines[0]["at"]
        kept = [
            line
            for line in lines
            if not (
                10.0 < line["at"] - first < 30.0
                and line["data"].get("message", {}).get("type") == "StepReport"
            )
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    run = read_run(without_learners_tapes(tmp_path), "details")
    told = " ".join(explain_learner(run, A, live=True))
    assert "none more than 3 times that" in told


def test_one_that_fell_silent_and_never_came_back_was_not_there_at_the_end(
    tmp_path: Path,
) -> None:
    write_world(tmp_path, faults=[Fault(60.0, "crash", D, 1000.0)])
    far = read_run(without_learners_tapes(tmp_path))
    (outage,) = far.learners[D].outages
    assert outage.how == "fell silent"
    assert outage.restarted_at is None
    assert account_for(far).learners[D].tokens.crashed > 0
    assert account_for(far).learners[A].tokens.crashed == 0


def test_the_line_counts_who_steps_now(tmp_path: Path) -> None:
    write_world(tmp_path, faults=[Fault(60.0, "crash", D, 1000.0)], until=75.0)
    progress = ProgressDisplay(tmp_path, console=SteadyConsole(file=io.StringIO()))
    told, states = {}, {}
    losses = {A: 1.0, B: 2.0, C: 3.0, D: 9.0}
    for record in TapeReader(without_learners_tapes(tmp_path)):
        progress.run.take(record)
        for name, learner in progress.run.learners.items():
            learner.loss = losses[name]
        now = int(progress.run.duration)
        states[now] = {learner.name: learner.state for learner in progress.status().learners}
        told[now] = progress.line()
    assert ", loss 3.750, 4/4 learners, " in told[55]
    assert ", loss 2.000, 3/4 learners, " in told[74]
    assert [states[at][D] for at in (55, 61, 74)] == ["stepping", "out of reach", "down"]
