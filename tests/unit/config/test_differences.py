"""Two runs' settings are compared by the first one that differs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import difference_of, public_text, read_public
from decoupled_diloco.errors import ProtocolError


def public(**tables: Any) -> Any:
    run = {"max_steps": 10, **tables.pop("run", {})}
    return read_public(public_text(RunConfig(run=run, **tables))).public()


def test_equal_settings_do_not_differ() -> None:
    private = public(run={"folder": "elsewhere", "evaluator": False}, syncer={"port": 9000})
    assert difference_of(public(), private) == ""


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"sync": {"sync_every": 48}}, "sync.sync_every is 24 here and 48 there"),
        ({"syncer": {"shards": 2}}, "shards is 1 here and 2 there"),
        ({"run": {"seed": 3}}, "run.seed is 0 here and 3 there"),
        ({"outer": {"optimizer": "sgd"}}, "outer.momentum is 0.5 here and 0.0 there"),
        (
            {"workload": {"options": {"layers": 2}}},
            "workload.options.layers is not set here and 2 there",
        ),
    ],
)
def test_the_first_difference_is_named(tables: dict[str, Any], sentence: str) -> None:
    assert difference_of(public(), public(**tables)) == sentence


MALFORMED = [
    "",
    "nonsense",
    "[]",
    "{}",
    "7",
    "[" * 100_000,
    json.dumps({"sync": 1, "run": {}, "shards": 1, "outer": {}}),
    json.dumps({"sync": {}, "run": [], "shards": 1, "outer": {}}),
    json.dumps({"sync": {}, "run": {}, "shards": "x", "outer": {}}),
    '{"sync": {}, "run": {}, "shards": 1e999, "outer": {}}',
    json.dumps({"sync": {"sync_every": 0}, "run": {}, "shards": 1, "outer": {}}),
    json.dumps({"sync": {"of_a_later_version": 1}, "run": {}, "shards": 1, "outer": {}}),
    json.dumps({"sync": {}, "run": {}, "shards": 1, "outer": {"lr": "fast"}}),
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_unreadable_settings_are_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError, match="the run's settings cannot be read"):
        read_public(text)


def test_a_difference_of_any_size_is_one_short_sentence() -> None:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    theirs = {**public(), "workload": {"name": deep, "options": "x" * 10_000}}
    assert len(difference_of(public(), theirs)) < 500
    theirs = {**public(), "workload": {**public()["workload"], "options": "x" * 10_000}}
    assert len(difference_of(public(), theirs)) < 800
