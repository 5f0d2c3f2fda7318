"""Fragments at a learner: fetching copies, applying them, contributing changes (rules 4, 5, 7).

*Copies.* A learner that holds the base of a new copy fetches the difference. A learner that is a
few versions behind fetches one difference after the other, as long as a whole copy is larger.
Otherwise it fetches the whole copy. One fetch per fragment runs at a time; if a newer version
arrives meanwhile, it comes next. Per shard, the number of fetches equals its slots, in the order of
the announcements, each in the newest version: over a slow link, a copy then arrives soon and is not
yet superseded. If learners open rounds, M times as many versions arrive, and differences need no
slot until one fails.

*Divergence.* A learner has diverged in a fragment if it trained it for more steps than may count
while its link was down, and the fragment advanced by as many periods. Merging that training would
throw the run far back, even with capped weight. The learner drops it with the next copy, and
contributes nothing before.

*Boundaries.* A staged copy is applied first, in one of four ways. Then follows the snapshot that a
request waits for, or that will be due before the next boundary.

*Foresight* (rule 4). A request is answered from a snapshot, and snapshots are taken only at
boundaries. The learner therefore predicts the shard's clock. A learner with a backlog receives with
each request a list of what comes next, so that its link is not idle until the next boundary. One
snapshot too many costs a copy; one too few delays an answer by up to a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from decoupled_diloco.protocol import visits
from decoupled_diloco.protocol.learner_state import FragmentView, LearnerState, Sent, Taken
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    NOTHING_NEW,
    Apply,
    CopyDeclined,
    CopyWanted,
    Decline,
    Fetch,
    ForgetResidual,
    LearnerEffect,
    Note,
    Published,
    Pull,
    Relabel,
    Send,
    SendBody,
    SendCopy,
    Settle,
    Snapshot,
    Version,
    shard_peer,
)
from decoupled_diloco.protocol.participation import participation

RETRY_SECONDS = 1.0
"""Pause before a whole copy that could not be fetched is requested again."""


Mode = Literal["overwrite", "carry", "rebase", "blend"]


NOT_TAKEN = "no version contains this training"
"""Why a learner applies the held copy once more at the end of a run."""


STARTS_AGAIN = "its contribution is folded, and no newer version is known"
"""Why a device applies the held copy once more."""


BURNT = "its secure sum is abandoned after it was opened, and no other sum may contain it"
"""Why a learner drops training that it has masked."""


UNDER_WAY = "its contribution is under way, and follows"
"""Why a late contributor applies a copy as if it had taken part in it."""


def settle(
    options: Options, index: int, sent: Sent | None, why: str, *, gone: bool
) -> list[LearnerEffect]:
    """Order what a contribution leaves for the fragment's next one (rule 19).

    While a contribution's steps are still in the parameters, a checkpoint must hold the residual as
    it was before them: a run that resumes from it makes that contribution again. An accepted
    contribution is therefore settled when a newer copy is applied, not when its outcome arrives.
    """
    if sent is None or not options.error_feedback:
        return []
    return [Settle(index, sent.ask, gone, why)]


def drop_unmerged(state: LearnerState, options: Options) -> list[LearnerEffect]:
    """Drop the training that no version contains at the end: the model is the run's result.

    This includes the training of a loop that starts after the end. It waits for no copy.
    """
    effects = list[LearnerEffect]()
    for index, view in enumerate(state.fragments):
        if state.has_unmerged(view) and (view.fetching is None or state.over):
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
    """Return whether a request is answered although its round has merged, so the answer is late.

    Otherwise, a learner whose step takes longer than the delivery window would never take part.
    """
    pull, held, staged = view.pull, view.held, view.staged
    if pull is None or held is None or staged is None or pull.base != held:
        return False
    if pull.final and not state.ended:
        return False
    age = staged.counter - held.counter
    taken = staged.term == held.term and age <= options.age_max
    taken = taken and not has_diverged(options, view)
    return taken and options.late == "next" and state.steps_of(view) > 0


def has_diverged(options: Options, view: FragmentView) -> bool:
    """Return whether the training from the time without a link is dropped.

    It is kept, as one long contribution, if the fragment has not advanced meanwhile because no
    learner could reach the shard.
    """
    if options.missed == "rebase" or view.held is None or view.latest is None:
        return False
    advanced = view.latest.version.counter - view.held.counter
    return view.alone > options.steps_counted and advanced >= options.counter_cap_periods


def decline_if_diverged(options: Options, index: int, view: FragmentView) -> list[LearnerEffect]:
    """Decline a request for training that will be dropped."""
    if view.pull is None or not has_diverged(options, view):  # break: apart-learner-answers
        return []
    why = "it was disconnected for too long and drops its training"
    return decline(options, index, view, why, nothing_new=view.pull.final)


def may_apply(state: LearnerState, options: Options, view: FragmentView) -> bool:
    """Return whether a staged copy is applied at this boundary."""
    if options.apply == "on_arrival" or state.ended or view.sent is None:
        return True
    if view.owed_at is not None and state.step >= view.owed_at + options.overlap:
        return True  # the step is holding for it, however late its snapshot was
    return state.step >= view.sent.taken.step + options.overlap


def apply_staged(
    state: LearnerState, options: Options, index: int, view: FragmentView
) -> list[LearnerEffect]:
    """Apply the staged copy to the parameters, and report that it is held."""
    version, sent = view.staged, view.sent
    assert version is not None
    mode, why = apply_mode(state, options, view, version)
    discarded = 0
    lost_tokens = sent.taken.tokens if sent is not None and (sent.lost or sent.burnt) else 0
    if mode == "overwrite":
        discarded = state.tokens_of(view) - (sent.taken.tokens if sent else 0) + lost_tokens
        view.steps_before, view.tokens_before = state.step, state.tokens
    elif mode != "rebase":  # the training since the snapshot stays in the parameters
        assert sent is not None
        discarded = lost_tokens
        view.steps_before += sent.taken.steps
        view.tokens_before += sent.taken.tokens
    if sent is not None and sent.version is None and not (sent.lost or sent.burnt or sent.kept):
        view.late[sent.ask] = sent  # its steps leave the parameters, its outcome is still open
    # A device that has left in order has sent nothing since its checkpoint.
    forgets = options.error_feedback and view.restored and sent is None and not options.devices
    view.held, view.staged = version, None
    view.snapshot = view.sent = view.owed_at = None
    view.behind = view.restored = False
    view.dropped = ""
    view.again = 0
    view.alone = 0
    state.discarded_tokens += discarded
    effects: list[LearnerEffect] = [Apply(index, version, mode, discarded, why)]
    if sent is not None and (sent.lost or sent.kept or sent.version is not None):
        effects += settle(options, index, sent, why, gone=True)  # break: lost-link-sent-again
    if forgets:  # break: restored-residual-kept
        why_dropped = "a contribution of its earlier incarnation may contain it"
        effects.append(ForgetResidual(index, why_dropped))
    effects.append(Send(shard_peer(options.owner(index)), view.holding(index), why))
    if view.pull is not None and view.pull.base < version:
        effects += decline(options, index, view, f"behind: it holds {version}")
    return effects


def start_again(
    state: LearnerState, options: Options, index: int, view: FragmentView
) -> list[LearnerEffect]:
    """Let a device start from its version again, once its contribution from it is folded."""
    sent = view.sent
    if sent is None or not visits.starts_again(state, options, view):
        return []
    assert view.held is not None
    discarded = state.tokens_of(view) - sent.taken.tokens
    view.steps_before, view.tokens_before = state.step, state.tokens
    view.snapshot = view.sent = None
    view.again += 1
    view.restored = False
    state.discarded_tokens += discarded
    return [
        Apply(index, view.held, "overwrite", discarded, STARTS_AGAIN),
        *settle(options, index, sent, STARTS_AGAIN, gone=True),
        Send(shard_peer(options.owner(index)), view.holding(index), STARTS_AGAIN),
    ]


def drop_burnt(
    state: LearnerState, options: Options, index: int, view: FragmentView
) -> list[LearnerEffect]:
    """Drop the training of a secure sum that was opened, or could be, and is in no version.

    If the same training were in another sum, too, the difference of both could be the contribution
    of one learner. What was trained since stays.
    """
    sent = view.sent
    if sent is None or not sent.burnt or view.staged is not None:
        return []  # a staged copy replaces it
    assert view.held is not None
    discarded = sent.taken.tokens
    view.steps_before += sent.taken.steps
    view.tokens_before += discarded
    view.snapshot = view.sent = None
    state.discarded_tokens += discarded
    return [
        Apply(index, view.held, "carry", discarded, BURNT),
        Send(shard_peer(options.owner(index)), view.holding(index), BURNT),
    ]


def apply_mode(
    state: LearnerState, options: Options, view: FragmentView, version: Version
) -> tuple[Mode, str]:
    """Return how a copy is applied (rule 7), and why.

    A learner that sent a contribution from its held copy takes part in every newer version up to
    the one with the contribution. What was sent is therefore never kept, and never merged twice.
    After the budget is reached, no training is dropped, except that of a diverged learner.
    """
    sent, keeps = view.sent, state.ended
    diverged = has_diverged(options, view)  # break: apart-steps-kept
    if view.dropped and not keeps:  # break: weightless-training-kept
        # If it were kept, every later contribution would contain it and be refused too. This holds
        # even if it was sent, because subtracting from NaN gives NaN.
        return "overwrite", view.dropped
    if sent is not None:  # break: lost-contribution-kept, in-flight-steps-kept
        mode: Mode = sent.taken.alignment  # break: merged-steps-carried
        follows = sent.version is None or sent.version > version
        why = UNDER_WAY if follows else "its contribution is in this version"
        if sent.burnt:
            mode, why = "carry", BURNT
        if sent.lost:
            why = f"its contribution may be in this version ({sent.ask})"
        if sent.version is not None and sent.version < version:
            mode = "carry" if options.missed == "rebase" else "overwrite"
            why = f"its contribution is in {sent.version}, before this one"
        if keeps:
            # Without a rest, overwrite instead of carrying zero: NaN - NaN would remain NaN.
            rest = state.steps_of(view) > sent.taken.steps
            mode = "carry" if rest else "overwrite"
        return "overwrite" if diverged else mode, why
    if view.restored:
        return "overwrite", "a contribution of its earlier incarnation may be in it"
    if visits.is_outdated(options, view) and not keeps:  # break: outdated-training-kept
        return "overwrite", f"its training is older than {options.age_max} versions"
    if diverged:
        return "overwrite", f"it was disconnected for more than {options.steps_counted} steps"
    why = "it was behind" if view.behind else "it took no part in this version"
    # `blend` has left a part of merged training in θ. Without training since, none of it may stay.
    rest = options.alignment != "blend" or state.steps_of(view) > 0
    if view.held is not None and rest and (options.missed == "rebase" or view.behind or keeps):
        return "rebase", why
    return "overwrite", why


def snapshot_if_due(
    state: LearnerState,
    options: Options,
    index: int,
    view: FragmentView,
    ahead: tuple[int, int] | None,
) -> list[LearnerEffect]:
    """Take the snapshot that a request waits for, or that will be due before the next boundary."""
    if view.held is None:
        return []
    steps = state.steps_of(view)
    if view.sent is not None:
        return []  # `carry` still needs the snapshot that was sent
    pull = view.pull
    if pull is not None and pull.base == view.held and (not pull.final or state.ended):
        if declined := decline_if_diverged(options, index, view):
            return declined
        if steps == 0 and (state.ended or state.leaving or state.holding):
            # It will not step again, so a round that waits for it would wait forever.
            return decline(options, index, view, NOTHING_NEW, nothing_new=True)
        if steps > 0:
            effects = _take(
                state, options, index, view, pull.tick, pull.tick, "a request waits for it"
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
    """Answer a request from the snapshot."""
    assert view.snapshot is not None
    taken = replace(view.snapshot, alignment=pull.alignment)
    view.pull, view.sent = None, Sent(pull.ask, taken)
    why = f"requested for step {pull.tick}, snapshot of own step {taken.step}"
    newer = want(state, options, index) if options.devices else []
    return [
        *newer,
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
            packed=pull.packed,
        ),
    ]


def decline(
    options: Options, index: int, view: FragmentView, reason: str, *, nothing_new: bool = False
) -> list[LearnerEffect]:
    """Answer a request with a reason instead of a contribution."""
    pull, view.pull = view.pull, None
    assert pull is not None
    decline = Decline(index, pull.ask, nothing_new, reason)
    return [Send(shard_peer(options.owner(index)), decline, reason)]


def published(state: LearnerState, options: Options, message: Published) -> list[LearnerEffect]:
    """Record a new published copy that a shard announced."""
    view = state.fragments[message.fragment]
    link = state.shards[options.owner(message.fragment)]
    link.news = max(0, link.news - 1) if link.news else link.news
    if view.latest is not None and view.latest.version >= message.version:
        return []
    again, view.retry_at = view.retry_at is not None, None
    view.announce(message, options.chain)
    return want(state, options, message.fragment, again=again)


def want(
    state: LearnerState, options: Options, index: int, *, again: bool = False
) -> list[LearnerEffect]:
    """Fetch the newest copy of a fragment, or queue the fetch; a queued fragment keeps its place.

    After a failed fetch (``again``), the fragment comes first. Behind all others, its copy could be
    superseded before each attempt and never arrive.
    """
    view, shard = state.fragments[index], options.owner(index)
    newest, latest = view.newest, view.latest
    if latest is None or view.fetching is not None:
        return []
    if newest is not None and latest.version <= newest:
        return []
    link = state.shards[shard]
    if newest is not None and latest.base == newest and not latest.difference:
        link.fetch_queue.pop(index, None)
        return _relabel(options, index, view, latest.version)
    if visits.stays_behind(state, options, view):  # break: device-follows-while-training
        return []
    if again:
        link.fetch_queue = {index: None, **link.fetch_queue}
    link.fetch_queue.setdefault(index)
    return _fetch_wanted(state, options, shard)


def _fetch_wanted(state: LearnerState, options: Options, shard: int) -> list[LearnerEffect]:
    """Start the queued fetches for which slots are free."""
    link, effects = state.shards[shard], list[LearnerEffect]()
    link.crowded = link.crowded and bool(link.fetch_queue)
    free = participation(options).differences_are_free(link)
    views = [state.fragments[p] for p in options.owned(shard)]
    flying = sum(v.fetching is not None and (v.fetch_whole or not free) for v in views)
    for index in tuple(link.fetch_queue):
        view = state.fragments[index]
        takes_turn = not free or view.fetch_whole or view.next_difference() is None
        # break: copies-fetched-without-limit
        if state.ready and takes_turn and flying >= options.open_rounds_max:
            continue
        del link.fetch_queue[index]
        effects += _fetch(options, index, view)
        flying += takes_turn
    return effects


def _fetch(options: Options, index: int, view: FragmentView) -> list[LearnerEffect]:
    newest, latest, follows = view.newest, view.latest, view.next_difference()
    assert latest is not None
    whole = follows is None or view.fetch_whole  # break: no-whole-copy-after-gap
    if newest is not None and follows is None:
        view.behind = True  # a gap in the versions: the copy is applied by rebase
    taken = latest if follows is None or whole else follows
    view.fetching, view.fetch_whole = taken.version, whole
    view.seals[taken.version] = (taken.digest, taken.seal)
    why = "it follows the local copy" if not whole else f"the local copy is {newest}"
    path, nbytes = (taken.whole, 0) if whole else (taken.difference, taken.difference_nbytes)
    shard = options.owner(index)
    return [Fetch(shard, index, taken.version, path, whole, taken.digest, why, nbytes)]


def _relabel(
    options: Options, index: int, view: FragmentView, version: Version
) -> list[LearnerEffect]:
    why = "the values are the same"
    if view.staged is not None:
        if view.sent is not None and view.sent.version == view.staged:
            view.sent.version = version
        view.staged = version
        return [Relabel(index, version, why, staged=True)]
    # A restarted shard has lost what was sent to its earlier process.
    sent = view.sent
    view.held, view.snapshot, view.sent = version, None, None
    if sent is not None and sent.opened:
        sent.taken, sent.burnt = replace(sent.taken, base=version), True
        view.sent = sent
    settled = settle(options, index, sent, "it was lost in the shard's restart", gone=False)
    holding = Send(shard_peer(options.owner(index)), view.holding(index), why)
    return [Relabel(index, version, why), *settled, holding]


def fetched(
    state: LearnerState, options: Options, index: int, version: Version
) -> list[LearnerEffect]:
    """Stage a copy that has arrived, for the next step boundary."""
    view = state.fragments[index]
    if view.fetching != version:
        return []
    view.fetching, view.fetch_whole, view.staged = None, False, version
    state.attention.add(index)
    return want(state, options, index) + _fetch_wanted(state, options, options.owner(index))


def fetch_failed(
    state: LearnerState, options: Options, now: float, index: int, version: Version, reason: str
) -> list[LearnerEffect]:
    """Retry a failed fetch: a newer or whole copy at once, the same whole copy after a pause."""
    view = state.fragments[index]
    if view.fetching != version:
        return []
    was_whole = view.fetch_whole
    state.shards[options.owner(index)].crowded |= not was_whole
    view.fetching, view.fetch_whole = None, False
    view.following = ()  # the shard may have dropped the older differences
    assert view.latest is not None
    note = Note(f"version {version} of fragment {index} could not be fetched", reason)
    if view.latest.version == version:
        view.fetch_whole = True  # its difference may be withdrawn for good
    if view.latest.version > version or not was_whole:
        again = want(state, options, index, again=True)
    else:
        again, view.retry_at = [], now + RETRY_SECONDS
        state.retrying.add(index)
    return [note, *again, *_fetch_wanted(state, options, options.owner(index))]


def retry(state: LearnerState, options: Options, now: float) -> list[LearnerEffect]:
    """Request again the copies whose retry is due."""
    effects: list[LearnerEffect] = []
    for index in sorted(state.retrying):
        view = state.fragments[index]
        if view.retry_at is not None and now >= view.retry_at:
            view.retry_at = None
            effects += want(state, options, index, again=True)
        if view.retry_at is None:
            state.retrying.discard(index)
    return effects


def copy_wanted(
    state: LearnerState, options: Options, shard: int, wanted: CopyWanted
) -> list[LearnerEffect]:
    """Answer a shard's request for a whole fragment: the parameters, or the held published copy.

    With secure sums, parameters are shared only before the run has weights. Later they would reveal
    what this learner alone has trained.
    """
    held, version = state.fragments[wanted.fragment].held, wanted.version
    reason = ""
    if version is not None and version != held:
        reason = f"it holds {held}, not {version}"
    # break: trained-parameters-shared
    if version is None and options.secure and held is not None:
        reason = "it shares only published copies in a run with secure sums"
    if reason:
        return [
            Send(shard_peer(shard), CopyDeclined(wanted.fragment, wanted.attempt, reason), reason)
        ]
    why = "the shard requested it"
    return [SendCopy(shard, wanted.fragment, wanted.attempt, version, wanted.path, why)]


# Which fragments will be due before the next boundary (rule 4)


def due_ahead(state: LearnerState, options: Options, now: float) -> dict[int, tuple[int, int]]:
    """Return the fragments that will be due before the next boundary, each with its ticks."""
    found: dict[int, tuple[int, int]] = {}
    due, period = options.due_by_phase, options.period
    for shard in range(len(state.shards)):
        first, last = ahead = ticks_ahead(state, options, now, shard)
        for tick in range(first, last + 1):
            for index in due[tick % period]:
                if options.owner(index) == shard:
                    found[index] = ahead
        found |= dict.fromkeys(state.shards[shard].upcoming, ahead)
    return found


def ticks_ahead(state: LearnerState, options: Options, now: float, shard: int) -> tuple[int, int]:
    """Return the first and last tick of the shard's clock before this learner's next boundary."""
    link = state.shards[shard]
    if link.offset is None:
        return (0, -1)
    return participation(options).ticks_ahead(options, state, link, now)
