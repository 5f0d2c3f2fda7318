"""Arguments of parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Mark cases so that `make test` runs the first ``count`` and `make test-long` the rest."""
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        *(pytest.param(*case) for case in each[:count]),
        *(pytest.param(*case, marks=pytest.mark.long) for case in each[count:]),
    ]
