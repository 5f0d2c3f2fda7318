"""Compute the share of trained tokens that a fault-free run of the same recipe merges."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.run_model import read_run
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import Scenario

STEPS_MAX = 300
"""Limit on the reference run's steps. The share converges long before."""

VARIANCE = 0.01
"""Least variance of a virtual learner's step time. Real steps always vary. Without variance, all
virtual learners would always report at the same instant, and ties would decide which qualify."""


def accepted_share_of(folder: Path) -> float:
    """Return the share of trained tokens that a run merged, read from its tape.

    Raises:
        StorageError: The folder has no tape.
        ConfigError: No token was trained in the run.
    """
    tokens = read_run(folder).account.tokens
    if not tokens.trained:
        raise ConfigError(
            f"{folder} cannot be the reference run because it trained no tokens: use a run that "
            "trained"
        )
    return tokens.merged / tokens.trained


def fault_free_share(scenario: Scenario) -> float:
    """Simulate the scenario's run without faults and return its share of merged tokens.

    All learners take part from the start. The share depends on the recipe, on the ratio of round
    time to step time, and on the learners' speeds. The virtual run reproduces all three. The share
    does not depend on the model or the data, so the simulation needs no tensors.
    """
    run = scenario.config.run
    steps = min(run.max_steps or STEPS_MAX, STEPS_MAX)
    own = run.model_copy(update={"max_steps": steps, "max_tokens": None})
    lifelike = with_variance(scenario)
    members = {
        name: group.model_copy(update={"present": True, "tokens": 1})
        for name, group in lifelike.members.items()
    }
    quiet = dataclasses.replace(
        lifelike,
        config=scenario.config.model_copy(update={"run": own, "faults": ()}),
        file=scenario.file.model_copy(update={"until_seconds": None}),
        members=members,
        happenings=(),
        recurrences=(),
    )
    with tempfile.TemporaryDirectory() as folder:
        simulated = ProtocolRun(quiet, Path(folder))
        while simulated.advance():
            pass
        simulated.close()
        return accepted_share_of(Path(folder))


def with_variance(scenario: Scenario) -> Scenario:
    """Return the scenario with at least `VARIANCE` in each learner's step time."""
    members = {
        name: group.model_copy(update={"variance": max(group.variance, VARIANCE)})
        for name, group in scenario.members.items()
    }
    return dataclasses.replace(scenario, members=members)
