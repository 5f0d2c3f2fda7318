"""What is out of order beside a training loop, said so that it is seen and is no nuisance."""

from __future__ import annotations

import logging

from decoupled_diloco.runtime import now
from decoupled_diloco.units import format_duration

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
"""How often it is said again that something is still out of order."""


class TroubleLog:
    """One thing that may be out of order: said at once, now and then again, and when it is over.

    All of it are warnings: who has read of a trouble wants to read of its end, and a loop that has
    set up no logging shows nothing less.

    """

    def __init__(self) -> None:
        self._kind = ""
        self._since = self._again_at = 0.0

    def tell(self, kind: str, sentence: str) -> None:
        """Says what is out of order, unless it has just done so.

        Args:
            kind: What, in words that stay the same while it lasts.
            sentence: What to say; details may differ each time.
        """
        at = now()
        if not self._kind:
            self._since = at
        if kind == self._kind and at < self._again_at:
            return
        lasting = f" (for {format_duration(at - self._since)})" if kind == self._kind else ""
        logger.warning("%s%s", sentence, lasting)
        self._kind, self._again_at = kind, at + AGAIN_SECONDS

    def over(self, sentence: str) -> None:
        """Says that it is in order again, if it was said not to be."""
        if self._kind:
            logger.warning("%s, after %s", sentence, format_duration(now() - self._since))
        self._kind = ""
