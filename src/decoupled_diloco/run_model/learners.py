"""The fold of the learners' own tapes; see `run_model.fold_records`."""

from __future__ import annotations

import math
from typing import Any

from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import LOSS_MAX
from decoupled_diloco.run_model.facts import LearnerLog, LossPoint, ProcessLife, RunFacts
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.samples import LossMeasured
from decoupled_diloco.units import format_duration


def take(run: RunFacts, learner: LearnerLog, life: ProcessLife, value: Any) -> None:
    match value:
        case messages.StepFinished(tokens):
            life.steps += 1
            life.tokens += tokens
            learner.stepped_at, learner.process = run.at, "training"
            run.count_tokens(learner)
            learner.rate.add(run.at, learner.tokens)
            run.token_rate.add(run.duration, run.tokens)
        case messages.Began(steps_alone=steps, tokens_alone=tokens) if steps:
            life.steps += steps
            life.tokens += tokens
            run.count_tokens(learner)
        case LossMeasured(_, global_step, _, loss):
            note_loss(run, learner, global_step, loss)
        case messages.Apply(fragment, _, mode, discarded, why):
            run.fragments_seen = max(run.fragments_seen, fragment + 1)
            if discarded:
                learner.discarded[(mode, why)] += discarded
        case messages.Ready():
            life.ready_at = run.at if life.ready_at is None else life.ready_at
            learner.process, learner.stepped_at = "training", run.at
            note_joined(run, learner)
        case messages.EndTraining() | messages.RunOver():
            life.over, learner.process = True, "finished"
            if isinstance(value, messages.EndTraining) and not run.stopped_by:
                run.remark("", "the budget is reached: the closing rounds start")
        case messages.Recovered():
            learner.recoveries.append(value)
    if run.whole:
        _keep_books(life, run.at, value)


def note_loss(run: RunFacts, learner: LearnerLog, step: int, loss: float | None) -> None:
    """Record a learner's loss; ``None`` or a value from `LOSS_MAX` up means not finite."""
    learner.loss = None if loss is None or abs(loss) >= LOSS_MAX else loss
    if learner.loss is None:
        learner.losses_not_finite += 1
        run.remark(learner.name, f"the loss of {learner.name} is not finite: it has diverged")
    elif run.whole:
        learner.losses.append(LossPoint(run.at, step, learner.loss))


def note_sent(run: RunFacts, life: ProcessLife, record: Record) -> None:
    """Record a sent contribution, without decoding the rest of the record."""
    try:
        ask = record.data["ask"]
        name = (int(ask["term"]), int(ask["number"]))
        life.ledger.sent(int(record.data["fragment"]), name, int(record.data["tokens"]))
    except (KeyError, TypeError, ValueError) as error:
        run.left_out[f"{record.process}: SendBody: {error!r}"] += 1


def note_joined(run: RunFacts, learner: LearnerLog) -> None:
    """Add the remark that a learner has started to train."""
    text, down_at = f"{learner.name} joined", learner.down_at
    if down_at is not None:
        text = f"{learner.name} is back, {format_duration(run.at - down_at)} after it went down"
    elif run.has_devices:
        text = ""
    elif learner.afar and len(learner.lives) > 1:
        text = f"{learner.name} is back"
    learner.down_at = None
    run.remark(learner.name, text)


def _keep_books(life: ProcessLife, at: float, value: Any) -> None:
    """Record each step and what became of its tokens; used only for whole tapes."""
    match value:
        case messages.StepFinished(tokens):
            life.steps_at.append(at)
            life.step_tokens.append(tokens)
            life.ledger.stepped(tokens)
        case messages.Began(kept=kept, tokens_alone=alone):
            life.ledger.stepped(alone)  # a device trained them before this visit: no other has them
            for own in kept:
                earlier = max(0, own.tokens - alone)
                life.ledger.restored(own.fragment, _version_key(own.version), earlier)
        case messages.Apply(fragment, version, mode, discarded, why):
            life.ledger.applied(fragment, mode, discarded, why)
            life.ledger.holds(fragment, _version_key(version))
        case messages.Relabel(fragment, version, staged=staged):
            life.ledger.renamed(fragment, staged=staged)
            if not staged:
                life.ledger.holds(fragment, _version_key(version))
        case messages.Hold():
            life.holds.append((at, math.inf))
        case messages.Release() if life.holds:
            life.holds[-1] = (life.holds[-1][0], at)


def _version_key(version: Any) -> tuple[int, int]:
    return (version.term, version.counter)
