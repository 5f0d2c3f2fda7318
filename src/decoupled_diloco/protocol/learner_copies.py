"""How a learner comes by published copies: which it fetches, and in which form (rules 5 and 7).

Functions of its state. Who holds what a new copy follows takes the difference, everybody else the
whole; one fetch of a fragment is under way at a time, and what is newer by then comes next. From
one shard as many fragments come at a time as it has slots, in the order in which they were
announced, each in its newest version: over a slow link a copy is soon here, and not yet superseded.
"""

from __future__ import annotations

from decoupled_diloco.protocol.effects import Fetch, LearnerEffect, Note, Relabel, Send, SendCopy
from decoupled_diloco.protocol.learner_state import FragmentView, LearnerState
from decoupled_diloco.protocol.messages import CopyDeclined, CopyWanted, Published
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import shard_peer
from decoupled_diloco.protocol.versions import Version

RETRY_SECONDS = 1.0
"""A whole copy that could not be had is asked for again after this."""


def published(state: LearnerState, options: Options, message: Published) -> list[LearnerEffect]:
    """A shard has told of a new copy."""
    view = state.fragments[message.fragment]
    link = state.shards[options.owner(message.fragment)]
    link.news = max(0, link.news - 1) if link.news else link.news
    if view.latest is not None and view.latest.version >= message.version:
        return []
    again, view.retry_at = view.retry_at is not None, None
    view.told(message)
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
    wanted, effects = state.shards[shard].wanted, list[LearnerEffect]()
    flying = sum(state.fragments[p].fetching is not None for p in options.owned(shard))
    while wanted and (not state.ready or flying < options.open_rounds_max):
        index = next(iter(wanted))
        del wanted[index]
        effects += _fetch(options, index, state.fragments[index])
        flying += 1
    return effects


def _fetch(options: Options, index: int, view: FragmentView) -> list[LearnerEffect]:
    newest, latest = view.newest, view.latest
    assert latest is not None
    follows = newest is not None and latest.base == newest
    whole = not follows or view.fetch_whole
    if newest is not None and not follows:
        view.behind = True
    view.fetching, view.fetch_whole = latest.version, whole
    why = "it follows what is here" if not whole else f"what is here is {newest}"
    path = latest.whole if whole else latest.difference
    shard = options.owner(index)
    return [Fetch(shard, index, latest.version, path, whole, latest.digest, why)]


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
    view.held, view.snapshot, view.sent = version, None, None
    holding = Send(shard_peer(options.owner(index)), view.holding(index), why)
    return [Relabel(index, version, why), holding]


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
    view.fetching, view.fetch_whole = None, False
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
