"""Whole systems: closed forms, exact accounts, monotony."""

from __future__ import annotations

import math
import time
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.goodput.chip_learner import RUN
from decoupled_diloco_plan.goodput.chip_time import overlap, stepping, working
from decoupled_diloco_plan.goodput.cluster_settings import (
    MACHINE_CHIPS,
    PREEMPTED_A_DAY,
    SECOND,
    YEAR_SECONDS,
    Cluster,
    Constants,
    Preemption,
    Scavenged,
    Stragglers,
    stay_of,
)
from decoupled_diloco_plan.goodput.systems import simulate

DAY = 86400.0
NEVER_FAILS = 1e9 * YEAR_SECONDS
INSTANT = Constants(
    step_seconds=1e-3,
    downscale_seconds=0.0,
    upscale_seconds=0.0,
    upscale_window_seconds=0.0,
    slice_chips=1,
    repair_seconds=100.0,
    repair_power=1.0,
    repair_tail=1.0,
)


def test_repair_of_many_is_m_m_infinity() -> None:
    """Of chips that fail after f and are repaired after r, the share f / (f + r) is present."""
    cluster = Cluster("elastic", 200, constants=INSTANT, mtbi_seconds=900.0)
    account = simulate(cluster, 2 * DAY, 0)
    assert account.goodput == pytest.approx(90.0, abs=0.4)
    heavy = replace(INSTANT, repair_tail=0.5, repair_power=2.0)
    account = simulate(replace(cluster, constants=heavy), 4 * DAY, 0)
    assert account.goodput == pytest.approx(90.0, abs=0.7), "only the mean of a repair counts"


def test_the_number_of_absent_slices_has_a_binomial_spread() -> None:
    counts: list[tuple[float, float]] = []

    def watch(spans: list[np.ndarray], waits: list[np.ndarray]) -> None:
        if not len(spans[0]):
            return
        lengths, away = spans[0][:, 1] - spans[0][:, 0], 200 - spans[0][:, 3]
        mean = np.average(away, weights=lengths)
        counts.append((mean, np.average((away - mean) ** 2, weights=lengths)))

    cluster = Cluster("elastic", 200, constants=INSTANT, mtbi_seconds=900.0)
    simulate(cluster, 2 * DAY, 0, watch=watch)
    mean, variance = np.mean(counts, axis=0)
    assert mean == pytest.approx(20.0, rel=0.05)
    assert variance == pytest.approx(200 * 0.1 * 0.9, rel=0.15)


def test_one_slice_is_an_alternating_renewal() -> None:
    cluster = Cluster("elastic", 1, constants=INSTANT, mtbi_seconds=300.0, minimum_share=1.0)
    account = simulate(cluster, 60 * DAY, 0)
    assert account.goodput == pytest.approx(75.0, abs=0.8)
    assert account.uptime == pytest.approx(account.goodput)
    assert account.badput["below_minimum"] == 0, "no chip is paused: the only one is away"


@pytest.mark.parametrize("chips", [150_000, 2_400_000])
def test_non_elastic_training_is_a_renewal_process_too(chips: int) -> None:
    """Runs of whole steps, whose number is geometrically distributed, alternate with restarts."""
    account = simulate(Cluster("data-parallel", chips), 20_000 * YEAR_SECONDS / chips, 0)
    step, restart = Constants().step_seconds, Constants().restart_seconds
    run = step / -math.expm1(-step * chips / YEAR_SECONDS)
    assert account.goodput == pytest.approx(100 * run / (run + restart), abs=0.6)


def test_lost_work_has_its_closed_form() -> None:
    """Of runs between failures, whole checkpoints are kept: c / (exp(c λ) − 1) of each."""
    chips, every = 150_000, 60.0
    constants = Constants(step_seconds=0.01)
    cluster = Cluster("data-parallel", chips, constants=constants, checkpoint_seconds=every)
    account = simulate(cluster, 20_000 * YEAR_SECONDS / chips, 0)
    mean = YEAR_SECONDS / chips
    kept = every / math.expm1(every / mean)
    assert account.goodput == pytest.approx(
        100 * kept / (mean + constants.restart_seconds), abs=0.6
    )


