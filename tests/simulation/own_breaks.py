"""Deliberate breaks of rounds that learners open by their own steps; see `deliberate_breaks`."""

from __future__ import annotations

from decoupled_diloco.simulate.shrink import Changes
from deliberate_breaks import Break

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
        "for fragment in state.fragments:",
        "a learner receives a request at each of its steps",
        OWN,
        noticed_by=3,
    ),
    Break(
        "own-steps-never-due",
        'if options.participants == "own" or state.phase != "running":',
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
        "if False:",
        "a round opens although no contribution has arrived",
        OWN,
    ),
)

FORGOTTEN_TURNS = (
    Break(
        "due-during-merge-not-asked",
        "if round is not None and round.settled_at is not None:",
        "a learner that is due while its fragment is merged receives no request",
    ),
    Break(
        "broken-link-not-asked-again",
        "if False:",
        "a request that was lost with its connection is not repeated",
    ),
)
"""No world notices these: a turn that comes a period later is within its limits."""
