import math

import pytest
import torch
from safetensors.torch import load, save

from decoupled_diloco.errors import MergeError
from decoupled_diloco.merge import Accumulator, Contribution, Segment, merge

N = 10
SEGMENTS = (Segment(0, 4, "rda"), Segment(4, 7, "mean"), Segment(7, 10, "rda"))


def vectors(count, numel=N):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def filled(count, segments=SEGMENTS):
    accumulator = Accumulator(N, segments)
    for weight, vector in enumerate(vectors(count), start=1):
        accumulator.add(vector, weight)
    return accumulator


class TestAdd:
    def test_counts_learners_and_weights(self):
        accumulator = filled(3)
        assert (accumulator.count, accumulator.weight) == (3, 6.0)

    def test_the_vector_is_neither_changed_nor_kept(self):
        (vector,) = vectors(1)
        before = vector.clone()
        accumulator = Accumulator(N, SEGMENTS)
        accumulator.add(vector, 2.0)
        assert torch.equal(vector, before)
        vector.zero_()
        torch.testing.assert_close(accumulator.result(), before, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf])
    def test_a_weight_must_be_positive_and_finite(self, weight):
        with pytest.raises(MergeError, match="not positive and finite: leave"):
            Accumulator(N, SEGMENTS).add(torch.ones(N), weight)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("place", range(0, N, 3))
    def test_a_value_that_is_not_finite_changes_nothing(self, value, place):
        accumulator = filled(2)
        before = accumulator.result()
        vector = torch.ones(N)
        vector[place] = value
        with pytest.raises(MergeError, match="not finite"):
            accumulator.add(vector, 1.0)
        assert torch.equal(accumulator.result(), before)
        assert accumulator.count == 2

    @pytest.mark.parametrize(
        ("vector", "message"),
        [
            (torch.ones(9), "9 elements, the fragment has 10"),
            (torch.ones(11), "11 elements, the fragment has 10"),
            (torch.ones(2, 5), "flat float32"),
            (torch.ones(N, dtype=torch.float64), "is float64"),
        ],
    )
    def test_wrong_size_shape_or_dtype(self, vector, message):
        with pytest.raises(MergeError, match=message):
            Accumulator(N, SEGMENTS).add(vector, 1.0)

    def test_known_norms_give_the_same(self):
        norms = [float(v.norm()) for v in (torch.ones(4), torch.ones(3), torch.ones(3))]
        accumulator = Accumulator(N, SEGMENTS)
        accumulator.add(torch.ones(N), 3.0, norms)
        torch.testing.assert_close(accumulator.result(), torch.ones(N), rtol=1e-6, atol=0)

    @pytest.mark.parametrize(
        ("norms", "message"),
        [([1.0], "1 norms were given for 3"), ([1, 1, math.nan], "segment 2"), ([-1, 1, 1], "-1")],
    )
    def test_wrong_norms(self, norms, message):
        with pytest.raises(MergeError, match=message):
            Accumulator(N, SEGMENTS).add(torch.ones(N), 1.0, norms)

    def test_wrong_size_with_known_norms(self):
        with pytest.raises(MergeError, match="9 elements, the fragment has 10"):
            Accumulator(N, SEGMENTS).add(torch.ones(9), 1.0, [1, 1, 1])


class TestResult:
    def test_nothing_added(self):
        with pytest.raises(MergeError, match="weights sum to 0"):
            Accumulator(N, SEGMENTS).result()

    def test_fills_a_given_vector_and_can_be_called_again(self):
        accumulator, out = filled(3), torch.empty(N)
        assert accumulator.result(out) is out
        assert torch.equal(accumulator.result(), out)

    def test_overflow_raises(self):
        accumulator = Accumulator(2, [Segment(0, 2, "mean")])
        accumulator.add(torch.full((2,), 3e38), 10.0)
        with pytest.raises(MergeError, match="1 contributions overflowed"):
            accumulator.result()

    @pytest.mark.parametrize("scale", [1e-38, 1e-25, 1e25, 1e37])
    @pytest.mark.parametrize("weight", [1e-6, 1e12])
    def test_rda_of_extreme_lengths(self, scale, weight):
        vector = torch.tensor([3.0, 4.0]) * scale
        accumulator = Accumulator(2, [Segment(0, 2, "rda")])
        accumulator.add(vector, weight)
        torch.testing.assert_close(accumulator.result(), vector, rtol=1e-6, atol=0)

    def test_zero_vectors_merge_to_zero(self):
        zero = torch.zeros(N)
        assert torch.equal(merge([zero, zero], [1, 2], SEGMENTS), zero)

    def test_a_zero_vector_halves_the_length_and_keeps_the_direction(self):
        found = merge([torch.zeros(2), torch.tensor([3.0, 4.0])], [1, 1], [Segment(0, 2, "rda")])
        torch.testing.assert_close(found, torch.tensor([1.5, 2.0]))

    def test_cancelling_directions_give_a_small_step(self):
        one = torch.tensor([1.0, 0.0])
        two = torch.tensor([-1.0, 1e-6])
        found = merge([one, two], [1, 1], [Segment(0, 2, "rda")], epsilon=1e-3)
        assert float(found.norm()) == pytest.approx(5e-7 / 1e-3, rel=1e-3)