@pytest.mark.parametrize("learners", [2, 8])
def test_a_barrier_waits_for_the_largest_of_m(learners: int) -> None:
    """Without failures: the mean time of a learner's H steps over that of the longest."""
    cluster = Cluster("barrier", 10_000, learners, mtbi_seconds=NEVER_FAILS, jitter=0.5, period=16)
    account = simulate(cluster, 10 * DAY, 0)
    assert account.rounds > 1000
    draws = np.random.default_rng(0).standard_normal((100_000, learners)).max(axis=1).mean()
    assert account.goodput == pytest.approx(100 / (1 + 0.5 / 4 * draws), abs=0.3)


def test_a_barrier_has_the_pace_of_the_slowest_learner() -> None:
    cluster = Cluster("barrier", 4096, 4, mtbi_seconds=NEVER_FAILS, slowdowns=(1.0, 1.0, 1.0, 2.0))
    account = simulate(cluster, 4 * DAY, 0)
    assert account.goodput == pytest.approx(100 * (3 / 2 + 1) / 4, abs=0.1)
    assert account.tokens / account.wall / 4096 == pytest.approx(0.5, abs=0.01)


def test_one_decoupled_learner_is_the_elastic_system() -> None:
    elastic = simulate(Cluster("elastic", 100_000), 5 * DAY, 3)
    decoupled = simulate(Cluster("decoupled", 100_000, 1), 5 * DAY, 3)
    assert decoupled == elastic


def test_decoupled_learners_are_elastic_systems_of_their_size() -> None:
    whole = simulate(Cluster("decoupled", 1_200_000, 8), 3 * DAY, 0)
    part = simulate(Cluster("elastic", 150_000), 24 * DAY, 1)
    assert whole.goodput == pytest.approx(part.goodput, abs=0.5)


FEATURES = {
    "plain": {},
    "sudden": {"sudden": True},
    "below minimum": {"minimum_share": 1.0},
    "stragglers": {"stragglers": Stragglers(30 * DAY, 300.0, 0.5)},
    "preempted": {"preemptions": (Preemption(3600.0, 7200.0, 0.5), Preemption(5000.0, 60.0, 0.2))},
}


@pytest.mark.parametrize("system", ["data-parallel", "elastic", "barrier", "decoupled"])
@pytest.mark.parametrize("feature", FEATURES)
def test_chip_time_is_conserved_exactly(system: str, feature: str) -> None:
    learners = 3 if system in ("barrier", "decoupled") else 1
    cluster = Cluster(system, 100_003, learners, **FEATURES[feature])  # type: ignore[arg-type]
    if system == "decoupled":
        cluster = replace(cluster, quorum=2, jitter=0.1, slowdowns=(1.0, 1.1, 1.3))
    account = simulate(cluster, DAY + 0.123457, 0)
    assert account.wall == round((DAY + 0.123457) * SECOND)
    assert account.allocated == 100_003 * account.wall
    assert account.useful + sum(account.badput.values()) == account.allocated
    assert min(account.badput.values()) >= 0
    expected = {"stragglers": "stragglers", "below minimum": "below_minimum", "sudden": "lost_work"}
    if feature in expected and (system, feature) != ("data-parallel", "below minimum"):
        assert account.badput[expected[feature]] > 0


