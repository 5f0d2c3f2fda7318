"""A fragment merged by a user's rule: the rule's inputs, and the handling of its errors."""

import itertools
from functools import partial
from uuid import uuid4

import pytest
import torch

from decoupled_diloco.config.sync import ROBUST_RULES
from decoupled_diloco.errors import ConfigError, MergeError
from decoupled_diloco.merge import Contribution, Segment, layout_of
from decoupled_diloco.merge.fragments import partition, segments
from decoupled_diloco.merge.outer import make_outer, momentum_of
from decoupled_diloco.merge.rules import (
    ROBUST,
    RuleAccumulator,
    geometric_median,
    register_rule,
    rule_named,
    trimmed_mean,
)

PIECES = (Segment(0, 3, "own"), Segment(3, 5, "own"), Segment(5, 7, "buffer"))


def registered(function):
    name = f"tests:{function.__name__}-{uuid4().hex}"
    register_rule(name, function)
    return name


def contribution(values, segments=PIECES, cuts=()):
    vector = torch.tensor(values, dtype=torch.float32)
    whole = Contribution(vector.numel(), segments)
    for start, stop in itertools.pairwise((0, *cuts, vector.numel())):
        whole.add(start, vector[start:stop])
    return whole


def median(contributions, weights):
    return contributions.median(0).values


def test_each_piece_is_merged_alone_and_buffers_by_their_mean():
    seen = []

    def rule(contributions, weights):
        seen.append((contributions.clone(), weights))
        return contributions.amax(0)

    merged = RuleAccumulator(registered(rule), 7, PIECES)
    seen.clear()
    merged.add_contribution(contribution([1, 2, 3, 4, 5, 6.5, 8.25]), 1.0)
    merged.add_contribution(contribution([3, 2, 1, 0, 9, 2.5, 0.25]), 3.0)
    assert merged.result().tolist() == [3, 2, 3, 4, 9, 3.5, 2.25]
    (first, weights), (second, _) = seen
    assert first.tolist() == [[1, 2, 3], [3, 2, 1]]
    assert second.tolist() == [[4, 5], [0, 9]]
    assert weights.tolist() == [0.25, 0.75]


