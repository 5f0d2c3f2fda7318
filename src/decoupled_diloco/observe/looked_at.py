"""Which records a `RunModel` looks at: what a running syncer need not tell, it does not."""

from __future__ import annotations

from typing import get_args

from decoupled_diloco.observe.samples import CheckpointWritten, LinkState, PayloadsEnded, Sample
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol.checkpoints.effects import KeepCheckpoint

_OTHER_SAMPLES = (CheckpointWritten, LinkState, PayloadsEnded)
_DECIDED = (
    do.Accept, do.Apply, do.Broadcast, do.ClockAdvanced, do.EndTraining, do.Evict, do.Expect,
    do.Fold, do.Hold, do.Install, KeepCheckpoint, do.Merge, do.Note, do.Ready, do.Recovered,
    do.Relabel, do.Release, do.RoundFinished, do.RoundOpened, do.RunOver, do.Send, do.Stop,
    do.Unexpect, fact.Began, fact.BodyArrived, fact.Connected, fact.Heard, fact.Lost,
    fact.Received, fact.Reported, fact.StepFinished,
)  # fmt: skip
LOOKED_AT = frozenset(
    cls.__name__ for cls in (*_DECIDED, *(c for c in get_args(Sample) if c not in _OTHER_SAMPLES))
)

MESSAGES = {
    "Send": frozenset({"Welcome", "Shifted", "Revision"}),
    "Received": frozenset(
        {"StepReport", "Holding", "Ahead", "Leave", "ShardAdmitted", "Begin", "EndOrdered"}
    ),
    "Broadcast": frozenset({"Shifted", "Ending", "Finished"}),
}
"""Which messages of the high-volume kinds matter here."""
