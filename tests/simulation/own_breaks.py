"""Rounds that learners open by themselves, broken on purpose; see `breaks`."""

from __future__ import annotations

from decoupled_diloco.protocol import asking, syncer_rounds
from decoupled_diloco.simulate.shrink import Changes
from simulation.breaks import Break

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
        "a learner is asked at each of its steps",
        asking,
        "due_by_own_steps",
        "for fragment in options.due(step):",
        "for fragment in state.fragments:",
        OWN,
        noticed_by=4,
    ),
    Break(
        "a learner's own steps make nothing due",
        asking,
        "due_by_own_steps",
        'if options.participants != "own"',
        'if options.participants == "own"',
        FOR_LONG,
    ),
    Break(
        "who took a newer version while it was asked loses its turn",
        syncer_rounds,
        "declined",
        'member.pressed or options.participants == "own"',
        "member.pressed",
        FOR_LONG,
        noticed_by=7,
    ),
    Break(
        "a contribution that is here opens no round",
        syncer_rounds,
        "_fold",
        "            state.queue[fragment] = state.clock\n",
        "            pass\n",
        FOR_LONG,
    ),
    Break(
        "one that comes while the one before is merged waits for the next",
        syncer_rounds,
        "_fold",
        "round.next_tick = state.clock",
        "pass",
        FOR_LONG,
    ),
    Break(
        "a round is opened though nothing is here",
        syncer_rounds,
        "_openable",
        'if options.participants == "own":',
        "if False:",
        OWN,
    ),
)

FORGOTTEN_TURNS = (
    Break(
        "who is due while its fragment is merged is not asked",
        asking,
        "_can_be_served",
        ' and options.participants != "own"',
        "",
    ),
    Break(
        "what was asked over a connection that broke is not asked again",
        syncer_rounds,
        "_fall_out",
        'if ask_state == "gone" and options.participants == "own":',
        "if False:",
    ),
)
"""No world notices these: a turn that comes a period later is within its limits."""
