"""The state machine of a relay: no I/O, clock, randomness or tensors (rule 22).

Theory of operation. A relay passes its children's control messages on and serves them the published
copies. Its machine handles the uplink. A shard's orders about a child's payload arrive as messages,
and the relay executes them as the shard would: it expects the payload, and folds or drops it. It
reports each payload to the shard, which decides.

The one decision of a relay is when it sends the sum of what it has folded for a fragment:

```
                  no child owes a payload, and no round may request more
 collecting ─────────────────────────────────────────────────────────────▶ sent
      └──── its upload would only just arrive in the delivery window ──────────┘
```

Before the end of a round's grace window, the shard may send further requests, so the relay waits
for `Collected`. It sends earlier only if the sum would otherwise be late for the round.

A child owes a payload from its request until its payload is folded or dropped. Between the payload
and the shard's verdict lies one round trip to the shard.

When the connection to a shard breaks, the shard voids what the relay has for it. The relay forgets
it, too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import assert_never

from decoupled_diloco.protocol.clock import MovingAverage
from decoupled_diloco.protocol.messages import (
    Asking,
    BodyArrived,
    BodyCorrupt,
    Collect,
    Collected,
    Connected,
    Done,
    Drop,
    DropSum,
    Expect,
    Failed,
    Fold,
    FoldSum,
    ForgetFolded,
    Lost,
    Message,
    Note,
    Received,
    RelayEffect,
    RelayEvent,
    Send,
    SendSum,
    SettleSum,
    SumArrived,
    SumCorrupt,
    SumOutcome,
    Tick,
    Unexpect,
    shard_of,
    shard_peer,
)

UNKNOWN_SHARE = 0.5
"""Share of a delivery window that the first sum is assumed to take."""

SMOOTHING = 0.3
"""Weight of the newest upload in the expected time of the next one."""


@dataclass(slots=True)
class Collection:
    """What a relay has and expects for one fragment.

    Attributes:
        shard: The shard that owns the fragment.
        owed: Requests whose payload is neither folded nor dropped, each with its path.
        folded: Requests whose payload is folded and in no sum yet.
        sums: Sums of child relays that have arrived and are not folded yet, with their requests.
        round: The round that may still request more; 0: there is none.
        window: The time that the sums of the newest round have.
        send_at: When the sum is sent at the latest, although more may follow; ``None`` before the
            first round.
        number: The number of sums sent in this connection.
        uploading: The number of the one that is being sent; 0: none is. The next one follows
            afterwards.
        sent_at: When its upload began.
        under_way: Sums that have no outcome yet.
    """

    shard: int
    owed: dict[Asking, str] = field(default_factory=dict)
    folded: list[Asking] = field(default_factory=list)
    sums: dict[tuple[str, int], tuple[Asking, ...]] = field(default_factory=dict)
    round: int = 0
    window: float = 0.0
    send_at: float | None = None
    number: int = 0
    uploading: int = 0
    sent_at: float = 0.0
    under_way: set[int] = field(default_factory=set)


@dataclass(slots=True)
class RelayMachineState:
    """The state of a relay; ``upload_seconds`` is the usual time of a sum's upload."""

    shards: int = 1
    fragments: dict[int, Collection] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    upload_seconds: MovingAverage = field(default_factory=MovingAverage)


