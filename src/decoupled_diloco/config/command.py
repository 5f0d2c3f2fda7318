"""What a command in the settings has to be, and which other settings it makes pointless."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError

OF_WORKLOAD_DATA = ("leases", "parts")
"""The settings of `[data]` that say how the data of a workload are shared."""


def has_value(table: Any, name: str) -> bool:
    """Whether a table that is not validated yet sets a value."""
    return bool(table.get(name) if isinstance(table, dict) else getattr(table, name, None))


def require_command(settings: Settings, name: str, command: tuple[str, ...]) -> None:
    """Checks the form of a command.

    Raises:
        ConfigError: It is an empty list, or its program or an argument is no text for a process.
    """
    if name in settings.model_fields_set and not command:
        raise ConfigError(
            f"{name}=[] in {settings.table} is empty: list the program and its arguments, for "
            f'example {name} = ["python", "train.py"], or leave {name} out'
        )
    if command and not command[0].strip():
        raise ConfigError(
            f"{name}={list(command)!r} in {settings.table} begins with an empty text: list the "
            "program first"
        )
    if any("\0" in word for word in command):
        raise ConfigError(
            f"{name}={list(command)!r} in {settings.table} contains a NUL character, which no "
            "process can receive: remove it"
        )
