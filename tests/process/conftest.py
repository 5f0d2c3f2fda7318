from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from process.runs import orphans, until


@pytest.fixture(autouse=True)
def _no_orphans(tmp_path: Path) -> Iterator[None]:
    yield
    # A fork server that was started just before its launcher ended needs a moment to notice.
    until(lambda: not orphans(tmp_path / "run"), "no process is left", seconds=10.0)
