"""Two runs' settings are compared by the first one that differs."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of, public_text, read_public


def public(**tables: Any) -> Any:
    run = {"budget_steps": 10, **tables.pop("run", {})}
    return read_public(public_text(RunConfig(run=run, **tables)))


def test_equal_settings_do_not_differ() -> None:
    private = public(run={"folder": "elsewhere", "evaluator": False}, syncer={"port": 9000})
    assert difference_of(public(), private) == ""


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"sync": {"period": 48}}, "sync.period is 24 here and 48 there"),
        ({"syncer": {"shards": 2}}, "shards is 1 here and 2 there"),
        ({"run": {"seed": 3}}, "run.seed is 0 here and 3 there"),
        ({"outer": {"optimizer": "sgd"}}, "outer.momentum is 0.5 here and 0.0 there"),
        (
            {"workload": {"options": {"layers": 2}}},
            "workload.options.layers is None here and 2 there",
        ),
    ],
)
def test_the_first_difference_is_named(tables: dict[str, Any], sentence: str) -> None:
    assert difference_of(public(), public(**tables)) == sentence
