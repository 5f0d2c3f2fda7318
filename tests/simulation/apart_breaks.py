"""What a learner trained while its link was down for too long is kept, in several ways."""

from __future__ import annotations

from decoupled_diloco.protocol import learner_fragments
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.simulate.shrink import Changes
from simulation.breaks import Break

LIKELY = Changes(
    options={"missed": "overwrite", "counter_cap_periods": 1, "quorum": 1, "wait": "never"}
)

APART = (
    Break(
        "a learner that was apart answers from the version that it held before",
        learner_fragments,
        "decline_if_apart",
        "view.pull is None or not is_apart(options, view)",
        "True",
        LIKELY,
        noticed_by=45,
    ),
    Break(
        "a learner that was apart does not notice that its link is back",
        LearnerMachine,
        "_welcomed",
        "min(unheard, self.state.steps_of(view))",
        "0",
        LIKELY,
        noticed_by=45,
    ),
    Break(
        "a learner that was apart keeps what it trained alone",
        learner_fragments,
        "apply_mode",
        "view.sent, state.ended, is_apart(options, view)",
        "view.sent, state.ended, False",
        LIKELY,
        noticed_by=45,
    ),
    Break(
        "a learner drops what it has trained although its link was down for an instant only",
        LearnerMachine,
        "_welcomed",
        "min(unheard, self.state.steps_of(view))",
        "self.state.steps_of(view)",
        LIKELY,
    ),
)
