"""Names of the processes of a run."""

from __future__ import annotations

from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.processes import EVALUATOR, evaluator_name
from decoupled_diloco.protocol.messages import name_problem


def test_two_evaluators_do_not_take_over_from_each_other() -> None:
    config = RunConfig(run={"max_steps": 1})
    names = {evaluator_name(config) for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith(EVALUATOR) and not name_problem(name) for name in names)


def test_with_secrets_per_id_the_evaluator_has_its_fixed_name() -> None:
    config = RunConfig(run={"max_steps": 1}, syncer={"principals_file": Path("p")})
    assert evaluator_name(config) == EVALUATOR
