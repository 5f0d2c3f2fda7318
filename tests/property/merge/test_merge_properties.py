"""Properties of merging for all fragments, weights, orders and layouts."""

from itertools import pairwise, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import (
    EPSILON,
    Accumulator,
    Contribution,
    Layout,
    Segment,
    TensorSpec,
    cast_like,
    codec,
    contribution,
    gather,
    merge,
    partition,
    publish,
    receive,
    scatter,
    segments,
)
from decoupled_diloco.merge.blocks import BLOCK, ROW

small = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def rounds(draw, learners_min=1):
    """Draw vectors, weights and segments of a round, sometimes zero or with different norms."""
    numel = draw(st.integers(1, 40) | st.sampled_from([ROW + 3, 3 * ROW, BLOCK + 7]))
    learners = draw(st.integers(learners_min, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scales = draw(
        st.lists(st.sampled_from([0.0, 1e-6, 1.0, 1e4]), min_size=learners, max_size=learners)
    )
    vectors = [scale * torch.randn(numel, generator=generator) for scale in scales]
    weights = draw(st.lists(st.floats(1e-2, 1e8), min_size=learners, max_size=learners))
    cuts = draw(st.lists(st.integers(1, numel), max_size=4))
    kinds = st.sampled_from(["rda", "mean"])
    bounds = pairwise(sorted({0, numel, *cuts}))
    return vectors, weights, tuple(Segment(a, b, draw(kinds)) for a, b in bounds)


def assert_agree(one, two, vectors, weights, parts):
    """Check that both agree to 1e-6 of the longest contribution, segment by segment.

    RDA scales the merged direction u to length 1, including its rounding error. The factor is
    1/‖u‖, which is at most 1/ε if directions cancel.
    """
    for part in parts:
        place = slice(part.start, part.stop)
        held = [vector[place].double() for vector in vectors]
        allowed = 1e-6 * max(float(v.norm()) for v in held)
        if part.merge == "rda":
            units = (
                w * v / max(float(v.norm()), 1e-300) for v, w in zip(held, weights, strict=True)
            )
            allowed /= max(float(sum(units).norm()) / sum(weights), EPSILON)
        assert float((one[place] - two[place]).double().norm()) <= allowed


@small
@given(rounds(learners_min=2), st.randoms(use_true_random=False))
def test_merge_ignores_order(round_, rng):
    vectors, weights, parts = round_
    order = list(range(len(vectors)))
    rng.shuffle(order)
    one = merge(vectors, weights, parts)
    two = merge([vectors[m] for m in order], [weights[m] for m in order], parts)
    assert_agree(one, two, vectors, weights, parts)


@small
@given(rounds(), st.floats(1e-6, 1e6))
def test_weights_ignore_a_common_scale(round_, scale):
    vectors, weights, parts = round_
    one = merge(vectors, weights, parts)
    two = merge(vectors, [scale * weight for weight in weights], parts)
    assert_agree(one, two, vectors, weights, parts)


@small
@given(rounds())
def test_one_learner_is_the_identity(round_):
    (vector, *_), (weight, *_), parts = round_
    torch.testing.assert_close(merge([vector], [weight], parts), vector, rtol=1e-6, atol=1e-38)


@small
@given(rounds(), st.data())
def test_any_tree_equals_the_flat_fold(round_, data):
    vectors, weights, parts = round_
    nodes = []
    for vector, weight in zip(vectors, weights, strict=True):
        node = Accumulator(len(vector), parts)
        node.add(vector, weight)
        nodes.append(node)
    while len(nodes) > 1:
        child = nodes.pop(data.draw(st.integers(0, len(nodes) - 1)))
        nodes[data.draw(st.integers(0, len(nodes) - 1))].combine(child)
    assert nodes[0].count == len(vectors)
    flat = merge(vectors, weights, parts)
    assert_agree(nodes[0].result(), flat, vectors, weights, parts)


@small
@given(rounds(), st.data())
def test_parts_equal_the_whole(round_, data):
    (vector, *_), (weight, *_), parts = round_
    numel = len(vector)
    cuts = data.draw(st.lists(st.integers(0, numel), max_size=5))
    slices = data.draw(st.permutations(list(pairwise(sorted({0, numel, *cuts})))))
    arriving = Contribution(numel, parts)
    for start, stop in slices:
        arriving.add(start, vector[start:stop])
    accumulator = Accumulator(numel, parts)
    accumulator.add_contribution(arriving, weight)
    torch.testing.assert_close(accumulator.result(), vector, rtol=1e-6, atol=1e-38)


@small
@given(rounds())
def test_the_merge_is_not_longer_than_the_longest_contribution(round_):
    vectors, weights, parts = round_
    found = merge(vectors, weights, parts)
    for part in parts:
        place = slice(part.start, part.stop)
        longest = max(float(v[place].norm()) for v in vectors)
        assert float(found[place].norm()) <= longest * (1 + 1e-5) + 1e-38


floats = st.floats(width=32, allow_nan=False, min_value=-(2.0**126), max_value=2.0**126)


@small
@given(st.lists(floats, min_size=1, max_size=20))
def test_codec_error_bounds(values):
    vector = torch.tensor(values, dtype=torch.float32)
    for name, bound in (("fp32", 0.0), ("bf16", 2**-8)):
        used = codec(name)
        body = used.encode(vector)
        decoded = used.decode(body, len(values))
        assert body.numel() == used.nbytes(len(values))
        error = (decoded.double() - vector.double()).abs()
        assert bool((error <= bound * vector.double().abs() + 2**-126 * bound).all())
        assert torch.equal(used.encode(decoded), body)


@small
@given(st.lists(floats, min_size=1, max_size=128))
def test_error_bounds_of_codecs_with_a_scale(values):
    vector = torch.tensor(values, dtype=torch.float32)
    for name, of_element, of_scale in (
        ("int8", 0, 0.5),
        ("int4", 0, 0.5),
        ("fp4-e3m0", 0.336, 1 / 85),
    ):
        body = codec(name).encode(vector)
        scale = float(body[:2].view(torch.bfloat16))
        error = (codec(name).decode(body, len(values)).double() - vector.double()).abs()
        bound = torch.maximum(of_element * vector.double().abs(), torch.tensor(of_scale * scale))
        assert bool((error <= bound * (1 + 2**-12) + 127 * 2**-120).all())


@small
@given(
    st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 50) | st.just(BLOCK + 1),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_published_plus_residual_is_the_master(name, numel, versions, seed):
    used, generator = codec(name), torch.Generator().manual_seed(seed)
    master, published = torch.randn(numel, generator=generator), torch.zeros(numel)
    receiver = published.clone()
    for _ in range(versions):
        master += 0.1 * torch.randn(numel, generator=generator)
        sent = (master - published).double()
        receive(receiver, publish(master, published, used), used)
        residual = master.double() - published.double()
        assert torch.equal(receiver, published)
        assert torch.equal((published.double() + residual).float(), master)
        bound = 2**-8 * sent.abs() + 2**-23 * (master.double().abs() + published.double().abs())
        assert bool((residual.abs() <= bound).all())


@st.composite
def layouts(draw, roles=("matrix", "embedding"), size_max=9, tensors_max=7):
    shapes = st.lists(st.integers(1, size_max), max_size=3)
    dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
    return Layout(
        tuple(
            TensorSpec(
                f"blocks.{index // 2}.t{index}",
                tuple(shape),
                draw(dtypes),
                draw(st.sampled_from(roles)),
            )
            for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=tensors_max)))
        )
    )


