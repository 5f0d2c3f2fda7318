"""The driver: the one class that runs a state machine.

A machine decides, and handlers execute its orders. A *handler* is a plain object with a method
for each kind of order, marked by `executes`. The method returns the facts that the machine receives
next: one, several, or none. If the work takes time, it returns a coroutine with that result.

The contract:

1. A fact and the orders that it caused are on the tape before any of these orders is executed.
2. Orders are executed in the order in which they were given, including the orders of facts that
   arrive in the meantime. No order waits for a coroutine, except after `HoldsUp`: then all later
   orders wait. The machine receives the facts of a coroutine at the instant that it ends, before
   any other fact. Kinds marked ``sliced`` can have thousands of orders at once. They keep their
   order among themselves, at most `SLICE` are executed per turn of the event loop, and other orders
   do not wait for them.
3. Before a `Tick`, everything that has arrived is delivered (rule 13).
4. An error that no handler turned into a fact stops the driver, once. It is stored in ``failure``
   and reported. The driver then decides and executes nothing more.
5. Work that must happen at the instant of the decision is done then, under the monitor, by methods
   marked with `at_decision`. The result is passed to the method that executes the order.
6. A process that has lost its lease decides nothing.

`Orders` is the table of handlers. It checks at the start that each kind of order that the machine
can give has exactly one method.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, get_args

from decoupled_diloco.protocol.messages import Tick
from decoupled_diloco.runtime import Monitor, now
from decoupled_diloco.tape import Recorder, TapeWriter

_FactT = TypeVar("_FactT", bound=Any)
_OrderT = TypeVar("_OrderT", bound=Any)
_KindT = TypeVar("_KindT")
_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])

TURNS = 3
"""Turns of the event loop before a `Tick`: the delivery of an arrived payload takes two."""


SLICE = 256
"""Sliced orders per turn of the event loop: each takes 20 µs, and as much again for its socket."""


def executes(*kinds: type, sliced: bool = False) -> Callable[[_MethodT], _MethodT]:
    """Mark the method of a handler that executes orders of these kinds.

    Args:
        kinds: The types of the orders.
        sliced: Execute the orders in slices. The method may then return an iterator that does one
            part of its work per step.
    """
    return _marked("sliced" if sliced else "executes", kinds)


def at_decision(*kinds: type) -> Callable[[_MethodT], _MethodT]:
    """Mark a method to be called at the instant of the decision, under the monitor.

    A kind may have such a method, a method that executes it, or both.
    """
    return _marked("at_decision", kinds)


def _marked(part: str, kinds: tuple[type, ...]) -> Callable[[_MethodT], _MethodT]:
    def mark(method: _MethodT) -> _MethodT:
        setattr(method, f"_{part}", kinds)
        return method

    return mark


@dataclass(frozen=True, slots=True)
class HoldsUp:
    """The result of a method whose work must end before any later order is executed."""

    work: Coroutine[Any, Any, Any]


class Orders(Generic[_OrderT]):
    """The methods that execute the orders of one machine.

    Args:
        union: All kinds of orders of the machine, as a union of types.
        handlers: Objects with marked methods.
        later: Classes of handlers that `add` will add later, each before its first order.

    Raises:
        TypeError: A kind has no method or several, or a method is for a kind outside the union.
    """

    def __init__(self, union: Any, *handlers: object, later: Iterable[type] = ()) -> None:
        self.execute: dict[type, Callable[..., Any]] = {}
        self.decide: dict[type, Callable[..., Any]] = {}
        self.sliced: set[type] = set()
        for handler in handlers:
            self.add(handler)
        promised = {kind for handler in later for kind, _, _ in _methods(handler)}
        required, found = set(_kinds(union)), {*self.execute, *self.decide, *promised}
        if required != found:
            names = ", ".join(sorted(kind.__name__ for kind in required ^ found))
            raise TypeError(f"orders and methods do not match: {names}")

    def add(self, handler: object) -> None:
        """Add the methods of a handler."""
        for kind, part, name in _methods(type(handler)):
            table = self.decide if part == "at_decision" else self.execute
            if kind in table:
                raise TypeError(f"{kind.__name__} has two methods: {name} and another one")
            table[kind] = getattr(handler, name)
            if part == "sliced":
                self.sliced.add(kind)


def _methods(handler: type) -> Iterator[tuple[type, str, str]]:
    """Yield each kind of order for which a class has a marked method, with mark and method name.

    A method that overrides a marked one applies to the same kinds.
    """
    for name in {name for base in handler.__mro__ for name in vars(base)}:
        for part in ("executes", "sliced", "at_decision"):
            for base in handler.__mro__:
                kinds = getattr(vars(base).get(name), f"_{part}", ())
                if kinds:
                    yield from ((kind, part, name) for kind in kinds)
                    break


def _kinds(union: Any) -> Iterator[type]:
    if isinstance(union, type):
        yield union
    for part in get_args(union):
        yield from _kinds(part)


class _Answering(Coroutine[Any, Any, None]):
    """A coroutine that passes on the result of another one at the instant that it ends.

    A callback of the task would run one turn later. By then the machine may have decided by state
    that the coroutine has just replaced. A wrapping coroutine function would leave the inner
    coroutine never awaited if its task is cancelled before the first step.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], answer: Callable[[Any], None]) -> None:
        self._work, self._answer = work, answer

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        raise TypeError("a task runs it")

    def _step(self, step: Callable[..., Any], *values: Any) -> Any:
        try:
            return step(*values)
        except StopIteration as end:
            self._answer(end.value)
            end.value = None  # the machine has received the result; the task has none
            raise


