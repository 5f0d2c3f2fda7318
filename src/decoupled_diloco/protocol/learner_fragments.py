"""What becomes of a learner's fragments: copies come, are applied, and changes go (rules 4, 5, 7).

*Copies*. Who holds what a new copy follows takes the difference, who is a few behind one difference
after the other, as long as a whole copy is larger, everybody else the whole; one
fetch of a fragment is under way at a time, and what is newer by then comes next. From one shard as
many fragments come at a time as it has slots, in the order in which they were announced, each in
its newest version: over a slow link a copy is soon here, and not yet superseded. Where learners
open rounds, M times as many versions come, and differences wait for no slot until one fails.

*Apart*. Who has trained a fragment for more steps than count while its link was down, and while the
fragment has gone on for as long, has become another model: merged, it would throw the run far back,
with capped weight too. It drops that with the next copy, and contributes nothing before.

*Boundaries*. A copy that is staged is applied first, in one of four ways. Then comes the snapshot
that a pull waits for, or that will be due before the next boundary.

Functions of the learner's state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from decoupled_diloco.protocol.effects import (
    NOTHING_NEW,
    Apply,
    Fetch,
    ForgetResidual,
    LearnerEffect,
    Note,
    Relabel,
    Send,
    SendBody,
    SendCopy,
    Settle,
    Snapshot,
)
from decoupled_diloco.protocol.learner_state import FragmentView, LearnerState, Sent, Taken
from decoupled_diloco.protocol.messages import CopyDeclined, CopyWanted, Decline, Published, Pull
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import shard_peer
from decoupled_diloco.protocol.versions import Version

RETRY_SECONDS = 1.0
"""A whole copy that could not be had is asked for again after this."""

Mode = Literal["overwrite", "carry", "rebase", "blend"]

NOT_TAKEN = "nothing of it was taken"
"""Why a learner takes a copy that it holds once more, in the end."""

UNDER_WAY = "its contribution is under way, and follows"
"""Why a learner takes a copy that its contribution was too late for as one that it took part in."""


def settle(
    options: Options, index: int, sent: Sent | None, why: str, *, gone: bool
) -> list[LearnerEffect]:
    """Orders what a contribution leaves for the fragment's next one (rule 19).

    While a contribution's steps are still in the parameters, a checkpoint must hold the residual as
    it was before them: a run that resumes from it makes that contribution again. An accepted
    contribution is therefore settled when a newer copy is applied, not when its outcome arrives.
    """
    if sent is None or not options.error_feedback:
        return []
    return [Settle(index, sent.ask, gone, why)]


def leave_no_rest(state: LearnerState, options: Options) -> list[LearnerEffect]:
    """What no version has taken in the end is not kept: the model is the run's result.

    Nor is what a loop has trained that began when all was over: then no copy is waited for.
    """
    effects = list[LearnerEffect]()
    for index, view in enumerate(state.fragments):
        if state.has_rest(view) and (view.fetching is None or state.over):
            assert view.held is not None
            sent, view.sent, view.snapshot = view.sent, None, None
            merged = sent if sent is not None and sent.version is not None else None
            discarded = state.tokens_of(view) - (merged.taken.tokens if merged else 0)
            view.steps_before, view.tokens_before = state.step, state.tokens
            state.discarded_tokens += discarded
            why = NOT_TAKEN
            effects.append(Apply(index, view.held, "overwrite", discarded, why))
            effects += settle(options, index, merged, why, gone=True)
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
    taken = taken and not is_apart(options, view)
    return taken and options.late == "next" and state.steps_of(view) > 0


def is_apart(options: Options, view: FragmentView) -> bool:
    """Whether what was trained while the link was down is dropped: the fragment has gone on.

    Where it has not, because nobody could reach the shard, it is a long contribution, and no more.
    """
    if options.missed == "rebase" or view.held is None or view.latest is None:
        return False
    gone_on = view.latest.version.counter - view.held.counter
    return view.alone > options.steps_counted and gone_on >= options.counter_cap_periods


def decline_if_apart(options: Options, index: int, view: FragmentView) -> list[LearnerEffect]:
    """Answers a pull of what will be dropped."""
    if view.pull is None or not is_apart(options, view):  # break: apart-learner-answers
        return []
    why = "it was apart for too long, and drops what it has"
    return decline(options, index, view, why, nothing_new=view.pull.final)


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
    forgets = options.error_feedback and view.restored and sent is None
    view.held, view.staged = version, None
    view.snapshot = view.sent = view.owed_at = None
    view.behind = view.restored = view.unfit = False
    view.alone = 0
    state.discarded_tokens += discarded
    effects: list[LearnerEffect] = [Apply(index, version, mode, discarded, why)]
    if sent is not None and (sent.lost or sent.version is not None):
        effects += settle(options, index, sent, why, gone=True)  # break: lost-link-sent-again
    if forgets:  # break: restored-residual-kept
        effects.append(ForgetResidual(index, "what its earlier life sent may have had it"))
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
    never merged twice. Once the budget is spent nothing that was trained since is thrown away, but
    what was trained apart.
    """
    sent, keeps, apart = view.sent, state.ended, is_apart(options, view)  # break: apart-steps-kept
    if view.unfit and not keeps:
        # Kept, it would be in the next contribution, which would be refused for it, for ever. That
        # holds of NaN even if it was sent: nothing can be subtracted from it.
        return "overwrite", "what it made before was too large, or not finite"
    if sent is not None:  # break: lost-contribution-kept, in-flight-steps-kept
        mode: Mode = sent.taken.alignment  # break: merged-steps-carried
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
        return "overwrite" if apart else mode, why
    if view.restored:
        return "overwrite", "what its earlier life sent may be in it"
    if apart:
        return "overwrite", f"it was apart for more than {options.steps_counted} steps"
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
        if declined := decline_if_apart(options, index, view):
            return declined
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


