"""One run over a link that is too slow; several tests use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from network.network_runs import finish, start
from network.network_spaces import link

STEP_SECONDS = 0.2
MBIT = 1.0
"""About a third of the rate that the fragments need."""


@dataclass(frozen=True)
class Saturated:
    """The folder, settings and link of the run."""

    folder: Path
    config: RunConfig
    mbit: float = MBIT
    step_seconds: float = STEP_SECONDS


@pytest.fixture(scope="session")
def saturated(tmp_path_factory: pytest.TempPathFactory) -> Saturated:
    """A finished run of two learners that share the link."""
    folder = tmp_path_factory.mktemp("saturated")
    with link(folder, mbit=MBIT) as made:
        config = start(made, folder, steps=90, step_seconds=STEP_SECONDS, width=64, layers=2)
        finish(made, seconds=120)
    return Saturated(folder, config)
