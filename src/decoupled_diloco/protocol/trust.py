"""How much a learner's contributions count: probation (rule 26).

A learner that joins a run in progress with a fresh inner optimizer is on probation for its first
steps. Its contributions then have weight 0: a shard requests, verifies and discards them, and the
learner drops their training with the next copy. They do not count for a quorum. The learner reports
how it started, so a shard that restarts decides as before.

Functions of the shard's state.
"""

from __future__ import annotations

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.syncer_state import SyncerState


def weight_of(state: SyncerState, options: Options, learner: str) -> tuple[float, str]:
    """Return the factor on the weight of a learner's contributions, 0 to 1, and why it is not 1."""
    member = state.members[learner]
    if member.is_fresh and member.step < options.probation_steps:  # break: probation-ignored
        left = options.probation_steps - member.step
        return 0.0, f"on probation for {left} more steps, because its optimizer started fresh"
    return 1.0, ""
