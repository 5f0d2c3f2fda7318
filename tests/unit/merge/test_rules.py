"""A fragment merged by a user's rule: the rule's inputs, and the handling of its errors."""

import itertools
from uuid import uuid4

import pytest
import torch

from decoupled_diloco.errors import ConfigError, MergeError
from decoupled_diloco.merge import Contribution, Segment
from decoupled_diloco.merge.rules import RuleAccumulator, register_rule, rule_named

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
