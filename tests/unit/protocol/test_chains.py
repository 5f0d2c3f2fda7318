"""Learners that are behind: chains of differences (rule 5), and what is kept (rule 7)."""

from __future__ import annotations

from typing import Any

from decoupled_diloco.protocol import Version
from decoupled_diloco.protocol.messages import Failed, Fetch, Holding, Paused
from unit.protocol.conftest import fetch_of


def fetches(bench: Any) -> list[tuple[str, str, bool]]:
    return [(str(o.version), o.path, o.whole) for o in bench.orders(Fetch)]


def behind(learner_bench: Any, versions: int, **options: Any) -> Any:
    """It fetches 1.1 of fragment 0, while more versions are announced."""
    bench = learner_bench(**options)
    bench.step()
    for counter in range(1, versions + 2):
        base, version = Version(1, counter - 1), Version(1, counter)
        bench.publish(version, base, difference=f"/d/{version}")
    return bench


def test_a_learner_a_few_versions_behind_fetches_a_chain_of_differences(
    learner_bench: Any,
) -> None:
    """Each difference is verified by its own digest, and held by its own seal."""
    bench = behind(learner_bench, 3, chain=3)
    for counter in (1, 2, 3):
        bench.fetched(Version(1, counter))
        assert fetches(bench) == [(f"1.{counter + 1}", f"/d/1.{counter + 1}", False)]
        assert [o.digest for o in bench.orders(Fetch)] == [f"digest-1.{counter + 1}"]
    bench.fetched(Version(1, 3 + 1))
    assert not fetches(bench)
    bench.step()
    (held,) = bench.messages(Holding)
    assert (held.version, held.seal) == (Version(1, 4), "seal-1.4")


def test_a_learner_far_behind_fetches_the_whole_copy(learner_bench: Any) -> None:
    bench = behind(learner_bench, 4, chain=3)
    bench.fetched(Version(1, 1))
    assert fetches(bench) == [("1.5", "/w", True)]


def test_a_withdrawn_difference_is_not_requested_again(learner_bench: Any) -> None:
    bench = behind(learner_bench, 2, chain=3)
    bench.fetched(Version(1, 1))
    bench.handle(Failed(fetch_of(0, Version(1, 2)), "gone"))
    assert fetches(bench) == [("1.3", "/w", True)]


def test_an_unannounced_version_breaks_the_chain(learner_bench: Any) -> None:
    bench = behind(learner_bench, 1, chain=7)
    bench.publish(Version(1, 4), Version(1, 3), difference="/d/1.4")
    bench.fetched(Version(1, 1))
    assert fetches(bench) == [("1.4", "/w", True)]


def test_a_new_name_breaks_the_chain(learner_bench: Any) -> None:
    bench = behind(learner_bench, 1, chain=7)
    bench.publish(Version(2, 0), Version(1, 2), difference="")
    bench.fetched(Version(1, 1))
    assert fetches(bench) == [("2.0", "/w", True)]


def test_where_learners_open_rounds_only_whole_copies_wait_for_a_slot(learner_bench: Any) -> None:
    """M times as many copies come: one a step and slot is too little for a learner of ranks.

    One that fails has been superseded under way: the link is too slow, and from then on all take
    turns, until none waits any more.
    """
    values = {"fragments": 6, "period": 6, "overlap": 2, "quorum": 1, "grace_margin": 0.0}
    bench = learner_bench(participants="own", **values)
    bench.handle(Paused())
    v0, v1 = Version(1, 0), Version(1, 1)
    fetched, whole = list[tuple[int, bool]](), list[tuple[int, bool]]()
    for fragment in (3, 1, 0, 2):
        bench.publish(v1, v0, fragment)
        fetched += [(o.fragment, o.whole) for o in bench.orders(Fetch)]
    assert fetched == [(3, False), (1, False), (0, False), (2, False)]
    for fragment in (3, 1, 0):
        bench.handle(Failed(fetch_of(fragment, v1), "superseded"))
        whole += [(o.fragment, o.whole) for o in bench.orders(Fetch)]
    assert whole == [(0, True)], "this fetch and the difference of 2 use both slots"
    for fragment in (4, 5):
        bench.publish(v1, v0, fragment)
        assert not fetches(bench), "it waits for a slot"
    for fragment in (2, 0, 1, 3, 4, 5):
        bench.fetched(v1, fragment)
    for fragment in (3, 1, 0, 2):
        bench.publish(Version(1, 2), v1, fragment)
        assert fetches(bench) == [("1.2", "/d", False)], "again it waits for no slot"