def published(state: LearnerState, options: Options, message: Published) -> list[LearnerEffect]:
    """A shard has told of a new copy."""
    view = state.fragments[message.fragment]
    link = state.shards[options.owner(message.fragment)]
    link.news = max(0, link.news - 1) if link.news else link.news
    if view.latest is not None and view.latest.version >= message.version:
        return []
    again, view.retry_at = view.retry_at is not None, None
    view.told(message, options.chain)
    return _want(state, options, message.fragment, again=again)


def _want(
    state: LearnerState, options: Options, index: int, *, again: bool = False
) -> list[LearnerEffect]:
    """Takes the newest copy of a fragment, or has it wait for its turn; it keeps its place.

    One whose turn came to nothing (``again``) is the next: behind all others it could be superseded
    in each of its turns, and never come.
    """
    view, shard = state.fragments[index], options.owner(index)
    newest, latest = view.newest, view.latest
    if latest is None or view.fetching is not None:
        return []
    if newest is not None and latest.version <= newest:
        return []
    link = state.shards[shard]
    if again:
        link.wanted = {index: None, **link.wanted}
    link.wanted.setdefault(index)
    if newest is not None and latest.base == newest and not latest.difference:
        del link.wanted[index]
        return _relabel(options, index, view, latest.version)
    return _fetch_wanted(state, options, shard)


def _fetch_wanted(state: LearnerState, options: Options, shard: int) -> list[LearnerEffect]:
    """Those whose turn it is."""
    link, effects = state.shards[shard], list[LearnerEffect]()
    link.crowded = link.crowded and bool(link.wanted)
    free = options.participants == "own" and not link.crowded  # differences wait for no slot
    views = [state.fragments[p] for p in options.owned(shard)]
    flying = sum(v.fetching is not None and (v.fetch_whole or not free) for v in views)
    for index in tuple(link.wanted):
        view = state.fragments[index]
        takes_turn = not free or view.fetch_whole or view.next_difference() is None
        # break: copies-fetched-without-limit
        if state.ready and takes_turn and flying >= options.open_rounds_max:
            continue
        del link.wanted[index]
        effects += _fetch(options, index, view)
        flying += takes_turn
    return effects


