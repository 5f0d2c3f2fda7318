from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from process.runs import orphans


@pytest.fixture(autouse=True)
def _no_orphans(tmp_path: Path) -> Iterator[None]:
    yield
    assert not orphans(tmp_path / "run")
