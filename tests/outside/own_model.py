"""A naive model of a shard whose learners open rounds with their own steps.

It was written only from the rule and the docs. It receives every event and every order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.protocol import Options, Version, messages
from decoupled_diloco.protocol.messages import Asking, Done, Failed, Holding

Key = tuple[str, int, Asking]
"""Identifies one contribution: the learner, the fragment, the request."""


@dataclass
class Part:
    """A shard's state about one incarnation of a learner.

    Attributes:
        step: Its last reported step.
        before: Versions from which its earlier incarnations have contributed.
        turns: Fragments to request from it, and whether the shard must request them.
        fresh: Fragments that the last event has made due.
        late: Requests from the backlog.
        asked: Requests in flight.
        names: All its requests.
        made: Versions from which it has contributed.
        swept: Fragments requested in the closing sweep.
    """

    step: int
    before: dict[int, list[Version]]
    connected: bool = True
    going: bool = False
    turns: dict[int, bool] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    asked: dict[int, tuple[Asking, Version]] = field(default_factory=dict)
    names: set[Asking] = field(default_factory=set)
    held: dict[int, Version] = field(default_factory=dict)
    made: dict[int, list[Version]] = field(default_factory=lambda: defaultdict(list))
    swept: set[int] = field(default_factory=set)


class Model:
    """The requests, folds and merges that a shard must order, and no others."""

    def __init__(self, options: Options, shard: int) -> None:
        self.options, self.owned = options, options.owned(shard)
        self.parts: dict[str, Part] = {}
        self.epochs: Counter[str] = Counter()
        self.before: dict[str, dict[int, list[Version]]] = defaultdict(lambda: defaultdict(list))
        self.newest = dict.fromkeys(self.owned, 0)
        self.folded: dict[int, list[Key]] = {p: [] for p in self.owned}
        self.merging: dict[int, list[Key]] = {}
        self.bases: dict[Key, Version] = {}
        self.failed: dict[int, tuple[int, float]] = {}
        self.present: set[str] = set()
        self.owed: dict[Key, str] = {}
        self.body: Key | None = None
        self.closing = self.swept = False
        self.merges: Counter[str] = Counter()

    def before_event(self, now: float, event: Any) -> None:
        """Update the model with an event before the shard handles it."""
        for part in self.parts.values():
            part.fresh = set()
        match event:
            case messages.Connected(name, messages.Hello() as hello):
                self._greeted(name, hello)
            case messages.Lost(name):
                self.parts[name].connected = False
                self.present.discard(name)
            case messages.Reported(reports):
                for name, report in reports:
                    self._stepped(name, report.step)
            case messages.Received(name, messages.StepReport(step=step)):
                self._stepped(name, step)
            case messages.Received(name, Holding(p, version)):
                self.parts[name].held[p] = version
            case messages.Received(name, messages.Leave()):
                self._gone(name)
            case messages.Received(name, messages.Draining(fragments)):
                part = self.parts[name]
                part.turns |= dict.fromkeys(fragments, not part.going)  # it has stopped stepping
                part.going = True
            case messages.Received(name, messages.Decline(p, ask, nothing_new, reason)):
                if self._over(name, p, ask) and not nothing_new:
                    turns = self.parts[name].turns
                    turns[p] = turns.get(p, False) or reason == "behind"
            case messages.BodyCorrupt(name, p, ask):
                if self._over(name, p, ask):
                    self.parts[name].turns.setdefault(p, False)
            case messages.BodyArrived(name, _, p, ask):
                if base := self._over(name, p, ask):
                    self.body, self.bases[name, p, ask] = (name, p, ask), base
            case Done(messages.Merge(_, p)):
                self.newest[p] += 1
                self.failed.pop(p, None)
                self._owes(p, "accepted")
            case Failed(messages.Merge(_, p)):
                count = self.failed.get(p, (0, 0.0))[0]
                self.failed[p] = count + 1, now + min(60.0, 2.0**count)
                for key in self._owes(p, "abandoned"):
                    part = self.parts[key[0]]
                    part.made[p] = [made for made in part.made[p] if made != self.bases[key]]
            case messages.Received(_, messages.EndOrdered()):
                self.closing = True
                self.present = {name for name, part in self.parts.items() if part.connected}

    def _greeted(self, name: str, hello: messages.Hello) -> None:
        self.present.discard(name)
        if hello.epoch > self.epochs[name]:
            self._gone(name)
        self.epochs[name] = hello.epoch
        if name not in self.parts:
            self.parts[name] = Part(hello.step, self.before[name])
            self.parts[name].turns = dict.fromkeys(self.owned, False) if hello.step else {}
        part = self.parts[name]
        part.connected = True
        part.held |= {holding.fragment: holding.version for holding in hello.held}
        for p, (ask, _) in list(part.asked.items()):
            if ask not in hello.asks:
                self._over(name, p, ask)
                part.turns[p] = True
                part.fresh.add(p)
        self._stepped(name, hello.step)

    def _gone(self, name: str) -> None:
        self.present.discard(name)
        if part := self.parts.pop(name, None):
            for p, made in part.made.items():
                self.before[name][p] += made

    def _stepped(self, name: str, step: int) -> None:
        part, period = self.parts[name], self.options.period
        for s in range(part.step + 1, step + 1):
            due = {p for p in self.owned if s % period == self.options.phase(p)}
            part.fresh |= {p for p in due if not (part.turns.get(p) and self._fit(part, p))}
            part.turns |= dict.fromkeys(due, True)
        part.step = max(part.step, step)

    def _over(self, name: str, p: int, ask: Asking) -> Version | None:
        part = self.parts.get(name)
        if part is None or part.asked.get(p, (None,))[0] != ask:
            return None
        part.late.discard(p)
        return part.asked.pop(p)[1]

    def _owes(self, p: int, verdict: str) -> Sequence[Key]:
        keys = [key for key in self.merging.pop(p) if key[0] in self.parts]
        mine = [key for key in keys if key[2] in self.parts[key[0]].names]
        self.owed |= {key: verdict for key in mine if self.parts[key[0]].connected}
        return mine

    def check(self, effect: Any) -> None:
        """Check that the shard may give an order."""
        match effect:
            case messages.Expect(learner=learner, fragment=p, ask=ask):
                self.expected = learner, p, ask
            case messages.Send(peer, messages.Pull() as pull):
                self._asks(self.parts[peer], peer, pull)
            case messages.Send(peer, messages.Outcome(p, ask, verdict)) if (
                peer,
                p,
                ask,
            ) in self.owed:
                assert self.owed.pop((peer, p, ask)) == verdict, f"{effect} reports a wrong verdict"
            case messages.Fold(fragment=p, learner=learner, ask=ask):
                assert self.body == (learner, p, ask), f"{effect}: only {self.body} has arrived"
                assert self._age(p) <= self.options.late_rounds_max, f"{effect}: too late"
                self.folded[p].append(self.body)
                self.parts[learner].made[p].append(self.bases[self.body])
                self.parts[learner].swept |= {p} if self.closing else set()
                self.body = None
            case messages.Drop(fragment=p, learner=learner, ask=ask) if self.body == (
                learner,
                p,
                ask,
            ):
                assert self._age(p) > self.options.late_rounds_max, f"wrongly dropped: {effect.why}"
                self.body = None
            case messages.Merge(fragment=p, version=version):
                assert p not in self.merging, f"fragment {p} is already merging"
                assert self.folded[p], f"fragment {p} has nothing to merge"
                assert version == Version(1, self.newest[p] + 1), f"unexpected version {version}"
                self.merging[p], self.folded[p] = self.folded[p], []
                self.merges["late" if len(self.merging[p]) > 1 else "alone"] += 1
            case messages.RoundOpened(fragment=p, closing=False):
                assert self.folded[p], f"a round of {p} without a contribution: {effect.why}"
            case messages.Evict(learner):
                self._gone(learner)
            case messages.Send(_, messages.Swept()):
                left = [*self.merging, *filter(self.folded.get, self.owned)]
                assert not left, f"contributions are left to {left}"
                for name in self.present:
                    left = sorted({*self.owned} - self.parts[name].swept)
                    assert not left, f"{name} was not swept: {left}"
                self.swept = True

    def _age(self, p: int) -> int:
        """Return by how many versions the arrived payload is late if it is folded now."""
        assert self.body
        return self.newest[p] + (p in self.merging) - self.bases[self.body].counter

    def _asks(self, part: Part, name: str, pull: messages.Pull) -> None:
        p, about = pull.fragment, f"request to {name} for {pull.fragment} from {pull.base}"
        assert self.expected == (name, p, pull.ask), f"{about}: not expected"
        assert p in self.owned, f"{about}: fragment of another shard"
        assert part.connected, f"{about}: not connected"
        assert p not in part.asked, f"{about}: already requested"
        assert pull.final == self.closing, f"{about}: final is {pull.final}"
        if not self.closing:
            age = self.newest[p] - pull.base.counter
            assert p in part.turns or part.going, f"{about}: not its turn"
            assert pull.base not in part.made[p], f"{about}: already contributed"
            assert age in (0, self.newest[p] - part.held.get(p, pull.base).counter), about
            assert age <= self.options.late_rounds_max, f"{about}: too old"
        if not self.closing and not part.going:
            assert len(part.asked) < self.options.open_rounds_max, f"{about}: {part.asked}"
            assert p in part.fresh or not part.asked, (
                f"{about}: backlog request beside {part.asked}"
            )
        part.swept |= {p} if self.closing else set()
        part.late |= {p} - part.fresh
        part.turns.pop(p, None)
        part.asked[p] = pull.ask, pull.base
        part.names.add(pull.ask)

    def settled(self, now: float) -> None:
        """Check that nothing is left undone after an event and all due ticks."""
        assert self.body is None, f"{self.body} is neither folded nor dropped"
        assert not self.owed, f"outcomes were not sent: {self.owed}"
        slots = self.options.open_rounds_max
        for p in self.owned if not self.closing else ():
            waits = p in self.merging or now < self.failed.get(p, (0, 0.0))[1]
            waits |= len(self.merging) >= slots
            assert waits or not self.folded[p], f"{self.folded[p]} is not merged"
        for name, part in self.parts.items() if not self.closing else ():
            if not part.connected:
                continue
            turns = {p for p, sure in part.turns.items() if sure}
            left = sorted(p for p in turns if self._fit(part, p))
            more = len(part.asked) < slots and not part.late and part.fresh >= turns
            more &= turns.isdisjoint(part.asked.keys())
            free = not part.asked or more or part.going
            assert not (free and left), f"{name} has a free link but no request for {left}"

    def _fit(self, part: Part, p: int) -> bool:
        held = part.held.get(p)
        if held is None or p in part.asked:
            return False
        fresh = held not in part.made[p] + part.before[p]
        return fresh and self.newest[p] - held.counter <= self.options.late_rounds_max
