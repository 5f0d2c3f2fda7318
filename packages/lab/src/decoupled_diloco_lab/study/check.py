"""Check a method: one table of properties for each kind.

The shipped methods have all properties of their kind. A property is a function that raises
`AssertionError` with the input for which it does not hold.

Shapes:
    M  contributions
    N  elements
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from decoupled_diloco.config.plugins import SHIPPED, register_method, registered
from decoupled_diloco.config.settings import is_own
from decoupled_diloco.config.sync import SUMMED_RULES
from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.merge.accumulate import Accumulator, Contribution
from decoupled_diloco.merge.blocks import is_finite
from decoupled_diloco.merge.codec import Codec, codec, has_codec
from decoupled_diloco.merge.fragments import Segment, SegmentMerge
from decoupled_diloco.merge.outer import OuterFactory, make_outer
from decoupled_diloco.merge.rules import GIVEN, FragmentMerge, RuleAccumulator
from decoupled_diloco.protocol.adapt import Schedule, period_at
from decoupled_diloco.protocol.machine_options import Candidate
from decoupled_diloco.protocol.machine_options import Rule as Participation
from decoupled_diloco.protocol.participation import TriedRound, why_included
from decoupled_diloco_lab.study.functions import source_digest
from decoupled_diloco_lab.study.methods import KINDS, Method, name_of

Kind = Literal["merge", "outer", "codec", "schedule", "participation"]

SIZES = (1, 2, 72, 129, 4097)
"""Elements: one, a few, and one more than the groups of the built-in codecs."""

LEARNERS = (1, 2, 5)

MAGNITUDES = (1e-12, 1.0, 1e3)

TRIM = 0.2
"""`sync.merge.trim` of "trimmed-mean"."""

TOLERANCE = 1e-5
"""Relative error of results that rounding may change."""

FEEDBACK_ROUNDS = 512
"""Rounds of error feedback, enough for a codec that sends one element in a hundred."""


def check(method: Any, kind: Kind | None = None, **options: Any) -> tuple[str, ...]:
    """Check a method by the properties that all shipped methods of its kind have.

    Args:
        method: The name of a shipped method, ``"module:function"``, or a function or class as
            `Study.run` accepts it.
        kind: "merge", "outer", "codec", "schedule" or "participation". Default: the kind that its
            arguments and methods imply.
        options: Arguments of an outer optimizer; ``lr`` is 0.1 by default.

    Returns:
        The properties that were checked.

    Raises:
        ConfigError: Properties do not hold. The message lists each of them with its input.
    """
    chosen = kind or _kind_of(method)
    if chosen not in KINDS:
        raise ConfigError(f"kind={chosen!r} is not valid: use one of {', '.join(KINDS)}")
    name, shown = method, method
    if not isinstance(method, str):
        name = name_of(method, source_digest(method))
        made = method if callable(method) else lambda: method
        shown = name.rpartition("_")[0]
        register_method(KINDS[chosen][0], name, made)
    elif is_own(method):
        Method.make({chosen: method}, {})  # imports its module
    table: Mapping[str, Callable[[Any], None]]
    subject: Any
    if chosen == "merge":
        table, subject = MERGE, Rule(name)
    elif chosen == "outer":
        options = {"lr": 0.1, **options}
        table, subject = OUTER, _outer_of(name, options)
    elif chosen == "codec":
        table, subject = CODEC, codec(name)
    else:
        table = SCHEDULE if chosen == "schedule" else PARTICIPATION
        subject = registered(KINDS[chosen][0], name)
    failures = []
    for law, holds in table.items():
        try:
            holds(subject)
        except Exception as error:
            why = str(error) if isinstance(error, AssertionError) else f"it raises {error!r}"
            failures.append(f"{law}: {why}")
    if failures:
        listed = "".join(f"\n- {failure}" for failure in failures)
        raise ConfigError(
            f"{KINDS[chosen][0]} {shown!r} lacks {len(failures)} of {len(table)} properties:"
            f"{listed}"
        )
    return tuple(table)


def _kind_of(method: Any) -> Kind:
    if isinstance(method, str) and not is_own(method):
        for kind, (words, _) in KINDS.items():
            if method in SHIPPED[words]:
                return cast("Kind", kind)
        return "codec" if has_codec(method) else "outer"
    if _is_codec(method):
        return "codec"
    if inspect.isclass(method) and all(
        callable(getattr(method, m, None)) for m in ("add", "result")
    ):
        return "merge"
    if callable(method):
        named = inspect.signature(method).parameters
        needed = [
            p for p in named.values() if p.default is p.empty and p.kind < 2 and p.name not in GIVEN
        ]
        if "lr" in named or inspect.isclass(method):
            return "outer"
        if needed and needed[0].name in ("step", "learner"):
            return "schedule" if needed[0].name == "step" else "participation"
        if len(needed) in (0, 2):
            return "merge" if needed else "codec"
    kinds = ", ".join(map(repr, KINDS))
    raise ConfigError(f"the kind of {method!r} is not clear: pass kind= with one of {kinds}")


def _is_codec(method: Any) -> bool:
    return all(callable(getattr(method, name, None)) for name in ("encode", "decode", "nbytes"))


def _outer_of(name: str, options: dict[str, Any]) -> OuterFactory:
    lr, momentum = options.pop("lr"), options.pop("momentum", None)
    return make_outer(name, lr, momentum, options)


def _vectors(count: int, numel: int, magnitude: float = 1.0) -> Tensor:
    """Return fixed random contributions, fp32 [M, N]."""
    generator = torch.Generator().manual_seed(1000 * count + numel)
    return magnitude * torch.randn(count, numel, generator=generator)


def _require(condition: object, given: str, found: object = "") -> None:
    if not condition:
        raise AssertionError(
            f"with {given}" + (f", it returned {_short(found)}" if found != "" else "")
        )


def _short(found: object) -> str:
    if not isinstance(found, Tensor):
        return repr(found)
    values = [f"{value:.6g}" for value in found.flatten()[:4].tolist()]
    values += ["…"] * (found.numel() > 4)
    dtype = str(found.dtype).removeprefix("torch.")
    return f"{dtype} {list(found.shape)} [{', '.join(values)}]"


def _is_near(one: Tensor, other: Tensor) -> bool:
    scale = max(float(other.norm()), 1e-30)
    return float((one - other).norm()) <= TOLERANCE * scale


class Rule:
    """A merge rule, as a shard uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, vectors: Tensor, weights: Sequence[float] = ()) -> Tensor:
        """Return the merged contribution, fp32 [N], of contributions [M, N]."""
        numel = vectors.shape[1]
        summed = self._name in SUMMED_RULES
        shape = () if summed or numel % 2 else (2, numel // 2)  # an own rule can use the shape
        method = cast("SegmentMerge", self._name if summed else "own")
        segments = (Segment(0, numel, method, shape),)
        merge: FragmentMerge = (
            Accumulator(numel, segments)
            if summed
            else RuleAccumulator(self._name, numel, segments, TRIM)
        )
        for vector, weight in zip(vectors, weights or [1.0] * len(vectors), strict=True):
            contribution = Contribution(numel, segments)
            contribution.add(0, vector)
            merge.add_contribution(contribution, weight)
        return merge.result()


def _all_vectors() -> Iterator[tuple[str, Tensor]]:
    """Yield contributions of all numbers and sizes, each with its description."""
    for count in LEARNERS:
        for numel in SIZES:
            yield f"{count} contributions of {numel} elements", _vectors(count, numel)


def _finite_merge(rule: Rule) -> None:
    for given, vectors in _all_vectors():
        for magnitude in MAGNITUDES:
            found = rule(magnitude * vectors)
            _require(is_finite(found), f"{given} of magnitude {magnitude:g}", found)


def _equal_contributions(rule: Rule) -> None:
    for given, vectors in _all_vectors():
        found = rule(vectors[:1].expand_as(vectors).contiguous())
        _require(_is_near(found, vectors[0]), f"{given}, all equal to {_short(vectors[0])}", found)


def _zero_contributions(rule: Rule) -> None:
    for given, vectors in _all_vectors():
        found = rule(torch.zeros_like(vectors))
        _require(not found.any(), f"{given}, all zero", found)


def _order_of_learners(rule: Rule) -> None:
    for given, vectors in _all_vectors():
        weights = [1.0 + index for index in range(len(vectors))]
        found, turned = rule(vectors, weights), rule(vectors.flip(0), weights[::-1])
        _require(_is_near(turned, found), f"{given} in the opposite order", turned)


def _scale_of_weights(rule: Rule) -> None:
    for given, vectors in _all_vectors():
        weights = [1.0 + index for index in range(len(vectors))]
        found, scaled = rule(vectors, weights), rule(vectors, [1024 * w for w in weights])
        _require(_is_near(scaled, found), f"{given} and 1024 times the weights", scaled)


def _pure_merge(rule: Rule) -> None:
    for given, vectors in _all_vectors():
        before = vectors.clone()
        found = rule(vectors)
        _require(torch.equal(vectors, before), f"{given}, it changed them")
        _require(torch.equal(rule(vectors), found), f"{given} for the second time", found)


MERGE: dict[str, Callable[[Rule], None]] = {
    "finite contributions give a finite result": _finite_merge,
    "equal contributions give that contribution": _equal_contributions,
    "zero contributions give zero": _zero_contributions,
    "the order of the learners does not matter": _order_of_learners,
    "only the ratios of the weights matter": _scale_of_weights,
    "the same contributions give the same bits, and do not change": _pure_merge,
}
"""The properties of a merge rule."""


def _stepped(make: OuterFactory, gradients: Tensor, *, restores: bool = False) -> Tensor:
    """Return the weights, fp32 [N], after a step with each gradient [K, N] from fixed weights.

    Args:
        restores: Each step is by a new optimizer with the state of the last one, as in a shard.
    """
    numel = gradients.shape[1]
    master, optimizer = _vectors(1, numel)[0], make(numel)
    for gradient in gradients:
        optimizer.step(master, gradient)
        if restores:
            state = load(save({k: v.contiguous() for k, v in optimizer.state_dict().items()}))
            optimizer = make(numel)
            optimizer.load_state_dict(state)
    return master


def _finite_step(make: OuterFactory) -> None:
    for numel in SIZES:
        for magnitude in MAGNITUDES:
            found = _stepped(make, _vectors(5, numel, magnitude))
            given = f"5 gradients of {numel} elements of magnitude {magnitude:g}"
            _require(is_finite(found), given, found)


def _zero_gradient(make: OuterFactory) -> None:
    for numel in SIZES:
        master = torch.zeros(numel, dtype=torch.float32)
        make(numel).step(master, torch.zeros_like(master))
        _require(not master.any(), f"{numel} weights of zero and a gradient of zero", master)


def _descends(make: OuterFactory) -> None:
    for numel in SIZES:
        gradient = _vectors(2, numel)[1]
        master = torch.zeros(numel, dtype=torch.float32)
        make(numel).step(master, gradient)
        along = float(master.double() @ gradient.double())
        _require(along < 0, f"weights of zero and the gradient {_short(gradient)}", master)


def _in_place(make: OuterFactory) -> None:
    for numel in SIZES:
        master, gradient = torch.zeros(numel, dtype=torch.float32), _vectors(1, numel)[0]
        pointer, before = master.data_ptr(), gradient.clone()
        make(numel).step(master, gradient)
        kept = (master.data_ptr(), master.dtype, master.shape)
        same = kept == (pointer, torch.float32, before.shape)
        _require(same, f"{numel} weights", master)
        _require(torch.equal(gradient, before), f"a gradient of {numel} elements, it changed it")


def _restores(make: OuterFactory) -> None:
    for numel in SIZES:
        gradients = _vectors(5, numel)
        found, expected = _stepped(make, gradients, restores=True), _stepped(make, gradients)
        given = f"5 gradients of {numel} elements, and a new optimizer for each"
        _require(torch.equal(found, expected), given, found)


def _repeats(make: OuterFactory) -> None:
    for numel in SIZES:
        gradients = _vectors(5, numel)
        found, again = _stepped(make, gradients), _stepped(make, gradients)
        _require(torch.equal(found, again), f"the same 5 gradients of {numel} elements", again)


OUTER: dict[str, Callable[[OuterFactory], None]] = {
    "finite gradients give finite weights": _finite_step,
    "zero weights with a zero gradient stay zero": _zero_gradient,
    "the first step goes against the gradient": _descends,
    "a step changes the weights in place, and not the gradient": _in_place,
    "the state survives a file": _restores,
    "the same gradients give the same bits": _repeats,
}
"""The properties of an outer optimizer."""


def _decoded(code: Codec, vector: Tensor) -> Tensor:
    return code.decode(code.encode(vector), vector.numel())


def _finite_code(code: Codec) -> None:
    for numel in SIZES:
        for magnitude in MAGNITUDES:
            found = _decoded(code, _vectors(1, numel, magnitude)[0])
            given = f"{numel} elements of magnitude {magnitude:g}"
            _require(is_finite(found), given, found)


def _sizes(code: Codec) -> None:
    for numel in (0, *SIZES):
        vector = _vectors(1, numel)[0]
        payload = code.encode(vector)
        is_payload = payload.dtype == torch.uint8 and payload.shape == (code.nbytes(numel),)
        _require(is_payload, f"{numel} elements, not uint8 [{code.nbytes(numel)}]", payload)
        found = code.decode(payload, numel)
        is_vector = found.dtype == torch.float32 and found.shape == (numel,)
        _require(is_vector, f"a payload of {numel} elements", found)


def _zero_code(code: Codec) -> None:
    for numel in SIZES:
        found = _decoded(code, torch.zeros(numel, dtype=torch.float32))
        _require(not found.any(), f"{numel} zeros", found)


def _error(code: Codec) -> None:
    for numel in SIZES:
        for magnitude in MAGNITUDES[1:]:
            vector = _vectors(1, numel, magnitude)[0]
            found = _decoded(code, vector)
            is_less = float((found - vector).norm()) < float(vector.norm())
            _require(is_less, _short(vector), found)


def _feedback(code: Codec) -> None:
    for numel in SIZES:
        vector = _vectors(1, numel)[0]
        total, rest = torch.zeros_like(vector), torch.zeros_like(vector)
        for _ in range(FEEDBACK_ROUNDS):
            sent = _decoded(code, vector + rest)
            rest += vector - sent
            total += sent
        mean = total / FEEDBACK_ROUNDS
        is_close = float((mean - vector).norm()) < 0.5 * float(vector.norm())
        _require(is_close, f"{FEEDBACK_ROUNDS} times {_short(vector)}", mean)


def _pure_code(code: Codec) -> None:
    for numel in SIZES:
        vector = _vectors(1, numel)[0]
        before, payload = vector.clone(), code.encode(vector)
        _require(torch.equal(vector, before), f"{numel} elements, it changed them")
        same = torch.equal(code.encode(vector), payload)
        _require(same, f"the same {numel} elements for the second time")


def _groups(code: Codec) -> None:
    if code.group is None:
        return
    numel = 3 * code.group + 1
    vector = _vectors(1, numel)[0]
    parts = [code.encode(part) for part in torch.split(vector, 2 * code.group)]
    given = f"{numel} elements, divided after {2 * code.group}"
    _require(torch.equal(torch.cat(parts), code.encode(vector)), given)


def _short_payload(code: Codec) -> None:
    for numel in SIZES:
        payload = code.encode(_vectors(1, numel)[0])
        try:
            found = code.decode(payload[:-1].clone(), numel)
        except ProtocolError:
            continue
        _require(False, f"a payload of {numel} elements without its last byte", found)


CODEC: dict[str, Callable[[Codec], None]] = {
    "a payload has the announced size, and decodes to fp32": _sizes,
    "finite values decode to finite values": _finite_code,
    "zeros decode to zeros": _zero_code,
    "the error is smaller than the vector": _error,
    "with error feedback, the mean of what is sent comes close to the vector": _feedback,
    "the same vector gives the same bits, and does not change": _pure_code,
    "the payloads of whole groups, joined, are the vector's payload": _groups,
    "a payload of the wrong size is rejected": _short_payload,
}
"""The properties of a codec."""


LENGTHS = (1, 100, 10_000, None)
"""Steps of a run; ``None``: it ends by tokens."""


def _periods(schedule: Schedule) -> Iterator[tuple[int, int | None, int]]:
    """Yield steps, lengths of runs, and the period."""
    for steps in LENGTHS:
        last = 10_000 if steps is None else steps
        for step in sorted({*range(0, last, max(1, last // 100)), last}):
            yield step, steps, period_at(schedule, step, steps)


def _valid_periods(schedule: Schedule) -> None:
    for _ in _periods(schedule):
        pass


def _pure_schedule(schedule: Schedule) -> None:
    for step, steps, period in _periods(schedule):
        again = period_at(schedule, step, steps)
        _require(again == period, f"step={step}, steps={steps} for the second time", again)


SCHEDULE: dict[str, Callable[[Schedule], None]] = {
    "it returns an integer for any step and length of a run": _valid_periods,
    "the same step gives the same period": _pure_schedule,
}
"""The properties of a schedule."""

ROUNDS = 64
"""Rounds in which a participation rule is tried."""


def _rounds(count: int) -> Iterator[tuple[str, TriedRound]]:
    """Yield rounds, each with its description. Learner i needs 1 + i times as long for a step."""
    for number in range(1, ROUNDS + 1):
        tick = 8 * number
        learners = [
            Candidate(
                name=f"learner-{i}",
                step=tick // (1 + i),
                has_stepped=number % (1 + i) == 0,
                missed=i > 0 and number % (1 + i) == 1,
                step_seconds=1.0 + i,
            )
            for i in range(count)
        ]
        yield f"round {number} of {count} learners", TriedRound(0, number, tick, learners)


def _included(rule: Participation, round: TriedRound) -> list[str]:
    return [each.name for each in round.learners if why_included(rule, each, round) is not None]


def _some_learner(rule: Participation) -> None:
    for count in LEARNERS:
        for given, round in _rounds(count):
            _require(_included(rule, round), given, [])


def _each_learner(rule: Participation) -> None:
    for count in LEARNERS:
        found = {name for _, round in _rounds(count) for name in _included(rule, round)}
        _require(len(found) == count, f"{ROUNDS} rounds of {count} learners", sorted(found))


def _pure_participation(rule: Participation) -> None:
    for count in LEARNERS:
        for given, round in _rounds(count):
            found, again = _included(rule, round), _included(rule, round)
            _require(again == found, f"{given} for the second time", again)


PARTICIPATION: dict[str, Callable[[Participation], None]] = {
    "each round has a learner": _some_learner,
    "each learner takes part sooner or later": _each_learner,
    "the same round gives the same learners": _pure_participation,
}
"""The properties of a participation rule."""
