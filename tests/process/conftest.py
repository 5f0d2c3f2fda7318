from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from process.process_runs import orphans, until

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of real processes as long, unless it is the smoke test of its feature."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("smoke"):
            item.add_marker("long")


@pytest.fixture(autouse=True)
def _no_orphans(tmp_path: Path) -> Iterator[None]:
    yield
    # A fork server that was started just before its launcher ended needs a moment to notice.
    until(lambda: not orphans(tmp_path / "run"), "no process is left", seconds=10.0)
