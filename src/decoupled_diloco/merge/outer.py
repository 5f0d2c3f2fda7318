"""Outer optimizers: apply a merged outer gradient to the syncer's master copy.

One instance serves one fragment and owns that fragment's state. The outer gradient points from the
learners' final parameters to their initial ones (`Δ = -d`), so an optimizer descends along it.

Shapes:
    N  elements of one fragment
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError, a_kind
from decoupled_diloco.merge.blocks import blocks_of, replace_known

LR = 0.7
MOMENTUM = 0.5

AVERAGE = "average.values"
"""Name of the average of the master in the state of an `Averaged` optimizer."""

AVERAGE_STEPS = "average.steps"
"""Name of the number of steps in an average."""


class OuterOptimizer(Protocol):
    """Applies merged outer gradients to a fragment's master copy."""

    def step(self, master: Tensor, gradient: Tensor) -> None:
        """Update `master` in place.

        Args:
            master: Θ [N], fp32, contiguous.
            gradient: Δ [N], fp32; not changed.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors, for safetensors; empty before the first step."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the output of `state_dict`."""


def momentum_of(outer: OuterOptimizer) -> Tensor | None:
    """Return b, fp32 [N], which must not be modified.

    None before the first step, and if the state has no `"momentum"` or `"momentum_buffer"`.
    """
    state = outer.state_dict()
    return state.get("momentum", state.get("momentum_buffer"))


OuterFactory = Callable[[int], OuterOptimizer]
"""Creates the optimizer of one fragment of N elements."""