@pytest.mark.parametrize("system", ["data-parallel", "elastic", "decoupled"])
def test_scavenged_chips_are_allocated_while_they_are_there(system: str) -> None:
    terms = Scavenged(chips=5_000, blocks=5, stay_seconds=2000.0, away_seconds=6000.0)
    learners = 4 if system == "decoupled" else 1
    cluster = Cluster(
        system,
        20_000,
        learners,
        mtbi_seconds=NEVER_FAILS,
        scavenged=terms,  # type: ignore[arg-type]
    )
    account = simulate(cluster, 10 * DAY, 0)
    more = account.allocated / account.wall - 20_000
    assert more == pytest.approx(1250, rel=0.25)
    assert account.useful + sum(account.badput.values()) == account.allocated
    if system == "decoupled":
        assert account.goodput > 99.9, "no learner pauses when a block comes or leaves"


def test_a_barrier_rejects_scavenged_chips() -> None:
    terms = Scavenged(chips=512, blocks=1)
    with pytest.raises(ConfigError, match="combined with system='barrier'"):
        Cluster("barrier", 4096, 4, scavenged=terms)


def test_a_scavenged_block_leaves_when_it_is_preempted_or_fails() -> None:
    terms = Scavenged(chips=2_000, blocks=2, stay_seconds=3000.0, away_seconds=1000.0)
    cluster = Cluster("decoupled", 20_000, 4, scavenged=terms, mtbi_seconds=1000 * 1500.0)
    assert cluster.block_stay_seconds == pytest.approx(1000.0)
    account = simulate(cluster, 5 * DAY, 0)
    more = account.allocated / account.wall - 20_000
    assert more == pytest.approx(1000, rel=0.1)


def test_preempted_slices_are_missing_for_the_given_time() -> None:
    cluster = Cluster(
        "elastic",
        25_600,
        mtbi_seconds=NEVER_FAILS,
        preemptions=(Preemption(3600.0, 7200.0, 0.25),),
    )
    account = simulate(cluster, DAY, 0)
    constants = Constants()
    away = 7200.0 + constants.upscale_window_seconds + constants.upscale_seconds
    missing = 100 * account.badput["missing_chips"] / account.allocated
    assert missing == pytest.approx(25.0 * away / DAY, rel=0.01)
    stops = account.badput["downscale"] / (0.75 * 25_600 * SECOND)
    assert stops == pytest.approx(constants.downscale_seconds), "all slices share one downscale"


def test_goodput_is_monotonic() -> None:
    def goodput(**changes: object) -> float:
        fields: dict[str, object] = {"system": "decoupled", "chips": 400_000, "learners": 4}
        return simulate(Cluster(**{**fields, **changes}), 3 * DAY, 0).goodput  # type: ignore[arg-type]

    def falls(values: list[float]) -> bool:
        return all(a > b for a, b in pairwise(values))

    assert falls([goodput(chips=chips) for chips in (10**5, 4 * 10**5, 16 * 10**5)])
    assert falls([goodput(learners=learners) for learners in (16, 4, 1)])
    assert falls([goodput(quorum=quorum) for quorum in (1, 3, 4)])
    assert falls([goodput(constants=Constants(downscale_seconds=s)) for s in (5.0, 15.0, 60.0)])
    assert falls([goodput(constants=Constants(upscale_seconds=s)) for s in (5.0, 15.0, 60.0)])
    assert falls([goodput(constants=Constants(repair_seconds=s)) for s in (60.0, 600.0, 6000.0)])
    assert falls([goodput(mtbi_seconds=s * YEAR_SECONDS) for s in (4, 1, 0.25)])
    shared = [goodput(constants=Constants(upscale_window_seconds=s)) for s in (300.0, 60.0, 0.0)]
    assert falls(shared), "the longer the window, the more slices share an upscale"


def test_a_full_quorum_counts_only_time_in_which_all_step() -> None:
    """Independent learners: the share in which all step is the product of their shares."""
    cluster = Cluster("decoupled", 600_000, 4)
    one = simulate(cluster, 4 * DAY, 0)
    every = simulate(replace(cluster, quorum=4), 4 * DAY, 0)
    there = 1 - one.badput["missing_chips"] / one.allocated
    share = one.goodput / 100 / there
    assert every.goodput / 100 / there == pytest.approx(share**4, abs=0.01)
    assert every.uptime / 100 == pytest.approx(share**4, abs=0.01), "otherwise the clock stalls"


