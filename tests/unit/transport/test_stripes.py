from __future__ import annotations

import random
from itertools import pairwise

import pytest

from decoupled_diloco.transport.range_transfer import COUNTS, StripeController, plan

MIB = 1 << 20


def drive(controller: StripeController, rate_of: dict[int, float], rtt: float, n: int) -> list[int]:
    """Move n payloads of 64 MiB over a link whose rate depends only on the count."""
    counts = []
    for _ in range(n):
        count = controller.choose(64 * MIB, rtt)
        controller.observe(count, 64 * MIB, 64 * MIB / rate_of[count])
        counts.append(count)
    return counts


def test_small_payloads_use_one_connection() -> None:
    assert StripeController().choose(100_000, 0.2) == 1


def test_few_bytes_use_few_connections() -> None:
    assert StripeController().choose(512 << 10, 0.2) == 4


@pytest.mark.parametrize("best", [1, 2])
def test_loopback_stays_at_one_or_two(best: int) -> None:
    rates = dict.fromkeys(COUNTS, 1.0) | {best: 2.0}
    counts = drive(StripeController(), rates, 0.0001, 100)
    assert set(counts) <= {1, 2}
    assert counts.count(best) > 80


@pytest.mark.parametrize("saturates_at", COUNTS)
@pytest.mark.parametrize("rtt", [0.01, 0.05])
def test_climbs_until_the_link_is_full(saturates_at: int, rtt: float) -> None:
    rates = {count: float(min(count, saturates_at)) for count in COUNTS}
    counts = drive(StripeController(), rates, rtt, 300)
    assert counts[200:].count(saturates_at) > 80, counts


def test_fewer_connections_than_initially_are_tried_late() -> None:
    """On a long link a trial with fewer connections costs several times its possible gain."""
    rates = {count: float(min(count, 16)) for count in COUNTS}
    counts = drive(StripeController(), rates, 0.05, 16)
    assert set(counts) == {16, 32}


def test_notices_that_the_link_changed() -> None:
    controller = StripeController()
    drive(controller, {count: float(min(count, 4)) for count in COUNTS}, 0.05, 200)
    assert controller.count == 4
    drive(controller, {count: float(count) for count in COUNTS}, 0.05, 150)
    assert controller.count == 32


def test_noise_keeps_the_count_near_the_best() -> None:
    rng, controller, seen = random.Random(0), StripeController(), []
    for _ in range(300):
        count = controller.choose(64 * MIB, 0.05)
        rate = min(count, 16) * rng.uniform(0.8, 1.25)
        controller.observe(count, 64 * MIB, 64 * MIB / rate)
        seen.append(min(count, 16) / 16)
    assert sum(seen) / len(seen) > 0.8


@pytest.mark.parametrize("nbytes", [1, 128 << 10, 300_001, 64 * MIB])
@pytest.mark.parametrize("count", COUNTS)
def test_a_plan_covers_every_byte_once(nbytes: int, count: int) -> None:
    ranges = plan(nbytes, count)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == nbytes
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
