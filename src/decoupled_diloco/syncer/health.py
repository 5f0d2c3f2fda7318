"""The shard's answer at `/healthz`."""

from __future__ import annotations

from decoupled_diloco._version import __version__
from decoupled_diloco.protocol.syncer_machine import SyncerMachine


def health_of(machine: SyncerMachine, run: str) -> dict[str, object]:
    """Return a summary of the shard's state as plain JSON values.

    Args:
        machine: The shard's machine.
        run: The run's name.
    """
    state = machine.state
    return {
        "shard": machine.shard,
        "version": __version__,
        "run": run,
        "phase": state.phase,
        "term": state.term,
        "clock": state.clock,
        "learners": sorted(state.members),
        "observers": sorted(state.observers),
        "open_rounds": len(state.rounds),
    }
