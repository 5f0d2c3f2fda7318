"""Buffers: which ones are merged, how they are merged, and that the results are valid."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.learner.exchange import Capture, LearnerTensors
from decoupled_diloco.learner.parameter_store import Copied, ModuleStore
from decoupled_diloco.merge import (
    Accumulator,
    Constant,
    Contribution,
    Layout,
    Segment,
    digest,
    gather,
    layout_of,
    make_outer,
    parameters_numel,
    partition,
    receive,
)
from decoupled_diloco.merge.fragments import Buffers
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.syncer.shard_tensors import ShardTensors


class Model(nn.Module):
    """A buffer of every kind."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.hidden = nn.Linear(5, 7)
            self.norm = nn.BatchNorm1d(7)
        self.register_buffer("angles", torch.rand(6))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")))
        self.register_buffer("indices", torch.arange(100))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("again", self.angles)


def plan_for(model: nn.Module, fragments: int = 3, **changes: str) -> MergePlan:
    """A plan with coarse codecs and an outer optimizer that overshoots."""
    options = {"strategy": "balanced", "method": "rda", "uplink": "bf16", "downlink": "bf16"}
    return MergePlan.make(
        layout_of(model),
        fragments=fragments,
        weighting="tokens",
        outer=make_outer("nesterov", 0.7, 0.9),
        **{**options, **changes},
    )


def test_buffers_follow_the_parameters() -> None:
    layout = layout_of(Model())
    roles = {spec.name: spec.role for spec in layout.tensors}
    assert list(roles)[-4:] == ["angles", "mask", "norm.running_mean", "norm.running_var"]
    assert [spec.aliases for spec in layout.tensors if spec.name == "angles"] == [("again",)]
    assert list(roles.values()).count("buffer") == 4
    assert layout.excluded == ("scratch", "indices")
    assert layout.constants == (
        Constant("flags", (2,), "bool", (1, 0)),
        Constant("norm.num_batches_tracked", (), "int64", (0,)),
    )
    assert layout.constants[0].tensor().tolist() == [True, False]
    assert Layout.from_json(layout.to_json()) == layout
    local = layout.without_buffers()
    assert {spec.role for spec in local.tensors} == {"matrix"}
    assert local.fingerprint != layout.fingerprint
    assert local.tensors == layout.tensors[: len(local.tensors)], "the places stay the same"


def test_constants_do_not_affect_the_fingerprint() -> None:
    model = Model()
    before = layout_of(model).fingerprint
    model.norm.num_batches_tracked.add_(3)
    assert layout_of(model).fingerprint == before


@pytest.mark.parametrize(
    "change",
    [
        {"values": [1]},
        {"values": [1, "x"]},
        {"dtype": "float32"},
        {"shape": [-1, -2]},
        {"name": "hidden.weight"},
        {"values": [0] * 65, "shape": [65]},
    ],
)
def test_an_invalid_constant_is_rejected(change: dict[str, object]) -> None:
    data = layout_of(Model()).to_json()
    data["constants"][0] |= change
    with pytest.raises(ProtocolError):
        Layout.from_json(data)


def test_a_parameter_after_a_buffer_is_rejected() -> None:
    data = layout_of(Model()).to_json()
    data["tensors"].reverse()
    with pytest.raises(ProtocolError, match="has a parameter after a buffer"):
        Layout.from_json(data)


def test_equal_buffers_do_not_make_contributions_parallel() -> None:
    models = [Model(seed) for seed in range(2)]
    plan = plan_for(models[0], fragments=1)
    shard, (part,) = ShardTensors(plan, (0,)), plan.fragments
    stores = [ModuleStore(model) for model in models]
    begin = gather(part, stores[0]._tensors)
    shard.install(0, begin)
    for n, model in enumerate(models * 3):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(tensor + torch.randn_like(tensor) if tensor.requires_grad else 1e4)
        capture = Capture(plan, 0, stores[n % 2].snapshot(part), begin)
        body, announced, _ = capture.encode("bf16")
        shard.verify(0, Asking(1, n), body, announced)
        assert shard.alike(0, Asking(1, n), f"learner-{n % 2}") == ()


