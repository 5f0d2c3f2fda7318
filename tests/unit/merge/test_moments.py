"""Moments of the inner optimizer are merged by the mean of those that have them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge import (
    Layout,
    body_digest,
    codec,
    layout_of,
    make_outer,
    parameters_numel,
)
from decoupled_diloco.merge.accumulate import Accumulator, merge
from decoupled_diloco.merge.packing import packed, packed_sizes, unpacked
from decoupled_diloco.merge.plan import MergePlan, MomentPlan
from decoupled_diloco.merge.published import publish, receive
from decoupled_diloco.merge.sum_payload import read_sum, write_sum
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.syncer.shard_tensors import ShardTensors

NAMES = ("exp_avg|momentum_buffer", "exp_avg_sq")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 6)
        self.norm = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 6)


def plan_for(moments: MomentPlan | None = None, **changes: Any) -> MergePlan:
    options = {"fragments": 3, "strategy": "balanced", "uplink": "bf16", "downlink": "bf16"}
    return MergePlan.make(
        layout_of(Model()),
        method="rda",
        weighting="tokens",
        outer=make_outer("nesterov", 0.7, 0.9),
        moments=moments,
        **{**options, **changes},
    )


def moments_for(every: int = 1, name: str = "bf16") -> MomentPlan:
    return MomentPlan(every, codec(name), NAMES)


def test_an_average_is_of_the_parameters_alone() -> None:
    """Buffers and moments have none: the newest merged ones go with it."""
    plan = replace(plan_for(moments_for()), average=0.5)
    part, tensors = plan.fragments[0], ShardTensors(plan, (0,))
    trained, wire = parameters_numel(part, plan.layout), plan.uplink_of(0)
    tensors.install(0, torch.zeros(part.numel))
    assert torch.equal(tensors.whole(0, average=True), torch.zeros(part.numel))
    masters = []
    for seed in (1, 2, 3):
        body = wire.encode(contribution(plan, seed))
        ask = Asking(1, seed)
        tensors.verify(0, ask, body, body_digest(body, wire))
        tensors.fold(0, ask, 1, 1)
        tensors.merge(0)
        masters.append(tensors.fragments[0].master[:trained].clone())
    average = tensors.average(0)
    assert average is not None
    expected = (0.25 * masters[0] + 0.25 * masters[1]) + 0.5 * masters[2]
    torch.testing.assert_close(average, expected)
    whole = tensors.whole(0, average=True)
    assert torch.equal(whole[:trained], average)
    assert torch.equal(whole[trained:], tensors.whole(0)[trained:])


def test_a_run_without_a_setting_keeps_no_average() -> None:
    tensors = ShardTensors(plan_for(), (0,))
    tensors.install(0, torch.ones(tensors.plan.fragments[0].numel))
    assert tensors.average(0) is None
    assert tensors.whole(0, average=True) is tensors.whole(0)


def contribution(plan: MergePlan, seed: int, *, moments: bool = True) -> Tensor:
    torch.manual_seed(seed)
    values = torch.randn(plan.fragments[0].numel)
    if not moments:
        values[plan.moments_start(0) :] = math.nan
    return values


def test_moments_follow_all_tensors_of_the_model() -> None:
    model = layout_of(Model())
    whole = model.with_moments(NAMES)
    assert whole.tensors[: len(model.tensors)] == model.tensors
    assert whole.of_model == model
    assert len(whole.tensors) == len(model.tensors) + 2 * model.trained
    assert whole.fingerprint != model.fingerprint
    assert whole.with_moments(NAMES) == whole, "moments are never added twice"
    assert Layout.from_json(whole.to_json()) == whole
    owner, keys = whole.moment(len(whole.tensors) - 1)
    assert (owner, keys) == (model.trained - 1, ("exp_avg_sq",))
    assert whole.moment(len(model.tensors)) == (0, ("exp_avg", "momentum_buffer"))


def test_a_moment_before_a_buffer_is_rejected() -> None:
    data = layout_of(Model()).with_moments(NAMES).to_json()
    data["tensors"].insert(0, data["tensors"].pop())
    with pytest.raises(ProtocolError, match="or either after a moment"):
        Layout.from_json(data)


@pytest.mark.parametrize("strategy", ["balanced", "tensor", "layer-strided"])
def test_each_fragment_has_the_moments_of_its_elements(strategy: str) -> None:
    without, plan = plan_for(strategy=strategy), plan_for(moments_for(), strategy=strategy)
    seen: set[tuple[int, int]] = set()
    for bare, part in zip(without.fragments, plan.fragments, strict=True):
        assert part.pieces[: len(bare.pieces)] == bare.pieces, "the model is split as without them"
        trained = parameters_numel(part, plan.layout)
        assert trained == parameters_numel(bare, without.layout)
        assert part.numel == bare.numel + 2 * trained
        for piece in part.pieces[len(bare.pieces) :]:
            seen |= {(piece.tensor, i) for i in range(piece.start, piece.stop)}
    assert len(seen) == sum(s.numel for s in plan.layout.tensors if s.is_moment)


def test_moments_are_the_mean_of_those_that_have_them() -> None:
    plan, bare = plan_for(moments_for()), plan_for()
    first = plan.moments_start(0)
    vectors = [contribution(plan, seed, moments=seed != 1) for seed in range(3)]
    merged = merge(vectors, [1.0, 5.0, 3.0], plan.segments(0))
    expected = (vectors[0][first:] + 3 * vectors[2][first:]) / 4
    assert torch.allclose(merged[first:], expected, atol=1e-6)
    others = merge([v[:first] for v in vectors], [1.0, 5.0, 3.0], bare.segments(0))
    assert torch.equal(merged[:first], others), "moments do not change the merge of the model"


@pytest.mark.parametrize("absent", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_sums_of_sums_have_the_same_moments(absent: tuple[int, ...]) -> None:
    plan = plan_for(moments_for(name="fp32"), uplink="fp32")
    vectors = [contribution(plan, seed, moments=seed not in absent) for seed in range(4)]
    whole, left, right = (plan.accumulator(0) for _ in range(3))
    for number, vector in enumerate(vectors):
        for each in (whole, left if number < 2 else right):
            assert isinstance(each, Accumulator)
            each.add(vector, 1.0 + number)
    assert isinstance(left, Accumulator)
    assert isinstance(right, Accumulator)
    body, announced, _ = write_sum(plan, 0, left, ())
    total = read_sum(plan, 0, body, announced)
    total.combine(Accumulator.from_state_dict(right.state_dict()))
    assert torch.allclose(total.result(), whole.result(), atol=1e-5, equal_nan=True)


def test_without_any_moments_the_result_has_none() -> None:
    plan = plan_for(moments_for())
    merged = merge([contribution(plan, 0, moments=False)], [1.0], plan.segments(0))
    assert merged[plan.moments_start(0) :].isnan().all()
    assert merged[: plan.moments_start(0)].isfinite().all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_an_absent_moment_costs_one_bit(name: str) -> None:
    plan = plan_for(moments_for(name=name), fragments=1)
    wire, values = plan.uplink_of(0), contribution(plan, 0)
    base, first = plan.buffers_of(0, values), plan.moments_start(0)
    body = wire.encode(values)
    assert packed(body, base + 1, wire) is body
    error = 0.4 if name == "int4" else 0.03
    assert torch.allclose(wire.decode(body, values.numel())[first:], values[first:], atol=error)
    values[first:] = math.nan
    body = wire.encode(values)
    short = packed(body, base, wire)
    bare = plan_for(fragments=1).uplink_of(0).nbytes(first) - 4 * base.numel()
    assert short.numel() <= bare + 1 + len(plan.fragments[0].pieces) // 8
    assert short.numel() in packed_sizes(wire, values.numel())
    assert torch.equal(torch.as_tensor(unpacked(short, base, wire)), body)
    assert wire.decode(body, values.numel())[first:].isnan().all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_a_published_moment_has_the_same_bits_everywhere(name: str) -> None:
    plan = plan_for(moments_for(name=name))
    wire, first = plan.downlink_of(0), plan.moments_start(0)
    published = contribution(plan, 0, moments=False)  # as before the first merge
    receiver, master = published.clone(), contribution(plan, 1)
    master[-1] = math.nan
    for number in range(2):
        body = publish(master, published, wire)
        receive(receiver, body, wire)
        assert torch.equal(receiver.nan_to_num(9.0), published.nan_to_num(9.0))
        assert receiver[first : -plan.fragments[0].pieces[-1].numel].isfinite().all()
        if number:
            short = packed(body, plan.buffers_of(0, published), wire)
            assert short.numel() < plan_for().downlink_of(0).nbytes(first) + 2, "nothing changed"


def test_a_contribution_has_moments_in_every_nth_version() -> None:
    plan = plan_for(moments_for(every=3))
    assert [plan.sends_moments(counter) for counter in range(5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not plan_for().sends_moments(0)


def test_a_shard_keeps_moments_that_no_contribution_has() -> None:
    plan = plan_for(moments_for(name="fp32"), uplink="fp32", downlink="fp32")
    shard, first = ShardTensors(plan, (0,)), plan.moments_start(0)
    shard.install(0, contribution(plan, 0, moments=False))
    shard.installed(0, Version(1, 0))
    expected = torch.empty(0)
    for number, has_moments in enumerate((True, False)):
        values = contribution(plan, 1 + number, moments=has_moments)
        body = plan.uplink_of(0).encode(values)
        shard.verify(0, Asking(1, number), body, body_digest(body, plan.uplink_of(0)))
        shard.fold(0, Asking(1, number), 4, 40)
        copy = shard.published(0, Version(1, 1 + number), shard.merge(0))
        if has_moments:
            assert torch.allclose(copy.whole[first:], values[first:])
            expected = copy.whole[first:]
        assert torch.equal(copy.whole[first:], expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0])
def test_a_relay_cannot_give_moments_more_weight_than_was_ordered(share: float) -> None:
    plan, ask, name = plan_for(moments_for()), Asking(1, 1), ("site-a", 1)
    accumulator, vector = plan.accumulator(0), contribution(plan, 0)
    assert isinstance(accumulator, Accumulator)
    accumulator.add(vector, plan.weight(40, 4))
    merges = [segment.merge for segment in accumulator.segments]
    for index, merge_of in enumerate(merges):
        accumulator._norm_sums[index] *= share if merge_of == "moment" else 1.0
    shard = ShardTensors(plan, (0,))
    shard.reported(0, ask, float(vector[: plan.moments_start(0)].norm()))
    shard.folded_at_relay(0, ask, 4, 40, 1.0, 1.0)
    shard.verify_sum(0, name, *write_sum(plan, 0, accumulator, ())[:2])
    if share > 1:
        with pytest.raises(MergeError, match="has moments of weight 800, but 400 was ordered"):
            shard.check_sum(0, name, [ask])
    else:
        shard.check_sum(0, name, [ask])
