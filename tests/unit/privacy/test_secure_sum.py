"""A secure sum is the plain sum, bit for bit, for every pattern of dropouts (rule 24)."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge.accumulate import merge
from decoupled_diloco.merge.fixed_point import opened, reduced
from decoupled_diloco.merge.fragments import Segment
from decoupled_diloco.merge.plan import token_weight
from decoupled_diloco.privacy.secure_sum import (
    Claim,
    Cohort,
    claim_text,
    degree,
    read_claim,
    read_cohort,
)
from decoupled_diloco.protocol.quotas import Quota
from unit.privacy.sums import SEGMENTS, STEPS_MAX, SecureSum

STAGES = ("stays", "shares", "masks", "opens")
"""The stage before which a learner drops out."""


def run(sums: SecureSum, drops: Sequence[str]) -> None:
    """Run a sum; ``drops`` has the stage of each learner's dropout."""
    at = {
        stage: {n for n, d in zip(sums.names, drops, strict=True) if d == stage} for stage in STAGES
    }
    sums.claim()
    sums.share(at["shares"])
    sums.mask(at["masks"])
    opening = sums.open(at["opens"])
    opening.unmask(sums.total)


def is_opened(sums: SecureSum, drops: Sequence[str]) -> bool:
    """Return whether enough learners stay for the answers, and so for all earlier stages."""
    return drops.count("stays") >= sums.cohort.needed


def patterns() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each pattern of dropouts of 3 to 6 learners, up to the order of the learners.

    The first and the last learner of each kind differ in the signs of their masks, so each pattern
    is also reversed.
    """
    for count in range(3, 7):
        for drops in itertools.combinations_with_replacement(STAGES, count):
            yield count, drops
            yield count, drops[::-1]


def assert_equals_the_plain_sum(sums: SecureSum) -> None:
    form = sums.form
    assert torch.equal(reduced(form, sums.total.elements), reduced(form, sums.plain.elements))
    assert torch.equal(sums.total.scalars, sums.plain.scalars)


def test_every_pattern_of_dropouts_of_up_to_six_learners() -> None:
    opens = 0
    for count, drops in patterns():
        sums = SecureSum(count, threshold=2, bits=16)
        if drops.count("stays") >= max(2, count // 2 + 1):
            run(sums, drops)
            assert is_opened(sums, drops)
            assert_equals_the_plain_sum(sums)
            opens += 1
        elif set(drops) != {"shares"}:  # otherwise there are no masks, and nothing to open
            with pytest.raises((MergeError, ProtocolError)):
                run(sums, drops)
    assert opens > 50


@pytest.mark.parametrize("count", [7, 12, 32, 33, 64])
def test_random_dropouts_of_more_learners(count: int) -> None:
    rng = random.Random(count)
    for seed in range(4 if count < 32 else 1):
        drops = ["stays"] * count
        for number in rng.sample(range(count), count // 4):
            drops[number] = rng.choice(STAGES[1:])
        sums = SecureSum(count, threshold=count // 2, seed=seed)
        run(sums, drops)
        assert_equals_the_plain_sum(sums)


@pytest.mark.parametrize("merge_rule", ["rda", "mean"])
@pytest.mark.parametrize("count", [3, 8, 64])
def test_the_merge_is_that_of_the_accumulator(count: int, merge_rule: str) -> None:
    segments = (Segment(0, 40, merge_rule), Segment(40, 64, merge_rule))  # type: ignore[arg-type]
    sums = SecureSum(count, segments=segments)
    run(sums, ["stays"] * (count - 1) + ["masks"])
    weights, heaviest = sums.open().weights(token_weight)
    args = (weights, heaviest, sums.cohort.bounds)
    result = opened(sums.form, segments, sums.total, sums.base, *args).accumulator.result()
    expected = merge(*sums.contributions(), segments)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-6)


def test_buffers_are_means_and_keep_their_kind() -> None:
    segments = (Segment(0, 2, "rda"), Segment(2, 4, "buffer"), Segment(4, 5, "buffer"))
    segments = (*segments, Segment(5, 8, "buffer"), Segment(8, 9, "buffer"))
    sums = SecureSum(3, segments=segments)
    sums.base[2:] = torch.tensor([1.0, 2.0, 100.0, 1.0, 0.0, 0.0, -torch.inf])
    for number, vector in enumerate(sums.vectors.values()):
        vector[2:4] = sums.base[2:4] + 0.25 * number  # running means
        vector[4] = 124.0 + number  # a counter
        vector[5:8] = torch.nn.functional.normalize(torch.tensor([1.0, 0.1 * number, 0]), dim=0)
        vector[8] = -torch.inf  # a mask
    run(sums, ["stays"] * 3)
    vectors, weights = sums.contributions()
    opening = sums.open()
    args = (*opening.weights(token_weight), sums.cohort.bounds)
    result = opened(sums.form, segments, sums.total, sums.base, *args).accumulator.result()
    mean = sum(w * v for v, w in zip(vectors, weights, strict=True)) / sum(weights)
    torch.testing.assert_close(result[2:4], mean[2:4], rtol=1e-3, atol=1e-3)
    assert result[4] == mean[4].round()
    assert float(result[5:8].norm()) == pytest.approx(1.0, abs=1e-5)
    assert result[8] == -torch.inf


def test_a_long_contribution_is_clipped_by_its_learner() -> None:
    sums = SecureSum(4)
    quiet = SecureSum(4)
    for sum_ in (sums, quiet):
        sum_.claim()
    bounds = quiet.cohort.bounds
    sums.vectors[sums.names[0]][:20] *= 1e6
    largest = sums.integers(sums.names[0])
    one = sums.form.one
    assert int(largest.elements.abs().max()) <= one
    weights = sums.cohort.weights(token_weight, STEPS_MAX)
    share = weights[sums.names[0]] / max(weights.values())
    mean = largest.elements[9:20].double() / one * bounds[1]
    assert float(mean.norm()) == pytest.approx(share * bounds[1], rel=1e-4)


def test_a_contribution_that_is_not_finite_is_refused() -> None:
    sums = SecureSum(3)
    sums.claim()
    sums.vectors[sums.names[0]][3] = torch.nan
    with pytest.raises(MergeError, match="elements 0:9 hold a value that is not finite"):
        sums.integers(sums.names[0])


def test_a_mask_that_is_left_in_a_sum_is_noticed() -> None:
    sums = SecureSum(4)
    sums.claim()
    sums.share()
    sums.mask()
    opening = sums.open()
    forged = replace(opening, survivors=opening.survivors[1:])
    with pytest.raises(MergeError, match=f"the shares of {sums.names[0]} do not belong"):
        forged.unmask(sums.total)
    args = (*opening.weights(token_weight), sums.cohort.bounds)
    with pytest.raises(MergeError, match="a mask is left in it"):
        opened(sums.form, SEGMENTS, sums.total, sums.base, *args)


def test_the_graph_of_a_large_cohort_is_symmetric() -> None:
    sums = SecureSum(48)
    cohort = sums.claim()
    for name in cohort.names:
        neighbors = cohort.neighbors(name)
        assert len(neighbors) == degree(48) < 47
        assert all(name in cohort.neighbors(other) for other in neighbors)
        assert len(cohort.holders(name)) < 2 * cohort.shares_needed


def test_a_member_with_many_tokens_counts_at_most_32_times_the_median() -> None:
    sums = SecureSum(3)
    cohort = sums.claim()
    claims = list(cohort.claims)
    claims[0] = type(claims[0])(claims[0].learner, 24, 10**9, *[b"x" * 32] * 2)
    weights = Cohort("sum", tuple(claims), (1.0,), 2).weights(token_weight, 96)
    median = claims[2].tokens / 24
    assert weights[claims[0].learner] == pytest.approx(24 * (32 * median) ** 2)
    long = type(claims[0])(claims[0].learner, 960, 960 * 10, *[b"x" * 32] * 2)
    capped = Cohort("sum", (long, *claims[1:]), (1.0,), 2).weights(token_weight, 96)
    assert capped[long.learner] == pytest.approx(96 * 10.0**2)


def test_the_parties_limits_hold_in_a_cohort() -> None:
    sums = SecureSum(3)
    cohort = sums.claim()
    quotas = [Quota(f"party-{n}", (f"learner-00{n}",), 0.0, 0.4) for n in range(3)]
    claims = list(cohort.claims)
    claims[0] = replace(claims[0], tokens=24 * 100)
    weights = Cohort("sum", tuple(claims), (1.0,), 2).weights(token_weight, 96, quotas)
    assert max(weights.values()) / sum(weights.values()) == pytest.approx(0.4)


def test_a_member_cannot_stop_a_sum_with_a_key_of_low_order() -> None:
    """The shard refuses the claim, so the others' sum goes on without it."""
    claim = SecureSum(3).claim().claims[0]
    read_claim(claim.learner, 4, 8, claim_text(claim))
    for keys in ((bytes(32), claim.share_key), (claim.mask_key, b"\1" + bytes(31))):
        text = claim_text(Claim(claim.learner, 4, 8, *keys))
        with pytest.raises(ProtocolError, match="a public key is not valid"):
            read_claim(claim.learner, 4, 8, text)


