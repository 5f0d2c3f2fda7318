"""The share of the trained tokens that a fault-free run of the same recipe accepts."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco.simulate.protocol_run import ProtocolRun
from decoupled_diloco.simulate.scenario import Scenario

STEPS_MAX = 300
"""The share has settled long before."""

VARIANCE = 0.01
"""Real steps are never exactly alike, as those of virtual learners are without a variance: they
would all report in the same instant for ever, and who is in time would be decided by ties."""


def accepted_share_of(folder: Path) -> float:
    """Share of the trained tokens that a run has merged, by its tape.

    Raises:
        StorageError: There is no tape.
        ConfigError: Nothing was trained in it.
    """
    tokens = read_run(folder).account.tokens
    if not tokens.trained:
        raise ConfigError(f"{folder} is no reference: nothing was trained in it")
    return tokens.merged / tokens.trained


def fault_free_share(scenario: Scenario) -> float:
    """The same share for the scenario's run without faults, with all learners, in virtual time.

    The share depends on the recipe, on how long a round takes against a step, and on the learners'
    speeds, all of which the virtual world has; it does not depend on what is trained.
    """
    run = scenario.config.run
    steps = min(run.budget_steps or STEPS_MAX, STEPS_MAX)
    own = run.model_copy(update={"budget_steps": steps, "budget_tokens": None})
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
    """The scenario with learners whose steps vary a little at least."""
    members = {
        name: group.model_copy(update={"variance": max(group.variance, VARIANCE)})
        for name, group in scenario.members.items()
    }
    return dataclasses.replace(scenario, members=members)
