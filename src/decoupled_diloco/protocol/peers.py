"""Peers, by the names that processes have everywhere: on the wire, in tokens, on tapes.

The coordinator is ``coordinator``, a shard ``shard-0``, ``shard-1``, …; a learner or observer has
the name that it was given, which may be none of those.
"""

from __future__ import annotations

import re
from functools import cache

COORDINATOR = "coordinator"

_SHARD = re.compile(r"shard-(\d{1,9})")
_GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@cache
def shard_peer(shard: int) -> str:
    """The name of a shard.

    >>> shard_peer(1)
    'shard-1'
    """
    return f"shard-{shard}"


@cache
def shard_of(peer: str) -> int:
    """The shard that bears a name; asserts that one does."""
    found = _SHARD.fullmatch(peer)
    assert found is not None, f"{peer} is no shard"
    return int(found[1])


def is_shard_peer(peer: str) -> bool:
    """Whether a name is that of a shard."""
    return _SHARD.fullmatch(peer) is not None


def name_problem(name: str) -> str:
    """Why a learner or observer cannot bear a name, in words; empty: it can.

    >>> name_problem("learner-0"), name_problem("shard-0")
    ('', "'shard-0' is the name of a process of the syncer: choose another learner id")
    """
    if not _GIVEN.fullmatch(name):
        return (
            f"{name!r} cannot be a learner id: use 1 to 64 letters, digits, dots, dashes or "
            "underscores, beginning with a letter or digit"
        )
    if name == COORDINATOR or is_shard_peer(name):
        return f"{name!r} is the name of a process of the syncer: choose another learner id"
    return ""
