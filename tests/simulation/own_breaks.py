"""Deliberate breaks of rounds that learners open by their own steps; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break
from worlds.shrink import Changes

SETTINGS = {
    "participants": "own",
    "quorum": 1,
    "grace_margin": 0.0,
    "wait": "never",
    "late": "next",
    "missed": "rebase",
    "adapt": None,
}
OWN = Changes(options=SETTINGS)
FOR_LONG = Changes(options=SETTINGS, endless=True)

OWN_STEPS = (
    Break(
        "asked-at-every-step",
        "found += [(own, p) for p in range(options.fragments)]",
        "a learner receives a request at each of its steps",
        OWN,
        noticed_by=3,
    ),
    Break(
        "own-steps-never-due",
        "for own in ():",
        "a learner's own steps make no fragment due",
        FOR_LONG,
    ),
    Break(
        "newer-version-loses-turn",
        "keeps_turn = member.pressed",
        "a learner that takes a newer version while it has a request loses its turn",
        FOR_LONG,
        noticed_by=7,
    ),
    Break(
        "arrival-opens-no-round",
        "pass",
        "a contribution that arrives opens no round",
        FOR_LONG,
    ),
    Break(
        "arrival-during-merge-waits",
        "pass",
        "a contribution that arrives during a merge waits for the one after it",
        FOR_LONG,
        noticed_by=14,
    ),
    Break(
        "empty-round-opened",
        "return True",
        "a round opens although no contribution has arrived",
        OWN,
    ),
)

FORGOTTEN_TURNS = (
    Break(
        "due-during-merge-not-asked",
        "if merges:",
        "a learner that is due while its fragment is merged receives no request",
    ),
    Break(
        "broken-link-not-asked-again",
        "pass",
        "a request that was lost with its connection is not repeated",
    ),
)
"""No world notices these, because a request one period later is within the limits."""
