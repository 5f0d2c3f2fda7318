"""What a shard remembers besides its copies: what its next life would otherwise begin anew.

The clock, so that learning rate schedules and budgets go on where they were; whose tokens are
counted already, so that none is counted twice; and the norms that the gate judges by. It goes to
the disk with every merge, and is at most as old as the last one.
"""

from __future__ import annotations

from decoupled_diloco.protocol.events import KnownLearner, KnownNorms, ShardMemory
from decoupled_diloco.protocol.membership import Identity
from decoupled_diloco.protocol.syncer_state import SyncerState


def remembered(state: SyncerState) -> ShardMemory:
    """What goes to the disk."""
    return ShardMemory(
        state.clock,
        state.tokens_retired,
        tuple(
            KnownLearner(name, known.epoch, known.nonce, state.tokens_of(known))
            for name, known in state.identities.items()
        ),
        tuple(
            KnownNorms(fragment, tuple(entry.norms))
            for fragment, entry in state.fragments.items()
            if entry.norms
        ),
    )


def recall(state: SyncerState, memory: ShardMemory) -> None:
    """Takes over what an earlier life knew; what this one has heard already is newer."""
    state.clock = max(state.clock, memory.clock)
    state.tokens_retired += memory.tokens_retired
    for known in memory.learners:
        heard = state.identities.get(known.learner)
        if heard is None:
            state.identities[known.learner] = Identity(known.epoch, known.nonce, known.tokens)
        elif heard.epoch > known.epoch:
            state.tokens_retired += known.tokens
    for norms in memory.norms:
        if norms.fragment in state.fragments:
            state.fragments[norms.fragment].norms = list(norms.samples)
