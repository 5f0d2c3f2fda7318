"""Devices: learners that are disconnected most of the time (rule 23). Functions of both states.

A device visits the run: it joins with its own checkpoint, fetches what is new, and leaves. Between
two visits it may train alone. What it keeps on its disk is its learner's checkpoint: the published
copies, so that a visit fetches differences, the residuals, the counters and the inner optimizer.

*Training alone.* From its first step on, a device fetches no newer copy of a fragment until its
contribution is sent. The contribution is therefore based on the version with which the training
began, and its age is the number of versions since (`Options.discount`). If the base is older than
``history`` versions, the shard requests nothing, and the device starts from the newest copy.

*A visit with training* begins with the contributions: the greeting lists the trained fragments, and
the shard requests all that it can still merge before it announces anything newer. Each is confirmed
(`Receipt`) as soon as it is folded. A device need not wait until its round merges.

*Again.* When its contribution is folded and no newer version is known, a device starts from the
same version again. It may contribute any number of times from one version, which counts as one
learner for the quorum.

*Once.* A shard remembers, for as long as its history reaches, from which version it has folded how
many contributions of each device. A device reports the same number. A device that lost power after
its upload, and comes back with an older checkpoint, reports a smaller one. It is therefore not
asked for the same training again. The memory of a shard ends with its term, and so do the versions
of that term.

*Places.* With ``cohort``, a device trains only while it holds a place (`features.places`). A device
that waits for its place fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from decoupled_diloco.protocol.learner_state import FragmentView, LearnerState, Sent
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Hello,
    LearnerEffect,
    PlaceGiven,
    PlaceLost,
    PlaceReturned,
    PlaceWanted,
    Published,
    Receipt,
    Send,
    StepReport,
    SyncerEffect,
    Version,
    shard_peer,
)
from decoupled_diloco.protocol.syncer_state import Ask, FragmentState, Member

# The shard's side


def remembers(options: Options, newest: Version, base: Version) -> bool:
    """Return whether a shard must remember that it has folded a contribution from ``base``."""
    if not options.devices or base.term != newest.term:
        return False
    # break: device-forgotten
    return newest.counter - base.counter <= options.age_max


def trained(options: Options, hello: Hello, owned: frozenset[int]) -> list[int]:
    """Return the fragments for which a device that comes back has a contribution."""
    return sorted(set(hello.trained) & owned) if options.devices else []


def may_again(options: Options, entry: FragmentState, member: Member, fragment: int) -> bool:
    """Return whether a device has new training from a version from which it has contributed."""
    if not options.devices:
        return False
    # break: device-merged-twice
    return member.again.get(fragment, 0) == entry.made_times.get(member.learner, 0)


def folded(options: Options, ask: Ask) -> list[SyncerEffect]:
    """Confirm a folded contribution to a device, which may leave now."""
    if not options.devices:
        return []
    why = "its contribution is folded"
    return [Send(ask.learner, Receipt(ask.fragment, ask.name), why)]


def missed(
    options: Options, fragment: int, entry: FragmentState, held: Version | None, clock: int
) -> Iterator[Published]:
    """Yield the announcements that a learner with this version has missed.

    If the shard still offers all differences since that version, these are their announcements.
    Otherwise it is that of the newest version, which the learner fetches as a whole.
    """
    newest = entry.announcement(fragment, clock)
    if options.devices and held is not None:
        bases = [each.base for each in entry.chain]
        if held in bases:  # break: device-fetches-whole
            yield from entry.chain[bases.index(held) : -1]
    yield newest


# The device's side


def is_returning(state: LearnerState, options: Options) -> bool:
    """Return whether a device has come back with training that it has not sent yet."""
    return options.devices and any(_is_unsent(state, view) for view in state.fragments)


def trained_fragments(state: LearnerState, options: Options, shard: int) -> tuple[int, ...]:
    """Return the fragments of a shard that a device has trained since its last visit."""
    if not options.devices:
        return ()
    return tuple(p for p in options.owned(shard) if _is_unsent(state, state.fragments[p]))


def _is_unsent(state: LearnerState, view: FragmentView) -> bool:
    unsent = view.restored and view.sent is None
    return unsent and view.held is not None and state.steps_of(view) > 0


def stays_behind(state: LearnerState, options: Options, view: FragmentView) -> bool:
    """Return whether a device fetches no newer copy of a fragment now.

    It waits for a place, it is about to leave, or it trains the fragment alone and has not
    contributed yet.
    """
    if not options.devices or state.ending:
        return False
    if state.leaving:
        return True
    if state.place == 0 and not is_returning(state, options):
        return True
    alone = view.sent is None and state.steps_of(view) > 0 and not view.restored
    return alone and not view.dropped and not is_outdated(options, view)


def is_outdated(options: Options, view: FragmentView) -> bool:
    """Return whether a device's training is based on too old a version to be merged."""
    if not options.devices or view.held is None or view.latest is None:
        return False
    newest, held = view.latest.version, view.held
    return newest.term != held.term or newest.counter - held.counter > options.age_max