class RelayMachine:
    """The machine of one relay. ``handle`` maps facts to orders; ``check`` asserts invariants."""

    def __init__(self) -> None:
        self.state = RelayMachineState()

    def handle(self, now: float, event: RelayEvent) -> list[RelayEffect]:
        """Process one event.

        Args:
            now: Seconds of any clock that never goes back.
            event: What happened.

        Returns:
            The orders, to be executed in this sequence.
        """
        effects = self._dispatch(now, event)
        for fragment in self.state.fragments:
            effects += self._send_if_complete(now, fragment)
        return effects

    def deadline(self) -> float | None:
        """Return when the next ``Tick`` is due; ``None``: the next event suffices."""
        waiting = (c for c in self.state.fragments.values() if c.folded and not c.uploading)
        instants = (collection.send_at for collection in waiting)
        return min((instant for instant in instants if instant is not None), default=None)

    def snapshot(self) -> RelayMachineState:
        """Return a deep copy of the whole state."""
        return copy.deepcopy(self.state)

    def restore(self, state: RelayMachineState) -> None:
        """Continue from a snapshot."""
        self.state = copy.deepcopy(state)

    def check(self) -> None:
        """Assert every invariant that is visible in one state."""
        for collection in self.state.fragments.values():
            assert collection.shard in self.state.connected, "it collects for a lost shard"
            assert not collection.owed.keys() & set(collection.folded), "a folded payload is owed"
            assert len(set(collection.folded)) == len(collection.folded), "folded twice"

    def _dispatch(self, now: float, event: RelayEvent) -> list[RelayEffect]:
        match event:
            case Tick():
                return []
            case Connected(peer, shards=shards):
                self.state.connected.add(shard_of(peer))
                self.state.shards = shards
                return []
            case Lost(peer):
                return self._lost(shard_of(peer))
            case Received(peer, message):
                return self._ordered(now, shard_of(peer), message)
            case BodyArrived(fragment=fragment) | BodyCorrupt(fragment=fragment):
                return self._report(fragment, event)
            case SumArrived(relay=relay, fragment=fragment, number=number, asks=asks):
                shard = fragment % self.state.shards
                if shard not in self.state.connected:
                    return [
                        DropSum(fragment, relay, number, "", "the connection to its shard broke")
                    ]
                self._collection(shard, fragment).sums[relay, number] = asks
                return self._report(fragment, event)
            case SumCorrupt(fragment=fragment):
                return self._report(fragment, event)
            case Done(SendSum(_, fragment, number)):
                self._sent(now, fragment, number)
                return []
            case Failed(SendSum() as order, reason):
                return self._not_sent(order, reason)
            case Done() | Failed():
                raise AssertionError(f"unexpected answer at a relay: {event}")
            case _:
                assert_never(event)

    def _report(
        self, fragment: int, event: BodyArrived | BodyCorrupt | SumArrived | SumCorrupt
    ) -> list[RelayEffect]:
        collection = self.state.fragments.get(fragment)
        if collection is None:
            return []  # the connection to its shard broke meanwhile
        return [Send(shard_peer(collection.shard), event, "its shard decides")]

    def _ordered(self, now: float, shard: int, message: Message) -> list[RelayEffect]:
        if shard not in self.state.connected:
            return []
        match message:
            case Expect(path, fragment=fragment, ask=ask):
                self._collection(shard, fragment).owed[ask] = path
                return [message]
            case Unexpect(path):
                for each in self.state.fragments.values():
                    each.owed = {a: other for a, other in each.owed.items() if other != path}
                return [message]
            case Fold(fragment=fragment, ask=ask):
                collection = self._collection(shard, fragment)
                collection.owed.pop(ask, None)
                collection.folded.append(ask)
                return [message]
            case Drop(fragment=fragment, ask=ask):
                self._collection(shard, fragment).owed.pop(ask, None)
                return [message]
            case FoldSum(fragment, relay, number):
                collection = self._collection(shard, fragment)
                collection.folded += collection.sums.pop((relay, number), ())
                return [message]
            case DropSum(fragment, relay, number):
                self._collection(shard, fragment).sums.pop((relay, number), None)
                return [message]
            case Collect(fragment, round, seconds):
                collection = self._collection(shard, fragment)
                usual = self.state.upload_seconds.value
                upload = seconds * UNKNOWN_SHARE if usual is None else min(usual, seconds)
                collection.round, collection.window = round, seconds
                collection.send_at = now + seconds - upload
                return []
            case Collected(fragment, round):
                collection = self._collection(shard, fragment)
                if collection.round == round:
                    collection.round = 0
                return []
            case ForgetFolded(fragment):
                # Masked contributions of an abandoned sum.
                collection = self._collection(shard, fragment)
                collection.folded, collection.sums = [], {}
                return [message]
            case SumOutcome(fragment, number, verdict, reason):
                self._collection(shard, fragment).under_way.discard(number)
                why = reason or "it is merged"
                return [SettleSum(fragment, number, verdict, why)]
            case _:
                raise AssertionError(f"unexpected message from a shard: {message}")

    def _collection(self, shard: int, fragment: int) -> Collection:
        return self.state.fragments.setdefault(fragment, Collection(shard))

    def _lost(self, shard: int) -> list[RelayEffect]:
        """Forget what a shard's connection was about: the shard voids it."""
        self.state.connected.discard(shard)
        reason = f"the connection to shard {shard} broke"
        gone = [p for p, each in self.state.fragments.items() if each.shard == shard]
        effects: list[RelayEffect] = []
        for fragment in gone:
            collection = self.state.fragments.pop(fragment)
            for number in sorted(collection.under_way):
                effects.append(SettleSum(fragment, number, "unknown", reason))
            effects.append(ForgetFolded(fragment, reason))
        return effects

    def _sent(self, now: float, fragment: int, number: int) -> None:
        """Measure an upload that has ended."""
        collection = self.state.fragments.get(fragment)
        if collection is not None and collection.uploading == number:
            collection.uploading = 0
            self.state.upload_seconds.update(now - collection.sent_at, SMOOTHING)

    def _not_sent(self, order: SendSum, reason: str) -> list[RelayEffect]:
        """Report a sum that could not be sent: its shard requests what is in it again."""
        collection = self.state.fragments.get(order.fragment)
        if collection is None or collection.uploading != order.number:
            return []
        collection.uploading = 0
        failed = SumCorrupt("", order.fragment, order.number, order.asks, reason)
        note = Note(f"sum {order.number} of fragment {order.fragment} did not arrive", reason)
        return [note, Send(shard_peer(order.shard), failed, reason)]  # break: failed-sum-unreported

    def _send_if_complete(self, now: float, fragment: int) -> list[RelayEffect]:
        collection = self.state.fragments[fragment]
        if not collection.folded or collection.uploading:
            return []
        waits = bool(collection.owed or collection.sums or collection.round)
        is_due = collection.send_at is not None and now >= collection.send_at
        if waits and not is_due:  # break: relay-sends-at-once
            return []
        why = "its upload would otherwise be late" if waits else "it expects nothing more"
        collection.number += 1
        collection.uploading, collection.sent_at = collection.number, now
        collection.under_way.add(collection.number)
        if is_due:  # what is late already may wait for more as long again
            collection.send_at = now + collection.window
        asks, collection.folded = tuple(collection.folded), []  # break: folded-stay-after-sum
        return [SendSum(collection.shard, fragment, collection.number, asks, why)]
