"""Compare the merge with short implementations of each sentence of the method.

The source is Decoupled DiLoCo (arXiv 2604.21428) unless stated otherwise. "Rule" is our own exact
rule where the paper does not specify one.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from decoupled_diloco.merge import (
    Accumulator,
    Contribution,
    Layout,
    NesterovSGD,
    Segment,
    TensorSpec,
    codec,
    contribution,
    gather,
    layout_of,
    merge,
    partition,
    publish,
    receive,
    scatter,
    segments,
    tensors_of,
    token_weight,
)
from decoupled_diloco.protocol.machine_options import Options

N = 50


def vectors(count, numel=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def rda(numel=N):
    return [Segment(0, numel, "rda")]


def mean(numel=N):
    return [Segment(0, numel, "mean")]


def naive_mean(vs, ws):
    return (sum(w * v.double() for v, w in zip(vs, ws, strict=True)) / sum(ws)).float()


def phi(x):
    length = x.norm()
    return x if length == 0 else x / length


def naive_rda(vs, ws):
    vs = [v.double() for v in vs]
    radial = sum(w * v.norm() for v, w in zip(vs, ws, strict=True)) / sum(ws)
    direction = sum(w * phi(v) for v, w in zip(vs, ws, strict=True)) / sum(ws)
    return (radial * phi(direction)).float()


def close(found, expected, rtol=1e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-7)


def test_weight_is_quantity_times_quality():
    """Algorithm 2: w_m = c_tokens · (c_tokens / c_steps)."""
    for tokens, steps in [(512, 4), (1000, 3), (7, 1)]:
        assert token_weight(tokens, steps) == tokens * (tokens / steps)


def test_a_learner_with_twice_the_batch_counts_four_times():
    """Algorithm 2: with the same number of steps, twice the tokens have twice the quality."""
    assert token_weight(2048, 8) == 4 * token_weight(1024, 8)


def test_a_learner_that_did_not_train_has_weight_zero():
    """Algorithm 2: w_m = 0 for learners not in the set, and for one that did not train."""
    assert token_weight(0, 0) == 0


def test_the_merge_uses_the_weights():
    """Algorithm 2, merge of {Δ, w}: one learner with weight 3 counts as three with weight 1."""
    a, b = vectors(2)
    for kind in (rda(), mean()):
        close(merge([a, b], [3, 1], kind), merge([a, a, a, b], [1, 1, 1, 1], kind))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_rda_equals_the_equation(count):
    """RDA: (Σw‖v‖ / Σw) · φ(Σwφ(v) / Σw), φ(x) = x/‖x‖."""
    vs, ws = vectors(count), [1.0 + m for m in range(count)]
    close(merge(vs, ws, rda()), naive_rda(vs, ws))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_mean_equals_the_equation(count):
    """Plain weighted mean: Σwv / Σw."""
    vs, ws = vectors(count), [1.0 + m for m in range(count)]
    close(merge(vs, ws, mean()), naive_mean(vs, ws))


def test_the_length_is_the_weighted_mean_of_the_norms():
    """RDA: the radial part is the mean of the norms, not the norm of the mean."""
    vs, ws = vectors(5), [5, 4, 3, 2, 1]
    length = sum(w * float(v.norm()) for v, w in zip(vs, ws, strict=True)) / sum(ws)
    assert float(merge(vs, ws, rda()).norm()) == pytest.approx(length, rel=1e-6)


def test_the_direction_ignores_the_lengths():
    """RDA: directions are merged as unit vectors, so a long update does not dominate."""
    a, b = vectors(2)
    short, long = merge([a, b], [1, 1], rda()), merge([1000 * a, b], [1, 1], rda())
    close(phi(short), phi(long), rtol=1e-5)


def test_phi_of_zero_is_zero():
    """RDA: φ(0) = 0."""
    (v,) = vectors(1)
    zero = torch.zeros(N)
    close(merge([zero], [1], rda()), zero)
    close(merge([v, zero], [1, 1], rda()), v / 2)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_orthogonal_updates_shrink_by_the_root_of_m_in_a_mean_and_not_in_rda(count):
    """Outer gradients of different learners are nearly orthogonal: a mean shrinks by 1/√M."""
    vs, ws = list(torch.eye(count)), [1.0] * count
    assert float(merge(vs, ws, mean(count)).norm()) == pytest.approx(1 / math.sqrt(count))
    assert float(merge(vs, ws, rda(count)).norm()) == pytest.approx(1)


def test_rda_and_mean_agree_for_equal_updates():
    """RDA and mean agree if all learners agree."""
    (v,) = vectors(1)
    close(merge([v, v, v], [1, 2, 3], rda()), v)
    close(merge([v, v, v], [1, 2, 3], mean()), v)


def test_the_embedding_uses_a_plain_mean_and_everything_else_rda():
    """The embedding is merged by a plain weighted mean, every other tensor separately by RDA."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5))
    layout = layout_of(model)
    (fragment,) = partition(layout, 1)
    numel, ws = fragment.numel, [1.0, 2.0, 5.0]
    vs = vectors(3, numel)
    expected = torch.cat(
        [
            naive_mean([v[:24] for v in vs], ws),
            naive_rda([v[24:44] for v in vs], ws),
            naive_rda([v[44:] for v in vs], ws),
        ]
    )
    close(merge(vs, ws, segments(fragment, layout, "rda")), expected)