class TestCombine:
    def test_equals_adding_everything_to_one(self):
        left, right, flat = (Accumulator(N, SEGMENTS) for _ in range(3))
        for weight, vector in enumerate(vectors(5), start=1):
            (left if weight < 3 else right).add(vector, weight)
            flat.add(vector, weight)
        left.combine(right)
        assert (left.count, left.weight) == (5, flat.weight)
        torch.testing.assert_close(left.result(), flat.result(), rtol=1e-6, atol=1e-7)

    def test_an_empty_one_changes_nothing(self):
        full, empty = filled(2), Accumulator(N, SEGMENTS)
        before = full.result()
        full.combine(empty)
        empty.combine(full)
        assert torch.equal(full.result(), before)
        assert torch.equal(empty.result(), before)

    @pytest.mark.parametrize(
        "other",
        [
            Accumulator(N, [Segment(0, N, "mean")]),
            Accumulator(N, SEGMENTS, epsilon=0.1),
        ],
    )
    def test_another_kind_is_rejected(self, other):
        with pytest.raises(MergeError, match="do not match"):
            filled(1).combine(other)


class TestState:
    @pytest.mark.parametrize("count", [0, 3])
    def test_round_trip_through_safetensors(self, count):
        accumulator = filled(count)
        again = Accumulator.from_state_dict(load(save(accumulator.state_dict())))
        assert (again.count, again.weight) == (accumulator.count, accumulator.weight)
        accumulator.add(torch.ones(N), 1.5)
        again.add(torch.ones(N), 1.5)
        assert torch.equal(again.result(), accumulator.result())

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("sums", torch.full((N,), math.nan)),
            ("sums", torch.zeros(N - 1)),
            ("sums", torch.zeros(N, dtype=torch.float64)),
            ("norm_sums", torch.zeros(2, dtype=torch.float64)),
            ("norm_sums", torch.full((3,), -1.0, dtype=torch.float64)),
            ("weight", torch.tensor([math.inf], dtype=torch.float64)),
            ("weight", torch.tensor([0.0], dtype=torch.float64)),
            ("weight", torch.tensor([-1.0], dtype=torch.float64)),
            ("count", torch.tensor([-1])),
            ("count", torch.tensor([0])),
            ("epsilon", torch.tensor([0.0], dtype=torch.float64)),
            ("segment_bounds", torch.tensor([[0, 4], [5, 7], [7, 10]])),
            ("segment_bounds", torch.tensor([[0, 4], [4, 4], [4, 10]])),
            ("segment_is_rda", torch.tensor([True])),
        ],
    )
    def test_a_state_from_a_peer_is_validated(self, name, value):
        with pytest.raises(MergeError, match="accumulator state"):
            Accumulator.from_state_dict({**filled(2).state_dict(), name: value})

    def test_missing_and_unknown_tensors(self):
        state = filled(1).state_dict()
        with pytest.raises(MergeError, match="expected"):
            Accumulator.from_state_dict({**state, "more": torch.zeros(1)})
        del state["sums"]
        with pytest.raises(MergeError, match="expected"):
            Accumulator.from_state_dict(state)


class TestContribution:
    def test_slices_in_any_order_equal_the_whole(self):
        (vector,) = vectors(1)
        contribution = Contribution(N, SEGMENTS)
        for start, stop in ((5, 9), (0, 2), (9, 10), (2, 5)):
            assert not contribution.complete
            contribution.add(start, vector[start:stop])
        assert contribution.complete
        in_parts, at_once = filled(2), filled(2)
        in_parts.add_contribution(contribution, 3.0)
        at_once.add(vector, 3.0)
        assert in_parts.count == 3
        torch.testing.assert_close(in_parts.result(), at_once.result(), rtol=1e-6, atol=1e-7)

    def test_missing_parts(self):
        contribution = Contribution(N, SEGMENTS)
        contribution.add(2, torch.ones(3))
        with pytest.raises(MergeError, match="3 of 10 elements: parts are missing"):
            Accumulator(N, SEGMENTS).add_contribution(contribution, 1.0)

    @pytest.mark.parametrize(
        ("start", "numel", "message"),
        [(1, 3, "overlaps slice 2:5"), (-1, 2, "outside"), (9, 2, "outside"), (7, 0, "outside")],
    )
    def test_overlap_and_overhang(self, start, numel, message):
        contribution = Contribution(N, SEGMENTS)
        contribution.add(2, torch.ones(3))
        with pytest.raises(MergeError, match=message):
            contribution.add(start, torch.ones(numel))

    def test_a_bad_slice_leaves_the_rest_usable(self):
        contribution = Contribution(N, SEGMENTS)
        bad = torch.ones(N)
        bad[8] = math.nan
        with pytest.raises(MergeError, match="elements 7:10 hold a value that is not finite"):
            contribution.add(0, bad)
        contribution.add(0, torch.ones(N))
        assert contribution.norms == (2.0, 0.0, pytest.approx(math.sqrt(3)))


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [Segment(0, 9, "mean")],
        [Segment(1, 10, "mean")],
        [Segment(0, 4, "rda"), Segment(5, 10, "rda")],
        [Segment(0, 6, "rda"), Segment(5, 10, "rda")],
        [Segment(0, 0, "rda"), Segment(0, 10, "rda")],
    ],
)
def test_segments_must_cover_the_fragment(segments):
    with pytest.raises(AssertionError, match="segment"):
        Accumulator(N, segments)