@pytest.mark.parametrize(
    "change",
    [
        lambda claims: claims[0].__setitem__(1, 10**400),
        lambda claims: claims[0].__setitem__(2, 0),
        lambda claims: claims[0].__setitem__(0, "\ud800"),
    ],
    ids=["steps", "tokens", "name"],
)
def test_a_lying_shard_cannot_stop_a_member_with_a_cohort(change: Callable[[Any], None]) -> None:
    """Each error is one that the learner reports, and its training continues."""
    name, claims, *rest = json.loads(SecureSum(3).claim().to_text())
    change(claims)
    with pytest.raises(ProtocolError, match="a cohort"):
        read_cohort(json.dumps([name, claims, *rest]))


def test_a_dishonest_learner_spoils_a_sum_and_stops_nothing() -> None:
    """Its integers are random. The sum opens, and is wrong or refused."""
    sums = SecureSum(4)
    sums.claim()
    sums.share()
    sums.mask()
    name, honest = sums.names[0], sums.total.clone()
    noise = SecureSum(4, seed=9)
    noise.claim()
    sums.total.add(noise.integers(name))
    opening = sums.open()
    opening.unmask(sums.total)
    opening.unmask(honest)
    args = (*opening.weights(token_weight), sums.cohort.bounds)
    with contextlib.suppress(MergeError):
        spoiled, *_ = opened(sums.form, SEGMENTS, sums.total, sums.base, *args)
        right, *_ = opened(sums.form, SEGMENTS, honest, sums.base, *args)
        assert not torch.equal(spoiled, right)
