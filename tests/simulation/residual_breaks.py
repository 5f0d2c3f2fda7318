"""Deliberate breaks of error feedback; see `deliberate_breaks`."""

from __future__ import annotations

from dataclasses import replace

from deliberate_breaks import Break
from worlds.shrink import Changes

COARSE = Changes(options={"uplink_codec": "int2", "error_feedback": True})


def _break(mark: str, becomes: str, what: str, noticed_by: int = 0) -> Break:
    return Break(mark, becomes, what, COARSE, noticed_by)


RESIDUALS = (
    _break(
        "residual-stays-after-capture",
        "taken, _ = self.residuals[fragment], ()",
        "a residual stays although a contribution contains it",
    ),
    _break(
        "residual-not-sent",
        "return Capture(self.plan, fragment, copy, published, ())",
        "a residual is dropped instead of sent",
    ),
    _break(
        "merged-keeps-old-residual",
        "if False:",
        "a merged contribution leaves the residual that it contained",
    ),
    _break(
        "refused-keeps-encoding-loss",
        "if entry.leaves is not None:",
        "a refused contribution leaves only what its payload lacks",
        14,
    ),
    _break(
        "residual-overwrites-later",
        "self.residuals[fragment] = left",
        "a residual replaces what was left meanwhile",
        7,
    ),
    _break(
        "residual-is-everything",
        "pass",
        "the residual is the whole contribution",
    ),
    _break(
        "refusal-drops-residual",
        "effects = []",
        "a refused contribution leaves nothing",
        14,
    ),
    _break(
        "lost-outcome-sent-again",
        "effects += fragments.settle(self.options, index, sent, _MAY_BE_MERGED, gone=False)",
        "a contribution that may be merged is sent again after its outcome was lost",
        114,
    ),
    _break(
        "lost-link-sent-again",
        "effects += settle(options, index, sent, why, gone=False)",
        "a contribution that was lost with its connection and may be merged is sent again",
        22,
    ),
    Break(
        "repeated-request-drops-residual",
        "pass",
        "a repeated request drops the residual of the first contribution",
        replace(COARSE, mishaps={"slips": 0.02, "corruption": 0.05, "impatience": 1.0}),
        noticed_by=19,
    ),
    _break(
        "restored-residual-kept",
        "if False:",
        "a learner keeps a restored residual that its earlier process may have sent",
        37,
    ),
    _break(
        "checkpoint-without-residuals",
        '"residuals": [],',
        "a checkpoint has no residuals",
        63,
    ),
    _break(
        "residuals-not-restored",
        "pass",
        "residuals are not restored from a checkpoint",
        63,
    ),
    _break(
        "encoding-loss-not-noted",
        "pass",
        "what a payload lacks is not recorded",
    ),
    _break(
        "accepted-settled-early",
        "if False:",
        "an accepted contribution is settled while its steps are in the parameters",
    ),
)
