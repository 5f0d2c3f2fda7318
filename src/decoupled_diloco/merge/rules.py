"""Merge rules that need single contributions: the robust rules, and a user's own.

A fragment's parameters are merged piece by piece (see `fragments.segments`). Its buffers are merged
as with the built-in rules. A function with two arguments is the rule itself. It requires all
contributions at once, so the shard keeps them until the merge: 4 bytes per element and learner. A
function with one argument, or a class, creates an `OwnAccumulator`, which can keep less. Each can
have one more parameter, `shape`: that of the piece's tensor, or (N,) if a tensor has several
pieces. A rule that is called with all contributions can also have `momentum`, fp32 [N]: that of the
outer optimizer in the direction of contributions, or zeros if it has none.

A robust rule limits what one contribution can change, whatever it contains. The bound holds while
the others have more than half of the weight, so a learner that claims many tokens must not gain
weight by it (``sync.merge.weighting = "uniform"``).

Shapes:
    M  contributions, at least 1
    N  elements of one piece
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError
from decoupled_diloco.merge.accumulate import Accumulator, Contribution
from decoupled_diloco.merge.blocks import BLOCK, is_finite, norm_of
from decoupled_diloco.merge.fragments import Segment

Rule = Callable[[Tensor, Tensor], Tensor]
"""Merges contributions, fp32 [M, N], with weights, fp32 [M] with sum 1, into one, fp32 [N]."""


class OwnAccumulator(Protocol):
    """Merges the contributions to one piece of N elements as they arrive."""

    def add(self, vector: Tensor, weight: float) -> None:
        """Add a contribution.

        Args:
            vector: The learner's change: its values minus those that it started from, fp32 [N]. It
                may be kept but must not be modified.
            weight: w > 0, set by `sync.merge.weighting`: tokens · tokens / steps, or 1.
        """

    def result(self) -> Tensor:
        """Return the merged contribution, fp32 [N]; called once, after at least one `add`."""


FindMomentum = Callable[[], Tensor | None]
"""Returns the outer optimizer's momentum at the time of the merge, fp32 [N]: see `momentum_of`."""

MakeAccumulator = Callable[[int, tuple[int, ...]], OwnAccumulator]
"""Creates a new accumulator, for one merge of a piece of N elements with a shape."""

TRIALS = (((1,), 1), ((5,), 1), ((5,), 3), ((2, 3), 3))
"""Shapes and numbers of contributions that a new rule is tried with."""


class FragmentMerge(Protocol):
    """Interface of `Accumulator` and `RuleAccumulator`: one merge of a fragment."""

    def add_contribution(self, contribution: Contribution, weight: float) -> None:
        """See `Accumulator.add_contribution`."""

    def result(self) -> Tensor:
        """See `Accumulator.result`."""


MEDIAN_TRIM = 0.4999
"""The share that a median cuts off at each end. The rest is the middle value, or the two middle
values if half of the weight is on either side of them."""

WEISZFELD_STEPS = 64
"""Most steps of the geometric median."""

WEISZFELD_TOLERANCE = 1e-5
"""The geometric median has been found when a step is shorter than this, relative to its length."""

WEISZFELD_DISTANCE = 1e-6
"""Least distance to a contribution, relative to their median norm: no share is infinite."""


