"""What a learner does with one fragment at a step boundary (rules 4 and 7): applies and snapshots.

A copy that is staged is applied first, in one of four ways. Then comes the snapshot that a pull
waits for, or that will be due before the next boundary. Functions of the learner's state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from decoupled_diloco.protocol.effects import (
    NOTHING_NEW,
    Apply,
    LearnerEffect,
    Send,
    SendBody,
    Snapshot,
)
from decoupled_diloco.protocol.learner_state import FragmentView, LearnerState, Sent, Taken
from decoupled_diloco.protocol.messages import Decline, Pull
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import shard_peer
from decoupled_diloco.protocol.versions import Version

Mode = Literal["overwrite", "carry", "rebase", "blend"]

NOT_TAKEN = "nothing of it was taken"
"""Why a learner takes a copy that it holds once more, in the end."""

UNDER_WAY = "its contribution is under way, and follows"
"""Why a learner takes a copy that its contribution was too late for as one that it took part in."""


def leave_no_rest(state: LearnerState) -> list[LearnerEffect]:
    """What no version has taken in the end is not kept: the model is the run's result.

    Nor is what a loop has trained that began when all was over.
    """
    effects = list[LearnerEffect]()
    for index, view in enumerate(state.fragments):
        if state.has_rest(view) and view.fetching is None:
            assert view.held is not None
            sent, view.sent, view.snapshot = view.sent, None, None
            merged = sent.taken.tokens if sent is not None and sent.version is not None else 0
            discarded = state.tokens_of(view) - merged
            view.steps_before, view.tokens_before = state.step, state.tokens
            state.discarded_tokens += discarded
            why = NOT_TAKEN
            effects.append(Apply(index, view.held, "overwrite", discarded, why))
    return effects


def answers_first(state: LearnerState, options: Options, view: FragmentView) -> bool:
    """Whether a pull is answered although its round has merged: the answer is late.

    A learner whose step takes longer than the delivery window would otherwise never be heard.
    """
    pull, held, staged = view.pull, view.held, view.staged
    if pull is None or held is None or staged is None or pull.base != held:
        return False
    if pull.final and not state.ended:
        return False
    age = staged.counter - held.counter
    taken = staged.term == held.term and age <= options.late_rounds_max
    return taken and options.late == "next" and state.steps_of(view) > 0


def may_apply(state: LearnerState, options: Options, view: FragmentView) -> bool:
    """Whether a staged copy is applied at this boundary."""
    if options.apply == "on_arrival" or state.ended or view.sent is None:
        return True
    if view.owed_at is not None and state.step >= view.owed_at + options.overlap:
        return True  # the step waits for it, however late its snapshot was
    return state.step >= view.sent.taken.step + options.overlap


def apply_staged(
    state: LearnerState, options: Options, index: int, view: FragmentView
) -> list[LearnerEffect]:
    """Takes the staged copy into the parameters, and says that it is held."""
    version, sent = view.staged, view.sent
    assert version is not None
    mode, why = apply_mode(state, options, view, version)
    discarded = 0
    given_up = sent.taken.tokens if sent is not None and sent.lost else 0
    if mode == "overwrite":
        discarded = state.tokens_of(view) - (sent.taken.tokens if sent else 0) + given_up
        view.steps_before, view.tokens_before = state.step, state.tokens
    elif mode != "rebase":
        assert sent is not None
        discarded = given_up
        view.steps_before += sent.taken.steps
        view.tokens_before += sent.taken.tokens
    if sent is not None and sent.version is None and not sent.lost:
        view.late[sent.ask] = sent
    view.held, view.staged = version, None
    view.snapshot = view.sent = view.owed_at = None
    view.behind = view.restored = False
    state.discarded_tokens += discarded
    effects: list[LearnerEffect] = [Apply(index, version, mode, discarded, why)]
    effects.append(Send(shard_peer(options.owner(index)), view.holding(index), why))
    if view.pull is not None and view.pull.base < version:
        effects += decline(options, index, view, f"behind: I hold {version}")
    return effects


def apply_mode(
    state: LearnerState, options: Options, view: FragmentView, version: Version
) -> tuple[Mode, str]:
    """How a copy is taken over (rule 7), and why.

    Who has sent what it made from the copy that it held takes part in every newer one until
    then, whether its contribution is in it or follows: what was sent is not kept, and so is
    never merged twice. Once the budget is spent nothing that was trained since is thrown away.
    """
    sent = view.sent
    keeps = state.ended
    if sent is not None:
        mode: Mode = sent.taken.alignment
        follows = sent.version is None or sent.version > version
        why = UNDER_WAY if follows else "its contribution is in this version"
        if sent.lost:
            why = f"what it sent as {sent.ask} may be in it"
        if sent.version is not None and sent.version < version:
            mode = "carry" if options.missed == "rebase" else "overwrite"
            why = f"its contribution is in {sent.version}, before this one"
        if keeps:
            # With nothing to carry it is the copy, even where values are not finite.
            rest = state.steps_of(view) > sent.taken.steps
            mode = "carry" if rest else "overwrite"
        return mode, why
    if view.restored:
        return "overwrite", "what its earlier life sent may be in it"
    why = "it was behind" if view.behind else "it took no part in this version"
    if view.held is not None and (options.missed == "rebase" or view.behind or keeps):
        return "rebase", why
    return "overwrite", why


def snapshot_if_due(
    state: LearnerState,
    options: Options,
    index: int,
    view: FragmentView,
    ahead: tuple[int, int] | None,
) -> list[LearnerEffect]:
    """The snapshot that a pull waits for, or that will be due before the next boundary."""
    if view.held is None:
        return []
    steps = state.steps_of(view)
    if view.sent is not None:
        return []  # the snapshot that was sent is still needed
    pull = view.pull
    if pull is not None and pull.base == view.held and (not pull.final or state.ended):
        if steps == 0 and (state.ended or state.leaving or state.holding):
            # It will not step for this: who waits for it would wait for ever.
            return decline(options, index, view, NOTHING_NEW, nothing_new=True)
        if steps > 0:
            effects = _take(
                state, options, index, view, pull.tick, pull.tick, "a pull waits for it"
            )
            return effects + send(state, options, index, view, pull)
    if ahead is None or steps == 0 or view.staged is not None or state.ended:
        return []
    first, last = ahead
    return _take(state, options, index, view, first, last, f"it is due in steps {first} to {last}")


def _take(
    state: LearnerState,
    options: Options,
    index: int,
    view: FragmentView,
    first: int,
    last: int,
    why: str,
) -> list[LearnerEffect]:
    assert view.held is not None
    steps, tokens = state.steps_of(view), state.tokens_of(view)
    view.snapshot = Taken(state.step, view.held, steps, tokens, first, last)
    return [Snapshot(index, view.held, state.step, why)]


def send(
    state: LearnerState, options: Options, index: int, view: FragmentView, pull: Pull
) -> list[LearnerEffect]:
    """Answers a pull from the snapshot."""
    assert view.snapshot is not None
    taken = replace(view.snapshot, alignment=pull.alignment)
    view.pull, view.sent = None, Sent(pull.ask, taken)
    why = f"pulled for step {pull.tick}, snapshot of own step {taken.step}"
    return [
        SendBody(
            shard=options.owner(index),
            fragment=index,
            ask=pull.ask,
            base=taken.base,
            steps=taken.steps,
            tokens=taken.tokens,
            codec=pull.codec,
            path=pull.path,
            why=why,
        )
    ]


def decline(
    options: Options, index: int, view: FragmentView, reason: str, *, nothing_new: bool = False
) -> list[LearnerEffect]:
    """Answers a pull with a reason in the place of a contribution."""
    pull, view.pull = view.pull, None
    assert pull is not None
    decline = Decline(index, pull.ask, nothing_new, reason)
    return [Send(shard_peer(options.owner(index)), decline, reason)]