@pytest.mark.parametrize("method", ["rda", "mean"])
@pytest.mark.parametrize("strategy", ["balanced", "tensor", "layer-strided"])
@pytest.mark.parametrize("seed", range(3))
def test_a_merge_is_the_weighted_mean_of_the_buffers(method: str, strategy: str, seed: int) -> None:
    """Compare with a manual computation; late values count the same as others."""
    rng = random.Random(seed)
    models = [Model(seed) for _ in range(3)]
    plan = plan_for(models[0], method=method, strategy=strategy)
    shard = ShardTensors(plan, (0, 1, 2))
    stores = [ModuleStore(model) for model in models]
    begin = [gather(part, stores[0]._tensors) for part in plan.fragments]
    for index, values in enumerate(begin):
        shard.install(index, values)
    for number in range(1, 4):
        for model in models:
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) * 10 ** rng.uniform(-6, 3))
        for index, part in enumerate(plan.fragments):
            trained = parameters_numel(part, plan.layout)
            named = [(rng.randint(1, 9), store) for store in stores]
            for process, (tokens, store) in enumerate(named):
                capture = Capture(plan, index, store.snapshot(part), begin[index])
                body, announced, _ = capture.encode("bf16")
                assert body.numel() == plan.uplink_nbytes(index)
                ask = Asking(number, process)
                shard.verify(index, ask, body, announced)
                shard.fold(index, ask, 1, tokens, scale=rng.choice([1.0, 0.5]))
            copy = shard.merge(index)
            assert copy.difference.numel() in plan.downlink_sizes(index)
            assert copy.digest == digest(shard.whole(index))
            weights = [plan.weight(tokens, 1) for tokens, _ in named]
            values = [store.snapshot(part).values()[trained:] for _, store in named]
            mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            merged = shard.whole(index)[trained:]
            assert torch.allclose(merged, mean, rtol=1e-5, atol=1e-3)
            assert bool((merged >= 0).all()), "as a variance has to be"


