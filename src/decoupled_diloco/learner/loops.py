"""Training loops that do not call `Learner.step` themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.counting import TokenCounter, whole_tokens
from decoupled_diloco.learner.optimizers import InnerOptimizers
from decoupled_diloco.runtime import blocking

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Steps(Protocol):
    """What of a learner a loop needs.

    Attributes:
        untold: Tokens of batches behind the last step, when the loader ended.
    """

    untold: int

    def step(self, tokens: int) -> bool:
        """One inner step is finished; returns whether the run goes on."""

    async def ends_in_order(self, error: BaseException) -> bool:
        """Whether an exception of the loader means that the process was asked to stop."""

    def close(self) -> None:
        """Leaves the run."""


class LeaveLoop(BaseException):
    """Leaves the loop in `following` when the run is over."""


def batches_of(
    learner: Steps,
    model: nn.Module,
    optimizers: InnerOptimizers | None,
    batches: Iterable[T],
    tokens: Callable[[T], Any] | None,
) -> Iterator[T]:
    """See `Learner.batches`."""
    stepped = optimizers is None
    seen = made = pending = 0
    trained, learner.untold = learner.untold, 0

    def note(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    counter = TokenCounter(model) if tokens is None else None
    end = None if optimizers is None else optimizers.on_step(note)
    try:
        for batch in _until_stopped(learner, batches):
            yield batch
            seen, pending = seen + 1, pending + 1
            trained += 0 if tokens is None else whole_tokens(tokens(batch))
            if not stepped:
                continue
            made, stepped = made + 1, optimizers is None
            goes_on = learner.step(trained + (0 if counter is None else counter.take()))
            trained = pending = 0
            if not goes_on:
                learner.close()
                return
        if pending:
            learner.untold = trained + (0 if counter is None else counter.take())
        if seen and not made:
            logger.warning(
                "optimizer.step was not called in %d batches, so the run was told of no step: give "
                "Learner the optimizer that trains the model",
                seen,
            )
    finally:
        if counter is not None:
            counter.close()
        if end is not None:
            end()


def _until_stopped(learner: Steps, batches: Iterable[T]) -> Iterator[T]:
    """The batches; ends when a signal that also asks this process to stop has ended a worker."""
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            if not blocking(learner.ends_in_order(error)):
                raise
            learner.close()
            return
        yield batch


@contextmanager
def following(
    learner: Steps,
    model: nn.Module,
    optimizers: InnerOptimizers | None,
    tokens: Callable[[], Any] | None,
) -> Iterator[None]:
    """See `Learner.following`."""
    if optimizers is None:
        raise ConfigError("there is no optimizer to follow: give Learner the argument optimizer=")
    counter = TokenCounter(model) if tokens is None else None
    count = tokens or (lambda: counter.take() if counter else 1)

    waiting = set(range(len(optimizers.all)))

    def made(number: int) -> None:
        waiting.discard(number)
        if waiting:
            return
        waiting.update(range(len(optimizers.all)))
        if not learner.step(count()):
            raise LeaveLoop

    end = optimizers.on_step(made)
    try:
        yield
    except LeaveLoop:
        learner.close()
    finally:
        end()
        if counter is not None:
            counter.close()
