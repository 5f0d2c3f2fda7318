"""Revisions of H and τ, broken on purpose; see `breaks`."""

from __future__ import annotations

from decoupled_diloco.protocol import following, revisions
from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.revisions import AdaptLimits
from decoupled_diloco.simulate.shrink import Changes
from simulation.breaks import Break

SETTINGS = {
    "wait": "never",
    "quorum": 1,
    "phases": (),
    "fragments": 4,
    "period": 4,
    "overlap": 1,
    "adapt": AdaptLimits((2, 8), (0, 3), 0.5),
}
OFTEN = Changes(options=SETTINGS)
FOR_LONG = Changes(options=SETTINGS, endless=True)

REVISIONS = (
    Break(
        "a revision is told before it is kept",
        CoordinatorMachine,
        "_revise",
        "            Persist(why),\n",
        "",
        OFTEN,
        noticed_by=225,
    ),
    Break(
        "the number of a revision is used again",
        revisions,
        "_revised",
        "number=present.number + 1,",
        "number=1,",
        FOR_LONG,
        noticed_by=1,
    ),
    Break(
        "the greatest period is exceeded",
        revisions,
        "_revised",
        "period=plan[0],",
        "period=2 * plan[0],",
        OFTEN,
    ),
    Break(
        "the overlap is as long as the period",
        revisions,
        "fitting",
        "return found, min(overlap, found - 1)",
        "return found, overlap",
        Changes(options={**SETTINGS, "adapt": AdaptLimits((2, 4), (0, 9), 0.5)}),
        noticed_by=2,
    ),
    Break(
        "a shard that was started again is not told of the plan",
        CoordinatorMachine,
        "_shard_greeted",
        "if state.revision is not None:",
        "if False:",
        FOR_LONG,
        noticed_by=13,
    ),
    Break(
        "who comes later is not told of the plan",
        following,
        "welcome",
        "for revision in known]",
        "for revision in known if False]",
        FOR_LONG,
        noticed_by=15,
    ),
    Break(
        "a shard does not pass a plan on",
        following,
        "pass_on",
        "if hear(state, revision) else []",
        "if hear(state, revision) and False else []",
        FOR_LONG,
        noticed_by=1,
    ),
    Break(
        "a plan holds before its tick",
        following,
        "is_due",
        "state.next_revisions[0].tick <= tick",
        "state.next_revisions[0].tick <= tick + 2",
        OFTEN,
        noticed_by=19,
    ),
)