def is_unwanted(options: Options, view: FragmentView) -> bool:
    """Return whether no version can contain a device's training, so that it need not wait.

    A shard requests what a returning device has trained as soon as it has welcomed it. What it does
    not request is too old, or merged already.
    """
    if not options.devices:
        return False
    unasked = view.restored and view.pull is None and view.sent is None
    return unasked or is_outdated(options, view)


def starts_again(state: LearnerState, options: Options, view: FragmentView) -> bool:
    """Return whether a device starts from its held version again at this boundary.

    With ``late = "drop"``, rounds are synchronous: a device waits until its round has merged.
    """
    sent = view.sent
    if sent is None or not options.devices or state.ended or view.staged is not None:
        return False
    newest = view.latest is None or view.latest.version == view.held
    return (sent.kept or sent.version is not None) and (newest or bool(state.leaving))


def contributed(state: LearnerState, sent: Sent) -> None:
    """Record that the device has answered the request of its place."""
    if sent.taken.step > state.place_step:
        state.contributed = True


def report_alone(state: LearnerState, options: Options, shard: int) -> list[LearnerEffect]:
    """Report what a device has trained alone, so that its tokens count."""
    if not options.devices or not state.step:
        return []
    report = StepReport(state.step, state.tokens, 0.0, state.discarded_tokens)
    return [Send(shard_peer(shard), report, "it has trained alone")]


def present(state: LearnerState, options: Options) -> list[LearnerEffect]:
    """Request a place, as soon as the coordinator is connected."""
    if state.place is None:
        return []
    fresh = state.place == 0 and is_returning(state, options)
    why = "it has trained and contributes" if fresh else "it is present"
    return [Send(COORDINATOR, PlaceWanted(fresh), why)]


def has_boundary_work(state: LearnerState) -> bool:
    """Return whether a device that waits for its place needs a step boundary."""
    kept = any(view.sent is not None and view.sent.kept for view in state.fragments)
    return kept or bool(state.attention)


def is_placed(state: LearnerState) -> bool:
    """Return whether a device may train: it needs no place or has one, and is up to date."""
    if state.place == 0:
        return False
    fetching = any(view.fetching is not None for view in state.fragments)
    return state.place is None or not fetching


def placed(state: LearnerState, message: PlaceGiven | PlaceLost) -> None:
    """Record that the device has got, or lost, its place."""
    match message:
        case PlaceGiven(number):
            if state.place == number:
                return
            state.place, state.place_step = number, state.step
            state.contributed = state.visit_over = False
        case PlaceLost(number):
            if state.place == number:
                state.visit_over = True


def visit_ended(state: LearnerState) -> list[LearnerEffect]:
    """Return the place of a device that has contributed; otherwise it keeps it while it is away."""
    if not state.place or not (state.contributed or state.ending):
        return []
    number, state.place = state.place, 0
    return [Send(COORDINATOR, PlaceReturned(number), "it has contributed")]
