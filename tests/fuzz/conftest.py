"""The targets, created once, because their samples need a small real run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fuzz.harness import Target
from fuzz.targets import all_targets


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return all_targets(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture
def quiet() -> Iterator[None]:
    """Disable warnings, because each of thousands of torn files logs one."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)
