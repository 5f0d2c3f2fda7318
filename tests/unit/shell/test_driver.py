"""The driver with a toy machine: one test for each sentence of its contract."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from decoupled_diloco.protocol.messages import Tick
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.shell.driver import SLICE, Driver, HoldsUp, Orders, at_decision, executes
from decoupled_diloco.tape import TapeWriter


@dataclass(frozen=True)
class Asked:
    """A fact: the machine gives the orders in it, in this order."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Heard:
    """A fact without orders."""

    name: str


@dataclass(frozen=True)
class Now:
    """An order that is executed immediately."""

    name: str


@dataclass(frozen=True)
class Later:
    """An order that takes time."""

    name: str


@dataclass(frozen=True)
class First:
    """An order that must finish before the next one."""

    name: str


@dataclass(frozen=True)
class Copy:
    """An order with a method for the instant of the decision."""

    name: str


@dataclass(frozen=True)
class Small:
    """A sliced order, one of thousands."""

    name: str


@dataclass(frozen=True)
class Many:
    """A sliced order with several steps."""

    name: str


Order = Now | Later | First | Copy | Small | Many
KINDS = {"now": Now, "later": Later, "first": First, "copy": Copy, "small": Small, "many": Many}


@dataclass
class Toy:
    """A machine that gives the orders in its facts, and keeps the facts."""

    due: float | None = None
    facts: list[Any] = field(default_factory=list)

    def handle(self, now: float, event: Any) -> list[Any]:
        self.facts.append(event)
        if isinstance(event, Tick):
            self.due = None
        if event == Heard("impossible"):
            raise AssertionError("no such fact")
        names = event.names if isinstance(event, Asked) else ()
        return [KINDS[name.split("-")[0]](name) for name in names]

    def deadline(self) -> float | None:
        return self.due