@pytest.mark.parametrize("buffers", ["mean", "one"])
@pytest.mark.parametrize("feedback", [None, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_leaving_buffers_out_changes_no_bit(
    seed: int, feedback: float | None, buffers: Buffers
) -> None:
    """Late contributions have the values of their base version."""
    rng = random.Random(seed)
    models = [Model(seed) for _ in range(3)]
    plan = replace(plan_for(models[0], fragments=1), feedback=feedback, buffers=buffers)
    stores, (part,) = [ModuleStore(model) for model in models], plan.fragments
    whole, short = ShardTensors(plan, (0,)), ShardTensors(plan, (0,), earlier_versions=3)
    begin = gather(part, stores[0]._tensors)
    for shard in (whole, short):
        shard.install(0, begin)
        shard.installed(0, Version(1, 0))
    held, saved = [(Version(1, 0), begin)] * 3, 0
    for number in range(1, 9):
        for index, (store, model) in enumerate(zip(stores, models, strict=True)):
            base, published = held[index]
            store.overwrite(part, published)
            with torch.no_grad():
                model.hidden.weight.add_(rng.uniform(-1, 1))
                for changes in (model.angles, model.norm.running_mean, model.mask):
                    if rng.random() < 0.3:
                        changes.fill_(rng.random())
            capture = Capture(plan, 0, store.snapshot(part), published)
            body, announced, _ = capture.encode("bf16")
            sent, ask = capture.packed(body, "bf16"), Asking(number, index)
            saved += body.numel() - sent.numel()
            whole.verify(0, ask, body, announced)
            short.verify(0, ask, short.unpacked(0, sent, base), announced)
            for shard in (whole, short):
                shard.fold(0, ask, 1, index + 1)
        full, copy = whole.merge(0), short.merge(0)
        packed = short.published(0, Version(1, number), copy).difference
        saved += full.difference.numel() - packed.numel()
        assert torch.equal(whole.whole(0), short.whole(0))
        for index, (base, published) in enumerate(held):
            if base == Version(1, number - 1) and (index == 0 or rng.random() < 0.6):
                learner = LearnerTensors(plan, stores[index])
                learner.stage(0, published)
                received = learner.next_values(0, packed, full.digest)
                assert torch.equal(received, whole.whole(0))
                held[index] = Version(1, number), received
            elif number - base.counter == 3:
                held[index] = Version(1, number), whole.whole(0)
    assert saved > 100


def buffer_values(plan: MergePlan, value: float) -> torch.Tensor:
    """Return a contribution whose buffers all have this value; the rest is 0."""
    vector = torch.zeros(plan.fragments[0].numel)
    vector[plan.segments(0)[-1].start :] = value
    return vector


def merged_buffers(accumulator: Accumulator) -> set[float]:
    return set(accumulator.result()[accumulator.segments[-1].start :].tolist())


def test_buffers_of_one_learner_come_from_the_largest_weight() -> None:
    """With equal weights the first one wins: the same fold order gives the same bits."""
    plan = plan_for(Model(), fragments=1, buffers="one")
    accumulator = plan.accumulator(0)
    for value, weight in ((1.0, 2.0), (2.0, 5.0), (3.0, 5.0), (4.0, 1.0)):
        accumulator.add(buffer_values(plan, value), weight)
    assert merged_buffers(accumulator) == {2.0}


@pytest.mark.parametrize("swapped", [False, True])
def test_buffers_of_one_learner_combine_in_a_tree(swapped: bool) -> None:
    plan = plan_for(Model(), fragments=1, buffers="one")
    light, heavy = plan.accumulator(0), plan.accumulator(0)
    light.add(buffer_values(plan, 1.0), 3.0)
    heavy.add(buffer_values(plan, 2.0), 4.0)
    heavy = Accumulator.from_state_dict(heavy.state_dict())
    whole, other = (heavy, light) if swapped else (light, heavy)
    whole.combine(other)
    whole.add(buffer_values(plan, 9.0), 3.5)
    assert merged_buffers(whole) == {2.0}


def test_buffers_are_excluded_from_norms() -> None:
    plan = plan_for(Model(), fragments=1)
    segments = plan.segments(0)
    assert segments[-1].merge == "buffer"
    contribution = Contribution(plan.fragments[0].numel, segments)
    vector = torch.zeros(plan.fragments[0].numel)
    vector[segments[-1].start :] = 1e6
    contribution.add(0, vector)
    assert contribution.norm == 0.0
    contribution.scale(0.5)
    assert torch.equal(contribution.parts[0][1], vector)


def test_an_unchanged_table_keeps_its_bits() -> None:
    """Buffers are not rounded: an unchanged buffer keeps its bits forever."""
    model = Model()
    plan = plan_for(model, fragments=1)
    shard, store, part = ShardTensors(plan, (0,)), ModuleStore(model), plan.fragments[0]
    trained = parameters_numel(part, plan.layout)
    begin = store.snapshot(part).values()
    shard.install(0, begin)
    body, announced, _ = Capture(plan, 0, store.snapshot(part), begin).encode("bf16")
    shard.verify(0, Asking(1, 1), body, announced)
    shard.fold(0, Asking(1, 1), 1, 1)
    shard.merge(0)
    assert torch.equal(shard.whole(0)[trained:], begin[trained:])


def test_a_store_overwrites_buffers_in_every_mode() -> None:
    model = Model()
    plan, store = plan_for(model, fragments=1), ModuleStore(model)
    part = plan.fragments[0]
    trained = parameters_numel(part, plan.layout)
    before = store.snapshot(part).values()
    model.norm.running_mean = torch.full((7,), 3.0)
    assert (store.snapshot(part).values()[trained:] == 3.0).sum() == 7
    values = before + 1.0
    store.combine(part, values, Copied(before), 1.0)
    assert torch.equal(store.snapshot(part).values()[trained:], values[trained:])
    store.combine(part, before, None, 0.5)
    assert torch.equal(store.snapshot(part).values()[trained:], before[trained:])


def merged(*contributions: tuple[list[float], float], in_a_tree: bool = False) -> list[float]:
    """Merge one buffer from its contributions and their weights."""
    numel = len(contributions[0][0])
    segments = (Segment(0, numel, "buffer"),)
    whole = Accumulator(numel, segments)
    for values, weight in contributions:
        if in_a_tree:
            leaf = Accumulator(numel, segments)
            leaf.add(torch.tensor(values), weight)
            whole.combine(Accumulator.from_state_dict(leaf.state_dict()))
        else:
            whole.add(torch.tensor(values), weight)
    return Accumulator.from_state_dict(whole.state_dict()).result().tolist()


TREES = pytest.mark.parametrize("in_a_tree", [False, True])


@TREES
@pytest.mark.parametrize(
    ("contributions", "expected"),
    [
        ([([0.5, 2.0], 1.0), ([1.5, 4.0], 3.0)], [1.25, 3.5]),
        ([([10.0, 3.0], 1.0), ([20.0, 5.0], 3.0), ([30.0, 7.0], 2.0)], [20.0, 5.0]),
        ([([0.0, 1.0], 1.0), ([1.0, 1.0], 3.0)], [1.0, 1.0]),
        ([([10.0], 1.0), ([20.5], 3.0)], [17.875]),
        ([([0.8, 0.6], 1.0), ([-0.8, -0.6], 3.0)], [-0.8, -0.6]),
        ([([0.8, 0.6], 1.0), ([-0.8, -0.9], 3.0)], [-0.4, -0.525]),
    ],
    ids=["mean", "counters", "flags", "not all whole", "unit vectors", "not all of length 1"],
)
def test_a_buffer_without_a_mean_is_one_contribution(
    contributions: list[tuple[list[float], float]], expected: list[float], in_a_tree: bool
) -> None:
    assert merged(*contributions, in_a_tree=in_a_tree) == pytest.approx(expected)
    backwards = merged(*reversed(contributions), in_a_tree=in_a_tree)
    assert backwards == pytest.approx(expected), "whichever arrived first"


@TREES
@pytest.mark.parametrize("value", [0.1, math.inf, -math.inf, math.nan, torch.finfo().min])
def test_a_constant_keeps_its_bits(value: float, in_a_tree: bool) -> None:
    values = torch.tensor([value, 0.3, 1e-20]).tolist()
    result = merged(*((values, weight) for weight in (3.0, 7.0, 1e6)), in_a_tree=in_a_tree)
    assert torch.equal(
        torch.tensor(result).view(torch.int32), torch.tensor(values).view(torch.int32)
    )


@TREES
def test_a_finite_contribution_wins_over_others(in_a_tree: bool) -> None:
    """For example the minimum of an observer, which is infinite before it sees data."""
    seen, fresh = ([-2.5], 1.0), ([math.inf], 5.0)
    assert merged(seen, fresh, in_a_tree=in_a_tree) == [-2.5]
    assert merged(fresh, seen, ([-1.5], 2.0), in_a_tree=in_a_tree) == [-1.5]
    assert merged(fresh, ([math.nan], 1.0), in_a_tree=in_a_tree) == [math.inf]


@pytest.mark.parametrize("feedback", [None, 1.0])
def test_infinite_buffers_are_sent_both_ways(feedback: float | None) -> None:
    model = Model()
    plan = replace(plan_for(model, fragments=1), feedback=feedback)
    shard, store, part = ShardTensors(plan, (0,)), ModuleStore(model), plan.fragments[0]
    begin = store.snapshot(part).values()
    shard.install(0, begin.clone())
    with torch.no_grad():
        model.hidden.weight.add_(0.5)
        model.norm.running_mean.add_(0.25)
    body, announced, residual = Capture(plan, 0, store.snapshot(part), begin).encode("bf16")
    assert residual is None or torch.isfinite(residual).all()
    shard.verify(0, Asking(1, 1), body, announced)
    shard.fold(0, Asking(1, 1), 1, 1)
    copy = shard.merge(0)
    received = begin.clone()
    receive(received, copy.difference, plan.codec_of(0, plan.downlink))
    assert torch.equal(received, copy.whole)
    store.overwrite(part, received)
    assert torch.equal(model.mask, torch.full((2, 2), -math.inf))
    assert torch.equal(model.norm.running_mean, torch.full((7,), 0.25)), "values, not rounded"


class Pruned(nn.Linear):
    """A model with a buffer in addition to those of pruning."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        prune.l1_unstructured(self, "weight", 0.5)
        self.register_buffer("seen", torch.zeros(1))


@pytest.mark.parametrize(
    ("make", "single"),
    [
        (
            lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
            {"parametrizations.weight.0._u", "parametrizations.weight.0._v"},
        ),
        (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), {"parametrizations.weight.0.base"}),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), {"weight_u", "weight_v"}),
        (Pruned, {"weight_mask"}),
        (lambda: nn.BatchNorm1d(4), set()),
    ],
)
def test_buffers_of_a_parametrization_come_from_one_learner(
    make: Callable[[], nn.Module], single: set[str]
) -> None:
    layout = layout_of(nn.Sequential(make(), nn.Linear(4, 40)))
    found = {spec.name for spec in layout.tensors if spec.role == "single"}
    assert found == {f"0.{name}" for name in single}
    if single:
        places = [
            fragment.index
            for fragment in partition(layout, 4)
            for piece in fragment.pieces
            if layout.tensors[piece.tensor].role == "single"
        ]
        assert len(set(places)) == 1, "of one learner, so in one fragment"


def test_values_do_not_affect_the_layout() -> None:
    finite, infinite = Model(), Model()
    finite.mask.zero_()
    infinite.angles.fill_(math.nan)
    infinite.norm.running_var.fill_(math.inf)
    assert layout_of(finite) == layout_of(infinite)
