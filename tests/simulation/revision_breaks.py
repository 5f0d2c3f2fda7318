"""Deliberate breaks of schedule revisions (H and τ); see `deliberate_breaks`."""

from __future__ import annotations

from decoupled_diloco.protocol.adapt import AdaptLimits
from deliberate_breaks import Break
from worlds.shrink import Changes

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
        "revision-before-disk",
        "",
        "a schedule revision is sent before it is on disk",
        OFTEN,
        noticed_by=225,
    ),
    Break(
        "revision-number-reused",
        "number=1,",
        "the number of a schedule revision is used again",
        FOR_LONG,
        noticed_by=1,
    ),
    Break(
        "period-above-maximum",
        "period=2 * plan[0],",
        "a schedule revision exceeds the maximum period",
        OFTEN,
    ),
    Break(
        "overlap-as-long-as-period",
        "return found, overlap",
        "the overlap is as long as the period",
        Changes(options={**SETTINGS, "adapt": AdaptLimits((2, 4), (0, 9), 0.5)}),
        noticed_by=2,
    ),
    Break(
        "restarted-shard-lacks-revision",
        "if False:",
        "a restarted shard does not receive the current schedule",
        FOR_LONG,
        noticed_by=13,
    ),
    Break(
        "late-learner-lacks-revision",
        "return []",
        "a learner that joins later does not receive the current schedule",
        FOR_LONG,
        noticed_by=15,
    ),
    Break(
        "revision-not-passed-on",
        """\
record(state, revision)
return []""",
        "a shard does not pass a schedule revision on",
        FOR_LONG,
        noticed_by=1,
    ),
    Break(
        "revision-early",
        "return bool(state.next_revisions) and state.next_revisions[0].tick <= tick + 2",
        "a schedule revision holds before its tick",
        OFTEN,
        noticed_by=51,
    ),
)
