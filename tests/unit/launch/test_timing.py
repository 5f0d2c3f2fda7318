"""The table of intervals names the constants that are in force, and what a run has measured."""

from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest

from decoupled_diloco.launch.timing import MODULES, TABLE, Interval, intervals, name_of
from decoupled_diloco.protocol import first_copies
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.run_model import run_of
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.transport import backoff
from decoupled_diloco.transport.limits import Limits
from unit.show.show_worlds import write_world

NAMED = sorted({field for _, field, _, _ in Formatter().parse(TABLE) if field and "." in field})


@pytest.mark.parametrize("field", NAMED)
def test_the_table_follows_the_constant(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is copied: another constant gives another table."""
    before = intervals(Options(), lease_seconds=5.0)
    owner, _, name = field.partition("[")[0].rpartition(".")
    if owner == "limits":
        changed = replace(Limits(), **{name: getattr(Limits(), name) * 3})
        monkeypatch.setattr("decoupled_diloco.launch.timing.Limits", lambda: changed)
    else:
        [module] = [each for each in MODULES if name_of(each) == owner]
        value = getattr(module, name)
        other = tuple(3 * v for v in value) if isinstance(value, tuple) else 3 * value
        monkeypatch.setattr(module, name, other)
    assert intervals(Options(), lease_seconds=5.0) != before


def row(rows: list[Interval], name: str) -> Interval:
    return next(row for row in rows if row.name == name)


def test_a_syncer_that_starts_again_is_at_work_within_three_seconds() -> None:
    """Dialled after at most one pause, then by the others, then the copies are on their way."""
    assert backoff.BRISK_CAP_SECONDS < first_copies.SETTLE_SECONDS
    assert backoff.BRISK_CAP_SECONDS + first_copies.SETTLE_SECONDS < 2.0


def test_settings_go_into_the_formulas() -> None:
    rows = intervals(Options(period=48, overlap=5, grace_margin=0.5), give_up_seconds=90.0)
    assert "0.5 (5 ξ_step" in row(rows, "grace window").rule
    assert row(rows, "delivery window").rule == "5 ξ_step"
    assert row(rows, "learner gives up").value == "1 min 30 s"
    assert row(intervals(Options(grace_margin=0.0)), "grace window").value == "none"
    assert row(rows, "lease renewed").value == "no standbys"


def test_a_run_tells_the_measured_values(tmp_path: Path) -> None:
    world = write_world(tmp_path, until=60.0)
    rows = intervals(world.options, run=run_of(TapeReader(tmp_path)))
    assert row(rows, "delivery window").value == "2 s"
    for name in ("ξ_step, ξ_quorum, …", "grace window"):
        assert "not measured" not in row(rows, name).value
