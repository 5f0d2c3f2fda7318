"""Measured constants in predictions match their results folders."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from decoupled_diloco_plan.bandwidth import measured

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def read(folder: str, name: str = "result.json") -> Any:
    return json.loads((RESULTS / folder / name).read_text())


def test_merging() -> None:
    config = read("merging", "config.json")
    assert config["mib"] * 2**20 // 4 == measured.MERGE_ELEMENTS
    folds = median(row["rda, one segment"] for row in read("merging", "raw.json"))
    assert pytest.approx(folds / config["bodies"], rel=0.01) == measured.FOLD_SECONDS
    rest = read("merging")["result"]["seconds of the other stages, one fragment"]
    assert (
        pytest.approx(sum(value["median"] for value in rest.values()), rel=0.01)
        == measured.MERGE_SECONDS
    )


def test_the_memory_of_a_shard() -> None:
    (row,) = read("shard_memory", "raw.json")
    (small, process), *_, (large, most) = row
    each = (most - process) / (large - small)
    assert pytest.approx(each, rel=0.03) == measured.SYNCER_BYTES
    assert pytest.approx(process - small * each, rel=0.03) == measured.SHARD_BYTES


def test_the_overhead_of_a_step_and_the_usable_share_of_a_link() -> None:
    cases = [c for c in read("step_overhead")["result"].values() if isinstance(c, dict)]
    inside = max(case["inside_step_percent"]["median"] for case in cases)
    assert pytest.approx(inside / 100, abs=5e-5) == measured.STEP_OVERHEAD
    beside = max(case["bytes_per_merge_over_theory_percent"] for case in cases)
    assert pytest.approx(beside / 100, abs=5e-5) == measured.TRAFFIC_OVERHEAD
    wan = read("data_plane_wan")["result"]
    assert pytest.approx(wan["put_share_of_link"], abs=0.005) == measured.LINK_SHARE


def test_the_error_bars_are_those_of_the_real_runs() -> None:
    result = read("plan_real")["result"]
    handling = result["handling seconds per payload"]
    assert pytest.approx(handling, abs=5e-5) == measured.HANDLING_SECONDS
    for wait, largest in result["largest error"].items():
        utilization, traffic = largest["utilization"], largest["traffic"]
        assert pytest.approx(utilization, abs=5e-4) == measured.UTILIZATION_ERRORS[wait]
        assert pytest.approx(traffic, abs=5e-3) == measured.TRAFFIC_ERRORS[wait]
    rates = [case["mbit"] for case in result["cases"]]
    assert (min(rates), max(rates)) == measured.MEASURED_MBIT
    for case in result["cases"]:
        off = abs(case["predicted"]["utilization"] - case["measured"]["utilization"])
        wait = "never" if case["system"] == "decoupled" else "at_overlap"
        assert off <= measured.UTILIZATION_ERRORS[wait] + 5e-4


def test_the_loss_of_long_periods() -> None:
    result = read("schedule")["result"]
    for period, loss in measured.PERIOD_LOSS_PERCENT.items():
        assert pytest.approx(result[f"H = {period}"]["gap_percent"]["mean"], abs=0.005) == loss


def test_the_loss_of_low_bit_formats() -> None:
    result = read("traffic")["result"]
    for name, loss in measured.WIRE_LOSS_PERCENT.items():
        gap = result[f"M=4 adamw 0.008 {name}"]["gap_to_bf16_percent"]
        assert pytest.approx([gap["mean"], gap["low"], gap["high"]], abs=0.005) == list(loss)