def test_a_contribution_in_slices_of_any_order_is_one_vector_to_the_rule():
    name = registered(median)
    whole, cut = (RuleAccumulator(name, 7, PIECES) for _ in range(2))
    values = [1.0, -2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    whole.add_contribution(contribution(values), 2.0)
    parts = Contribution(7, PIECES)
    for start, stop in ((4, 7), (0, 2), (2, 4)):
        parts.add(start, torch.tensor(values[start:stop]))
    cut.add_contribution(parts, 2.0)
    assert torch.equal(whole.result(), cut.result())


def test_a_fragment_with_only_buffers():
    buffers = (Segment(0, 2, "one"),)
    merged = RuleAccumulator(registered(median), 2, buffers)
    merged.add_contribution(contribution([1, 2], buffers), 1.0)
    merged.add_contribution(contribution([3, 4], buffers), 2.0)
    assert merged.result().tolist() == [3, 4]


def test_a_class_merges_as_contributions_arrive():
    class Clipped:
        def __init__(self, numel):
            self.sums, self.weight = torch.zeros(numel), 0.0

        def add(self, vector, weight):
            self.sums += weight * vector / max(1.0, float(vector.norm()))
            self.weight += weight

        def result(self):
            return self.sums / self.weight

    merged = RuleAccumulator(registered(Clipped), 2, (Segment(0, 2, "own"),))
    merged.add_contribution(contribution([3, 4], merged._segments), 1.0)
    merged.add_contribution(contribution([0, 1], merged._segments), 1.0)
    assert merged.result().tolist() == pytest.approx([0.3, 0.9])


def rows_clipped(contributions, weights, shape):
    merged = (weights @ contributions).view(shape[0], -1)
    return (merged / merged.norm(dim=1, keepdim=True).clamp(min=1)).flatten()


class RowsClipped:
    def __init__(self, numel, *, shape=None):
        self.sum, self.weight, self.shape = torch.zeros(numel), 0.0, shape

    def add(self, vector, weight):
        self.sum += weight * vector
        self.weight += weight

    def result(self):
        return rows_clipped(self.sum[None] / self.weight, torch.ones(1), self.shape)


@pytest.mark.parametrize("rule", [rows_clipped, RowsClipped])
def test_a_rule_can_use_the_shape_of_a_tensor(rule):
    layout = layout_of(torch.nn.Linear(2, 3))
    (fragment,) = partition(layout, 1)
    parts = segments(fragment, layout, "own")
    assert [part.shape for part in parts] == [(3, 2), (3,)]
    merged = RuleAccumulator(registered(rule), 9, parts)
    merged.add_contribution(contribution([3, 4, 0, 0.5, 6, 8, 2, 0.5, 0], parts), 1.0)
    expected = [0.6, 0.8, 0, 0.5, 0.6, 0.8, 1, 0.5, 0]
    assert merged.result().tolist() == pytest.approx(expected)


def test_a_class_cannot_use_the_momentum():
    class Rule:
        def __init__(self, numel, momentum):
            pass

    with pytest.raises(ConfigError, match="a function with two one named momentum"):
        registered(Rule)


def test_a_part_of_a_tensor_has_the_shape_of_a_vector():
    layout = layout_of(torch.nn.Embedding(8, 2))
    shapes = []

    def rule(contributions, weights, shape):
        shapes.append(shape)
        return contributions[0]

    name = registered(rule)
    shapes.clear()
    for fragment in partition(layout, 2):
        parts = segments(fragment, layout, "own")
        merged = RuleAccumulator(name, 8, parts)
        merged.add_contribution(contribution([1] * 8, parts), 1.0)
        merged.result()
    assert shapes == [(8,), (8,)]


def following(contributions, weights, momentum):
    return weights @ contributions + 10 * momentum


@pytest.mark.parametrize("optimizer", ["nesterov", "SGD"])
def test_a_rule_can_use_the_momentum_of_the_outer_optimizer(optimizer):
    outer = make_outer(optimizer, 1.0, 0.5)(7)

    def merged():
        momentum = partial(momentum_of, outer)
        each = RuleAccumulator(registered(following), 7, PIECES, momentum=momentum)
        each.add_contribution(contribution([1] * 7), 1.0)
        return each.result().tolist()

    assert merged() == [1] * 7  # no momentum before the first step
    outer.step(torch.zeros(7), -torch.arange(7.0))
    # An outer gradient is a negated contribution; the two buffers have no momentum.
    assert merged() == [1 + 10 * i for i in range(5)] + [1, 1]
    assert momentum_of(make_outer("Adam", 1.0)(7)) is None


def test_missing_parts_and_invalid_weights_are_rejected():
    merged = RuleAccumulator(registered(median), 7, PIECES)
    half = Contribution(7, PIECES)
    half.add(0, torch.ones(3))
    with pytest.raises(MergeError, match="parts are missing"):
        merged.add_contribution(half, 1.0)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(MergeError, match="is not positive and finite"):
            merged.add_contribution(contribution([1] * 7), weight)


def test_a_rule_that_fails_later_fails_that_merge():
    def rule(contributions, weights):
        if len(contributions) == 2:
            raise ValueError("two are company")
        return contributions[0] * (float("nan") if len(contributions) == 4 else 1)

    name = registered(rule)
    for count, message in ((2, r"raises ValueError\('two are company'\)"), (4, "not finite")):
        merged = RuleAccumulator(name, 7, PIECES)
        for _ in range(count):
            merged.add_contribution(contribution([1] * 7), 1.0)
        with pytest.raises(MergeError, match=message):
            merged.result()


def test_nothing_to_merge():
    with pytest.raises(MergeError, match="nothing to merge"):
        RuleAccumulator(registered(median), 7, PIECES).result()


def test_a_rule_must_work_for_one_contribution_of_one_element():
    def std(contributions, weights):
        return contributions.std(0)

    with (
        pytest.warns(UserWarning, match="degrees of freedom"),
        pytest.raises(ConfigError, match=r"fails for 1 contributions of 1 elements: .*not finite"),
    ):
        registered(std)


def test_a_rule_that_was_not_loaded():
    with pytest.raises(ConfigError, match="is not loaded in this process"):
        rule_named("nobody:here")


def merged_by(rule, rows, weights, trim=0.2):
    """Merge rows of one piece with a robust rule."""
    numel = len(rows[0])
    segments = (Segment(0, numel, "own"),)
    accumulator = RuleAccumulator(rule, numel, segments, trim)
    for row, weight in zip(rows, weights, strict=True):
        accumulator.add_contribution(contribution(row, segments), weight)
    return accumulator.result()


def test_the_settings_name_exactly_the_robust_rules():
    assert tuple(ROBUST) == ROBUST_RULES


@pytest.mark.parametrize("rule", ROBUST_RULES)
@pytest.mark.parametrize("bad", ["flipped", "large", "noise"])
def test_a_robust_rule_stays_near_the_honest_learners(rule, bad):
    random = torch.Generator().manual_seed(7)
    honest = 1.0 + 0.1 * torch.randn(7, 500, generator=random)
    other = {
        "flipped": -honest[0],
        "large": 1e6 * honest[0],
        "noise": 1e3 * torch.randn(500, generator=random),
    }[bad]
    found = merged_by(rule, [*honest.tolist(), other.tolist()], [1.0] * 8)
    assert float((found - 1.0).abs().max()) < 0.3
    assert float((found - honest.mean(0)).norm()) < 1.2
    assert float((torch.stack([*honest, other]).mean(0) - 1.0).norm()) > 5.0  # the mean is not


@pytest.mark.parametrize("rule", ROBUST_RULES)
def test_a_robust_rule_of_equal_or_single_contributions_returns_them(rule):
    for count in (1, 2, 5):
        rows = [[3.0, -1.5, 0.0]] * count
        assert merged_by(rule, rows, range(1, count + 1)).tolist() == pytest.approx(rows[0])
    assert merged_by(rule, [[0.0, 0.0]] * 3, [1.0] * 3).tolist() == [0.0, 0.0]


def test_a_median_counts_weights_and_takes_the_middle_of_two():
    rows = [[1.0], [2.0], [10.0], [50.0]]
    assert merged_by("median", rows, [1, 1, 1, 1]).tolist() == pytest.approx([6.0])
    assert merged_by("median", rows, [4, 1, 1, 1]).tolist() == pytest.approx([1.0])
    assert merged_by("median", rows[:3], [1, 1, 1]).tolist() == pytest.approx([2.0])


def test_a_trimmed_mean_counts_the_rest_of_a_weight_at_the_border():
    rows = [[0.0], [1.0], [2.0], [30.0]]
    assert merged_by("trimmed-mean", rows, [1] * 4, 0.25).tolist() == pytest.approx([1.5])
    # Half of the outer weights count: (0.5·0 + 1 + 2 + 0.5·30) / 3.
    assert merged_by("trimmed-mean", rows, [1] * 4, 0.125).tolist() == pytest.approx([6.0])


def test_the_blocks_of_a_long_vector_are_those_of_the_whole():
    random = torch.Generator().manual_seed(1)
    rows, weights = torch.randn(5, 200_001, generator=random), torch.full((5,), 0.2)
    assert torch.equal(
        trimmed_mean(rows, weights, 0.2)[-3:], trimmed_mean(rows[:, -3:], weights, 0.2)
    )
    assert torch.allclose(
        trimmed_mean(rows, weights, 0.2), rows.sort(0).values[1:4].mean(0), atol=1e-6
    )


def test_a_geometric_median_has_the_least_sum_of_distances():
    random = torch.Generator().manual_seed(2)
    rows, weights = torch.randn(6, 8, generator=random), torch.rand(6, generator=random)
    weights /= weights.sum()

    def distances(point):
        return float((weights * (rows - point).norm(dim=1)).sum())

    found = geometric_median(rows, weights)
    for _ in range(50):
        assert distances(found) <= distances(found + 0.01 * torch.randn(8, generator=random))
