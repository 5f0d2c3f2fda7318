"""Run a few hundred hostile inputs on each reader; benchmarks/fuzzing.py runs a million."""

from __future__ import annotations

import pytest

from fuzz.harness import Target, run

INPUTS = 250
SEED = 7
NAMES = (
    *("from-learner", "to-learner", "from-member", "to-member", "from-shard", "to-shard"),
    *("machine", "layout", "settings", "headers", "answer", "codecs", "state-head", "excerpt"),
    *("tape", "tape-followed", "tape-packed", "tape-bomb", "journal", "ledger", "shard-journal"),
    *("shard-checkpoint", "weights", "sealed", "learner-checkpoint", "ranges", "share"),
    *("packed-state", "coordinator", "layout-file", "claim", "renewals", "manifest", "facts"),
    *("jobs", "run-file", "scenario", "override", "run-folder", "tables", "certificate"),
    *("private-key", "authority", "token", "principals", "addresses", "launcher", "http"),
    *("sum-claim", "sum-cohort", "sum-shares", "sum-survivors", "sum-opening"),
    *("parties", "audit-trail"),
    *("tls-hello", "fetch-answer", "client-answer", "doctor-answer"),
)


pytestmark = pytest.mark.usefixtures("quiet")


def test_all_targets_are_named(targets: dict[str, Target]) -> None:
    assert set(NAMES) == set(targets)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_inputs_raise_only_allowed_errors(targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    tally = run(target, max(len(target.samples), int(INPUTS * target.share)), SEED)
    assert not tally.faults, "\n".join(map(str, tally.faults))
    assert tally.inputs


def test_the_harness_notices_an_exception_that_is_not_allowed() -> None:
    careless = Target("careless", lambda data: data.decode(), [b"text"], ())
    tally = run(careless, 300, SEED)
    assert tally.faults
    assert "UnicodeDecodeError" in tally.faults[0].what


def test_the_harness_notices_a_reader_that_keeps_memory() -> None:
    earlier = b"x" * (900 << 20)  # memory that another test of this process has used before
    del earlier
    hoard: list[bytes] = []
    greedy = Target("greedy", lambda data: hoard.append(b"x" * (600 << 20)), [b"text"], ())
    tally = run(greedy, 2, SEED)
    assert "MiB more for an input" in tally.faults[0].what