class NesterovSGD:
    """SGD with Nesterov momentum: `b ← μ·b + Δ;  Θ ← Θ - η·(Δ + μ·b)`.

    Args:
        lr: η > 0.
        momentum: μ in [0, 1). With 0 no state is kept.
        nesterov: False gives heavy-ball momentum, `Θ ← Θ - η·b`.

    Source:
        Decoupled DiLoCo, SGD with Nesterov momentum. The paper does not publish η and μ. The
        defaults 0.7 and 0.5 are gentler than DiLoCo's 0.7 and 0.9: equal merged gradients add up to
        a step of η/(1-μ).
    """

    def __init__(self, lr: float = LR, momentum: float = MOMENTUM, nesterov: bool = True) -> None:
        _check_lr(lr)
        _check_momentum(momentum)
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        self._momentum_buffer: Tensor | None = None

    def step(self, master: Tensor, gradient: Tensor) -> None:
        """Update `master` [N] in place; see `OuterOptimizer.step`.

        Raises:
            MergeError: The sizes of master, gradient and momentum differ.
        """
        _check_sizes(master, gradient, self._momentum_buffer)
        if self.momentum == 0:
            master.add_(gradient, alpha=-self.lr)
            return
        if self._momentum_buffer is None:
            self._momentum_buffer = torch.zeros_like(master)
        vectors = (master, gradient, self._momentum_buffer)
        for theta, delta, b in zip(*map(blocks_of, vectors), strict=True):
            b.mul_(self.momentum).add_(delta)
            if self.nesterov:
                theta.add_(delta, alpha=-self.lr)
                theta.add_(b, alpha=-self.lr * self.momentum)
            else:
                theta.add_(b, alpha=-self.lr)

    def state_dict(self) -> dict[str, Tensor]:
        """Return `{"momentum": b}`; empty before the first step or without momentum."""
        return {} if self._momentum_buffer is None else {"momentum": self._momentum_buffer}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a copy of the output of `state_dict`.

        Raises:
            MergeError: The state belongs to another optimizer.
        """
        if not state.keys() <= ({"momentum"} if self.momentum else set()):
            raise MergeError(
                f"outer optimizer state has {sorted(state)}, SGD with momentum={self.momentum} "
                f"keeps {['momentum'] if self.momentum else 'none'}: resume with the same optimizer"
            )
        kept = state.get("momentum")
        self._momentum_buffer = None if kept is None else kept.to(torch.float32, copy=True)


class DelayedNesterov:
    """Nesterov momentum that every N-th merge updates; each gradient is applied at once.

    Every step computes `s ← s + Δ`. Every N-th step then computes `b ← μ·b + s/N; s ← 0;
    Θ ← Θ - η·(Δ/N + μ·b)`. The other steps compute `Θ ← Θ - η·Δ/N`. With N = 1 it equals
    `NesterovSGD`. It suits frequent merges of one or a few learners each, which would otherwise all
    increase the momentum.

    Args:
        lr: η > 0.
        momentum: μ in [0, 1).
        every: N, at least 1: the number of learners, if each merge contains one learner.

    Source:
        Async Local-SGD (arXiv 2401.09135), Algorithm 3, with c = 0.
    """

    def __init__(self, lr: float = LR, momentum: float = MOMENTUM, *, every: int) -> None:
        _check_lr(lr)
        _check_momentum(momentum)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"outer option every={every!r} is not a valid number of merges: use an integer >= 1"
            )
        self.lr = lr
        self.momentum = momentum
        self.every = every
        self._count = 0
        self._state: dict[str, Tensor] = {}

    def step(self, master: Tensor, gradient: Tensor) -> None:
        """Update `master` [N] in place; see `OuterOptimizer.step`.

        Raises:
            MergeError: The sizes of master, gradient and state differ.
        """
        if not self._state:
            _check_sizes(master, gradient, None)
            self._state = {name: torch.zeros_like(master) for name in ("momentum", "sum")}
        _check_sizes(master, gradient, self._state["sum"])
        self._count = (self._count + 1) % self.every
        vectors = (master, gradient, self._state["momentum"], self._state["sum"])
        for theta, delta, b, total in zip(*map(blocks_of, vectors), strict=True):
            total.add_(delta)
            theta.add_(delta, alpha=-self.lr / self.every)
            if self._count == 0:
                b.mul_(self.momentum).add_(total, alpha=1 / self.every)
                theta.add_(b, alpha=-self.lr * self.momentum)
                total.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return momentum b, sum s and the count of merges since the last momentum update.

        The result is empty before the first step.
        """
        return self._state and {
            **self._state,
            "count": torch.tensor(self._count, dtype=torch.int64, device="cpu"),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a copy of the output of `state_dict`.

        Raises:
            MergeError: The state belongs to another optimizer.
        """
        if state and state.keys() != {"momentum", "sum", "count"}:
            raise MergeError(
                f"outer optimizer state has {sorted(state)}, delayed Nesterov keeps ['count', "
                "'momentum', 'sum']: resume with the same optimizer"
            )
        self._count = int(state["count"]) % self.every if state else 0
        self._state = {
            name: state[name].to(torch.float32, copy=True) for name in state if name != "count"
        }


class BuffersBehind:
    """An outer optimizer for a fragment's parameters that sets the values behind to their mean.

    A buffer's contribution is its value, so `Δ` is minus the mean: `Θ ← -Δ`. A buffer follows the
    learners at once, without momentum. It stays between the smallest and the largest of their
    values, as a variance must. Moments are set as well; one that no contribution has does not
    change.

    Args:
        parameters: The parameters' optimizer; None: the fragment has no parameters.
        numel: The number of parameters.
        values: The number of elements before the moments; None: all.
    """

    def __init__(
        self, parameters: OuterOptimizer | None, numel: int, values: int | None = None
    ) -> None:
        self._parameters = parameters
        self._numel = numel
        self._values = values

    def step(self, master: Tensor, gradient: Tensor) -> None:
        """Update `master` in place; see `OuterOptimizer.step`."""
        _check_sizes(master, gradient, None)
        if self._parameters is not None:
            self._parameters.step(master[: self._numel], gradient[: self._numel])
        values = slice(self._numel, self._values)
        torch.neg(gradient[values], out=master[values])
        if self._values is not None:
            replace_known(master[self._values :], -gradient[self._values :])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the parameters' optimizer; buffers have no state."""
        return {} if self._parameters is None else self._parameters.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._parameters is not None:
            self._parameters.load_state_dict(state)


class Averaged:
    """An outer optimizer that also keeps an average of the master over its steps.

    The k-th step sets `A ← A + (Θ - A)·max(1 - β, 1/k)`. So A is the plain mean of Θ after each of
    the first `1/(1 - β)` steps, and then an exponential moving average. Θ before the first step
    never counts.

    Args:
        outer: The optimizer.
        decay: β, between 0 and 1.

    Source:
        Averages of the weights of recent checkpoints or rounds: SWA (arXiv 1803.05407), LAWA (arXiv
        2209.14981).
    """

    def __init__(self, outer: OuterOptimizer, decay: float) -> None:
        self._outer = outer
        self._decay = decay
        self._values: Tensor | None = None
        self._steps = 0

    def step(self, master: Tensor, gradient: Tensor) -> None:
        """Update `master` [N] in place, and then the average; see `OuterOptimizer.step`."""
        self._outer.step(master, gradient)
        self._steps += 1
        if self._values is None:
            self._values = master.clone()
            return
        share = max(1 - self._decay, 1 / self._steps)
        for average, theta in zip(blocks_of(self._values), blocks_of(master), strict=True):
            average.lerp_(theta, share)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's state and, after the first step, A [N] and the number of steps."""
        state = self._outer.state_dict()
        if self._values is None:
            return state
        steps = torch.tensor(self._steps, dtype=torch.int64, device="cpu")
        return {**state, AVERAGE: self._values, AVERAGE_STEPS: steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a copy of the output of `state_dict`."""
        own = {AVERAGE, AVERAGE_STEPS}
        self._outer.load_state_dict({k: v for k, v in state.items() if k not in own})
        self._values = state[AVERAGE].clone() if AVERAGE in state else None
        self._steps = int(state[AVERAGE_STEPS]) if AVERAGE in state else 0


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class TorchOuter:
    """Any optimizer with the interface of `torch.optim`, on a flat fp32 parameter [N].

    Args:
        name: A class of `torch.optim`, such as `"AdamW"`, or a user's function `"module:function"`.
        numel: N.
        options: Arguments of the class or the function, in addition to the parameters.

    Raises:
        ConfigError: The optimizer is unknown or does not accept these options.
    """

    def __init__(self, name: str, numel: int, **options: Any) -> None:
        self._name = name
        self._numel = numel
        self._options = options
        self._parameter = torch.nn.Parameter(torch.zeros(numel, dtype=torch.float32, device="cpu"))
        self.optimizer: Any = _made(name, self._parameter, options)

    def step(self, master: Tensor, gradient: Tensor) -> None:
        """Update `master` [N] in place; see `OuterOptimizer.step`.

        Raises:
            MergeError: The sizes of master, gradient and state differ.
        """
        _check_sizes(master, gradient, self._parameter)
        # No copy: the parameter aliases the master, so the optimizer updates the master in place.
        self._parameter.data = master
        self._parameter.grad = gradient
        with _as_in_a_new_process(master.device):
            self.optimizer.step()
        self._parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's state; plain numbers become tensors under `number.<name>`."""
        state: dict[str, Tensor] = {}
        for key, value in self.optimizer.state.get(self._parameter, {}).items():
            if isinstance(value, Tensor):
                state[key] = value
            elif value is not None:
                state[f"number.{key}"] = torch.tensor(
                    value, dtype=_NUMBERS[type(value)], device="cpu"
                )
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a copy of the output of `state_dict`.

        Raises:
            MergeError: The state belongs to another optimizer or has another number of elements.
        """
        expected = self._state_after_a_step()
        if state and state.keys() != expected.keys():
            raise MergeError(
                f"outer optimizer state has {sorted(state)}, '{self._name}' keeps "
                f"{sorted(expected)}: resume with the same optimizer and options"
            )
        own: dict[str, Any] = {}
        for key, value in state.items():
            if value.numel() not in (1, self._numel):
                raise MergeError(
                    f"outer optimizer state '{key}' has {value.numel()} elements, the fragment has "
                    f"{self._numel}: the checkpoint has another partition"
                )
            is_number = key.startswith("number.")
            own[key.removeprefix("number.")] = value.item() if is_number else value.clone()
        self.optimizer.state[self._parameter] = own

    def _state_after_a_step(self) -> dict[str, Tensor]:
        # PyTorch's optimizers create their state in the first step, so only a step shows its keys.
        sample = TorchOuter(self._name, 2, **self._options)
        vectors = torch.zeros(2, 2, dtype=torch.float32, device="cpu")
        sample.step(vectors[0], vectors[1] + 1)
        return sample.state_dict()


def make_outer(
    name: str = "nesterov",
    lr: float = LR,
    momentum: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> OuterFactory:
    """Check an outer optimizer's settings once and return a factory of one optimizer per fragment.

    Args:
        name: `"nesterov"`, `"delayed-nesterov"`, `"sgd"` (heavy-ball momentum, or plain SGD without
            momentum), a class name of `torch.optim` such as `"AdamW"`, or a function registered
            with `register_own_outer` as `"module:function"`.
        lr: η > 0.
        momentum: μ in [0, 1). None means 0.5 for the two Nesterov variants, 0 for `"sgd"`, and the
            class's default otherwise.
        options: Further arguments of a `torch.optim` class, or `every` of `"delayed-nesterov"`.

    Raises:
        ConfigError: The name is unknown (the message contains the closest match), a value is out of
            range, or the optimizer does not accept an option or cannot work on a flat vector.

    Examples:
        >>> optimizer = make_outer("nesterov", lr=1.0, momentum=0.0)(2)
        >>> master = torch.tensor([1.0, 2.0])
        >>> optimizer.step(master, torch.tensor([0.5, 0.0]))
        >>> master
        tensor([0.5000, 2.0000])
    """
    options = dict(options or {})
    if ":" in name and name not in _own:
        return _absent(name)
    if name in ("nesterov", "sgd"):
        if options:
            raise ConfigError(
                f"outer optimizer '{name}' takes lr and momentum, not {sorted(options)}: remove "
                "them, or use a class of torch.optim, such as 'SGD'"
            )
        mu = momentum if momentum is not None else (MOMENTUM if name == "nesterov" else 0.0)
        NesterovSGD(lr, mu)
        return lambda numel: NesterovSGD(lr, mu, nesterov=name == "nesterov")
    if name == "delayed-nesterov":
        if options.keys() != {"every"}:
            raise ConfigError(
                f"outer optimizer '{name}' has options {sorted(options)}: set only 'every', the "
                "number of merges per momentum update"
            )
        mu, every = MOMENTUM if momentum is None else momentum, options["every"]
        DelayedNesterov(lr, mu, every=every)
        return lambda numel: DelayedNesterov(lr, mu, every=every)
    _check_lr(lr)
    beside = {"lr"} if momentum is None else {"lr", "momentum"}
    if twice := sorted(options.keys() & beside):
        raise ConfigError(
            f"outer options contain {twice}: set lr and momentum outside of the options"
        )
    arguments = {"lr": lr, **({} if momentum is None else {"momentum": momentum}), **options}
    _try_out(name, arguments)
    return lambda numel: _outer(name, numel, arguments)


_own: dict[str, Callable[..., Any]] = {}


def register_own_outer(name: str, make: Callable[..., Any]) -> None:
    """Register a user's function, ``"module:function"``, as an outer optimizer.

    Args:
        name: Its name in configurations.
        make: Called like a class of `torch.optim`, with a list of one parameter, fp32 [N], `lr` and
            the options. Returns a `torch.optim.Optimizer` or an `OuterOptimizer`.
    """
    _own[name] = make


def has_own_outer(name: str) -> bool:
    """Whether this process has loaded the user's outer optimizer of that name."""
    return name in _own


def _absent(name: str) -> OuterFactory:
    """Return a factory for a process without the optimizer's code; it fails when it is called.

    Learners have the settings of an outer optimizer but not its code, which they never use.
    """

    def make(numel: int) -> OuterOptimizer:
        raise ConfigError(
            f"outer optimizer {name!r} is not loaded in this process: load the run's file with "
            "decoupled_diloco.config.load_config"
        )

    return make


def _outer(name: str, numel: int, arguments: Mapping[str, Any]) -> OuterOptimizer:
    """Create an outer optimizer by `torch.optim`'s interface, or return the user's own object."""
    outer = TorchOuter(name, numel, **arguments)
    own = outer.optimizer
    if isinstance(own, torch.optim.Optimizer):
        return outer
    methods = ("step", "state_dict", "load_state_dict")
    missing = [method for method in methods if not callable(getattr(own, method, None))]
    if missing:
        raise ConfigError(
            f"outer optimizer {name!r} returned {a_kind(own)} without "
            f"{', '.join(missing)}: return a torch.optim.Optimizer, or an object with the methods "
            "of decoupled_diloco.merge.OuterOptimizer"
        )
    return own  # type: ignore[no-any-return]


def _try_out(name: str, arguments: Mapping[str, Any]) -> OuterOptimizer:
    """Take one step on two elements, to reject an unusable optimizer before the run."""
    optimizer = _outer(name, 2, arguments)
    master, gradient, ones = torch.tensor(
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]], dtype=torch.float32, device="cpu"
    )
    try:
        optimizer.step(master, gradient)
        if not torch.equal(gradient, ones):
            raise ConfigError(
                f"outer optimizer '{name}' changes the gradient: step() must not modify it"
            )
        if name in _own:
            _require_complete_state(name, arguments, optimizer, master)
    except ConfigError:
        raise
    except Exception as error:
        if name not in _own and not isinstance(error, TypeError | ValueError | RuntimeError):
            raise
        raise ConfigError(
            f"outer optimizer '{name}' cannot step on a flat vector: {error!r}: use another "
            "optimizer"
        ) from error
    return optimizer