WAITING = [
    Cluster("barrier", 300_000, 3),
    Cluster("barrier", 2_400_000, 5, jitter=0.2),
    Cluster("decoupled", 2_400_000, 5, quorum=4),
]


@pytest.mark.parametrize("cluster", WAITING, ids=lambda c: f"{c.system}-{c.chips}")
def test_waits_and_uptime_match_a_sample_of_instants(cluster: Cluster) -> None:
    """Compare with the states at 20,000 instants."""
    seen: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
    account = simulate(cluster, DAY, 0, watch=lambda *more: seen.append(more))
    begin, end = int(seen[0][0][0][0, 0]), int(seen[-2][0][0][-1, 1])
    at = np.sort(np.random.default_rng(0).integers(begin, end, 20_000))
    up, waited = np.zeros(len(at), bool), 0.0
    for m in range(cluster.learners):
        spans = np.concatenate([each[0][m] for each in seen])
        waits = np.concatenate([each[1][m] for each in seen])
        index = np.searchsorted(spans[:, 0], at, side="right") - 1
        chips = np.where(spans[index, 2] == RUN, spans[index, 3], 0)
        before = np.searchsorted(waits[:, 0], at, side="right") - 1
        waiting = (before >= 0) & (at < waits[before, 1])
        waited += np.mean(chips * waiting)
        up |= (chips > 0) & ~waiting
    assert account.uptime == pytest.approx(100 * up.mean(), abs=0.8)
    assert account.uptime < 99.9
    assert account.badput["waiting"] / account.wall == pytest.approx(waited, rel=0.05)


COSTS: list[tuple[dict[str, Any], ...]] = [
    ({"minimum_share": 0.9}, {"minimum_share": 0.99}, {"minimum_share": 1.0}),
    ({}, {"sudden": True}),
    (
        {"preemptions": (Preemption(3600.0, 3600.0, 0.1),)},
        {"preemptions": (Preemption(3600.0, 3600.0, 0.5),)},
        {"preemptions": (Preemption(3600.0, 36_000.0, 0.5),)},
    ),
    (
        {"stragglers": Stragglers(20_000 * DAY, 300.0, 0.2)},
        {"stragglers": Stragglers(20_000 * DAY, 300.0, 0.5)},
        {"stragglers": Stragglers(20_000 * DAY, 900.0, 0.5)},
        {"stragglers": Stragglers(5_000 * DAY, 900.0, 0.5)},
    ),
    (
        {"constants": Constants(slice_chips=64)},
        {"constants": Constants(slice_chips=256)},
        {"constants": Constants(slice_chips=4096)},
    ),
]
"""In each row, each entry costs more than the one before."""

COSTS_OF: list[tuple[str, tuple[dict[str, Any], ...]]] = [
    *((system, row) for system in ("elastic", "barrier", "decoupled") for row in COSTS),
    ("data-parallel", ({}, {"checkpoint_seconds": 60.0}, {"checkpoint_seconds": 600.0})),
    ("data-parallel", tuple({"constants": Constants(restart_seconds=s)} for s in (10.0, 80.0))),
    ("barrier", ({}, {"jitter": 0.5}, {"jitter": 1.0})),
    ("barrier", ({"period": 240}, {"period": 24}, {"period": 6})),
    ("barrier", ({}, {"slowdowns": (1.0, 1.0, 1.2)}, {"slowdowns": (1.0, 1.0, 1.5)})),
    ("decoupled", ({"slack_steps": 2}, {"slack_steps": 0})),
]


