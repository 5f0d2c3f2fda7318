"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        check: What was looked at, in one or two words.
        level: "error": a run cannot work like this; "warning": it can, and may disappoint.
        text: What was found, with names and values.
        advice: What to do about it; empty if all is well.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, advice: str) -> Finding:
    """A run works, and may disappoint."""
    return Finding(check, "warning", text, advice)


def error(check: str, text: str, advice: str) -> Finding:
    """A run cannot work."""
    return Finding(check, "error", text, advice)