def test_cancelling_directions_give_a_small_step():
    """Rule 8: radial · u / max(‖u‖, ε) with ε = 1e-3, because u is noise if directions cancel."""
    (v,) = vectors(1)
    noise = 1e-5 * phi(torch.randn(N, generator=torch.Generator().manual_seed(9)))
    found = merge([phi(v) + noise, -phi(v)], [1, 1], rda())
    assert float(found.norm()) < 0.02


def test_the_guard_leaves_a_thousand_orthogonal_learners_alone():
    """Rule 8: ‖u‖ = 1/√M of orthogonal directions is far above ε."""
    count = 1000
    found = merge(list(torch.eye(count)), [1.0] * count, rda(count))
    assert float(found.norm()) == pytest.approx(1, rel=1e-5)


def test_the_same_order_gives_the_same_bits():
    """Rule 8: the fold order is on the tape, and the same order gives the same bits."""
    vs, ws = vectors(7), [1.5**m for m in range(7)]
    assert torch.equal(merge(vs, ws, rda()), merge(vs, ws, rda()))


def test_other_orders_agree():
    """Rule 8: other orders agree to 1e-6 relative."""
    vs, ws = vectors(7), [1.5**m for m in range(7)]
    for kind in (rda(), mean()):
        one, two = merge(vs, ws, kind), merge(vs[::-1], ws[::-1], kind)
        assert float((one - two).norm() / one.norm()) < 1e-6


def test_memory_does_not_grow_with_the_learners():
    """Rule 8: memory O(fragment)."""

    def held(count):
        accumulator = Accumulator(N, rda())
        for v in vectors(count):
            accumulator.add(v, 1.0)
        return sum(tensor.nbytes for tensor in accumulator.state_dict().values())

    assert held(1) == held(20) <= 4 * N + 100


def test_a_tree_of_aggregators_gives_the_same_merge():
    """Rule 8: sums of sums are exact; K counts learners, not messages."""
    vs, ws = vectors(6), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    leaves = []
    for low, high in pairwise([0, 1, 4, 6]):
        leaf = Accumulator(N, rda())
        for v, w in zip(vs[low:high], ws[low:high], strict=True):
            leaf.add(v, w)
        leaves.append(leaf)
    root = Accumulator.from_state_dict(leaves[0].state_dict())
    root.combine(leaves[1])
    root.combine(Accumulator.from_state_dict(leaves[2].state_dict()))
    assert root.count == 6
    close(root.result(), naive_rda(vs, ws))


def test_a_contribution_in_parts_has_one_norm():
    """Rule 8: a contribution may arrive in parts, whose squared norms are summed before φ."""
    vs, ws = vectors(3), [1.0, 2.0, 3.0]
    accumulator = Accumulator(N, rda())
    for v, w in zip(vs, ws, strict=True):
        parts = Contribution(N, rda())
        parts.add(30, v[30:])
        parts.add(0, v[:30])
        accumulator.add_contribution(parts, w)
    close(accumulator.result(), naive_rda(vs, ws))


