"""Two runs' settings are compared by the first one that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.method import difference_of, public_text, read_public
from decoupled_diloco.config.resume import load_resumed
from decoupled_diloco.errors import ConfigError, ProtocolError


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


@pytest.mark.parametrize(
    ("before", "changed", "sentence"),
    [
        ({}, "sync.moments={}", "sync.moments is {'codec': 'bf16', .*} here and not set there"),
        (
            {"sync": {"moments": {"every": 4}}},
            "sync.moments.every=2",
            "sync.moments.every is 2 here and 4 there",
        ),
        ({"outer": {"average": 0.5}}, "outer.average=0.7", "outer.average is 0.7 here and 0.5"),
        ({}, "outer.average=0.5", "outer.average is 0.5 here and not set there"),
    ],
)
def test_a_run_resumes_only_with_the_moments_and_the_average_that_it_had(
    tmp_path: Path, before: dict[str, Any], changed: str, sentence: str
) -> None:
    config = RunConfig(run={"max_steps": 10, "folder": tmp_path}, **before)
    (tmp_path / "run.toml").write_text(dump_config(config))
    assert load_resumed(tmp_path) == config
    with pytest.raises(ConfigError, match=f"cannot resume with other settings: {sentence}"):
        load_resumed(tmp_path, [changed])
