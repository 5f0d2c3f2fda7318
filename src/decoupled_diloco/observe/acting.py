"""Which process acts for a shard that has a standby. The shard's lives are those of both."""

from __future__ import annotations

import re

from decoupled_diloco.observe.samples import TookOver
from decoupled_diloco.units import format_duration

_OTHERS = frozenset({"coordinator", "evaluator", "launcher", "logger"})
"""Processes that are neither learners nor shards; ``launcher.NAME`` launches that one alone."""

_SHARD = re.compile(r"shard-\d+")
"""The name of a shard, which is also that of the process that is meant to act for it."""


def is_shard(who: str) -> bool:
    """Whether a process is a shard of the syncer, by its name."""
    return _SHARD.fullmatch(who) is not None


def is_learner(who: str) -> bool:
    """Whether a process is a learner, by its name."""
    return who.partition(".")[0] not in _OTHERS and not who.startswith("shard-")


class Acting:
    """Follows which process acts for each shard, record by record."""

    def __init__(self) -> None:
        self._process: dict[str, str] = {}

    def took_over(self, value: TookOver) -> str:
        """A process acts from now on; returns that in words, or nothing for the first one."""
        self._process[f"shard-{value.shard}"] = value.process
        if value.claim == 1:
            return ""
        silent = format_duration(value.waited_seconds)
        return (
            f"{value.process} acts for shard {value.shard} by claim {value.claim}: "
            f"the one before was last renewed {silent} ago"
        )

    def whose(self, process: str) -> str:
        """The name that the start or end of a process counts for: its shard's, if it acts for one.

        >>> acting = Acting()
        >>> acting.took_over(TookOver("shard-1-standby", 1, 1, 0.0))
        ''
        >>> acting.whose("shard-1-standby"), acting.whose("shard-1"), acting.whose("learner-0")
        ('shard-1', 'shard-1, standing by', 'learner-0')
        """
        shard = _SHARD.match(process)
        if shard is None or shard[0] not in self._process:
            return process
        return shard[0] if self._process[shard[0]] == process else f"{process}, standing by"
