"""Contributions that reach a shard through relays (rule 22). Functions of the shard's state.

A relay stands between a site's learners and the shards. It carries data and decides nothing about
the method. The shard sends every learner behind it its own request, and judges every contribution,
as if the relay did not exist. Only the *location* of a contribution differs:

```
          payload at the relay       sum here                merge
 waiting ────────────────────▶ relayed ──────▶ folded ──────────────▶ in a version
    ▲      verdict: fold           │
    └──────────────────────────────┘
       the relay is lost, or a sum is refused: void, and requested again
```

A *relayed* contribution is folded into the relay's accumulator. The relay sends one sum of all that
it has for a fragment. The sum names its requests and is accepted as a whole: only if every one of
them is at that relay. So nothing is merged twice, and what a lost relay had is requested again. The
learner still has it, because it receives its outcome only when the sum is merged.

A relay waits for its children until the round's window is over (`Collected`), but not beyond the
round's delivery window (`Collect`).

A relay may be behind another one. Its sum then arrives at that relay, and moves all of its requests
there. The other relay receives `Collected` only when nothing more of the round can arrive from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from decoupled_diloco.protocol import rounds, visits
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Asking,
    DropSum,
    FoldSum,
    Note,
    Outcome,
    Send,
    SumArrived,
    SumCorrupt,
    SumOutcome,
    SyncerEffect,
    relay_peer,
)
from decoupled_diloco.protocol.syncer_state import Ask, Member, SyncerState


def rerouted(state: SyncerState, member: Member, relay: str) -> set[Asking]:
    """Return the requests of a reconnecting learner whose payload cannot arrive any more.

    They were made on another way: through a relay, or directly. They will be made again on the
    present one.
    """
    void = set[Asking]()
    for fragment, entry in state.fragments.items():
        ask = entry.asks.get(member.learner)
        if ask is not None and ask.relay != relay:
            void.add(ask.name)
            member.backlog.add(fragment)  # break: rerouted-request-not-repeated
    return void


def sum_arrived(
    state: SyncerState, options: Options, now: float, event: SumArrived
) -> list[SyncerEffect]:
    """Fold a relay's sum if all of its requests are at that relay; otherwise refuse all of it."""
    fragment, relay, number, at = event.fragment, event.relay, event.number, event.at
    entry = state.fragments.get(fragment)
    known = {} if entry is None else {a.name: a for a in entry.relayed if a.relay == relay}
    asks = [known.pop(name) for name in event.asks if name in known]
    parties = sorted({ask.party for ask in asks})
    mixed = len(parties) > 1  # break: mixed-sum-accepted
    incomplete = len(asks) < len(event.asks)  # break: sum-accepted-in-part
    if entry is None or not asks or incomplete or mixed:
        reason = f"{len(event.asks) - len(asks)} of its {len(event.asks)} requests are not open"
        if mixed:
            reason = f"it mixes {' and '.join(parties)}, whose shares are limited"
        state.site(relay).refuse(event.nbytes)
        drop = DropSum(fragment, relay, number, at, reason)
        outcome = SumOutcome(fragment, number, "void", reason)
        refused: list[SyncerEffect] = [drop, Send(relay_peer(relay), outcome, reason)]
        return refused + _void(state, options, now, asks, f"{relay} sent an invalid sum")
    effects: list[SyncerEffect] = [
        FoldSum(fragment, relay, number, at, f"{len(asks)} requests are in it", parties[0])
    ]
    state.site(relay).accept(event.nbytes, [ask.nbytes for ask in asks])
    for position, ask in enumerate(asks):
        ask.sums, ask.relay = (*ask.sums, (relay, number)), at
        ask.nbytes = 0 if position else event.nbytes  # the next relay has one sum for all of them
        if not at:
            entry.arrive(ask)
            rounds.is_here(state, options, now, ask)
            effects += visits.folded(options, ask)
    return effects


def sum_corrupt(
    state: SyncerState, options: Options, now: float, event: SumCorrupt
) -> list[SyncerEffect]:
    """Request again what an invalid sum contains."""
    entry = state.fragments.get(event.fragment)
    if entry is None:
        return []
    state.site(event.relay).refuse()
    asks = [a for a in entry.relayed if a.relay == event.relay and a.name in event.asks]
    outcome = SumOutcome(event.fragment, event.number, "invalid", event.reason)
    effects: list[SyncerEffect] = [Send(relay_peer(event.relay), outcome, event.reason)]
    return effects + _void(state, options, now, asks, event.reason)


def lost(state: SyncerState, options: Options, now: float, relay: str) -> list[SyncerEffect]:
    """Request again what a lost relay had. It comes back empty."""
    state.relays.pop(relay, None)
    reason = f"the connection to {relay} broke"
    all_relayed = [ask for entry in state.fragments.values() for ask in entry.relayed]
    relayed = [ask for ask in all_relayed if ask.relay == relay]  # break: lost-relay-keeps-requests
    effects = _void(state, options, now, relayed, reason)
    if relayed:
        effects.append(Note(f"{relay} had {len(relayed)} contributions that are void", reason))
    return effects


def _void(
    state: SyncerState, options: Options, now: float, asks: Iterable[Ask], reason: str
) -> list[SyncerEffect]:
    """Void relayed contributions, and request them again as soon as their learners are there."""
    effects: list[SyncerEffect] = []
    for ask in asks:
        fragment, learner = ask.fragment, ask.learner
        ask.state, ask.reason = "gone", reason
        state.fragments[fragment].void(ask)
        round, member = state.rounds.get(fragment), state.members.get(learner)
        if round is not None and round.settled_at is None:
            round.fallen[learner] = ask
            rounds.owes_nothing(state, round, learner)
            if not state.fragments[fragment].owes(learner):
                stepping = state.is_stepping(learner)
                round.turn_back(learner, live=member is not None, stepping=stepping)
        outcome = Outcome(fragment, ask.name, "abandoned", reason, None)
        effects.append(Send(learner, outcome, reason))
        if member is not None and learner not in state.fragments[fragment].asks:
            if round is not None and round.settled_at is None:
                effects += rounds.ask_if_qualified(state, options, now, round, member)
            if learner not in state.fragments[fragment].asks:
                member.backlog.add(fragment)
                effects += rounds.serve(state, options, now, member)
    return effects