def trimmed_mean(contributions: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Return the mean of each element without its smallest and its largest values.

    Each element is a different order of the M values. From each end of it, values with a total
    weight of `trim` are left out; a value at the border counts with the rest of its weight.

    Args:
        contributions: fp32 [M, N].
        weights: fp32 [M], sum 1.
        trim: Share of the weight at each end, 0 to less than 0.5.

    Examples:
        >>> values = torch.tensor([[1.0], [2.0], [3.0], [100.0]])
        >>> trimmed_mean(values, torch.full((4,), 0.25), 0.25).tolist()
        [2.5]

    Source:
        Yin et al. (arXiv 1803.01498), Definition 2, for equal weights.
    """
    parts = []
    for block in torch.split(contributions, max(1, BLOCK // len(contributions)), dim=1):
        values, order = block.sort(dim=0, stable=True)
        sorted_weights = weights.double()[order]
        upper = sorted_weights.cumsum(dim=0)
        kept = upper.clamp(max=1 - trim) - (upper - sorted_weights).clamp(min=trim)
        kept.clamp_(min=0)
        parts.append(((kept * values).sum(dim=0) / kept.sum(dim=0)).float())
    return torch.cat(parts)


def geometric_median(contributions: Tensor, weights: Tensor) -> Tensor:
    """Return the point with the least weighted sum of distances to the contributions.

    Weiszfeld's iteration starts at the median of each element, so that no outlier moves its start.

    Args:
        contributions: fp32 [M, N].
        weights: fp32 [M], sum 1.

    Examples:
        >>> values = torch.tensor([[0.0, 0.0], [0.0, 0.0], [90.0, 0.0]])
        >>> geometric_median(values, torch.full((3,), 1 / 3)).round(decimals=3).tolist()
        [0.0, 0.0]

    Source:
        Pillutla et al., Robust Aggregation for Federated Learning (arXiv 1912.13445), Algorithm 2.
    """
    point = trimmed_mean(contributions, weights, MEDIAN_TRIM)
    least = median(map(norm_of, contributions)) * WEISZFELD_DISTANCE
    for _ in range(WEISZFELD_STEPS if least > 0 else 0):
        distances = [max(least, norm_of(each - point)) for each in contributions]
        shares = [float(w) / d for w, d in zip(weights, distances, strict=True)]
        total = math.fsum(shares)
        before = point
        scaled = [share / total for share in shares]
        point = torch.tensor(scaled, dtype=torch.float32, device="cpu") @ contributions
        if norm_of(point - before) <= WEISZFELD_TOLERANCE * norm_of(point):
            break
    return point


ROBUST: dict[str, Callable[[float], Rule]] = {
    "median": lambda trim: partial(trimmed_mean, trim=MEDIAN_TRIM),
    "trimmed-mean": lambda trim: partial(trimmed_mean, trim=trim),
    "geometric-median": lambda trim: geometric_median,
}
"""The robust rules of `sync.merge.rule`, each as a function of `sync.merge.trim`."""

_rules: dict[str, MakeAccumulator] = {}


def register_rule(name: str, function: Callable[..., Any]) -> None:
    """Register a user's function, ``"module:function"``, after a trial with a few vectors.

    Raises:
        ConfigError: The function has the wrong number of arguments, raises an exception, or returns
            something other than fp32 [N].
    """
    make = _maker(name, function)
    for shape, count in TRIALS:
        numel = math.prod(shape)
        vectors = torch.linspace(-1, 1, count * numel, device="cpu", dtype=torch.float32)
        try:
            accumulator = make(numel, shape)
            for vector in vectors.view(count, numel):
                accumulator.add(vector, 2.0)
            _checked(name, accumulator.result(), numel)
        except Exception as error:
            problem = str(error) if isinstance(error, MergeError) else f"it raises {error!r}"
            raise ConfigError(
                f"merge rule '{name}' fails for {count} contributions of {numel} elements: "
                f"{problem}: correct the rule (a merge can have 1 or more contributions)"
            ) from error
    _rules[name] = make


def rule_named(name: str, trim: float = 0.0) -> MakeAccumulator:
    """Return a robust rule, with its trim, or a registered one.

    Raises:
        ConfigError: This process has not loaded the rule.
    """
    if name in ROBUST:
        return lambda numel, shape: _Gathering(ROBUST[name](trim))
    if name not in _rules:
        raise ConfigError(
            f"merge rule {name!r} is not loaded in this process: load the run's file with "
            "decoupled_diloco.config.load_config"
        )
    return _rules[name]


class RuleAccumulator:
    """Merges one fragment by a rule of this module, and its buffers by the built-in rule.

    Args:
        name: The rule's name.
        numel: The number of elements of the fragment.
        segments: The segments of its pieces, followed by those of its buffers.
        trim: See `sync.merge.trim`.
        momentum: Returns that of the fragment's parameters.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        segments: Sequence[Segment],
        trim: float = 0.0,
        momentum: FindMomentum = lambda: None,
    ) -> None:
        make = rule_named(name, trim)
        self._name = name
        self._segments = tuple(segments)
        self._momentum = momentum
        self._pieces = [
            (s, make(s.numel, s.shape or (s.numel,))) for s in segments if s.merge == "own"
        ]
        first = self._pieces[-1][0].stop if self._pieces else 0
        self._buffers_start = first
        buffers = [Segment(s.start - first, s.stop - first, s.merge) for s in segments]
        buffers = buffers[len(self._pieces) :]
        self._buffers = Accumulator(numel - first, buffers) if buffers else None

    def add_contribution(self, contribution: Contribution, weight: float) -> None:
        """Pass each piece of a complete contribution to the rule.

        Raises:
            MergeError: Parts are missing, the weight is not positive and finite, or the rule
                raises.
        """
        assert contribution.segments == self._segments, "the contribution has other segments"
        if not (math.isfinite(weight) and weight > 0):
            raise MergeError(
                f"weight={weight} is not positive and finite: leave such a contribution out"
            )
        vector = contribution.whole()
        for segment, accumulator in self._pieces:
            try:
                accumulator.add(vector[segment.start : segment.stop], weight)
            except Exception as error:
                raise MergeError(f"merge rule {self._name!r} raises {error!r}") from error
        if self._buffers is not None:
            self._buffers.add(vector[self._buffers_start :], weight)

    def result(self) -> Tensor:
        """Return the merged vector, fp32 [N].

        Raises:
            MergeError: No contribution was added, the rule raises an exception, or its result is
                not finite.
        """
        parts = []
        # Read now: when a contribution arrives, a replay may not have reached this version yet.
        momentum = self._momentum()
        for segment, accumulator in self._pieces:
            if momentum is not None and isinstance(accumulator, _Gathering):
                accumulator.momentum = momentum[segment.start : segment.stop]
            try:
                merged = accumulator.result()
            except Exception as error:
                raise MergeError(f"merge rule {self._name!r} raises {error!r}") from error
            parts.append(_checked(self._name, merged, segment.numel))
        if self._buffers is not None:
            parts.append(self._buffers.result())
        return torch.cat(parts)