STRATEGIES = ["balanced", "tensor", "layer-strided", "layer-sequential"]


@small
@given(
    layouts(), st.integers(1, 30), st.sampled_from(STRATEGIES), st.sampled_from([None, True, False])
)
def test_every_element_is_in_exactly_one_fragment(layout, count, strategy, splittable):
    options = {} if splittable is None else {"splittable": splittable}
    limit = {
        "balanced": len(layout.tensors) if splittable is False else layout.numel,
        "tensor": len(layout.tensors),
    }.get(strategy, -(-len(layout.tensors) // 2))
    try:
        fragments = partition(layout, count, strategy, **options)
    except ConfigError:
        assert count > limit
        return
    assert count <= limit
    assert [fragment.index for fragment in fragments] == list(range(count))
    assert all(fragment.numel >= 1 for fragment in fragments)
    seen = [torch.zeros(spec.numel) for spec in layout.tensors]
    for fragment in fragments:
        assert list(fragment.pieces) == sorted(fragment.pieces, key=lambda p: (p.tensor, p.start))
        for piece in fragment.pieces:
            assert piece.numel >= 1
            seen[piece.tensor][piece.start : piece.stop] += 1
    assert all(torch.equal(times, torch.ones_like(times)) for times in seen)


def optimum(sizes, bins):
    """Return the smallest possible size of the largest bin, by exhaustive search."""
    best = sum(sizes)
    for choice in product(range(bins), repeat=len(sizes)):
        loads = [0] * bins
        for size, chosen in zip(sizes, choice, strict=True):
            loads[chosen] += size
        best = min(best, max(loads))
    return best


@small
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_balanced_is_within_four_thirds_of_the_optimum(sizes, count, whole):
    layout = Layout(
        tuple(TensorSpec(f"t{i}", (size,), "float32", "matrix") for i, size in enumerate(sizes))
    )
    if count > (len(sizes) if whole else sum(sizes)):
        return
    fragments = partition(layout, count, splittable=False) if whole else partition(layout, count)
    pieces = [piece.numel for fragment in fragments for piece in fragment.pieces]
    largest = max(fragment.numel for fragment in fragments)
    assert 3 * largest <= 4 * optimum(pieces, count)


@small
@given(layouts(), st.integers(1, 12))
def test_balanced_is_less_than_two_fair_shares(layout, count):
    if count > layout.numel:
        return
    largest = max(fragment.numel for fragment in partition(layout, count))
    assert largest < 2 * layout.numel / count + 1


@small
@given(layouts(roles=("embedding",)), st.integers(1, 12))
def test_elementwise_merged_tensors_are_balanced_to_one_unit(layout, count):
    if count > layout.numel:
        return
    loads = [fragment.numel for fragment in partition(layout, count)]
    assert max(loads) - min(loads) <= max(1, layout.numel / count / 16)


@small
@given(layouts(), st.integers(1, 8), st.sampled_from(["rda", "mean"]))
def test_segments_cover_every_fragment(layout, count, method):
    for fragment in partition(layout, min(count, layout.numel)):
        found = segments(fragment, layout, method)
        assert [0, *(s.stop for s in found)] == [*(s.start for s in found), fragment.numel]
        means = sum(s.stop - s.start for s in found if s.merge == "mean")
        embedded = sum(
            p.numel for p in fragment.pieces if layout.tensors[p.tensor].role == "embedding"
        )
        assert means == (fragment.numel if method == "mean" else embedded)


@small
@given(layouts(), st.integers(1, 8), st.integers(0, 2**32))
def test_gather_scatter_and_cast_agree(layout, count, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.tensors]
    for fragment in partition(layout, min(count, layout.numel)):
        flat = torch.randn(fragment.numel, generator=generator)
        scatter(fragment, flat, tensors)
        theta = gather(fragment, tensors)
        assert torch.equal(theta, cast_like(fragment, layout, flat))
        assert torch.count_nonzero(contribution(fragment, layout, theta, flat)) == 0


@small
@given(layouts(), layouts())
def test_fingerprints_differ_exactly_if_layouts_do(one, two):
    assert Layout.from_json(one.to_json()) == one
    assert (one.fingerprint == two.fingerprint) == (one.tensors == two.tensors)
    assert (one.describe_difference(two) is None) == (one.tensors == two.tensors)
