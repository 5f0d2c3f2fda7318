"""Numbers that cannot be are refused in one sentence: name, value, limit."""

from __future__ import annotations

import math

from decoupled_diloco.errors import ConfigError


def above(limit: float, **values: float) -> None:
    """Raises ConfigError for a value that is not above the limit, or not finite."""
    for name, value in values.items():
        _finite(name, value)
        if not value > limit:
            raise ConfigError(
                f"{name}={value:g} is out of range: it must be greater than {limit:g}"
            )


def at_least(least: float, **values: float) -> None:
    """Raises ConfigError for a value below the least that can be, or one that is not finite."""
    for name, value in values.items():
        _finite(name, value)
        if not value >= least:
            raise ConfigError(f"{name}={value:g} is out of range: it must be at least {least:g}")


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{name}={value:g} is no number to reckon with: give a finite one")
