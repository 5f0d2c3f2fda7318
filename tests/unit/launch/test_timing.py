"""The table of intervals is made of the constants that are in force, and of all of them."""

import ast
import importlib
import io
from dataclasses import replace
from pathlib import Path

import pytest

import decoupled_diloco
from decoupled_diloco.cli.timing import print_essential
from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.timing import intervals
from decoupled_diloco.observe.progress import SteadyConsole
from decoupled_diloco.observe.reader import TapeReader
from decoupled_diloco.observe.run_model import run_of
from decoupled_diloco.protocol import syncer_fill
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.transport import backoff
from decoupled_diloco.transport.base import Limits
from unit.observe.worlds import write_world

ROOT = Path(decoupled_diloco.__file__).parent

NOT_OF_A_RUN = {
    "transport.probe": "ddiloco doctor's measurements",
    "transport.reach": "ddiloco doctor's measurements",
    "launch.doctor": "ddiloco doctor's measurements",
}
"""Modules whose intervals play no part in a run."""

THRESHOLDS = {
    "transport.sockets.NEAR_RTT_SECONDS",
    "transport.stripes.LOCAL_RTT_SECONDS",
    "protocol.membership.DRAIN_SECONDS",
    "syncer.shard.MEMORY_SECONDS",
}
"""Durations that what happens is compared with; nothing waits for them."""


def sources():
    return sorted({source for row in intervals(Options()) for source in row.sources})


def constants_in_force():
    """Every module-level number of seconds in what a run is made of."""
    found = set()
    for package in ("protocol", "transport", "learner", "syncer", "launch"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if any(module.startswith(left_out) for left_out in NOT_OF_A_RUN):
                continue
            for node in ast.parse(path.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else []
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                found |= {f"{module}.{name}" for name in names if "SECONDS" in name}
    return found


def test_every_interval_of_a_run_is_in_the_table():
    missing = constants_in_force() - set(sources()) - THRESHOLDS
    assert not missing, "add a row to launch/timing.py, or say why nothing waits for it"
    limits = {f"transport.base.Limits.{f}" for f in Limits.__dataclass_fields__ if "seconds" in f}
    assert limits <= set(sources())


@pytest.mark.parametrize("source", sources())
def test_the_table_follows_the_constant(source, monkeypatch):
    """No number is copied: another constant gives another table."""
    before = intervals(Options())
    owner, _, name = source.rpartition(".")
    if owner.endswith(".Limits"):
        changed = replace(Limits(), **{name: getattr(Limits(), name) * 3})
        monkeypatch.setattr("decoupled_diloco.launch.timing.Limits", lambda: changed)
    else:
        module = importlib.import_module(f"decoupled_diloco.{owner}")
        value = getattr(module, name)
        other = tuple(3 * v for v in value) if isinstance(value, tuple) else 3 * value
        monkeypatch.setattr(module, name, other)
    assert intervals(Options()) != before


def row(rows, name):
    return next(row for row in rows if row.name == name)


def test_a_syncer_that_starts_again_is_at_work_within_three_seconds():
    """Dialled after at most one pause, then by the others, then the copies are on their way."""
    assert backoff.BRISK_CAP_SECONDS < syncer_fill.SETTLE_SECONDS
    assert backoff.BRISK_CAP_SECONDS + syncer_fill.SETTLE_SECONDS < 2.0


def test_settings_go_into_the_formulas():
    rows = intervals(Options(period=48, overlap=5, grace_margin=0.5), give_up_seconds=90.0)
    assert "0.5 (5 ξ_step" in row(rows, "grace window").rule
    assert row(rows, "delivery window").rule == "5 ξ_step"
    assert row(rows, "learner gives up").value == "1 min 30 s"
    assert row(intervals(Options(grace_margin=0.0)), "grace window").value == "none"


def test_the_start_of_a_run_takes_six_lines_of_a_small_terminal():
    config = RunConfig(run={"budget_steps": 8, "folder": "runs/small"})
    console = SteadyConsole(file=io.StringIO(), width=80)
    print_essential(config, Path("runs/small"), console)
    lines = console.file.getvalue().strip().splitlines()
    assert len(lines) == 6, lines
    assert [line[:9] for line in lines[:2]] == ["learner's", "reconnect"]
    assert lines[-1] == "all of them: ddiloco timing runs/small"
    assert not any("ξ" in line for line in lines)


def test_a_run_tells_the_measured_values(tmp_path):
    world = write_world(tmp_path, until=60.0)
    chronicle = run_of(TapeReader(tmp_path))
    options = world.options
    rows = intervals(options, run=chronicle)
    assert row(rows, "delivery window").value == "2 s"
    assert "not measured" not in row(rows, "ξ_step, ξ_quorum, …").value
