from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.real_system import System
from replay_check import assert_replays


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., System]]:
    """Create systems; after the test, end them and replay their tapes."""
    made: list[System] = []

    def make_one(**tables: Any) -> System:
        folder = tmp_path / f"run-{len(made)}"
        (folder / "tape").mkdir(parents=True)
        made.append(System(folder, **tables))
        return made[-1]

    yield make_one
    for system in made:
        system.close()
        assert_replays(system.folder)