@pytest.mark.parametrize(("system", "row"), COSTS_OF, ids=lambda value: str(value)[:40])
def test_each_feature_costs_what_it_should(system: Any, row: tuple[dict[str, Any], ...]) -> None:
    learners = 1 if system in ("data-parallel", "elastic") else 3
    found = []
    for changes in row:
        more = {"quorum": 3, "jitter": 0.1} if "slack_steps" in changes else {}
        cluster = Cluster(system, 300_000, learners, **{**more, **changes})
        found.append(simulate(cluster, 2 * DAY, 0).goodput)
    assert all(a > b for a, b in pairwise(found)), found


def rounds_by_hand(lives: list[np.ndarray], need: int, end: int) -> tuple[int, int]:
    """Return waiting chip-time and rounds of a barrier, by walking through each learner's runs."""
    start, rounds, waited = int(min(life[0, 0] for life in lives)), 0, 0
    while True:
        ends = []
        for life in lives:
            left, at = need, end
            for begin, until, kind, _, _ in life.tolist():
                begin = max(begin, start)
                if kind == RUN and begin < until:
                    if left <= until - begin:
                        at, left = begin + left, 0
                        break
                    left -= until - begin
            ends.append(at if not left else 2 * end)
        over = min(end, max(ends))
        for life, at in zip(lives, ends, strict=True):
            for begin, until, kind, chips, _ in life.tolist():
                if kind == RUN:
                    waited += chips * max(0, min(until, over) - max(begin, at))
        if max(ends) > end:
            return waited, rounds
        start, rounds = over, rounds + 1


def test_a_barrier_matches_a_walk_through_its_rounds() -> None:
    cluster = Cluster("barrier", 30_000, 3, mtbi_seconds=YEAR_SECONDS / 40, period=6)
    seen: list[list[np.ndarray]] = []
    account = simulate(cluster, 5000.0, 0, watch=lambda spans, _: seen.append(spans))
    lives = [np.concatenate(each) for each in zip(*seen, strict=True)]
    need = 6 * round(Constants().step_seconds * SECOND)
    end = max(int(life[-1, 1]) for life in lives)
    waited, rounds = rounds_by_hand(lives, need, end)
    assert account.rounds == rounds > 50
    assert account.badput["waiting"] == waited > 0


def test_the_last_wait_is_reported_though_its_round_does_not_end() -> None:
    cluster = Cluster("barrier", 4096, 2, mtbi_seconds=NEVER_FAILS, slowdowns=(1.0, 2.0))
    reported: list[np.ndarray] = []
    length = 24 * Constants().step_seconds
    simulate(cluster, 1.5 * length, 0, watch=lambda _, waits: reported.append(waits[0]))
    (wait,) = np.concatenate(reported)
    assert np.diff(wait)[0] / SECOND == pytest.approx(0.5 * length, abs=Constants().step_seconds)


