"""The first copies of a shard's fragments (rules 10 and 12). Functions of its state.

*Seeding*: the coordinator names one learner or the run's file. These parameters become version
(term, 0) once every shard holds its whole share. *Restoring*: a shard that restarts during the run
asks its learners which versions they hold, and waits a moment so that the newest are among them. It
takes each fragment from its own disk, or from the holder of a newer version. A newer version exists
only if the disk was lost or is wrong. If the shard died just after the run began, no learner may
hold a copy. Then no learner has trained a step, because a learner starts with all fragments. The
shard uses the initial weights again, and logs this.
"""

from __future__ import annotations

from decoupled_diloco.protocol import privacy_account
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    CopyArrived,
    CopyCorrupt,
    CopyWanted,
    ExpectCopy,
    Install,
    LoadWeights,
    Note,
    SeedFailed,
    SeedNamed,
    Send,
    ShardAdmitted,
    ShardReady,
    SyncerEffect,
    Unexpect,
    Version,
)
from decoupled_diloco.protocol.syncer_state import (
    CLOCK_MAX,
    CopyAsk,
    Fill,
    Member,
    SyncerState,
    lower_median,
)

FROM_THE_START_SECONDS = 30.0
"""Time for which a restoring shard searches for a copy before it uses the initial weights."""


SETTLE_SECONDS = 1.0
"""Time that the others have after the first learner has come back.

It is longer than the pause between two reconnection attempts
(`transport.backoff.BRISK_CAP_SECONDS`).
"""


SEED_TRIES_MAX = 3
"""Failed deliveries of a fragment after which another seed is named."""


FROM_FILE = ""
"""The learner's name if the initial weights come from the run's file."""


def agreed_clock(fill: Fill) -> int:
    """Return the clock on which most learners agree, so that a single wrong one cannot set it."""
    return min(CLOCK_MAX, int(lower_median(list(fill.clocks.values()))))


def term_granted(
    state: SyncerState, owned: tuple[int, ...], now: float, admitted: ShardAdmitted
) -> list[SyncerEffect]:
    """Start as the coordinator orders; only the first admission of a process matters."""
    if state.phase == "ready" and state.fill is not None:
        why = "the coordinator may not have received it"
        return [Send(COORDINATOR, ShardReady(state.fill.attempt), why)]
    if state.phase == "seeding" and state.fill is not None and state.fill.failure:
        return [_failed(state.fill)]
    if state.phase != "starting":
        return []
    state.term = admitted.term
    if not admitted.begun:
        state.phase = "empty"
        return []
    state.phase = "restoring"
    # When the run returns to a checkpoint, newer copies are ignored, so a wait is useless.
    settle_at = now if state.durable_is_exact else None
    state.fill = Fill(attempt=0, started_at=now, settle_at=settle_at)
    effects: list[SyncerEffect] = []
    for member in state.members.values():
        effects += member_connected(state, owned, now, member)
    return effects


def seed_named(
    state: SyncerState, owned: tuple[int, ...], message: SeedNamed
) -> list[SyncerEffect]:
    """Request the initial weights from this learner. Results of earlier attempts are void."""
    fill = state.fill
    if state.phase == "restoring" and fill is not None:
        fill.source, fill.from_file = message.learner, message.learner == FROM_FILE
    if state.phase not in ("empty", "seeding", "ready"):
        return []
    if fill is not None and fill.attempt >= message.attempt:
        return []
    effects = [] if fill is None else _forget_asked(fill)
    state.phase = "seeding"
    state.fill = Fill(message.attempt, message.learner, message.epoch)
    if message.learner == FROM_FILE:
        return [*effects, LoadWeights("the run names a file of initial weights")]
    member = state.members.get(message.learner)
    if member is None or member.epoch != message.epoch or not member.connected:
        return effects
    return effects + _ask_seed(state, owned, member)


def _forget_asked(fill: Fill) -> list[SyncerEffect]:
    return [Unexpect(asked.path, "another attempt has begun") for asked in fill.asked.values()]


def member_connected(
    state: SyncerState, owned: tuple[int, ...], now: float, member: Member
) -> list[SyncerEffect]:
    """Ask a connected learner for copies: it may be the seed, or hold what was lost."""
    fill = state.fill
    if fill is None:
        return []
    if state.phase == "seeding" and (member.learner, member.epoch) == (fill.source, fill.epoch):
        return _ask_seed(state, owned, member) if member.connected else []
    if state.phase == "restoring" and fill.settle_at is None:
        fill.settle_at = now + SETTLE_SECONDS
    return []