def test_sums_are_in_fp32():
    """Streaming DiLoCo: sums are in fp32 for any codec, because bf16 sums would stop at 256."""
    one = codec("bf16").decode(codec("bf16").encode(torch.ones(1)), 1)
    accumulator = Accumulator(1, mean(1))
    for _ in range(1000):
        accumulator.add(one, 1.0)
    assert float(accumulator.state_dict()["sums"]) == 1000


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.9), (0.7, 0.5), (1.0, 0.0)])
def test_nesterov_equals_the_equation(lr, momentum):
    """Outer optimizer: b ← μb + Δ;  Θ ← Θ - η(Δ + μb)."""
    optimizer, master = NesterovSGD(lr, momentum), torch.ones(N)
    theta, b = torch.ones(N).double(), torch.zeros(N).double()
    for delta in vectors(5):
        optimizer.step(master, delta)
        b = momentum * b + delta
        theta = theta - lr * (delta + momentum * b)
    close(master, theta.float(), rtol=1e-5)


def test_equal_gradients_are_amplified_by_one_over_one_minus_momentum():
    """The effective rate is η/(1-μρ): equal gradients (ρ = 1) step by η/(1-μ) each."""
    optimizer, master = NesterovSGD(0.7, 0.5), torch.zeros(1)
    for _ in range(60):
        before = float(master)
        optimizer.step(master, torch.ones(1))
    assert before - float(master) == pytest.approx(0.7 / (1 - 0.5), rel=1e-4)


def test_the_outer_gradient_points_from_the_learner_to_its_start():
    """Algorithm 2, Δ = Θ_p - θ_{m,p}: with η = 1 and μ = 0, one learner's result is adopted."""
    model = nn.Linear(4, 3)
    layout = layout_of(model)
    (fragment,) = partition(layout, 1)
    tensors = tensors_of(model, layout)
    master = gather(fragment, tensors)
    scatter(fragment, master + 0.1 * vectors(1, 15)[0], tensors)
    theta = gather(fragment, tensors)
    d = contribution(fragment, layout, theta, master)
    merged = merge([d], [token_weight(100, 5)], segments(fragment, layout, "rda"))
    NesterovSGD(1.0, 0.0).step(master, -merged)
    close(master, theta)


def test_federated_averaging_is_a_special_case():
    """Rule 14, FedAvg: mean, η = 1, μ = 0 gives the weighted average of the parameters."""
    start, *thetas = vectors(4)
    ws = [1.0, 2.0, 3.0]
    master = start.clone()
    merged = merge([theta - start for theta in thetas], ws, mean())
    NesterovSGD(1.0, 0.0).step(master, -merged)
    close(master, naive_mean(thetas, ws), rtol=1e-5)


SIZES = [64, 48, 48, 30, 30, 22, 16, 16, 9, 9, 4, 4, 4, 2, 1, 1]


