"""How many files this process may have open: a run's tape has one for each of its processes."""

from __future__ import annotations

import contextlib
import resource

SPARE = 100
"""Files that are open beside those of a tape: libraries, logs, connections."""


def open_files_allowed(files: int) -> int | None:
    """Raises this process's limit so that so many files can be open, as far as the system lets it.

    Returns:
        The limit that stays below what is needed; ``None``: it suffices.
    """
    needed = files + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return None if needed <= soft else soft
