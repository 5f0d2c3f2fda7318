"""How a shard's fragments get their first copies: seeding and restoring (rules 10, 12)."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Options, SyncerMachine, Version
from decoupled_diloco.protocol.first_copies import (
    FROM_THE_START_SECONDS,
    SEED_TRIES_MAX,
    SETTLE_SECONDS,
)
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Begin,
    Connected,
    CopyArrived,
    CopyCorrupt,
    CopyDeclined,
    CopyWanted,
    DiskRead,
    Done,
    DurableCopy,
    Ending,
    EndOrdered,
    Finished,
    FinishOrdered,
    Heard,
    Hello,
    Holding,
    Install,
    LoadWeights,
    Lost,
    Note,
    Published,
    Pull,
    Received,
    SeedFailed,
    SeedNamed,
    Send,
    ShardAdmitted,
    ShardReady,
    Stop,
    Swept,
    Tick,
    Unexpect,
    WeightsLoaded,
)
from decoupled_diloco.protocol.syncer_machine import LINGER_SECONDS


class FillBench:
    """A shard of two fragments that was just admitted; ``begun=None``: it is about to be."""

    def __init__(self, *, begun: bool | None, quorum: int = 1) -> None:
        self.machine = SyncerMachine(Options(fragments=2, period=4, quorum=quorum), 0)
        self.effects: list[Any] = []
        self.now = 0.0
        if begun is not None:
            self.handle(Received(COORDINATOR, ShardAdmitted(2, begun)))

    def handle(self, event: Any, at: float | None = None) -> None:
        self.now = self.now if at is None else at
        self.effects = self.machine.handle(self.now, event)
        self.machine.check()

    def greet(self, name: str, *versions: Version, step: int = 0) -> None:
        held = tuple(Holding(p, version) for p, version in enumerate(versions))
        hello = Hello(name, 1, name, "learner", step, 7 if step else 0, step or None, held)
        self.handle(Connected(hello.learner, hello, len(self.machine.state.members) + 1))

    def wanted(self) -> list[tuple[str, CopyWanted]]:
        return [
            (effect.peer, effect.message)
            for effect in self.effects
            if isinstance(getattr(effect, "message", None), CopyWanted)
        ]

    def deliver(self, wanted: list[tuple[str, CopyWanted]]) -> None:
        for learner, ask in wanted:
            self.handle(CopyArrived(learner, ask.fragment, ask.attempt, f"copy-{ask.fragment}"))

    def orders(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def sent(self, kind: type) -> list[Any]:
        found = [getattr(effect, "message", None) for effect in self.effects]
        return [message for message in found if isinstance(message, kind)]


def test_seeding_from_the_named_learner() -> None:
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.greet("b")
    bench.handle(Received(COORDINATOR, SeedNamed("b", 1, 1)))
    wanted = bench.wanted()
    assert [(name, ask.fragment, ask.version) for name, ask in wanted] == [
        ("b", 0, None),
        ("b", 1, None),
    ]
    bench.deliver(wanted[:1])
    assert not bench.sent(ShardReady)
    bench.deliver(wanted[1:])
    assert bench.orders(Install) == [
        Install(0, Version(2, 0), "the initial weights are complete", "copy-0"),
        Install(1, Version(2, 0), "the initial weights are complete", "copy-1"),
    ]
    assert bench.sent(ShardReady) == [ShardReady(1)]
    assert not bench.sent(Published), "no round opens before every shard is ready"
    bench.handle(Received(COORDINATOR, Begin(1)))
    assert len(bench.sent(Published)) == 2


def test_a_shard_does_not_restore_from_a_disk_that_is_behind_a_learner() -> None:
    """A disk that has lost a merge would roll the run back."""
    bench = FillBench(begun=True)
    kept = tuple(DurableCopy(p, Version(1, 3), f"kept-{p}") for p in range(2))
    bench.handle(DiskRead(kept))
    bench.greet("a", Version(1, 3), Version(1, 5), step=9)
    bench.handle(Tick(), SETTLE_SECONDS + 1.0)
    wanted = bench.wanted()
    assert [(name, ask.fragment, ask.version) for name, ask in wanted] == [("a", 1, Version(1, 5))]
    bench.deliver(wanted)
    digests = {order.fragment: order.digest for order in bench.orders(Install)}
    assert digests == {0: "kept-0", 1: "copy-1"}


def test_a_seed_that_connects_later_is_asked_then() -> None:
    bench = FillBench(begun=False)
    bench.handle(Received(COORDINATOR, SeedNamed("b", 1, 1)))
    assert not bench.wanted()
    bench.greet("b")
    assert len(bench.wanted()) == 2


def test_another_seed_voids_the_copies_of_the_first() -> None:
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.greet("b")
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    first = bench.wanted()
    bench.deliver(first[:1])
    bench.handle(Received(COORDINATOR, SeedNamed("b", 1, 2)))
    assert len(bench.orders(Unexpect)) == 2
    second = bench.wanted()
    bench.deliver(first[1:])
    assert not bench.sent(ShardReady)
    bench.deliver(second)
    assert bench.sent(ShardReady) == [ShardReady(2)]
    bench.handle(Received(COORDINATOR, Begin(1)))
    assert bench.machine.state.phase == "ready", "an order of an earlier attempt"


def test_seeding_from_the_runs_file() -> None:
    bench = FillBench(begun=False)
    bench.handle(Received(COORDINATOR, SeedNamed("", 0, 1)))
    assert bench.orders(LoadWeights)
    bench.handle(Done(LoadWeights(""), WeightsLoaded(((0, "x"), (1, "y")))))
    assert bench.sent(ShardReady) == [ShardReady(1)]


def test_a_seed_whose_connection_broke_is_asked_again() -> None:
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    bench.deliver(bench.wanted()[:1])
    bench.handle(Lost("a"))
    bench.greet("a")
    assert [ask.fragment for _, ask in bench.wanted()] == [1]


def test_a_seed_that_reconnects_is_asked_again() -> None:
    """The broken connection was not noticed, and the request was lost with it."""
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    first = bench.wanted()
    bench.greet("a")
    assert [order.path for order in bench.orders(Unexpect)] == [ask.path for _, ask in first]
    again = bench.wanted()
    assert [ask.fragment for _, ask in again] == [0, 1]
    bench.deliver(first)
    assert not bench.sent(ShardReady), "answers to earlier requests are void"
    bench.deliver(again)
    assert bench.sent(ShardReady)


def test_a_holder_that_greets_anew_is_asked_again() -> None:
    bench = FillBench(begun=True)
    bench.greet("a", Version(1, 5), Version(1, 3), step=9)
    bench.handle(Tick(), SETTLE_SECONDS)
    assert len(bench.wanted()) == 2
    bench.greet("a", Version(1, 5), Version(1, 3), step=9)
    bench.handle(Tick(), bench.machine.deadline())
    bench.deliver(bench.wanted())
    assert bench.machine.state.phase == "running"


@pytest.mark.parametrize("how", ["spoiled", "declined"])
def test_a_failed_copy_is_requested_again(how: str) -> None:
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    _, ask = bench.wanted()[0]
    if how == "spoiled":
        bench.handle(CopyCorrupt("a", 0, ask.attempt, "another digest"))
    else:
        bench.handle(Received("a", CopyDeclined(0, ask.attempt, "disk full")))
    assert not bench.wanted(), "not at once"
    bench.handle(Tick(), SETTLE_SECONDS)
    ((name, again),) = bench.wanted()
    assert (name, again.fragment) == ("a", 0)
    assert again.attempt != ask.attempt


def test_rule_12_a_seed_that_always_fails_is_reported() -> None:
    """Rule 12: three tries, each after a pause; then the coordinator names another seed."""
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.greet("b")
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    bench.deliver(bench.wanted()[1:])
    tries = 0
    while not bench.sent(SeedFailed):
        fill = bench.machine.state.fill
        assert fill is not None
        if 0 in fill.asked:
            tries += 1
            bench.handle(CopyCorrupt("a", 0, fill.asked[0].number, "not finite"))
            assert not bench.wanted()
        bench.handle(Tick(), bench.machine.deadline())
        assert bench.now < 100.0
    assert tries == SEED_TRIES_MAX
    assert bench.now == tries * SETTLE_SECONDS
    assert bench.sent(SeedFailed) == [SeedFailed(1, "fragment 0: not finite")]
    bench.handle(Received(COORDINATOR, ShardAdmitted(2, False)))
    assert bench.sent(SeedFailed), "the coordinator may not have received it"
    bench.greet("a")
    assert not bench.wanted()
    bench.handle(Received(COORDINATOR, SeedNamed("b", 1, 2)))
    bench.deliver(bench.wanted())
    assert bench.sent(ShardReady) == [ShardReady(2)]


def test_the_failure_of_an_earlier_request_does_not_void_the_next() -> None:
    bench = FillBench(begun=False)
    bench.greet("a")
    bench.handle(Received(COORDINATOR, SeedNamed("a", 1, 1)))
    _, first = bench.wanted()[0]
    bench.handle(Received("a", CopyDeclined(0, first.attempt, "lost")))
    bench.handle(Tick(), SETTLE_SECONDS)
    _, second = bench.wanted()[0]
    bench.handle(Received("a", CopyDeclined(0, first.attempt, "lost")))
    assert not bench.wanted()
    assert not bench.orders(Unexpect)
    bench.handle(CopyArrived("a", 0, second.attempt, "copy"))
    fill = bench.machine.state.fill
    assert fill is not None
    assert fill.digests == {0: "copy"}


def test_restoring_takes_each_fragment_from_a_holder_of_the_newest() -> None:
    bench = FillBench(begun=True)
    bench.greet("a", Version(1, 5), Version(1, 3), step=9)
    bench.greet("b", Version(1, 4), Version(1, 6), step=8)
    bench.handle(Tick(), SETTLE_SECONDS)
    wanted = bench.wanted()
    assert [(name, ask.version) for name, ask in wanted] == [
        ("a", Version(1, 5)),
        ("b", Version(1, 6)),
    ]
    bench.deliver(wanted)
    assert bench.machine.state.phase == "running"
    published = bench.sent(Published)
    assert [(m.version, m.base, m.difference) for m in published] == [
        (Version(2, 5), Version(1, 5), ""),
        (Version(2, 6), Version(1, 6), ""),
    ], "only the name is new: a holder fetches nothing"
    assert bench.machine.state.clock == 9, "the clock is where the learners are"


@pytest.mark.parametrize("lie", ["clock", "run_step"])
@pytest.mark.parametrize("learners", [("liar", "a", "b"), ("a", "b", "liar")])
def test_rule_13_a_restored_clock_is_that_of_most_learners(
    lie: str, learners: tuple[str, ...]
) -> None:
    """Rule 13: a dishonest learner moves it by at most one period."""
    bench = FillBench(begun=True)
    held = tuple(Holding(p, Version(1, 5)) for p in (0, 1))
    for number, name in enumerate(learners):
        claims = {"clock": 7, "run_step": 8, lie: 2**47 if name == "liar" else 8}
        hello = Hello(name, 1, name, "learner", 6, held=held, **claims)
        bench.handle(Connected(hello.learner, hello, number))
    bench.handle(Tick(), SETTLE_SECONDS)
    bench.deliver(bench.wanted())
    state = bench.machine.state
    assert state.phase == "running"
    ahead = 0 if lie == "clock" else 4
    assert state.clock == 8 + ahead
    assert state.members["liar"].run_step == 8 + ahead


def test_a_holder_that_declines_is_skipped() -> None:
    bench = FillBench(begun=True)
    bench.greet("a", Version(1, 5), Version(1, 5), step=9)
    bench.greet("b", Version(1, 5), Version(1, 5), step=9)
    bench.handle(Tick(), SETTLE_SECONDS)
    (name, ask), *_ = bench.wanted()
    bench.handle(Received(name, CopyDeclined(ask.fragment, ask.attempt, "it holds another")))
    bench.handle(Tick(), 2 * SETTLE_SECONDS)
    ((other, again),) = bench.wanted()
    assert again.fragment == ask.fragment
    assert other != name


def test_a_shard_that_died_before_any_learner_held_its_copies_starts_again() -> None:
    bench = FillBench(begun=True)
    bench.handle(Received(COORDINATOR, SeedNamed("b", 1, 1)))
    bench.greet("a")
    bench.greet("b")
    while bench.now < FROM_THE_START_SECONDS:
        assert not bench.wanted(), "a holder may still come"
        bench.handle(Heard(("a", "b")), bench.now + SETTLE_SECONDS / 2)
        bench.handle(Tick(), bench.now + SETTLE_SECONDS / 2)
    wanted = bench.wanted()
    assert {(name, ask.version) for name, ask in wanted} == {("b", None)}
    assert bench.orders(Note), "it is logged"
    bench.deliver(wanted)
    assert bench.machine.state.phase == "running"
    assert bench.machine.state.fragments[0].version == Version(2, 0)


def test_nothing_starts_again_once_a_learner_has_trained() -> None:
    bench = FillBench(begun=True)
    bench.handle(Received(COORDINATOR, SeedNamed("b", 1, 1)))
    bench.greet("b")
    bench.greet("a", step=3)
    for _ in range(40):
        bench.handle(Heard(("a", "b")), bench.now + SETTLE_SECONDS / 2)
        bench.handle(Tick(), bench.now + SETTLE_SECONDS / 2)
        assert not bench.wanted()


def test_messages_that_the_coordinator_may_have_missed_are_repeated() -> None:
    bench = FillBench(begun=False)
    bench.handle(Received(COORDINATOR, SeedNamed("", 0, 1)))
    bench.handle(Done(LoadWeights(""), WeightsLoaded(((0, "x"), (1, "y")))))
    bench.handle(Received(COORDINATOR, ShardAdmitted(2, False)))
    assert bench.sent(ShardReady) == [ShardReady(1)]
    bench.handle(Received(COORDINATOR, Begin(1)))
    bench.handle(Received(COORDINATOR, EndOrdered()))
    assert bench.sent(Swept) == [Swept()]
    bench.handle(Received(COORDINATOR, ShardAdmitted(2, True)))
    assert [effect for effect in bench.effects if isinstance(effect, Send)]
    assert bench.sent(Swept) == [Swept()]


def test_who_starts_again_when_all_have_seen_the_end_and_gone_ends_as_well() -> None:
    """It died between its last message to the learners and its own end."""
    bench = FillBench(begun=None)
    bench.handle(DiskRead(tuple(DurableCopy(p, Version(1, 5), f"last {p}") for p in (0, 1))))
    bench.handle(Received(COORDINATOR, ShardAdmitted(2, True)))
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.handle(Tick(), 5.0)
    assert bench.machine.state.phase == "restoring", "a holder of a newer version may still come"
    bench.handle(Received(COORDINATOR, FinishOrdered()))
    bench.handle(Tick(), 5.0 + SETTLE_SECONDS)
    assert bench.machine.state.phase == "finished"
    fragments = bench.machine.state.fragments.values()
    assert [entry.digest for entry in fragments] == ["last 0", "last 1"]


def test_who_has_swept_in_an_earlier_life_asks_nobody_again() -> None:
    bench = FillBench(begun=None)
    bench.handle(DiskRead(tuple(DurableCopy(p, Version(1, 5), f"last {p}") for p in (0, 1))))
    for order in (ShardAdmitted(2, True), EndOrdered(), FinishOrdered()):
        bench.handle(Received(COORDINATOR, order))
    bench.greet("late")
    bench.handle(Tick(), SETTLE_SECONDS)
    assert bench.machine.state.phase == "finished"
    assert len(bench.sent(Published)) == 2
    assert not bench.sent(Pull)
    assert [type(each) for each in bench.sent(object)[-2:]] == [Ending, Finished]


def test_a_shard_without_its_disk_does_not_end_with_other_weights() -> None:
    bench = FillBench(begun=None)
    bench.handle(DiskRead((DurableCopy(0, Version(1, 5), "last 0"),)))
    for order in (ShardAdmitted(2, True), EndOrdered(), FinishOrdered()):
        bench.handle(Received(COORDINATOR, order))
    bench.handle(Tick(), LINGER_SECONDS)
    assert bench.machine.state.phase == "restoring"
    assert bench.orders(Stop)


def test_an_end_ordered_while_restoring_is_followed_by_a_sweep() -> None:
    bench = FillBench(begun=True)
    bench.handle(Received(COORDINATOR, EndOrdered()))
    bench.handle(Received(COORDINATOR, FinishOrdered()))
    bench.greet("a", Version(1, 5), Version(1, 3), step=9)
    bench.handle(Tick(), SETTLE_SECONDS)
    bench.deliver(bench.wanted())
    assert bench.machine.state.phase == "sweeping"


def test_rule_1_who_is_new_does_not_keep_a_lost_clock_down() -> None:
    """Otherwise run steps would differ between shards, and a learner might wait forever."""
    bench = FillBench(begun=True, quorum=3)
    bench.greet("new")
    bench.greet("a", Version(1, 5), Version(1, 5), step=9)
    bench.greet("b", Version(1, 5), Version(1, 5), step=8)
    bench.handle(Tick(), SETTLE_SECONDS)
    bench.deliver(bench.wanted())
    state = bench.machine.state
    assert (state.phase, state.clock) == ("running", 8)
    assert {name: member.run_step for name, member in state.members.items()} == {
        "new": 8,
        "a": 9,
        "b": 8,
    }