def _fetch(options: Options, index: int, view: FragmentView) -> list[LearnerEffect]:
    newest, latest, follows = view.newest, view.latest, view.next_difference()
    assert latest is not None
    whole = follows is None or view.fetch_whole  # break: no-whole-copy-after-gap
    if newest is not None and follows is None:
        view.behind = True
    taken = latest if follows is None or whole else follows
    view.fetching, view.fetch_whole = taken.version, whole
    view.seals[taken.version] = (taken.digest, taken.seal)
    why = "it follows what is here" if not whole else f"what is here is {newest}"
    path, nbytes = (taken.whole, 0) if whole else (taken.difference, taken.difference_nbytes)
    shard = options.owner(index)
    return [Fetch(shard, index, taken.version, path, whole, taken.digest, why, nbytes)]


def _relabel(
    options: Options, index: int, view: FragmentView, version: Version
) -> list[LearnerEffect]:
    why = "its values are the same"
    if view.staged is not None:
        if view.sent is not None and view.sent.version == view.staged:
            view.sent.version = version
        view.staged = version
        return [Relabel(index, version, why, staged=True)]
    # What was sent to the shard's earlier life went with it.
    sent = view.sent
    view.held, view.snapshot, view.sent = version, None, None
    settled = settle(options, index, sent, "it went with the shard's earlier life", gone=False)
    holding = Send(shard_peer(options.owner(index)), view.holding(index), why)
    return [Relabel(index, version, why), *settled, holding]


def fetched(
    state: LearnerState, options: Options, index: int, version: Version
) -> list[LearnerEffect]:
    """A copy is here, and waits for the next step boundary."""
    view = state.fragments[index]
    if view.fetching != version:
        return []
    view.fetching, view.fetch_whole, view.staged = None, False, version
    state.attention.add(index)
    return _want(state, options, index) + _fetch_wanted(state, options, options.owner(index))


def fetch_failed(
    state: LearnerState, options: Options, now: float, index: int, version: Version, reason: str
) -> list[LearnerEffect]:
    """A copy could not be had."""
    view = state.fragments[index]
    if view.fetching != version:
        return []
    was_whole = view.fetch_whole
    state.shards[options.owner(index)].crowded |= not was_whole
    view.fetching, view.fetch_whole = None, False
    view.following = ()  # those before the newest may be gone
    assert view.latest is not None
    note = Note(f"version {version} of fragment {index} could not be had", reason)
    if view.latest.version == version:
        view.fetch_whole = True
    if view.latest.version > version or not was_whole:
        again = _want(state, options, index, again=True)
    else:
        again, view.retry_at = [], now + RETRY_SECONDS
        state.retrying.add(index)
    return [note, *again, *_fetch_wanted(state, options, options.owner(index))]


def retry(state: LearnerState, options: Options, now: float) -> list[LearnerEffect]:
    """Asks again for the copies whose time has come."""
    effects: list[LearnerEffect] = []
    for index in sorted(state.retrying):
        view = state.fragments[index]
        if view.retry_at is not None and now >= view.retry_at:
            view.retry_at = None
            effects += _want(state, options, index, again=True)
        if view.retry_at is None:
            state.retrying.discard(index)
    return effects


def copy_wanted(state: LearnerState, shard: int, wanted: CopyWanted) -> list[LearnerEffect]:
    """A shard asks for a whole fragment: the parameters, or the published copy that is held."""
    held, version = state.fragments[wanted.fragment].held, wanted.version
    if version is not None and version != held:
        reason = f"I hold {held}, not {version}"
        return [
            Send(shard_peer(shard), CopyDeclined(wanted.fragment, wanted.attempt, reason), reason)
        ]
    why = "the shard asked for it"
    return [SendCopy(shard, wanted.fragment, wanted.attempt, version, wanted.path, why)]
