"""How a shard's fragments get their first copies (rules 10 and 12). Functions of its state.

*Seeding*: the coordinator names one learner (or the run's file); its parameters become version
(term, 0) once every shard has its whole share. *Restoring*: a shard that starts again while the run
is under way asks its learners which versions they hold, waits a moment so that the newest are among
them, and takes each fragment from its own disk, or from the holder of a newer version, which the
disk can only lack if it was lost or has lied. It may have died in the moment after the
run began, before any learner held a copy; then nobody can have trained a step (a learner begins
with all fragments), and the initial weights are as good as they were. It says so.
"""

from __future__ import annotations

from decoupled_diloco.protocol.effects import (
    ExpectCopy,
    Install,
    LoadWeights,
    Note,
    Send,
    SyncerEffect,
    Unexpect,
)
from decoupled_diloco.protocol.events import CopyArrived, CopyCorrupt
from decoupled_diloco.protocol.membership import CLOCK_MAX, Member
from decoupled_diloco.protocol.messages import (
    CopyWanted,
    SeedFailed,
    SeedNamed,
    ShardAdmitted,
    ShardReady,
)
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.syncer_state import CopyAsk, Fill, SyncerState, lower_median
from decoupled_diloco.protocol.versions import Version

FROM_THE_START_SECONDS = 30.0
"""How long a restoring shard looks for a holder of a copy before it takes initial weights."""

SETTLE_SECONDS = 1.0
"""After the first learner has come back, the others get this long: more than the pause between two
attempts to reconnect (`transport.backoff.BRISK_CAP_SECONDS`)."""

SEED_TRIES_MAX = 3
"""How often a seed may deliver a fragment wrong, or not at all, before another one is named."""

FROM_FILE = ""
"""The name of the learner when the initial weights come from the run's file."""


def agreed_clock(fill: Fill) -> int:
    """Where most of the learners say that the clock was: one who lies does not set it."""
    return min(CLOCK_MAX, int(lower_median(list(fill.clocks.values()))))


def term_granted(
    state: SyncerState, owned: tuple[int, ...], now: float, admitted: ShardAdmitted
) -> list[SyncerEffect]:
    """The coordinator let the shard in; only the first time matters."""
    if state.phase == "ready" and state.fill is not None:
        why = "the coordinator may not have heard it"
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
    # Who goes back to a checkpoint need not wait to hear of anything newer: it would not take it.
    settle_at = now if state.durable_is_exact else None
    state.fill = Fill(attempt=0, started_at=now, settle_at=settle_at)
    effects: list[SyncerEffect] = []
    for member in state.members.values():
        effects += member_connected(state, owned, now, member)
    return effects


def seed_named(
    state: SyncerState, owned: tuple[int, ...], message: SeedNamed
) -> list[SyncerEffect]:
    """Take the initial weights from this learner; whatever came in earlier attempts is void."""
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
    """A learner is here: it may be the seed, or hold what was lost."""
    fill = state.fill
    if fill is None:
        return []
    if state.phase == "seeding" and (member.learner, member.epoch) == (fill.source, fill.epoch):
        return _ask_seed(state, owned, member) if member.connected else []
    if state.phase == "restoring" and fill.settle_at is None:
        fill.settle_at = now + SETTLE_SECONDS
    return []


def all_are_swept(state: SyncerState, owned: tuple[int, ...], now: float) -> None:
    """The run is over but for this shard, which starts again: its disk has the last versions.

    It does not wait for a learner to connect: they may all have seen the end, and gone.
    """
    fill = state.fill
    restores = state.phase == "restoring" and fill is not None and fill.settle_at is None
    if restores and has_last_versions(state, owned):
        assert fill is not None
        fill.settle_at = now + SETTLE_SECONDS


