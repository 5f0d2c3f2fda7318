"""`ddiloco goodput` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco.learner.connections import RELAY_LOST_SECONDS
from decoupled_diloco.protocol.syncer_state import RECONNECT_SECONDS
from decoupled_diloco_plan.goodput.cluster_settings import SILENT_SECONDS, Cluster
from decoupled_diloco_plan.goodput.goodput_command import _count, _slowdowns
from decoupled_diloco_plan.goodput.goodput_options import complete_systems
from decoupled_diloco_plan.goodput.study import Effort, Row, study

ONE = ("goodput", "--chips", "50k", "--days", "0.2", "--seeds", "2")
SMALL = (*ONE, "--learners", "2,4")


def test_table_rows_and_pictures(tmp_path: Path) -> None:
    out, plot, timeline = (tmp_path / name for name in ("rows.json", "plot.png", "line.svg"))
    options = ["--out", str(out), "--plot", str(plot), "--timeline", str(timeline)]
    result = CliRunner().invoke(app, [*SMALL, "--system", "decoupled,elastic,barrier", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [(row["system"], row["learners"]) for row in rows] == [
        ("elastic", 1),
        ("barrier", 2),
        ("barrier", 4),
        ("decoupled", 2),
        ("decoupled", 4),
    ]
    assert all(row["chips"] == 50_000 and 0 < row["goodput"] < 100 for row in rows)
    assert all(row["uptime"] > 90 for row in rows)
    assert "decoupled M=4" in result.output
    assert plot.stat().st_size > 10_000
    assert "learner 3" in timeline.read_text() or timeline.stat().st_size > 10_000


def test_rows_on_standard_output() -> None:
    result = CliRunner().invoke(app, [*ONE, "--system", "data-parallel", "--json"])
    (row,) = json.loads(result.stdout)
    assert row["badput"]["restart"] > 0


def test_every_option_reaches_the_simulation() -> None:
    """Every option in this list changes the row."""
    base = [*ONE[:3], "--days", "1", "--seeds", "1", "--json"]

    def row(system: str, *options: str) -> object:
        learners = ["--learners", "2"] if system in ("barrier", "decoupled") else []
        result = CliRunner().invoke(app, [*base, "--system", system, *learners, *options])
        assert result.exit_code == 0, (options, result.output, result.exception)
        (document,) = json.loads(result.stdout)
        return document

    changes = {
        "elastic": [
            "--mtbi-years 0.5",
            "--slice-chips 64",
            "--repair-seconds 6000",
            "--repair-power 4",
            "--repair-tail 0.4",
            "--preempt 1,2,0.5",
            "--step-seconds 60",
            "--downscale-seconds 60",
            "--upscale-seconds 60",
            "--upscale-window-seconds 600",
            "--sudden",
            "--minimum-share 1",
            "--straggler-days 30",
            "--straggler-days 30 --straggler-seconds 60",
            "--straggler-days 30 --straggler-slowdown 1",
            "--scavenged-share 0.5",
            "--scavenged-share 0.5 --scavenged-block-chips 256",
            "--scavenged-share 0.5 --stay-seconds 600",
            "--scavenged-share 0.5 --away-seconds 600",
            "--seed 1",
            "--tokens-per-chip-second 1",
        ],
        "data-parallel": ["--restart-seconds 600", "--checkpoint-seconds 900"],
        "barrier": ["--period 240", "--jitter 0.5", "--slowdowns 1,1.5"],
        "decoupled": [
            "--quorum 2",
            "--quorum 2 --jitter 0.5",
            "--quorum 2 --jitter 0.5 --slack-steps 3",
            "--quorum 1 --jitter 0.5 --slack-steps 3",
            "--quorum 1 --jitter 0.5 --slack-steps 3 --no-grace",
            "--quorum 2 --slowdowns 1,1.5",
            "--scavenged-share 0.5",
            "--scavenged-share 0.5 --join-seconds 300",
            "--relays 2",
            "--relays 1",
            "--relays 1 --relay-days 1",
            "--relays 1 --relay-away-seconds 6000",
        ],
    }
    for system, each in changes.items():
        documents = [row(system), *(row(system, *options.split()) for options in each)]
        texts = [json.dumps(document) for document in documents]
        assert len(set(texts)) == len(texts), system


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chips", "0"), "chips=0"),
        (("--chips", "1.5"), "--chips '1.5' is not a whole number"),
        (("--chips", "1k"), "learners=8 exceeds the 4 slices"),
        (("--quorum", "9"), "quorum=9"),
        (("--system", "x"), "--system 'x' is not valid: give one of"),
        (("--downscale-seconds", "-1"), "downscale_seconds=-1"),
        (("--slowdowns", "1x4", "--days", "1"), "slowdowns has 4 values for learners=8"),
        (("--slowdowns", "fast"), "'fast' is not a valid number"),
        (("--preempt", "1,2"), "is not START,HOURS,SHARE"),
        (("--tokens-per-chip-second", "0"), "--tokens-per-chip-second=0 is out of range"),
        (("--mtbi-years", "0"), "--mtbi-years=0 is out of range: it must be greater than 0"),
        (("--chips", "-5"), "--chips: '-5' is not a valid count"),
        (("--learners", "-1"), "--learners: '-1' is not a valid count"),
        (("--learners", "0"), "learners=0 is out of range"),
        (("--plot", "x.foo"), "does not end in .png, .svg, .pdf"),
        (("--slack-steps", "2"), "--slack-steps requires --slowdowns or --jitter"),
        (("--jitter", "0.1", "--no-grace"), "--grace requires --slack-steps"),
        (("--system", "barrier", "--scavenged-share", "1"), "combined with system='barrier'"),
        (("--days", "-1"), "days=-1"),
        (("--preempt", "1,2,0.5"), "give days (--days)"),
        (("--preempt", "30,2,0.5", "--days", "1"), "is after the end, days=1"),
        (("--calibrate", "--chips", "1M"), "--calibrate cannot be combined with --chips"),
        (("--system", "elastic", "--quorum", "2"), "--quorum is for decoupled only"),
        (("--system", "elastic", "--learners", "2"), "--learners is for barrier and decoupled"),
        (("--stay-seconds", "60"), "--stay-seconds requires --scavenged-share"),
        (("--relays", "9"), "relays=9 exceeds learners=8"),
        (("--relays", "-1"), "relays=-1 is out of range"),
        (("--relays", "2", "--relay-days", "0"), "interval_seconds=0 is out of range"),
        (("--relay-days", "2"), "--relay-days requires --relays"),
        (("--relays", "2", "--system", "elastic"), "--relays is for decoupled only"),
    ],
)
def test_invalid_options_are_reported(options: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["goodput", *options])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_relays_lose_no_step_and_save_bytes_while_they_run() -> None:
    """With a failure every other day and a day away, half of the time all payloads pass."""
    options = ("--system", "decoupled", "--learners", "8", "--relays", "2", "--relay-days", "1")
    with_relays = CliRunner().invoke(
        app, [*ONE, *options, "--relay-away-seconds", "86400", "--json"]
    )
    (row,) = json.loads(with_relays.stdout)
    assert row["relays"] == {
        "sites": 2,
        "failures_per_day": 1.0,
        "silent_percent": pytest.approx(100 * RELAY_LOST_SECONDS / (2 * 86400)),
        "link_bytes_percent": pytest.approx(100 * (0.5 + 0.5 * 2 / 8)),
    }
    alone = CliRunner().invoke(app, [*ONE, *options[:4], "--json"])
    (same,) = json.loads(alone.stdout)
    assert same["goodput"] == row["goodput"]
    assert same["relays"] is None
    text = " ".join(CliRunner().invoke(app, [*ONE, *options]).stdout.split())
    assert "decoupled M=8, 2 sites with a relay: 2 relays fail per day; no step is lost" in text


def test_a_learner_stays_live_until_it_has_left_a_failed_relay() -> None:
    """So the failure of a relay does not stall the clock, whatever the quorum is."""
    assert SILENT_SECONDS == RELAY_LOST_SECONDS <= RECONNECT_SECONDS


def test_a_list_without_a_value_is_reported() -> None:
    result = CliRunner().invoke(app, ["goodput", "--chips", ","])
    assert result.exit_code == 2
    assert "--chips is empty: write" in result.stderr


@pytest.mark.parametrize("option", ["--out", "--plot", "--timeline"])
def test_an_output_that_cannot_be_written_is_reported_before_the_work(
    option: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.png").mkdir()
    for name, message in (("no/file.png", "does not exist"), ("folder.png", "it is a folder")):
        months = ["goodput", "--days", "3000", option, str(tmp_path / name)]
        result = CliRunner().invoke(app, months)
        assert isinstance(result.exception, StorageError)
        assert message in str(result.exception)


def test_without_system_names_all_systems_are_compared() -> None:
    result = CliRunner().invoke(app, [*ONE, "--learners", "1,2", "--json"])
    rows = json.loads(result.stdout)
    assert [(row["system"], row["learners"]) for row in rows] == [
        ("data-parallel", 1),
        ("elastic", 1),
        ("barrier", 1),
        ("barrier", 2),
        ("decoupled", 1),
        ("decoupled", 2),
    ]
    borrowed = CliRunner().invoke(app, [*ONE, "--scavenged-share", "1", "--json"])
    assert "barrier" not in {row["system"] for row in json.loads(borrowed.stdout)}


def test_learners_1_is_accepted_for_a_system_with_one_learner() -> None:
    result = CliRunner().invoke(app, [*ONE, "--system", "elastic", "--learners", "1,8"])
    assert result.exit_code == 0, result.output


def test_an_interrupt_prints_the_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Press Ctrl-C in the third row."""
    done = []

    def stopped(cluster: Cluster, effort: Effort) -> Row:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(cluster)
        return study(cluster, effort)

    monkeypatch.setattr("decoupled_diloco_plan.goodput.goodput_command.study", stopped)
    out = tmp_path / "rows.json"
    result = CliRunner().invoke(app, [*ONE, "--out", str(out)])
    assert result.exit_code == INTERRUPTED
    assert "stopped: 2 of 4 rows are done" in result.output
    assert [row["system"] for row in json.loads(out.read_text())] == ["data-parallel", "elastic"]


def test_counts_with_suffixes() -> None:
    texts = ("150000", "150k", "2.4M", "2.4e6", "150_000", "1e5", "0.5M")
    assert [_count(text, "") for text in texts] == [
        150_000,
        150_000,
        2_400_000,
        2_400_000,
        150_000,
        100_000,
        500_000,
    ]
    for text in ("1e400", "1.5", "nan", "inf", "", "k", "1e-3"):
        with pytest.raises(ConfigError, match=r"is (not a whole number|not a valid count)"):
            _count(text, "--chips")
    assert _slowdowns("1x2,1.18") == (1.0, 1.0, 1.18)


def test_system_names_are_completed() -> None:
    assert [name for name, _ in complete_systems("decoupled,e")] == ["decoupled,elastic"]
    assert len(complete_systems("")) == 4