def all_are_swept(state: SyncerState, owned: tuple[int, ...], now: float) -> None:
    """Let a restarted shard finish from its own disk, which has the last versions.

    It waits for no learner to connect: all may have received the end and left.
    """
    fill = state.fill
    restores = state.phase == "restoring" and fill is not None and fill.settle_at is None
    if restores and has_last_versions(state, owned):
        assert fill is not None
        fill.settle_at = now + SETTLE_SECONDS


def has_last_versions(state: SyncerState, owned: tuple[int, ...]) -> bool:
    """Return whether the disk has the closing rounds' versions; valid once all shards are swept."""
    return all(fragment in state.durable for fragment in owned)


def _ask_seed(state: SyncerState, owned: tuple[int, ...], member: Member) -> list[SyncerEffect]:
    effects: list[SyncerEffect] = []
    assert state.fill is not None
    if state.fill.failure:
        return []
    for fragment in owned:
        if fragment not in state.fill.digests and fragment not in state.fill.asked:
            effects += _want(state, fragment, member, None, "it was named as the seed")
    return effects


def _want(
    state: SyncerState, fragment: int, member: Member, version: Version | None, why: str
) -> list[SyncerEffect]:
    fill = state.fill
    assert fill is not None
    state.asks += 1
    number, path = state.asks, f"/copy/{state.term}/{fragment}/{member.learner}/{state.asks}"
    fill.asked[fragment] = CopyAsk(member.learner, number, path)
    fill.asked_version[fragment] = version
    return [
        ExpectCopy(path, member.learner, fragment, number, why),
        Send(member.learner, CopyWanted(fragment, number, version, path), why),
    ]


def copy_arrived(state: SyncerState, event: CopyArrived) -> list[SyncerEffect]:
    """Record a whole fragment that has arrived."""
    fill = state.fill
    if fill is None or not _was_asked(fill, event):
        return []
    fill.digests[event.fragment] = event.digest
    return []


def _was_asked(fill: Fill, event: CopyArrived | CopyCorrupt) -> bool:
    asked = fill.asked.get(event.fragment)
    mine = asked is not None and (asked.learner, asked.number) == (event.learner, event.attempt)
    return mine and event.fragment not in fill.digests


def copy_corrupt(state: SyncerState, now: float, event: CopyCorrupt) -> list[SyncerEffect]:
    """Request a failed fragment again later; when restoring, from another learner first."""
    fill = state.fill
    if fill is None or not _was_asked(fill, event):
        return []
    effects = _unask(fill, event.fragment, event.reason)
    note = Note(f"the copy of fragment {event.fragment} from {event.learner} failed", event.reason)
    if state.phase == "seeding":
        fill.tries[event.fragment] = fill.tries.get(event.fragment, 0) + 1
        fill.settle_at = now + SETTLE_SECONDS
        if fill.tries[event.fragment] >= SEED_TRIES_MAX:
            fill.failure = f"fragment {event.fragment}: {event.reason}"
    else:
        fill.refused.setdefault(event.fragment, set()).add(event.learner)
    return [*effects, note]


def _unask(fill: Fill, fragment: int, reason: str) -> list[SyncerEffect]:
    return [Unexpect(fill.asked.pop(fragment).path, reason)]


def member_gone(state: SyncerState, learner: str, reason: str) -> list[SyncerEffect]:
    """Drop the requests that this learner will not answer: it left or never received them."""
    fill, effects = state.fill, list[SyncerEffect]()
    if fill is not None:
        for fragment, asked in list(fill.asked.items()):
            if asked.learner == learner and fragment not in fill.digests:
                effects += _unask(fill, fragment, f"{learner}: {reason}")
    return effects


def weights_loaded(state: SyncerState, digests: tuple[tuple[int, str], ...]) -> list[SyncerEffect]:
    """Use the weights that were read from the run's file."""
    fill = state.fill
    if fill is not None and state.phase in ("seeding", "restoring"):
        for fragment, digest in digests:
            if fragment not in fill.digests and fragment not in fill.asked:
                fill.digests[fragment], fill.asked_version[fragment] = digest, None
    return []


def complete(state: SyncerState, owned: tuple[int, ...]) -> bool:
    """Return whether every owned fragment has its copy."""
    return state.fill is not None and all(p in state.fill.digests for p in owned)