class _Gathering:
    """Keeps all contributions and passes them to a rule at once.

    Args:
        rule: The rule.
        follows: Whether the rule has the parameter `momentum`.

    Attributes:
        momentum: b of the piece, fp32 [N]; None: zeros.
    """

    def __init__(self, rule: Callable[..., Tensor], follows: bool = False) -> None:
        self._rule = rule
        self._follows = follows
        self._vectors: list[Tensor] = []
        self._weights: list[float] = []
        self.momentum: Tensor | None = None

    def add(self, vector: Tensor, weight: float) -> None:
        self._vectors.append(vector)
        self._weights.append(weight)

    def result(self) -> Tensor:
        if not self._vectors:
            raise MergeError("nothing to merge: no contribution counts")
        # Normalize in fp64: large weights would overflow or lose precision in fp32.
        total = math.fsum(self._weights)
        shares = [weight / total for weight in self._weights]
        weights = torch.tensor(shares, dtype=torch.float32, device="cpu")
        vectors = torch.stack(self._vectors)
        if not self._follows:
            return self._rule(vectors, weights)
        # An outer gradient, and so b, points against the contributions.
        momentum = torch.zeros_like(vectors[0]) if self.momentum is None else -self.momentum
        return self._rule(vectors, weights, momentum=momentum)


GIVEN = ("shape", "momentum")
"""Parameters that a merge rule may have in addition."""


def _maker(name: str, function: Callable[..., Any]) -> MakeAccumulator:
    parameters = inspect.signature(function).parameters
    needed = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (2, 3, 4) and p.name not in GIVEN
    ]
    follows = "momentum" in parameters

    def shaped(shape: tuple[int, ...]) -> Callable[..., Any]:
        return partial(function, shape=shape) if "shape" in parameters else function

    if len(needed) == 2 and not inspect.isclass(function):
        return lambda numel, shape: _Gathering(shaped(shape), follows)
    if len(needed) == 1 and not follows:
        return lambda numel, shape: cast("OwnAccumulator", shaped(shape)(numel))
    raise ConfigError(
        f"merge rule '{name}' requires {len(needed)} arguments: write a function with two "
        "(contributions, weights), or a class or a function with one (numel) that creates an "
        "object with add and result; each can also have a parameter named shape, and a "
        "function with two one named momentum"
    )


def _checked(name: str, merged: object, numel: int) -> Tensor:
    if not isinstance(merged, Tensor) or merged.shape != (numel,):
        found = f"shape {list(merged.shape)}" if isinstance(merged, Tensor) else repr(merged)
        raise MergeError(f"merge rule {name!r} returned {found}, not a tensor of shape [{numel}]")
    merged = merged.detach().to(torch.float32)
    if not is_finite(merged):
        raise MergeError(f"merge rule {name!r} returned a value that is not finite")
    return merged
