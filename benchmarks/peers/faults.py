"""What goes wrong in a run, and what is seen of it.

A supervisor, as every cluster has one, starts again what ended with an error or was killed, after
`RESTART_SECONDS`. That is done alike for all systems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from links import Sites

RESTART_SECONDS = 5.0
CUT_SECONDS = 60.0
SLOWDOWN = 4.0


class Victims(Protocol):
    """What a fault needs of a run."""

    sites: Sites

    def kill(self, name: str) -> None:
        """Ends a process and its children at once (SIGKILL)."""


@dataclass(frozen=True)
class Fault:
    """What happens at `at_period`, and what ends it `seconds` later."""

    begin: Callable[[Victims], None]
    end: Callable[[Victims], None] = lambda run: None
    seconds: float = 0.0
    at_period: float = 2.5
    for_ever: bool = False  # who was killed is not started again


FAULTS = {
    "kill-worker": Fault(lambda run: run.kill("worker-1")),
    "kill-centre": Fault(lambda run: run.kill("centre")),
    "lose-worker": Fault(lambda run: run.kill("worker-3"), for_ever=True),
    "cut": Fault(lambda run: run.sites.cut(), lambda run: run.sites.heal(), CUT_SECONDS),
}
"""A system without a centre loses worker 0 as that: for DDP rank 0, and where its ranks meet."""

Step = tuple[float, int, int]
"""When it ended, which it was, and the worker's process."""


def steps_of(path: Path) -> list[Step]:
    """The steps of a worker, over all of its lives; step 0 is when a life began."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        what, instant, pid = line.split()
        if what != "end":
            found.append((float(instant), 0 if what == "begin" else int(what), int(pid)))
    return found


def effect(
    steps: list[list[Step]], begun: float, until: float, finished: list[bool], dead: set[int]
) -> dict[str, Any]:
    """What a fault did to each worker.

    Args:
        steps: Of each worker.
        begun: When the fault happened.
        until: When the run had ended, or its time was over.
        finished: Whether each worker came to its end.
        dead: The workers that were killed.

    Returns:
        For each worker, the longest time without a step from the fault on; for those that were not
        killed, how many steps they took in the minute after it; for those that were, the seconds
        until their first step.
    """
    found: dict[str, Any] = {"gaps": [], "steps_in_minute": [], "back_seconds": []}
    for worker, each in enumerate(steps):
        ended = [instant for instant, step, _ in each if step]
        before = [instant for instant in ended if instant <= begun]
        after = [instant for instant in ended if instant > begun]
        marks = [*before[-1:], *after, *([] if finished[worker] else [until])]
        found["gaps"].append(max((b - a for a, b in pairwise(marks)), default=None))
        found["steps_in_minute"].append(sum(instant <= begun + 60.0 for instant in after))
        found["back_seconds"].append(after[0] - begun if worker in dead and after else None)
    return found
