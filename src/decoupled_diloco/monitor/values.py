"""A run's numbers by name for an experiment tracker, named as in the frameworks' callbacks."""

from __future__ import annotations

from decoupled_diloco.show.status import LearnerStatus, RunStatus


def run_values(status: RunStatus) -> dict[str, float]:
    """Return the numbers of a run to log, without unknown ones.

    ``diloco/kept_share`` is the share of the tokens whose training is not overwritten.
    """
    found: dict[str, float | None] = {
        "diloco/run_step": status.step,
        "diloco/tokens": status.tokens,
        "diloco/tokens_per_second": status.tokens_per_second,
        "diloco/discarded_tokens": status.discarded_tokens,
        "diloco/kept_share": 1 - status.discarded_tokens / status.tokens if status.tokens else None,
        "diloco/rounds": status.rounds_merged,
        "diloco/rounds_abandoned": status.rounds_abandoned,
        "diloco/learners": sum(learner.state == "stepping" for learner in status.learners),
        "diloco/bytes_up": status.bytes_up,
        "diloco/bytes_down": status.bytes_down,
        "evaluation/loss": status.evaluation_loss,
        "evaluation/average_loss": status.average_loss,
    }
    for learner in status.learners:
        found |= _of_learner(learner)
    return {key: float(value) for key, value in found.items() if value is not None}


def _of_learner(learner: LearnerStatus) -> dict[str, float | None]:
    return {
        f"{learner.name}/loss": learner.loss,
        f"{learner.name}/tokens": learner.tokens,
        f"{learner.name}/discarded_tokens": learner.discarded_tokens,
        f"{learner.name}/participation": learner.participation_recent,
    }
