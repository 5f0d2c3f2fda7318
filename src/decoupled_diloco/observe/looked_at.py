"""Which records a `Chronicle` looks at: what a running syncer need not tell, it does not."""

from __future__ import annotations

from decoupled_diloco.observe.samples import (
    BytesMoved,
    EndRequested,
    Evaluated,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    TookOver,
    WentBack,
)
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact

LOOKED_AT = frozenset(
    cls.__name__
    for cls in (
        do.Accept,
        do.Apply,
        do.Broadcast,
        do.ClockAdvanced,
        do.EndTraining,
        do.Evict,
        do.Expect,
        do.Fold,
        do.Install,
        do.KeepCut,
        do.Merge,
        do.Note,
        do.Ready,
        do.Recovered,
        do.RoundFinished,
        do.RoundOpened,
        do.RunOver,
        do.Send,
        do.Stop,
        do.Unexpect,
        fact.BodyArrived,
        fact.Disconnected,
        fact.Greeted,
        fact.Heard,
        fact.Ordered,
        fact.Reported,
        fact.Said,
        fact.StepFinished,
        fact.TermGranted,
        BytesMoved,
        EndRequested,
        Evaluated,
        LossMeasured,
        ProcessEnded,
        ProcessStarted,
        RestartScheduled,
        TookOver,
        WentBack,
    )
)

_SENT = frozenset({"Welcome"})
_SAID = frozenset({"StepReport", "Holding", "Leave"})
_BROADCAST = frozenset({"Shifted", "Ending", "Finished"})
_ORDERED = frozenset({"Begin", "EndOrdered"})
MESSAGES = {"Send": _SENT, "Said": _SAID, "Broadcast": _BROADCAST, "Ordered": _ORDERED}
"""Which messages of the high-volume kinds matter here."""
