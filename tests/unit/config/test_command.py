"""`[learner] command`: a run whose learners are the user's own program."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.method import difference_of_work, read_settings
from decoupled_diloco.errors import ConfigError

COMMAND = ["torchrun", "--nproc-per-node=2", "train.py", "--config", "x"]


def config(**tables: Any) -> RunConfig:
    learner = {"command": COMMAND, **tables.pop("learner", {})}
    run = {"max_steps": 10, **tables.pop("run", {})}
    return RunConfig(run=run, learner=learner, **tables)


def test_a_run_with_a_command_has_no_workload_and_no_evaluator() -> None:
    run = config()
    assert run.learner.command == tuple(COMMAND)
    assert run.workload is None
    assert not run.run.evaluator


def test_an_evaluate_command_is_evaluated() -> None:
    assert config(run={"evaluate_command": ["python", "evaluate.py"]}).run.evaluator


@pytest.mark.parametrize("evaluate", [{}, {"evaluate_command": ["python", "evaluate.py"]}])
def test_the_resolved_file_is_the_same_run(evaluate: dict[str, Any]) -> None:
    run = config(run=evaluate, data={"prefetch": 3})
    assert RunConfig(**tomllib.loads(dump_config(run))) == run


def test_another_process_reads_the_public_settings_without_the_command() -> None:
    run = config(learner={"command": ["python", "train.py", "--key=secret"]})
    assert "secret" not in str(run.public())
    theirs = read_settings(run.public())
    assert theirs.workload is None
    assert theirs.public() == run.public()


def test_a_run_with_a_command_rejects_a_built_in_learner() -> None:
    built_in = RunConfig(run={"max_steps": 10})
    assert "workload" in difference_of_work(built_in, read_settings(config().public()))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"learner": {"command": []}}, r"command=\[\] in \[learner\] is empty"),
        ({"learner": {"command": [""]}}, "begins with an empty text"),
        ({"learner": {"command": ["python", "a\0b"]}}, "NUL"),
        ({"learner": {"command": "python train.py"}}, "is not a list"),
        ({"learner": {"command": ["python", 3]}}, "is not text in quotes"),
        ({"workload": {"name": "gpt"}}, r"\[workload\] would be ignored with command"),
        ({"workload": {}}, r"\[workload\] would be ignored with command"),
        ({"learner": {"ranks": 2}}, "ranks=2 in .* would be ignored with command"),
        ({"learner": {"parallelism": "ddp"}}, "parallelism='ddp' in .* would be ignored with"),
        ({"learner": {"precision": "bf16"}}, "precision='bf16' in .* would be ignored with"),
        ({"learner": {"device": "cuda:1"}}, "device='cuda:1' in .* would be ignored with"),
        ({"data": {"elastic": False}}, r"elastic=False in \[data\] would be ignored with command"),
        ({"data": {"partitions": 9}}, r"partitions=9 in \[data\] would be ignored with command"),
        ({"run": {"evaluator": True}}, r"evaluator=true in \[run\] needs evaluate_command"),
        ({"run": {"evaluate_interval_seconds": 3.0}}, "evaluate_interval_seconds=3.0 .* would be"),
        ({"run": {"evaluate_command": []}}, r"evaluate_command=\[\] in \[run\] is empty"),
        ({"launch": {"learner": {"hosts": 2}}}, "hosts=2"),
    ],
)
def test_settings_that_would_be_ignored_are_rejected(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**tables)
