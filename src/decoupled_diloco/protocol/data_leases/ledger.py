"""Entries of the data ledger: what the coordinator decided about the parts of the data.

The data are so many virtual parts, and pass after pass is made over them. An entry is durable
before anybody hears of it, and the leases are what the entries lead to, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args


@dataclass(frozen=True, slots=True)
class DataDescribed:
    """The first learner with leased data said how many parts there are."""

    parts: int


@dataclass(frozen=True, slots=True)
class Leased:
    """A part is a learner's own from batch ``start`` on; ``turn`` is the pass over the data."""

    lease: int
    turn: int
    part: int
    start: int
    learner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A part is durable to its end: every fragment had an accepted merge after its last step."""

    lease: int
    learner: str
    batches: int


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A lease is over before its part is durable; others go on at batch ``durable``.

    What the learner trained from there on is trained again: up to ``trained`` by what it said last,
    and it may have gone on since.
    """

    lease: int
    learner: str
    durable: int
    trained: int
    reason: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """A learner without a lease left trained ``batches`` more on a part that it had finished."""

    lease: int
    learner: str
    batches: int


LedgerEntry = DataDescribed | Leased | Settled | TakenBack | Repeated
LEDGER_ENTRIES: tuple[type[LedgerEntry], ...] = get_args(LedgerEntry)
