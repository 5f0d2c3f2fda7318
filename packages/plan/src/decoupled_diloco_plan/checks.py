"""Range checks that report name, value and limit."""

from __future__ import annotations

import math

from decoupled_diloco.errors import ConfigError


def above(limit: float, **values: float) -> None:
    """Raise ConfigError if a value is not above the limit, or not finite."""
    for name, value in values.items():
        _finite(name, value)
        if not value > limit:
            raise ConfigError(
                f"{name}={value:g} is out of range: it must be greater than {limit:g}"
            )


def at_least(least: float, **values: float) -> None:
    """Raise ConfigError if a value is below `least`, or not finite."""
    for name, value in values.items():
        _finite(name, value)
        if not value >= least:
            raise ConfigError(f"{name}={value:g} is out of range: it must be at least {least:g}")


def between(limit: float, most: float, **values: float) -> None:
    """Raise ConfigError if a value is not above the limit, or above `most`."""
    for name, value in values.items():
        if not limit < value <= most:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(
                f"{name}={shown} is out of range: it must be greater than {limit:g} and at most "
                f"{most:g}"
            )


def _finite(name: str, value: float) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value:g} is not finite: give a finite number")
