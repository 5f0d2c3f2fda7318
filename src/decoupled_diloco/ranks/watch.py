"""Says which rank hangs, and where: whoever waits in a collective can't.

Each rank tells the job's store every few seconds that it lives, and at which place of its program
it is. Rank 0 looks at all others, they look at rank 0. Nothing is ended here: collectives have
timeouts of their own (`group.SILENCE_SECONDS`, and the training program's).
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from typing import Any

from decoupled_diloco.runtime import now

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
LONG_SECONDS = 20.0
"""Ranks that are at different places for so long, or say nothing, are named."""


@dataclass
class _Seen:
    """What was last heard of a rank, and since when it is so (seconds of the runtime)."""

    said: Any = None
    heard: float = 0.0
    place: str = ""
    since: float = 0.0
    told: str = ""


class Watch:
    """One rank's look at the others, in a thread of its own.

    Args:
        store: The job's; copied, since a store serves one thread at a time.
        meeting: Begins the keys; the same on every rank, and used once.
        rank: This one.
        size: How many there are.

    Attributes:
        place: Where in its program this rank is.
    """

    def __init__(self, store: Any, meeting: str, rank: int, size: int) -> None:
        self.place = ""
        self._meeting = meeting
        self._rank = rank
        self._others = range(1, size) if rank == 0 else (0,)
        self._seen = {other: _Seen(heard=now()) for other in self._others}
        self._since, self._place = now(), ""
        self._end = threading.Event()
        if hasattr(store, "clone"):  # PyTorch before 2.8 has none
            self._store = store.clone()
            threading.Thread(target=self._run, name="ddiloco-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread soon; does not wait for it."""
        self._end.set()

    def _run(self) -> None:
        lives = 0
        try:
            while not self._end.wait(LOOK_SECONDS):
                lives += 1
                self._store.set(self._key(self._rank), json.dumps([lives, self.place]))
                self._look(now())
        except RuntimeError as error:  # the store ends with the rank that serves it
            if not self._end.is_set():
                logger.warning("other ranks can't be watched any more: %s", str(error)[:200])

    def _key(self, rank: int) -> str:
        return f"{self._meeting}/at/{rank}"

    def _look(self, at: float) -> None:
        if self.place != self._place:
            self._place, self._since = self.place, at
        for rank, seen in self._seen.items():
            said = self._store.get(self._key(rank)) if self._has(rank) else None
            if said != seen.said:
                seen.said, seen.heard = said, at
                place = json.loads(said)[1] if said else ""
                if place != seen.place:
                    seen.place, seen.since = place, at
            trouble = self._trouble(rank, seen, at)
            if trouble and trouble != seen.told:
                logger.warning("%s", trouble)
            if seen.told and not trouble:
                logger.warning("rank %d of this learner goes on", rank)
            seen.told = trouble

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank)]))

    def _trouble(self, rank: int, seen: _Seen, at: float) -> str:
        if at - seen.heard > LONG_SECONDS:
            return (
                f"rank {rank} of this learner says nothing: its process is stopped, or its "
                "machine or network is gone"
            )
        if seen.place != self._place and at - max(seen.since, self._since) > LONG_SECONDS:
            return (
                f"rank {rank} of this learner is at {seen.place!r} and rank {self._rank} at "
                f"{self._place!r}, for more than {LONG_SECONDS:.0f} s: every rank has to make the "
                "same calls, step by step"
            )
        return ""