@pytest.mark.parametrize("system", ["elastic", "barrier", "decoupled"])
def test_results_do_not_depend_on_windows(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(system, 600_000, 1 if system == "elastic" else 3, sudden=True)
    whole = simulate(cluster, DAY, 0)
    monkeypatch.setattr("decoupled_diloco_plan.goodput.systems.WINDOW_FAILURES", 7)
    assert simulate(cluster, DAY, 0) == whole


@pytest.mark.parametrize("window_failures", [3, 50_000])
def test_slow_spells_have_their_closed_form(
    window_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner is slow for 1 − exp(−L/I) of the time, and then s/(1 + s) of that is lost."""
    monkeypatch.setattr("decoupled_diloco_plan.goodput.systems.WINDOW_FAILURES", window_failures)
    terms = Stragglers(20_000 * 1000.0, 800.0, 0.5)
    cluster = Cluster("decoupled", 20_000, 1, mtbi_seconds=NEVER_FAILS, stragglers=terms)
    account = simulate(cluster, 30 * DAY, 0)
    slow = -math.expm1(-800.0 / 1000.0)
    share = account.badput["stragglers"] / account.allocated
    assert share == pytest.approx(slow * 0.5 / 1.5, rel=0.05)


def test_slow_learners_train_fewer_tokens() -> None:
    cluster = Cluster("decoupled", 4096, 2, mtbi_seconds=NEVER_FAILS, slowdowns=(1.0, 2.0))
    account = simulate(cluster, DAY, 0)
    assert account.goodput == 100
    assert account.tokens / account.useful == pytest.approx(0.75)


def test_a_new_block_fetches_the_weights_first_and_stays_for_an_exponential_time() -> None:
    terms = Scavenged(chips=1000, blocks=1, stay_seconds=1000.0, join_seconds=300.0)
    cluster = Cluster("decoupled", 4096, 2, mtbi_seconds=NEVER_FAILS, scavenged=terms)
    visits: list[np.ndarray] = []
    account = simulate(cluster, 60 * DAY, 0, watch=lambda spans, _: visits.append(spans[2]))
    joining = 1 - math.exp(-0.3)
    share = account.badput["upscale"] / (1000 * account.wall)
    assert share == pytest.approx(joining, rel=0.05)
    spans = np.concatenate(visits)
    runs = np.diff(spans[spans[:, 2] == RUN, :2])[:, 0] / SECOND
    assert runs.mean() == pytest.approx(1000.0, rel=0.05)
    assert runs.std() == pytest.approx(1000.0, rel=0.1), "the rest of an exponential time is one"


def test_the_account_starts_after_a_warm_up() -> None:
    """Many short runs have on average as many slices away as a long one."""
    cluster = Cluster("elastic", 200, constants=INSTANT, mtbi_seconds=900.0)
    short = [simulate(cluster, 30.0, seed).goodput for seed in range(60)]
    assert np.mean(short) == pytest.approx(90.0, abs=1.0)


def test_the_daily_preemption_rate_of_a_machine_is_as_given() -> None:
    for share in PREEMPTED_A_DAY:
        assert 1 - math.exp(-DAY / stay_of(MACHINE_CHIPS, share)) == pytest.approx(share)
    assert stay_of(1024) == pytest.approx(stay_of(MACHINE_CHIPS) / 128)


def test_overlap_is_measured_exactly() -> None:
    rng = np.random.default_rng(0)
    edges = np.sort(rng.choice(1000, 40, replace=False))
    starts, ends = edges[::2], edges[1::2]
    inside = np.zeros(1000, bool)
    for start, end in zip(starts, ends, strict=True):
        inside[start:end] = True
    runs = np.sort(rng.integers(0, 1000, (200, 2)), axis=1)
    expected = [int(inside[a:b].sum()) for a, b in runs]
    assert overlap(runs, starts, ends).tolist() == expected


def test_a_waiting_learner_does_not_work() -> None:
    runs = np.array([[0, 10, 0, 1, 1], [10, 20, 0, 1, 1], [30, 40, 0, 1, 1]])
    waits = np.array([[5, 12], [19, 35]])
    assert working(runs, waits).tolist() == [[0, 5], [12, 19], [35, 40]]
    assert working(runs, waits[:0])[:, 1].max() == 40


def test_stepping_learners_are_counted() -> None:
    runs = [np.array([[0, 10, 0, 1, 1]]), np.array([[5, 7, 0, 1, 1], [10, 12, 0, 1, 1]])]
    at, count = stepping(runs)
    assert np.diff(at)[count[:-1] > 1].sum() == 2
    assert np.diff(at)[count[:-1] > 0].sum() == 12


def test_a_month_of_millions_of_chips_is_fast_and_needs_little_memory() -> None:
    began = time.process_time()
    simulate(Cluster("decoupled", 2_400_000, 16), 30 * DAY, 0)
    assert time.process_time() - began < 10, "it takes a second; more on a busy machine"
    peaks = []
    for chips in (1_000_000, 100_000_000):
        tracemalloc.start()
        simulate(Cluster("decoupled", chips, 16), 5e8 * DAY / chips / 365, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] < 100e6