@contextmanager
def _as_in_a_new_process(device: torch.device) -> Iterator[None]:
    """Set the default dtype to float32 and the default device to the master's for one step.

    PyTorch's optimizers create some of their numbers with these defaults, which a user may have
    changed. The default dtype is shared by all threads; no other code of this package uses it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _require_complete_state(
    name: str, arguments: Mapping[str, Any], optimizer: OuterOptimizer, master: Tensor
) -> None:
    """Check that a step gives the same result after the state is saved and loaded.

    Each merge creates a new optimizer from the state of the last one, so that a failed merge
    changes nothing. Anything outside the state is lost.
    """
    restored, again = master.clone(), _outer(name, 2, arguments)
    again.load_state_dict({key: value.clone() for key, value in optimizer.state_dict().items()})
    gradient = torch.tensor([2.0, -1.0], dtype=torch.float32, device="cpu")
    optimizer.step(master, gradient)
    again.step(restored, gradient)
    if not torch.equal(master, restored):
        raise ConfigError(
            f"outer optimizer '{name}' steps differently after its state was saved and loaded: "
            "keep everything that a step uses in state_dict() (in a torch.optim.Optimizer: as "
            "tensors and numbers in self.state[parameter])"
        )


def _made(name: str, parameter: torch.nn.Parameter, options: Mapping[str, Any]) -> Any:
    make = _own.get(name) or _torch_optimizer(name)
    _check_options(name, make, options)
    try:
        return make([parameter], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"outer optimizer '{name}' rejects {options}: {error}") from error


def _torch_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    if name in classes:
        return classes[name]
    known = ["nesterov", "delayed-nesterov", "sgd", *sorted(classes)]
    by_lower = {key.lower(): key for key in reversed(known)}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)
    raise ConfigError(
        f"outer optimizer '{name}' is unknown: did you mean '{by_lower[near[0]]}'? "
        f"Known outer optimizers: {', '.join(known)}"
    )


def _check_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(make).parameters.values())[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in parameters]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"outer optimizer '{name}' does not take {', '.join(unknown)}: remove it; "
            f"it takes {', '.join(known)}"
        )


def _check_lr(lr: float) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise ConfigError(f"outer lr={lr} must be positive and finite: choose a value above 0")


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ConfigError(
            f"outer momentum={momentum} is not in [0, 1): choose a value from 0 to below 1"
        )


def _check_sizes(master: Tensor, gradient: Tensor, state: Tensor | None) -> None:
    if master.shape != gradient.shape or (state is not None and state.shape != master.shape):
        kept = "" if state is None else f", the optimizer's state {tuple(state.shape)}"
        raise MergeError(
            f"master has shape {tuple(master.shape)}, outer gradient {tuple(gradient.shape)}{kept}"
            ": the shapes must be equal"
        )
