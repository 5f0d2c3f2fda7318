"""Quotas: the shares of parties in a merge, and the orders that limit them."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from decoupled_diloco.merge.plan import token_weight
from decoupled_diloco.protocol.quotas import Quota, factors, party_of, weight_of


def quotas(*limits: tuple[float, float]) -> list[Quota]:
    return [Quota(f"p{i}", (f"p{i}-*",), *limit) for i, limit in enumerate(limits)]


def shares(limits: list[Quota], weights: list[float]) -> list[float]:
    """The shares after the limits; a party with the weight 0 is absent."""
    named = [(quota.party, weight) for quota, weight in zip(limits, weights, strict=True) if weight]
    by = dict(factors(limits, named))
    limited = [weight * by.get(party, 1.0) for party, weight in named]
    return [each / math.fsum(limited) for each in limited]


def test_a_merge_within_all_limits_does_not_change() -> None:
    assert factors(quotas((0.2, 0.5), (0.1, 0.9)), [("p0", 1.0), ("p1", 2.0)]) == ()
    assert factors([], [("", 1.0), ("", 2.0)]) == ()


def test_a_party_above_its_limit_has_its_limit_and_the_others_keep_their_proportion() -> None:
    assert shares(quotas((0, 0.5), (0, 1), (0, 1)), [8, 3, 1]) == pytest.approx([0.5, 0.375, 0.125])


def test_a_party_below_its_limit_is_raised() -> None:
    assert shares(quotas((0.25, 1), (0, 1), (0, 1)), [0.1, 6, 3]) == pytest.approx(
        [0.25, 0.5, 0.25]
    )


def test_a_limit_may_push_another_party_over_its_own() -> None:
    found = shares(quotas((0, 0.4), (0, 0.4), (0, 1)), [6, 3, 1])
    assert found == pytest.approx([0.4, 0.4, 0.2])


def test_upper_limits_are_relaxed_in_proportion_if_too_few_parties_take_part() -> None:
    limits = quotas((0, 0.2), (0, 0.4), (0, 0.4))
    assert factors(limits, [("p0", 7.0)]) == ()
    assert shares(limits, [1, 1, 0]) == pytest.approx([1 / 3, 2 / 3])
    assert shares(limits, [1, 1, 1]) == pytest.approx([0.2, 0.4, 0.4])


LIMITS = st.lists(st.tuples(st.floats(0, 0.2), st.floats(0.21, 1)), min_size=1, max_size=5)
WEIGHTS = st.lists(st.floats(1e-3, 1e6), min_size=5, max_size=5)


@given(LIMITS, WEIGHTS)
@example([(0.0, 0.5), (0.0, 0.5)], [1.0, 1.0, 1.0, 1.0, 1.0])
def test_shares_are_within_limits_and_clipped_by_one_factor(
    limits: list[tuple[float, float]], weights: list[float]
) -> None:
    weights = weights[: len(limits)]
    found = shares(quotas(*limits), weights)
    before = [weight / math.fsum(weights) for weight in weights]
    assert math.fsum(found) == pytest.approx(1)
    most = math.fsum(limit for _, limit in limits)
    if most <= 1:
        assert found == pytest.approx([limit / most for _, limit in limits])
        return
    for (least, limit), share in zip(limits, found, strict=True):
        assert least * (1 - 1e-9) <= share <= limit * (1 + 1e-9)
    inside = [
        share / old
        for (least, limit), share, old in zip(limits, found, before, strict=True)
        if least * (1 + 1e-6) < share < limit * (1 - 1e-6)
    ]
    assert not inside or max(inside) == pytest.approx(min(inside), rel=1e-6)


def test_the_weight_is_that_of_the_merge_arithmetic() -> None:
    for steps, tokens in ((1.0, 1.0), (7.0, 4096.0), (24.0, 1e9)):
        assert weight_of("tokens", steps, tokens, 1.0) == token_weight(tokens, steps)
        assert weight_of("tokens", steps, tokens, 0.5) == 0.5 * token_weight(tokens, steps)


def test_a_learner_is_found_by_name_or_pattern() -> None:
    limits = [Quota("a", ("a", "a-*")), Quota("b", ("b",))]
    assert [party_of(limits, name) for name in ("a", "a-1", "b", "b-1")] == ["a", "a", "b", ""]
