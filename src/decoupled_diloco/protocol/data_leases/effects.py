"""What the coordinator orders about leases of the data."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.data_leases.ledger import LedgerEntry


@dataclass(frozen=True, slots=True)
class Enter:
    """Write this into the data ledger, durably, before any later effect of this list."""

    entry: LedgerEntry
    why: str
