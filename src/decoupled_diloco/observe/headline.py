"""What a run's status comes to at first sight, in words: on a terminal and on the live page."""

from __future__ import annotations

from decoupled_diloco.observe.status import JOINED, RunStatus
from decoupled_diloco.units import format_duration


def headline(status: RunStatus) -> str:
    """How it is."""
    silent = format_duration(status.silent_seconds)
    match status.phase:
        case "finished" if status.virtual:
            return "finished, in virtual time"
        case "silent" if status.virtual:
            return "not finished, in virtual time"
        case "empty":
            return "nothing is on the tape yet"
        case "finished":
            return f"finished: its last record is {silent} old"
        case "interrupted":
            return f"interrupted at step {status.step}, {silent} ago"
        case "silent":
            return f"nothing has written this tape for {silent}: the run was not over, and stopped"
        case phase:
            return phase


def position(status: RunStatus) -> str:
    """How far it is, and of how much if that is known."""
    return f"step {status.step}" + (f"/{status.budget_steps}" if status.budget_steps else "")


def budget_share(status: RunStatus) -> float | None:
    """How much of the budget is spent, 0 to 1; the budget that ends the run first counts."""
    budgets = ((status.step, status.budget_steps), (status.tokens, status.budget_tokens))
    shares = [spent / budget for spent, budget in budgets if budget]
    return min(1.0, max(shares)) if shares else None


def learners_in_words(status: RunStatus) -> str:
    """How many learners step, of those that are there; while none does, what they do instead."""
    states = [learner.state for learner in status.learners if learner.state != "left"]
    stepping, joined = states.count("stepping"), states.count(JOINED)
    if stepping or not states:
        return f"{stepping}/{len(states)} learners" if states else "no learner is there"
    if joined == len(states):
        return f"{joined} joined, none has finished a step yet"
    return f"0/{len(states)} learners" + (f" ({joined} joined, no step yet)" if joined else "")
