"""Deliberate breaks of how a learner resumes after a long cut; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break
from worlds.shrink import Changes

LIKELY = Changes(
    options={"missed": "overwrite", "counter_cap_periods": 1, "quorum": 1, "wait": "never"}
)

APART = (
    Break(
        "apart-learner-answers",
        "if True:",
        "a learner that diverged during a cut answers from the version that it held before",
        LIKELY,
        noticed_by=45,
    ),
    Break(
        "apart-not-noticed",
        "view.alone += 0",
        "a learner does not count the steps that it trained during a cut",
        LIKELY,
        noticed_by=45,
    ),
    Break(
        "apart-steps-kept",
        "diverged = False",
        "a learner keeps what it trained during a long cut",
        LIKELY,
        noticed_by=45,
    ),
    Break(
        "short-cut-drops-steps",
        "view.alone += self.state.steps_of(view)",
        "a learner drops its steps after a cut of an instant",
        LIKELY,
        noticed_by=46,
    ),
)