def has_last_versions(state: SyncerState, owned: tuple[int, ...]) -> bool:
    """Whether its disk has what the closing rounds made: asked once every shard is swept."""
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
    """A whole fragment is here."""
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
    """A whole fragment came wrong or not at all: ask later, in restoring somebody else first."""
    fill = state.fill
    if fill is None or not _was_asked(fill, event):
        return []
    effects = _unask(fill, event.fragment, event.reason)
    note = Note(
        f"the copy of fragment {event.fragment} from {event.learner} is no good", event.reason
    )
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
    """Nothing that this learner was asked for will come: it is gone, or did not hear of it."""
    fill, effects = state.fill, list[SyncerEffect]()
    if fill is not None:
        for fragment, asked in list(fill.asked.items()):
            if asked.learner == learner and fragment not in fill.digests:
                effects += _unask(fill, fragment, f"{learner}: {reason}")
    return effects


def weights_loaded(state: SyncerState, digests: tuple[tuple[int, str], ...]) -> list[SyncerEffect]:
    """The run's file of initial weights was read."""
    fill = state.fill
    if fill is not None and state.phase in ("seeding", "restoring"):
        for fragment, digest in digests:
            if fragment not in fill.digests and fragment not in fill.asked:
                fill.digests[fragment], fill.asked_version[fragment] = digest, None
    return []


def complete(state: SyncerState, owned: tuple[int, ...]) -> bool:
    """Whether every owned fragment has its copy."""
    return state.fill is not None and all(p in state.fill.digests for p in owned)


def progress(state: SyncerState, owned: tuple[int, ...], now: float) -> list[SyncerEffect]:
    """Asks for what is still missing, and closes a fill that is complete."""
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
        if durable is not None and (
            # break: restore-ignores-newer-holder
            state.durable_is_exact or holder is None or durable.version >= holder.held[fragment]
        ):
            fill.digests[fragment] = durable.digest
            fill.asked_version[fragment] = durable.version
        elif holder is not None:
            version = holder.held[fragment]
            effects += _want(state, fragment, holder, version, f"it holds {version}, the newest")
        elif _nobody_has_trained(state, fill, now):
            effects += _from_the_start(state, fill, fragment)
    if complete(state, owned):
        return effects + _install(state, owned)
    fill.settle_at = now + SETTLE_SECONDS
    fill.refused.clear()
    return effects


def _seed_again(state: SyncerState, owned: tuple[int, ...], fill: Fill) -> list[SyncerEffect]:
    """Asks the seed once more for what was no good, or has the coordinator name another one."""
    fill.settle_at = None
    if fill.failure:
        return [_failed(fill)]
    seed = state.members.get(fill.source)
    return [] if seed is None else member_connected(state, owned, 0.0, seed)


def _failed(fill: Fill) -> SyncerEffect:
    return Send(
        COORDINATOR, SeedFailed(fill.attempt, fill.failure), f"{fill.source} cannot be the seed"
    )


def _nobody_has_trained(state: SyncerState, fill: Fill, now: float) -> bool:
    waited = now >= fill.started_at + FROM_THE_START_SECONDS
    return waited and all(member.step == 0 for member in state.members.values())


def _from_the_start(state: SyncerState, fill: Fill, fragment: int) -> list[SyncerEffect]:
    why = "no learner holds a copy, and none has trained a step"
    note = Note(f"fragment {fragment} starts from the initial weights (again)", why)
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
        source = "this shard's own disk" if kept else "its holder"
        why = "the initial weights are complete" if seeding else f"restored from {source}"
        entry = state.fragments[fragment]
        held = None if seeding else fill.asked_version[fragment]
        if held is None:
            entry.version, entry.base = Version(state.term, 0), None
        else:
            # The values are those of the old version; only the name is new, so who holds the old
            # version need not fetch anything.
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
    """Whether a restored fragment is what the disk had, momentum and all."""
    fill, durable = state.fill, state.durable.get(fragment)
    assert fill is not None
    return durable is not None and fragment not in fill.asked