class Handler:
    """Executes the toy's orders and records them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gate = asyncio.Event()
        self.value = "old"
        self.answer: Any = None

    @executes(Now)
    def now(self, order: Now) -> Any:
        if order.name == "now-broken":
            raise ValueError("a fault of the shell")
        self.done.append(order.name)
        return self.answer

    @executes(Later)
    async def later(self, order: Later) -> Any:
        await self.gate.wait()
        if order.name == "later-broken":
            raise ValueError("a fault of the shell")
        self.done.append(order.name)
        return Heard(order.name)

    @executes(First)
    def first(self, order: First) -> HoldsUp:
        return HoldsUp(self.later(Later(order.name)))

    @at_decision(Copy)
    def take(self, order: Copy) -> str:
        return self.value

    @executes(Copy)
    def copy(self, order: Copy, taken: str) -> None:
        self.done.append(f"{order.name}={taken}")

    @executes(Small, sliced=True)
    def small(self, order: Small) -> Any:
        self.done.append(order.name)
        return Asked(("small-led-to",)) if order.name == "small-leads" else None

    @executes(Many, sliced=True)
    def many(self, order: Many) -> Iterator[None]:
        for step in range(SLICE):
            self.done.append(f"{order.name} {step}")
            yield


class World:
    """A driver with its machine and handler."""

    def __init__(self, **arguments: Any) -> None:
        self.toy, self.handler = Toy(), Handler()
        self.failures: list[BaseException] = []
        arguments = {"tape": None, "on_failure": self.failures.append} | arguments
        self.driver = Driver[Any, Any](self.toy, **arguments)
        self.driver.set_handlers(Orders(Order, self.handler))

    def ask(self, *names: str) -> None:
        self.driver.deliver(Asked(names))


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_fact_and_its_orders_are_on_the_tape_before_one_is_executed(tmp_path):
    seen: list[list[str]] = []
    tape = TapeWriter(tmp_path, "toy", {})

    class Looking(Handler):
        @executes(Now)
        def now(self, order: Now) -> None:
            tape.flush()
            lines = (tmp_path / "toy.jsonl").read_text().splitlines()
            seen.append([json.loads(line)["type"] for line in lines][1:])

    driver = Driver[Any, Any](Toy(), tape=tape, on_failure=print)
    driver.set_handlers(Orders(Order, Looking()))
    driver.deliver(Asked(("now-1", "now-2")))
    tape.close()
    assert seen == [["Asked", "Now", "Now"]] * 2


async def test_orders_are_executed_in_order_and_nothing_waits_for_a_coroutine():
    world = World()
    world.ask("now-1", "later-2", "now-3")
    assert world.handler.done == ["now-1", "now-3"]
    world.handler.gate.set()
    await turns()
    assert world.handler.done == ["now-1", "now-3", "later-2"]
    assert world.toy.facts[-1] == Heard("later-2")


async def test_the_machine_receives_a_coroutines_facts_when_it_ends():
    """Otherwise a decision in between would use state that the coroutine has just replaced."""

    class Replacing(Handler):
        @executes(Later)
        async def later(self, order: Later) -> Any:
            asyncio.get_running_loop().call_soon(world.driver.deliver, Heard("after it"))
            return Heard(order.name)

    world = World()
    world.driver.set_handlers(Orders(Order, Replacing()))
    world.ask("later-1")
    await turns()
    assert world.toy.facts[1:] == [Heard("later-1"), Heard("after it")]


async def test_orders_of_a_resulting_fact_follow_the_waiting_ones():
    world = World()
    world.handler.answer = Asked(("copy-9",))
    world.ask("now-1", "now-2")
    assert world.handler.done == ["now-1", "now-2", "copy-9=old", "copy-9=old"]


async def test_later_orders_wait_and_facts_are_still_delivered():
    world = World()
    world.ask("first-1", "now-2")
    world.ask("now-3")
    world.driver.deliver(Heard("meanwhile"))
    assert world.handler.done == []
    assert world.toy.facts[-1] == Heard("meanwhile")
    world.handler.gate.set()
    await turns()
    assert world.handler.done == ["first-1", "now-2", "now-3"]


async def test_a_carrier_can_take_the_waiting_orders_of_a_kind():
    world = World()
    world.ask("first-1", "now-2", "copy-3", "now-4")
    assert world.driver.take(Now) == [Now("now-2"), Now("now-4")]
    world.handler.gate.set()
    await turns()
    assert world.handler.done == ["first-1", "copy-3=old"]


async def test_all_facts_that_a_method_returns_are_delivered_in_order():
    world = World()
    world.handler.answer = [Heard("a"), Heard("b")]
    world.ask("now-1")
    assert world.toy.facts[1:] == [Heard("a"), Heard("b")]


async def test_arrived_facts_are_delivered_before_a_tick():
    world = World(arrivals=lambda: [Heard("a learner")])
    world.toy.due = now()
    world.driver.deliver(Heard("first"))
    loop = asyncio.get_running_loop()
    loop.call_later(0, lambda: loop.call_soon(world.driver.deliver, Heard("a body")))
    while Tick() not in world.toy.facts:  # noqa: ASYNC110  # the machine has no event for it
        await asyncio.sleep(0.001)
    assert world.toy.facts[1:] == [Heard("a body"), Heard("a learner"), Tick()]


async def test_a_new_deadline_moves_the_only_timer():
    world = World()
    world.toy.due = now() + 3600
    world.driver.deliver(Heard("far"))
    world.toy.due = now()
    world.driver.deliver(Heard("near"))
    while Tick() not in world.toy.facts:  # noqa: ASYNC110  # the machine has no event for it
        await asyncio.sleep(0.001)
    await turns()
    assert world.toy.facts.count(Tick()) == 1


@pytest.mark.parametrize("name", ["now-broken", "later-broken", "first-broken", "impossible"])
async def test_an_error_stops_the_driver_once_and_is_kept(name):
    world = World()
    world.handler.gate.set()
    if name == "first-broken":
        world.handler.later = lambda order: Handler.later(  # type: ignore[method-assign]
            world.handler, Later("later-broken")
        )
    if name == "impossible":
        world.driver.deliver(Heard(name))
    else:
        world.ask(name, name, "now-3")
    await turns()
    done, facts = list(world.handler.done), list(world.toy.facts)
    world.ask("now-4")
    await turns()
    assert world.failures == [world.driver.failure]
    assert world.driver.stopped
    assert isinstance(world.driver.failure, (ValueError, AssertionError))
    assert "now-4" not in world.handler.done
    assert world.handler.done == done
    assert world.toy.facts == facts


async def test_work_at_the_decision_happens_under_the_monitor():
    monitor = runtime().monitor()
    world = World(monitor=monitor)
    world.driver.enter()
    decided = threading.Thread(target=world.driver.decide, args=(Asked(("copy-1",)),))
    decided.start()
    await asyncio.to_thread(decided.join)
    world.handler.value = "new"
    assert world.handler.done == []  # another thread decides; only the loop executes
    world.driver.wake()
    await turns()
    assert world.handler.done == ["copy-1=old"]


async def test_the_monitor_is_held_for_a_decision_and_not_while_an_order_is_executed():
    held: list[bool] = []

    class Counting:
        depth = 0

        def __enter__(self) -> None:
            self.depth += 1

        def __exit__(self, *error: object) -> None:
            self.depth -= 1

        def notify(self) -> None: ...

        async def wait(self, seconds: float) -> None: ...

    monitor = Counting()

    class Looking(Handler):
        @at_decision(Copy)
        def take(self, order: Copy) -> str:
            held.append(monitor.depth > 0)
            return ""

        @executes(Copy)
        def copy(self, order: Copy, taken: str) -> None:
            held.append(monitor.depth > 0)

    driver = Driver[Any, Any](Toy(), tape=None, on_failure=print, monitor=monitor)
    driver.set_handlers(Orders(Order, Looking()))
    driver.deliver(Asked(("copy-1",)))
    assert held == [True, False]


async def test_without_its_lease_a_process_decides_nothing():
    class Lease:
        held = False

        def holds(self) -> bool:
            return self.held

    lease = Lease()
    world = World(lease=lease)
    world.ask("now-1")
    assert not world.toy.facts
    lease.held = True
    world.ask("now-2")
    assert world.handler.done == ["now-2"]


async def test_close_cancels_coroutines_and_delivers_no_fact():
    world = World()
    world.ask("later-1")
    await turns()
    await world.driver.close()
    world.handler.gate.set()
    await turns()
    assert world.toy.facts == [Asked(("later-1",))]
    assert not world.failures


async def test_a_coroutine_that_is_cancelled_before_its_first_step_leaves_no_warning(recwarn):
    world = World()
    world.ask("later-1")
    await world.driver.close()
    del world
    gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize("shared", [False, True])
async def test_the_collector_pauses_during_a_decision_with_one_thread(shared):
    seen: list[bool] = []

    class Looking(Toy):
        def handle(self, now: float, event: Any) -> list[Any]:
            seen.append(gc.isenabled())
            return []

    driver = Driver[Any, Any](
        Looking(),
        tape=None,
        on_failure=print,
        monitor=runtime().monitor() if shared else None,
    )
    driver.set_handlers(Orders(Order, Handler()))
    driver.deliver(Heard("a"))
    assert (seen, gc.isenabled()) == ([shared], True)


async def test_finish_waits_for_coroutines_up_to_its_limit():
    world = World()
    world.ask("later-1")
    asyncio.get_running_loop().call_later(0.01, world.handler.gate.set)
    await world.driver.finish(60)
    assert world.handler.done == ["later-1"]
    assert world.driver.stopped
    slow = World()
    slow.ask("later-1")
    await turns()
    await slow.driver.finish(0.01)
    assert slow.handler.done == []
    await slow.driver.close()


async def test_one_slice_of_orders_is_executed_per_turn_in_order():
    world, names = World(), [f"small-{number}" for number in range(2 * SLICE + 10)]
    for start in (0, SLICE + 1):  # orders given at different times share the slice of a turn
        world.ask(*names[start : start + SLICE + 1])
    world.ask(*names[2 * SLICE + 2 :])
    counts = [len(world.handler.done)]
    for _ in range(3):
        await turns(1)
        counts.append(len(world.handler.done))
    assert counts == [SLICE, 2 * SLICE, 2 * SLICE + 10, 2 * SLICE + 10]
    assert world.handler.done == names


async def test_other_orders_do_not_wait_for_sliced_ones():
    world = World()
    world.ask(*["small-1"] * (SLICE + 5), "now-2")
    assert world.handler.done == ["now-2"] + ["small-1"] * SLICE


async def test_a_sliced_order_of_many_steps_finishes_before_the_next():
    world = World()
    world.ask("small-first", "many", "small-last")
    assert len(world.handler.done) == SLICE - 1, "its start and each step count"
    await turns(2)
    many = [f"many {step}" for step in range(SLICE)]
    assert world.handler.done == ["small-first", *many, "small-last"]


async def test_facts_of_a_sliced_order_come_after_waiting_orders():
    world = World()
    world.ask("small-leads", "small-2")
    assert world.handler.done == ["small-leads", "small-2", "small-led-to"]


async def test_a_carrier_that_is_added_later_executes_orders():
    @dataclass(frozen=True)
    class Extra:
        name: str

    class Late:
        done = ""

        @executes(Extra)
        def extra(self, order: Extra) -> None:
            Late.done = order.name

    toy, orders = Toy(), Orders[Any](Order | Extra, Handler(), later=(Late,))
    driver = Driver[Any, Any](toy, tape=None, on_failure=print)
    driver.set_handlers(orders)
    KINDS["extra"] = Extra
    try:
        orders.add(Late())
        driver.deliver(Asked(("extra-1",)))
    finally:
        del KINDS["extra"]
    assert Late.done == "extra-1"


class OnlyNow:
    @executes(Now)
    def now(self, order: Now) -> None: ...


class NowAndTick(OnlyNow):
    @executes(Tick)
    def tick(self, order: Tick) -> None: ...


@pytest.mark.parametrize(
    ("union", "handlers", "words"),
    [
        (Now | Later, [OnlyNow()], "do not match: Later"),
        (Now, [NowAndTick()], "do not match: Tick"),
        (Now, [OnlyNow(), OnlyNow()], "Now has two methods"),
    ],
)
def test_the_table_rejects_kinds_without_exactly_one_method(union, handlers, words):
    with pytest.raises(TypeError, match=words):
        Orders(union, *handlers)
