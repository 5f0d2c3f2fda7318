"""The targets, made once: a small real run is needed for their samples."""

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
    """Each torn file is told of in the log, and there are thousands."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)
