"""For any cluster: every chip-microsecond is accounted for, and windows follow the core's rules."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.protocol.clock import advanced, reached_at, stands, window_over
from decoupled_diloco_plan.goodput.cluster_settings import (
    YEAR_SECONDS,
    Cluster,
    Constants,
    Preemption,
    Scavenged,
    Stragglers,
)
from decoupled_diloco_plan.goodput.systems import simulate

CONSTANTS = st.builds(
    Constants,
    step_seconds=st.floats(0.5, 60),
    downscale_seconds=st.floats(0, 100),
    upscale_seconds=st.floats(0, 100),
    upscale_window_seconds=st.floats(0, 300),
    restart_seconds=st.floats(0, 300),
    slice_chips=st.integers(1, 300),
    repair_seconds=st.floats(1, 3000),
    repair_power=st.floats(0.5, 4),
    repair_tail=st.floats(0.4, 2),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    system = draw(st.sampled_from(("data-parallel", "elastic", "barrier", "decoupled")))
    learners = 1 if system in ("data-parallel", "elastic") else draw(st.integers(1, 5))
    constants = draw(CONSTANTS)
    more: dict[str, Any] = {}
    if system == "decoupled":
        more["quorum"] = draw(st.integers(1, learners))
        more["slack_steps"] = draw(st.integers(0, 3))
        more["grace"] = draw(st.booleans())
    if system != "barrier" and draw(st.booleans()):
        more["scavenged"] = draw(
            st.builds(
                Scavenged,
                chips=st.integers(10, 2000),
                blocks=st.integers(1, 9),
                stay_seconds=st.floats(10, 5000),
                away_seconds=st.floats(0, 5000),
                join_seconds=st.floats(0, 500),
            )
        )
    return Cluster(
        system,
        draw(st.integers(2 * learners * constants.slice_chips, 20_000)),
        learners,
        constants=constants,
        mtbi_seconds=YEAR_SECONDS * draw(st.floats(0.01, 10)),
        minimum_share=draw(st.floats(0, 1)),
        checkpoint_seconds=draw(st.floats(0, 500)),
        sudden=draw(st.booleans()),
        slowdowns=tuple(draw(st.floats(1, 3)) for _ in range(learners)),
        jitter=draw(st.floats(0, 0.3)),
        stragglers=draw(
            st.none() | st.builds(Stragglers, st.floats(1e5, 1e8), st.floats(10, 2000))
        ),
        preemptions=tuple(
            draw(
                st.lists(
                    st.builds(Preemption, st.floats(0, 5e4), st.floats(1, 2e4), st.floats(0.01, 1)),
                    max_size=3,
                )
            )
        ),
        **more,
    )


@settings(max_examples=40, deadline=None)
@given(clusters(), st.integers(0, 3))
def test_chip_time_is_conserved_exactly(cluster: Cluster, seed: int) -> None:
    account = simulate(cluster, 40_000.0, seed)
    assert account.useful + sum(account.badput.values()) == account.allocated
    assert min(account.useful, *account.badput.values()) >= 0
    if cluster.scavenged is None:
        assert account.allocated == cluster.chips * account.wall
    assert 0 <= account.up <= account.wall
    assert account.useful == 0 or account.up > 0


INSTANTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8)


@given(INSTANTS, st.integers(1, 8))
def test_a_clock_reaches_a_step_at_the_same_time_as_the_core(
    instants: list[float], quorum: int
) -> None:
    at = reached_at(instants, quorum)
    assert (at is None) == stands(len(instants), quorum)
    if at is not None:
        before, after = ([int(i < at) for i in instants], [int(i <= at) for i in instants])
        assert advanced(0, before, quorum) == 0
        assert advanced(0, after, quorum) == 1


@given(INSTANTS, st.data(), st.integers(0, 9), st.integers(0, 20))
def test_a_window_closes_with_all_learners_or_after_the_grace_time(
    reports: list[float], data: st.DataObject, grace: int, opened: int
) -> None:
    quorum = data.draw(st.integers(1, len(reports)))
    closed, qualified = window_over(opened, reports, quorum=quorum, grace_seconds=grace)
    assert qualified == sum(report <= closed for report in reports) >= quorum
    all_in = max(opened, *reports) if reports else opened
    enough = max(opened, sorted(reports)[quorum - 1])
    assert closed == min(all_in, max(opened + grace, enough))
