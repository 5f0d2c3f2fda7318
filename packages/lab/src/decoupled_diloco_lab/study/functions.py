"""A workload made of the user's functions, and the plain training loop over it."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError, DilocoError, a_kind
from decoupled_diloco.launch.on_device import home_of, moved
from decoupled_diloco.learner.loops import counted
from decoupled_diloco.workloads import Batch, Workload
from decoupled_diloco.workloads.inner import evaluating

MakeModel = Callable[[], nn.Module]
"""Creates a model; the study has seeded PyTorch's generators."""

MakeBatches = Callable[[int, int, int], Iterable[Batch]]
"""Called as ``batches(learner, learners, seed)``; returns the learner's endless batches."""

Loss = Callable[[nn.Module, Any], Tensor]
"""Returns the mean loss of a batch, a scalar."""

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
"""Returns the inner optimizer of a model, with the peak learning rate."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the default inner optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def steady(step: int) -> float:
    """Return the default factor on the inner learning rate."""
    return 1.0


@dataclass(frozen=True)
class Functions:
    """The user's functions; see `Study`."""

    model: MakeModel
    batches: MakeBatches
    loss: Loss
    evaluation: Callable[[], Iterable[Batch]]
    inner: MakeOptimizer = adamw
    rate: Callable[[int], float] = steady

    @cached_property
    def held_out(self) -> list[Batch]:
        """The held-out batches."""
        found = list(self.evaluation())
        if not found:
            raise ConfigError("evaluation() returned no batch: return at least one held-out batch")
        return found

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each function's source."""
        return {name: source_digest(value) for name, value in vars(self).items() if callable(value)}


class StudyWorkload(Workload):
    """The user's functions as a workload, with one seed; see `Workload` for the methods."""

    def __init__(self, functions: Functions, seed: int) -> None:
        self._functions, self._seed = functions, seed

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = self._functions.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model() returned {a_kind(model)}: return a torch.nn.Module")
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = self._functions.inner(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"inner(model) returned {a_kind(optimizer)}: return a torch.optim.Optimizer"
            )
        return optimizer

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Batch]:
        count = start
        for batch in islice(self._functions.batches(part, parts, self._seed), start, None):
            yield batch
            count += 1
        # Not a ConfigError: in a virtual run, only an unexpected error ends the whole run.
        raise DilocoError(
            f"batches(learner={part}, learners={parts}, seed={self._seed}) ended after {count} "
            "batches: yield batches without end"
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = self._functions.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else a_kind(loss)
            raise DilocoError(
                f"loss(model, batch) returned {found}: return a tensor without dimensions, such as "
                "the mean over the batch"
            )
        return loss

    def tokens(self, batch: Batch) -> int:
        return int(counted((batch,), {}) or 1)

    def schedule(self, step: int) -> float:
        return self._functions.rate(step)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        home = home_of(model) or torch.device("cpu")
        with evaluating(model):
            losses = [self.loss(model, moved(each, home)) for each in self._functions.held_out]
            return {"loss": float(torch.stack(losses).mean())}


def train_plainly(
    workload: Workload,
    model: nn.Module,
    steps: int,
    parts: range,
    of: int,
    on_step: Callable[[Tensor], None] = lambda loss: None,
) -> None:
    """Train a model in a plain loop; each step takes one batch from each of several partitions.

    The gradient is the mean over the partitions, as in data-parallel training.

    Args:
        workload: Data, loss, inner optimizer and its schedule.
        model: The model, on its device; it is changed.
        steps: Number of steps.
        parts: Numbers of the partitions.
        of: Number of partitions of the data.
        on_step: Receives the mean loss of each step.
    """
    optimizer = workload.optimizer(model)
    streams = [workload.batches(part, of) for part in parts]
    rates = [group["lr"] for group in optimizer.param_groups]
    home = home_of(model)
    for step in range(steps):
        factor = workload.schedule(step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        losses = []
        for stream in streams:
            batch = next(stream)
            loss = workload.loss(model, batch if home is None else moved(batch, home))
            (loss / len(streams)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(torch.stack(losses).mean())


def source_digest(value: Any) -> str:
    """Return a digest of a function's or a class's source and of the user's code that it uses.

    It covers functions, classes and constants that the source names, closures, defaults and
    arguments of `functools.partial`. Installed packages count by their names only.
    """
    texts: list[str] = []
    _describe(value, texts, set())
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _describe(value: Any, texts: list[str], seen: set[int]) -> None:
    """Append the sources that a value depends on, each once."""
    if isinstance(value, str | int | float | complex | bytes | bool | None):
        texts.append(repr(value))
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, partial):
        for each in (value.func, value.args, value.keywords):
            _describe(each, texts, seen)
    elif isinstance(value, MethodType):
        _describe(value.__func__, texts, seen)
        _describe(value.__self__, texts, seen)
    elif isinstance(value, tuple | list):
        for each in value:
            _describe(each, texts, seen)
    elif isinstance(value, dict):
        for key in value:
            texts.append(repr(key))
            _describe(value[key], texts, seen)
    elif isinstance(value, Tensor):
        texts.append(hashlib.sha256(value.detach().cpu().contiguous().numpy().data).hexdigest())
    elif isinstance(value, ModuleType):
        texts.append(value.__name__ if _is_installed(value) else inspect.getsource(value))
    elif isinstance(value, FunctionType | type):
        _describe_code(value, texts, seen)
    else:
        texts.append(f"{type(value).__module__}.{type(value).__qualname__}")
        if not _is_installed(sys.modules.get(type(value).__module__)):
            _describe(type(value), texts, seen)
            _describe(vars(value) if hasattr(value, "__dict__") else (), texts, seen)


def _describe_code(value: FunctionType | type, texts: list[str], seen: set[int]) -> None:
    texts.append(f"{value.__module__}.{value.__qualname__}")
    if _is_installed(sys.modules.get(value.__module__)):
        return
    with contextlib.suppress(OSError, TypeError):  # typed at a prompt: the bytecode must do
        texts.append(inspect.getsource(value))
    if isinstance(value, type):
        for each in (*value.__bases__, *vars(value).values()):
            if isinstance(each, FunctionType | type):
                _describe(each, texts, seen)
        return
    texts.append(value.__code__.co_code.hex())
    for cell in value.__closure__ or ():
        _describe(cell.cell_contents, texts, seen)
    for each in (value.__defaults__, value.__kwdefaults__):
        _describe(each, texts, seen)
    for name in sorted(set(_names(value.__code__))):
        if name in value.__globals__:
            texts.append(name)
            _describe(value.__globals__[name], texts, seen)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those inside it use."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _is_installed(module: ModuleType | None) -> bool:
    """Whether a module is of Python or of an installed package, and not the user's."""
    file = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__":
        return False
    if file is None:
        return True
    own = __name__.partition(".")[0].removesuffix("_lab")
    top = module.__name__.partition(".")[0]
    return top.startswith(own) or "site-packages" in file or top in sys.stdlib_module_names