def progress(state: SyncerState, owned: tuple[int, ...], now: float) -> list[SyncerEffect]:
    """Request the missing copies, or complete the fill."""
    fill = state.fill
    assert fill is not None
    if complete(state, owned) and state.phase in ("seeding", "restoring"):
        return _install(state, owned)
    if fill.settle_at is None or now < fill.settle_at:
        return []
    if state.phase == "seeding":
        return _seed_again(state, owned, fill)
    effects: list[SyncerEffect] = []
    for fragment in owned:
        if fragment in fill.digests or fragment in fill.asked:
            continue
        holder = _newest_holder(state, fragment, fill.refused.get(fragment, set()))
        durable = state.durable.get(fragment)
        # With equal versions, the disk is better: it also has the outer momentum.
        if durable is not None and (
            # break: restore-ignores-newer-holder
            state.durable_is_exact or holder is None or durable.version >= holder.held[fragment]
        ):
            fill.digests[fragment] = durable.digest
            fill.asked_version[fragment] = durable.version
        elif holder is not None:
            version = holder.held[fragment]
            effects += _want(state, fragment, holder, version, f"it holds {version}, the newest")
        elif _no_learner_has_trained(state, fill, now):
            effects += _from_the_start(state, fill, fragment)
    if complete(state, owned):
        return effects + _install(state, owned)
    fill.settle_at = now + SETTLE_SECONDS
    fill.refused.clear()  # after the pause, try them again: there may be no other holder
    return effects


def _seed_again(state: SyncerState, owned: tuple[int, ...], fill: Fill) -> list[SyncerEffect]:
    """Ask the seed once more for the failed fragments, or have the coordinator name another one."""
    fill.settle_at = None
    if fill.failure:
        return [_failed(fill)]
    seed = state.members.get(fill.source)
    return [] if seed is None else member_connected(state, owned, 0.0, seed)


def _failed(fill: Fill) -> SyncerEffect:
    return Send(
        COORDINATOR, SeedFailed(fill.attempt, fill.failure), f"{fill.source} failed as the seed"
    )


def _no_learner_has_trained(state: SyncerState, fill: Fill, now: float) -> bool:
    waited = now >= fill.started_at + FROM_THE_START_SECONDS
    return waited and all(member.step == 0 for member in state.members.values())


def _from_the_start(state: SyncerState, fill: Fill, fragment: int) -> list[SyncerEffect]:
    why = "no learner holds a copy or has trained a step"
    note = Note(f"fragment {fragment} starts from the initial weights again", why)
    if fill.from_file:
        return [note, LoadWeights(why)]
    connected = {m.learner: m for m in state.members.values() if m.connected}
    refused = fill.refused.get(fragment, set())
    names = sorted(connected.keys() - refused, key=lambda name: (name != fill.source, name))
    if not names:
        return []
    return [note, *_want(state, fragment, connected[names[0]], None, why)]


def _newest_holder(state: SyncerState, fragment: int, refused: set[str]) -> Member | None:
    holders = [
        member
        for member in state.members.values()
        if member.connected and fragment in member.held and member.learner not in refused
    ]
    return max(holders, key=lambda m: (m.held[fragment], m.learner), default=None)


def _install(state: SyncerState, owned: tuple[int, ...]) -> list[SyncerEffect]:
    fill = state.fill
    assert fill is not None
    fill.settle_at = None
    effects: list[SyncerEffect] = []
    seeding = state.phase == "seeding"
    for fragment in owned:
        kept = not seeding and _is_from_disk(state, fragment)
        source = "this shard's own disk" if kept else "a learner"
        why = "the initial weights are complete" if seeding else f"restored from {source}"
        entry = state.fragments[fragment]
        held = None if seeding else fill.asked_version[fragment]
        if not kept:
            known = state.durable.get(fragment)
            privacy_account.restored(entry, None if known is None else known.version, held)
        if held is None:
            entry.version, entry.base = Version(state.term, 0), None
        else:
            # The values are those of the old version and only the name is new, so a learner that
            # holds the old version fetches nothing.
            # break: restart-counter-zero
            entry.base, entry.version = held, Version(state.term, held.counter)
            entry.renamed = True
        entry.digest = fill.digests[fragment]
        effects.append(Install(fragment, entry.version, why, entry.digest))
    if seeding:
        state.phase = "ready"
        effects.append(
            Send(COORDINATOR, ShardReady(fill.attempt), "the initial weights are complete")
        )
    return effects


def _is_from_disk(state: SyncerState, fragment: int) -> bool:
    """Return whether a restored fragment is from the disk, including its momentum."""
    fill, durable = state.fill, state.durable.get(fragment)
    assert fill is not None
    return durable is not None and fragment not in fill.asked
