"""Error feedback, broken on purpose; see `breaks`."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.learner.background import Background
from decoupled_diloco.learner.body_exchange import BodyExchange
from decoupled_diloco.learner.checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.merge import plan
from decoupled_diloco.protocol import learner_fragments
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.simulate.shrink import Changes
from simulation.breaks import Break

COARSE = Changes(options={"uplink_codec": "int2", "error_feedback": True})


def _break(what: str, owner: Any, name: str, old: str, new: str, noticed_by: int = 0) -> Break:
    return Break(what, owner, name, old, new, COARSE, noticed_by)


RESIDUALS = (
    _break(
        "a residual stays, although a contribution has taken it along",
        LearnerTensors,
        "capture",
        "self.residuals[fragment] = self.residuals[fragment], ()",
        "_ = self.residuals[fragment], ()",
    ),
    _break(
        "a residual is forgotten instead of sent",
        LearnerTensors,
        "capture",
        "return Capture(self.plan, fragment, copy, published, taken)",
        "return Capture(self.plan, fragment, copy, published, ())",
    ),
    _break(
        "what is merged leaves what was left before it",
        LearnerTensors,
        "settle",
        "if gone and entry.leaves is not None:",
        "if False:",
    ),
    _break(
        "what is refused leaves what its body lacks",
        LearnerTensors,
        "settle",
        "if gone and entry.leaves is not None:",
        "if entry.leaves is not None:",
        14,
    ),
    _break(
        "what is left takes the place of what was left meanwhile",
        LearnerTensors,
        "settle",
        "self.residuals[fragment] += left",
        "self.residuals[fragment] = left",
        2,
    ),
    _break(
        "a residual is all of a contribution",
        plan,
        "encode_with_feedback",
        "u.sub_(codec.decode(body[octets], u.numel(), scratch))",
        "pass",
    ),
    _break(
        "a refusal leaves nothing",
        LearnerMachine,
        "_outcome",
        "effects = fragments.settle(self.options, message.fragment, sent, why, gone=False)",
        "effects = []",
        14,
    ),
    _break(
        "what may be merged is sent again if its outcome is lost",
        LearnerMachine,
        "_welcomed",
        "_MAY_BE_IN, gone=True)",
        "_MAY_BE_IN, gone=False)",
        63,
    ),
    _break(
        "what went with the connection and may be merged is sent again",
        learner_fragments,
        "apply_staged",
        "effects += settle(options, index, sent, why, gone=True)",
        "effects += settle(options, index, sent, why, gone=False)",
        22,
    ),
    _break(
        "what a shard asks for again has lost its residual",
        LearnerMachine,
        "_pulled",
        "effects += fragments.settle(self.options, index, view.sent, why, gone=False)",
        "pass",
        79,
    ),
    _break(
        "a residual is kept although an earlier life may have sent it",
        learner_fragments,
        "apply_staged",
        "if forgets:",
        "if False:",
        31,
    ),
    _break(
        "a checkpoint has no residuals",
        LearnerCheckpoint,
        "write",
        '"residuals": self.with_residual,',
        '"residuals": [],',
        63,
    ),
    _break(
        "residuals are not brought back",
        Background,
        "_begin",
        "shared.tensors.residuals = [held.residual for held in checkpoint.fragments]",
        "pass",
        63,
    ),
    _break(
        "what a body lacks is not noted",
        BodyExchange,
        "_encoded",
        "self._tensors().encoded(effect.fragment, effect.ask, residual)",
        "pass",
    ),
    _break(
        "an accepted contribution is settled while its steps are in the parameters",
        LearnerMachine,
        "_outcome",
        "if sent is view.sent:",
        "if False:",
    ),
)