class MayAct(Protocol):
    """A lease: reports whether this process may decide."""

    def holds(self) -> bool: ...


class Driver(Generic[_FactT, _OrderT]):
    """Runs one state machine; see the module for its contract.

    `carry` sets the handlers before the first fact. It is separate from the constructor because
    handlers may need the driver.

    Args:
        machine: A machine with ``handle(now, fact) -> orders`` and ``deadline() -> instant``.
        tape: The tape for facts and orders; ``None`` to record nothing.
        on_failure: Called once with the error that stops the driver.
        arrivals: Returns the facts that have arrived but were not delivered, when a `Tick` is due.
        monitor: Guards the machine if two threads use it; it is notified after each decision.
        lease: The lease of this process, if another process could act in its place.

    Attributes:
        failure: The error that stopped the driver.
        stopped: Whether the driver has stopped deciding and executing.
        tasks: Coroutines in progress.
        waiting: Orders not executed yet, each with the result of its `at_decision` method.
    """

    def __init__(
        self,
        machine: Any,
        *,
        tape: TapeWriter | None,
        on_failure: Callable[[BaseException], None],
        arrivals: Callable[[], Iterable[_FactT]] = tuple,
        monitor: Monitor | None = None,
        lease: MayAct | None = None,
    ) -> None:
        self.machine = machine
        self.failure: BaseException | None = None
        self.stopped = False
        self.waiting: deque[tuple[_OrderT, Any]] = deque()
        self._handle = machine.handle if tape is None else Recorder(machine, tape).handle
        self._on_failure = on_failure
        self._arrivals = arrivals
        self._monitor = monitor
        self._lease = lease
        self.tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: float | None = None
        self._sliced: deque[tuple[_OrderT, Any]] = deque()
        self._under_way: Iterator[object] = iter(())
        self._room = SLICE
        self._next_turn: asyncio.Handle | None = None
        self._is_executing = self._is_waiting = self._is_ticking = False

    def set_handlers(self, orders: Orders[_OrderT]) -> None:
        """Set the handlers that execute the machine's orders."""
        self._orders = orders

    def deliver(self, fact: _FactT) -> None:
        """Deliver a fact to the machine and execute its orders; call this in the event loop."""
        try:
            self.decide(fact)
        except Exception as error:
            self._fail(error)
        self._go_on()

    def decide(self, fact: _FactT) -> None:
        """Deliver a fact to the machine, in any thread; `wake` makes the loop execute its orders.

        Raises:
            Exception: The machine, or a method marked with `at_decision`, failed.
        """
        if self.stopped or not (self._lease is None or self._lease.holds()):
            return
        if self._monitor is not None:
            with self._monitor:
                self._decide(fact)
                self._monitor.notify()
            return
        # A decision for thousands of learners creates many objects. Without the pause, the cycle
        # collector would examine them several times. A learner's process (with a monitor) does not
        # pause it: the user's program may disable the collector in the training thread at this
        # instant, and `gc.enable()` would undo that.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._decide(fact)
        finally:
            if collects:
                gc.enable()

    def wake(self) -> None:
        """Make the event loop execute the orders that another thread has decided, if any."""
        if self.waiting:
            self.in_loop(self._go_on)

    def in_loop(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, from any thread; nothing happens if it has closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._guarded, work, *arguments)

    def enter(self) -> None:
        """Use the running event loop to execute orders."""
        self._loop = asyncio.get_running_loop()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Run a coroutine; the machine receives the facts that it returns."""
        task = asyncio.get_running_loop().create_task(_Answering(work, self._answer))
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def stop(self) -> None:
        """Stop deciding and executing; coroutines in progress continue."""
        self.stopped = True
        self._disarm()
        self.waiting.clear()
        self._sliced.clear()

    async def finish(self, seconds: float) -> None:
        """Wait at most ``seconds`` for coroutines in progress, then stop."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=seconds)
        self.stop()

    async def close(self) -> None:
        """Stop, and cancel the coroutines in progress."""
        self.stop()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def unrecorded(self) -> None:
        """Stop recording to the tape."""
        self._handle = self.machine.handle

    def take(self, kind: type[_KindT]) -> list[_KindT]:
        """Remove and return the waiting orders of a kind, for a method that executes them all."""
        taken = [order for order, _ in self.waiting if isinstance(order, kind)]
        self.waiting = deque(each for each in self.waiting if not isinstance(each[0], kind))
        return taken

    def _decide(self, fact: _FactT) -> None:
        table = self._orders
        # `handle` also writes the fact and all of its orders to the tape (contract 1).
        for order in self._handle(now(), fact):
            decide = table.decide.get(type(order))
            taken = None if decide is None else decide(order)
            if decide is None or type(order) in table.execute:
                self.waiting.append((order, taken))

    def _go_on(self) -> None:
        """Execute waiting orders, and set the timer for the machine's deadline."""
        if self._is_executing or self.stopped:
            return  # a handler delivered a fact: the loop below executes its orders afterwards
        self._is_executing = True
        try:
            while self._next_order() or self._next_of_slice():
                pass
            self._arm()
        except Exception as error:
            self._fail(error)
        finally:
            self._is_executing = False
        # This turn used a part of its slice: the next turn gets a full one.
        if self._room < SLICE and self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_slice)

    def _next_order(self) -> bool:
        if self._is_waiting or not self.waiting:  # break: orders-before-disk
            return False
        order, taken = self.waiting.popleft()
        if type(order) in self._orders.sliced:
            self._sliced.append((order, taken))  # break: orders-reordered
        else:
            self._execute(order, taken)
        return True

    def _next_of_slice(self) -> bool:
        """Execute one sliced order, or one step of the sliced order in progress."""
        if not self._room:
            return False
        for _ in self._under_way:
            self._room -= 1
            return True
        if not self._sliced:
            return False
        self._room -= 1
        answer = self._execute(*self._sliced.popleft())
        self._under_way = iter(()) if answer is None else answer
        return True

    def _begin_slice(self) -> None:
        self._next_turn, self._room = None, SLICE
        self._go_on()

    def _execute(self, order: _OrderT, taken: Any) -> Iterator[object] | None:
        method = self._orders.execute[type(order)]
        both = type(order) in self._orders.decide
        answer = method(order, taken) if both else method(order)
        if isinstance(answer, HoldsUp):
            self._is_waiting = True
            self.spawn(answer.work).add_done_callback(self._waited)
        elif isinstance(answer, Coroutine):
            self.spawn(answer)
        elif isinstance(answer, Iterator):
            return answer
        else:
            self._answer(answer)
        return None

    def _waited(self, task: asyncio.Task[None]) -> None:
        self._is_waiting = False
        self._go_on()

    def _answer(self, answer: Any) -> None:
        for fact in answer if isinstance(answer, (list, tuple)) else (answer,):
            if fact is not None:
                self.deliver(fact)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _guarded(self, work: Callable[..., object], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self.stop()
            self._on_failure(error)

    def _arm(self) -> None:
        if self._is_ticking or self.stopped:
            return
        with self._monitor or contextlib.nullcontext():  # the training thread may change it
            deadline = self.machine.deadline()
        if deadline == self._armed_for:
            return
        self._disarm()
        if deadline is not None:  # break: timer-missing
            delay = max(0.0, deadline - now())
            self._timer = asyncio.get_running_loop().call_later(delay, self.tick)
            self._armed_for = deadline

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._armed_for = None

    def tick(self) -> None:
        """Deliver a `Tick` to the machine; the timer calls this at the machine's deadline."""
        self._disarm()
        self._is_ticking = True  # until the `Tick`, facts must not arm the timer again
        self.spawn(self._tick())

    async def _tick(self) -> None:
        # Sockets that are already readable get their turns first. Otherwise a process that was
        # paused would count its peers as silent although their messages are in its buffers.
        for _ in range(TURNS):  # break: tick-before-arrivals
            await asyncio.sleep(0)
        for fact in self._arrivals():
            self.deliver(fact)
        self._is_ticking = False
        self.deliver(Tick())  # type: ignore[arg-type]  # each machine has it among its facts
