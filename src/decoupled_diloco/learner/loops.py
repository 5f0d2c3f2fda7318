"""Training loops that do not call `Learner.step` themselves, and the tokens of their steps.

`batches_of` wraps a loader, `attached` hooks ``optimizer.step``. If the program passes no number of
tokens, `StepTokens` counts the inputs of the model.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.learner.optimizers import InnerOptimizers
from decoupled_diloco.runtime import blocking

logger = logging.getLogger(__name__)

DEPTH_MAX = 4
"""Largest nesting of tuples, lists, mappings and dataclasses in which tensors are found."""

_UNCOUNTED: WeakSet[nn.Module] = WeakSet()
"""Models for which the warning has been logged: one warning per model, not one per epoch."""


def whole_tokens(tokens: Any) -> int:
    """Return the tokens of a step as a whole number; a fraction is rounded to the nearest.

    Args:
        tokens: An int, a float, a NumPy number or a tensor with one element; 0 or more. The call
            waits for a tensor on a GPU.

    Raises:
        ConfigError: It is negative, NaN, infinite, or not a number.

    >>> import torch
    >>> whole_tokens(0), whole_tokens(12.0), whole_tokens(torch.tensor(5))
    (0, 12, 5)
    """
    if type(tokens) is int and tokens >= 0:  # the usual case, and on the path of every step
        return tokens
    number = tokens
    if hasattr(tokens, "item") and hasattr(tokens, "shape"):  # a tensor or a NumPy number
        number = tokens.item() if math.prod(tokens.shape) == 1 else None
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0:
        raise ConfigError(
            f"tokens={tokens!r} is not a valid number of tokens: pass the step's tokens as one "
            "number, 0 or more"
        )
    rounded: int = round(number)
    return rounded


class TokenCounter:
    """Counts the tokens without padding, or the samples, in a model's calls in training mode.

    For each call it counts the ones in ``attention_mask``; without one, the elements of
    ``input_ids``; without these, the first tensor: its elements if it has rows of integers, as
    tokens are, otherwise its length. Tensors may be inside a mapping, a tuple, a list or a
    dataclass. Calls in evaluation mode are not counted. All calls of a step add up, so gradient
    accumulation works.

    Args:
        model: The model; it has a hook until `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._count: Tensor | int | None = None
        self._hook = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # A compiled graph would hold the count as a constant, and recompile for each new count.
        if torch.compiler.is_compiling():
            return
        found = counted(given, named) if module.training else None
        if found is not None:
            self._count = found if self._count is None else self._count + found

    def take(self) -> int:
        """Return the count since the last `take`; wait if the count is on a GPU.

        If nothing could be counted, return 1 and log one warning per model.
        """
        count, self._count = self._count, None
        if count is None:
            warn_uncounted(
                self._model,
                "the model was not called through model(...) in training mode with a tensor, or is "
                "compiled in place, or Learner has the model inside its torch.compile wrapper",
            )
            return 1
        return int(count)

    def drop(self) -> None:
        """Forget the count since the last `take`."""
        self._count = None

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        """Pickle or copy the hook as one that does nothing."""
        return _hook_of_copy, ()


def _hook_of_copy() -> Callable[..., None]:
    return _count_nothing


def _count_nothing(*_: Any) -> None:
    """Replace the hook in a copy of a model."""


class StepTokens:
    """The tokens of each step: as the program passes them, or counted from the model's inputs.

    Args:
        model: The model as passed to `Learner`. A list of pipeline stages is not counted.
    """

    def __init__(self, model: Any) -> None:
        countable = isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule)
        self._counter = TokenCounter(model) if countable else None
        self._passed = False

    def read(self, tokens: Any) -> int:
        """Return the tokens of a step.

        Args:
            tokens: As for `whole_tokens`; ``None``: those counted since the last step.

        Raises:
            ConfigError: They are not a valid number, or only earlier steps had them, or they cannot
                be counted.
        """
        if tokens is not None:
            if not self._passed:
                self.close()
                self._passed = True
            return whole_tokens(tokens)
        if self._passed:
            raise ConfigError(
                "step() without tokens=, but earlier steps had it: pass tokens= in every step, or "
                "in none"
            )
        if self._counter is None:
            raise ConfigError(
                "step() without tokens=: the tokens of pipeline stages and of scripted modules "
                "cannot be counted: pass tokens="
            )
        return self._counter.take()

    def forget(self) -> None:
        """Drop what was counted since the last step."""
        if self._counter is not None:
            self._counter.drop()

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._counter is not None:
            self._counter.close()


def warn_uncounted(model: nn.Module, why: str) -> None:
    """Log, once per model, that the tokens of its steps cannot be counted."""
    if model in _UNCOUNTED:
        return
    _UNCOUNTED.add(model)
    logger.warning(
        "the tokens of a step cannot be counted (%s), so each such step counts as 1 token. A "
        "budget in tokens and the weights of unequal learners are wrong. Pass tokens= to "
        "learner.step, learner.wrap or learner.attach",
        why,
    )


def counted(given: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | int | None:
    """Return the tokens, or samples, of one call; ``None`` if it has no tensor.

    >>> import torch
    >>> counted((torch.zeros(4, 7),), {})
    4
    >>> counted((), {"input_ids": torch.zeros(4, 7)})
    28
    >>> counted(((torch.zeros(4, 7, dtype=torch.int64), 3),), {})
    28
    """
    tensors = list(_tensors((*given, named), "", DEPTH_MAX))
    by_name = {name: each for name, each in reversed(tensors) if name}
    mask, tokens = by_name.get("attention_mask"), by_name.get("input_ids")
    if mask is not None and mask.ndim == 2:  # with more dimensions it masks pairs of tokens
        return mask.detach().sum()
    if tokens is not None:
        return tokens.numel()
    first = next((each for _, each in tensors if each.ndim), None)
    if first is None:
        return None
    whole = not (first.dtype.is_floating_point or first.dtype.is_complex)
    are_tokens = first.ndim == 2 and whole and first.dtype != torch.bool
    return first.numel() if are_tokens else len(first)


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value with their names, in order."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, str(key), depth - 1)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, "", depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), field.name, depth - 1)


T = TypeVar("T")


class Steps(Protocol):
    """The interface of a learner that a loop uses.

    Attributes:
        _unreported: Tokens of batches after the last step, when the loader ended.
        _counter: The tokens of its steps.
    """

    _unreported: int
    _counter: StepTokens

    def step(self, *, tokens: int | None) -> bool:
        """Finish one inner step; return whether the run continues."""

    async def _ends_in_order(self, error: BaseException) -> bool:
        """Return whether an exception of the loader means that the process was asked to stop."""

    def close(self) -> None:
        """Leave the run."""


class LeaveLoop(BaseException):
    """Leaves the loop in `attached` when the run has ended."""


def batches_of(
    learner: Steps,
    optimizers: InnerOptimizers | None,
    batches: Iterable[T],
    tokens: Callable[[T], Any] | None,
) -> Iterator[T]:
    """See `Learner.wrap`."""
    stepped = optimizers is None
    seen = made = 0
    trained, learner._unreported = learner._unreported, 0

    def note(*_: Any) -> None:
        nonlocal stepped
        stepped = True

    end = None if optimizers is None else optimizers.on_step(note)
    try:
        for batch in _until_stopped(learner, batches):
            yield batch
            seen += 1
            trained += 0 if tokens is None else whole_tokens(tokens(batch))
            if not stepped:
                continue
            made, stepped = made + 1, optimizers is None
            goes_on = learner.step(tokens=None if tokens is None else trained)
            trained = 0
            if not goes_on:
                learner.close()
                return
        learner._unreported = trained
        if seen and not made:
            logger.warning(
                "optimizer.step was not called in %d batches, so no step was reported to the run: "
                "pass the optimizer that trains the model to Learner",
                seen,
            )
    except GeneratorExit:
        learner._counter.forget()
        raise
    finally:
        if end is not None:
            end()


def _until_stopped(learner: Steps, batches: Iterable[T]) -> Iterator[T]:
    """Yield the batches; end early if a stop signal to this process has ended a loader's worker."""
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except DilocoError:  # from an ElasticLoader; some are also OSErrors
            raise
        except (RuntimeError, OSError, EOFError) as error:
            if not blocking(learner._ends_in_order(error)):
                raise
            learner.close()
            return
        yield batch


@contextmanager
def attached(
    learner: Steps, optimizers: InnerOptimizers | None, tokens: Callable[[], Any] | None
) -> Iterator[None]:
    """See `Learner.attach`."""
    if optimizers is None:
        raise ConfigError("attach() needs the optimizer: create the Learner with optimizer=")
    waiting = set(range(len(optimizers.all)))

    def made(number: int) -> None:
        waiting.discard(number)
        if waiting:
            return
        waiting.update(range(len(optimizers.all)))
        if not learner.step(tokens=None if tokens is None else tokens()):
            raise LeaveLoop

    end = optimizers.on_step(made)
    try:
        yield
    except LeaveLoop:
        learner.close()
    finally:
        end()
