"""Learners on other machines: what the shards received from them is enough for a true report."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decoupled_diloco.protocol.messages import LOSS_MAX
from decoupled_diloco.run_model import RunModel, read_run, run_of
from decoupled_diloco.run_model.accounts import TOKEN_PARTS, account_for
from decoupled_diloco.run_model.phrases import percent
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.explain import explain_learner
from decoupled_diloco.show.report import problems_of, render_report
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.tables import learner_rows, totals
from decoupled_diloco.show.terminal import ProgressDisplay
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import Record
from unit.show.show_worlds import BACK_AT, CUT_AT, HEALED_AT, KILLED_AT, A, B, C, D, write_world
from worlds.faults import Fault

LEARNERS = [A, B, C, D]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose processes all have their tapes in the folder."""
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
    """The same run as the syncer alone sees it."""
    folder = tmp_path_factory.mktemp("syncers")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    return without_learners_tapes(folder)


def both(whole: Path, syncers: Path) -> tuple[RunModel, RunModel]:
    return read_run(whole), read_run(syncers)


def test_steps_tokens_and_participation_match_the_learners_tapes(
    whole: Path, syncers: Path
) -> None:
    near, far = both(whole, syncers)
    assert sorted(far.learners) == LEARNERS == sorted(far.afar)
    assert near.afar == []
    for name, learner in far.learners.items():
        own = near.learners[name]
        assert abs(learner.steps - own.steps) <= 1, name  # its last step was never reported
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


def test_status_report_and_explanation_agree(syncers: Path) -> None:
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


def test_killed_and_cut_off_learners_are_reported(syncers: Path) -> None:
    far = read_run(syncers)
    (outage,) = far.outages
    assert outage.process == C
    assert KILLED_AT - 2.0 < outage.down_at <= KILLED_AT
    assert outage.restarted_at == pytest.approx(BACK_AT, abs=1.0)
    own = far.learners[B]
    assert own.gap_seconds_longest is not None
    assert own.gap_seconds_longest < 2.0, "it continued to step while its link was cut"
    assert CUT_AT < own.lives[-1].steps_at[-1] > HEALED_AT


def test_the_report_names_missing_tapes_and_shows_the_rest(syncers: Path) -> None:
    far = read_run(syncers)
    assert problems_of(far) == [
        f"The tapes of {A}, {B}, {C} and {D} are on other machines: their numbers come from the "
        "syncer."
    ]
    page = render_report(far)
    assert "4 learners, 2 syncer shards" in page
    assert [row[0] for row in learner_rows(far)] == ["", *LEARNERS]
    shown = {total.name: total.text for total in totals(far)}
    assert shown["tokens"] != "0"


def with_losses(records: Iterator[Record], loss: float) -> Iterator[Record]:
    """The tape of a run whose learners report their losses."""
    for record in records:
        message = record.data.get("message")
        if record.type == "Received" and message.get("type") == "StepReport":
            yield replace(record, data={**record.data, "message": {**message, "loss": loss}})
        else:
            yield record


def test_losses_come_from_the_reports(syncers: Path) -> None:
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


def test_a_loss_that_is_not_finite_is_shown_as_such(syncers: Path) -> None:
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
    """All shards are paused for 20 s, and then read everything at once."""
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


def test_explain_invents_no_gap_while_the_syncer_was_paused(tmp_path: Path) -> None:
    """The syncer received one report about twenty steps, which has their number."""
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
    assert "No gap is longer than 3 times that" in told


def test_a_learner_that_fell_silent_is_absent_at_the_end(
    tmp_path: Path,
) -> None:
    write_world(tmp_path, faults=[Fault(60.0, "crash", D, 1000.0)])
    far = read_run(without_learners_tapes(tmp_path))
    (outage,) = far.learners[D].outages
    assert outage.how == "fell silent"
    assert outage.restarted_at is None
    assert account_for(far).learners[D].tokens.crashed > 0
    assert account_for(far).learners[A].tokens.crashed == 0


def test_the_line_counts_the_learners_that_step_now(tmp_path: Path) -> None:
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