def layout_of_sizes(sizes):
    return Layout(
        tuple(
            TensorSpec(f"blocks.{i // 4}.t{i}", (n,), "float32", "matrix")
            for i, n in enumerate(sizes)
        )
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_balanced_tensor_equals_the_naive_version(count):
    """Appendix C, balanced tensor: by size, descending, each into the smallest bin."""
    bins = [[] for _ in range(count)]
    for index, size in sorted(enumerate(SIZES), key=lambda item: -item[1]):
        min(bins, key=lambda held: sum(s for _, s in held)).append((index, size))
    fragments = partition(layout_of_sizes(SIZES), count)
    found = [[(piece.tensor, piece.numel) for piece in f.pieces] for f in fragments]
    assert found == [sorted(held) for held in bins]


def test_fragments_are_disjoint_and_cover_the_model():
    """The P fragments are disjoint parts of the parameters."""
    layout = layout_of_sizes(SIZES)
    for count in (1, 3, 16, 40):
        seen = torch.zeros(layout.numel)
        starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
        for fragment in partition(layout, count):
            for piece in fragment.pieces:
                seen[starts[piece.tensor] + piece.start : starts[piece.tensor] + piece.stop] += 1
        assert torch.equal(seen, torch.ones(layout.numel))


def test_the_balanced_partition_has_the_lowest_peak():
    """Appendix C: layers are bursty, whole tensors uneven, and balanced has the lowest peak."""
    layout = layout_of_sizes(SIZES)
    peak = {
        strategy: max(fragment.numel for fragment in partition(layout, 4, strategy))
        for strategy in ("balanced", "tensor", "layer-strided", "layer-sequential")
    }
    assert peak["balanced"] == min(peak.values()) < min(peak["tensor"], peak["layer-strided"])


def test_layers_strided_and_sequential():
    """Appendix C: a layer fragment is every P-th layer, or consecutive layers."""
    layout = layout_of_sizes(SIZES)  # four layers of four tensors

    def layers(strategy):
        return [
            sorted({piece.tensor // 4 for piece in fragment.pieces})
            for fragment in partition(layout, 2, strategy)
        ]

    assert layers("layer-strided") == [[0, 2], [1, 3]]
    assert layers("layer-sequential") == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("fragments", "period"), [(24, 24), (8, 24), (5, 24), (1, 24), (3, 100)])
def test_offsets_are_distinct_and_spread(fragments, period):
    """Offsets t_p are distinct in 0…H-1, by the rule t_p = ⌊p·H/P⌋."""
    options = Options(fragments=fragments, period=period)
    found = tuple(options.phase(p) for p in range(fragments))
    assert found == tuple(math.floor(p * period / fragments) for p in range(fragments))
    assert len(set(found)) == fragments
    assert 0 <= min(found) <= max(found) < period


def test_with_as_many_fragments_as_steps_one_is_due_in_every_step():
    """P = H: exactly one fragment leaves in every step."""
    assert [Options(fragments=24, period=24).due(step) for step in range(24)] == [
        (step,) for step in range(24)
    ]


def test_tied_weights_are_merged_once():
    """Rule 9: tied weights are one piece by storage, and the embedding rule applies."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    layout = layout_of(model)
    (fragment,) = partition(layout, 1)
    assert fragment.numel == 24
    assert segments(fragment, layout, "rda") == (Segment(0, 24, "mean"),)


def test_the_published_copy_follows_the_recurrence():
    """Rule 5: Θ̂_{v+1} = Θ̂_v + dec(enc(Θ_{v+1} - Θ̂_v)), with the same bits everywhere."""
    bf16, published = codec("bf16"), torch.zeros(N)
    for master in vectors(4):
        expected = published + bf16.decode(bf16.encode(master - published), N)
        receiver = published.clone()
        receive(receiver, publish(master, published, bf16), bf16)
        assert torch.equal(published, expected)
        assert torch.equal(receiver, expected)


def test_values_lost_by_rounding_are_sent_later():
    """Rule 5: steps too small for one message add up in the master until they are sent."""
    bf16, published = codec("bf16"), torch.zeros(N)
    master = torch.zeros(N)
    for step in vectors(100):
        master += 1e-3 * step
        publish(master, published, bf16)
        assert float((master - published).abs().max()) <= 2**-8 * 0.01


def test_no_training_gives_exactly_zero():
    """Rule 6: d = θ - cast(Θ̂, dtype of θ) is exactly 0 without training, also in bf16."""
    model = nn.Linear(5, 5, dtype=torch.bfloat16)
    layout = layout_of(model)
    (fragment,) = partition(layout, 1)
    (published,) = vectors(1, 30)
    scatter(fragment, published, tensors_of(model, layout))
    theta = gather(fragment, tensors_of(model, layout))
    assert not torch.equal(theta, published)
    assert torch.count_nonzero(contribution(fragment, layout, theta, published)) == 0


def test_differences_survive_bf16_where_parameters_do_not():
    """Rule 6: the wire carries enc(d), never bf16 parameters, whose rounding exceeds the change."""
    start, direction = vectors(2)
    theta = start + 1e-4 * direction
    d, bf16 = theta - start, codec("bf16")
    from_difference = bf16.decode(bf16.encode(d), N)
    from_parameters = bf16.decode(bf16.encode(theta), N) - start
    assert float((from_difference - d).norm() / d.norm()) < 2**-8
    assert float((from_parameters - d).norm() / d.norm()) > 1
