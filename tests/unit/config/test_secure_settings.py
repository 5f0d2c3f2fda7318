"""`secure_sums` refuses what needs single contributions, with one sentence and the fix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of, public_text, read_public
from decoupled_diloco.config.parties import OwnParty, Parties
from decoupled_diloco.config.signing_keys import create_signing_key
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.masked_sums import require_for_sums

CANNOT = "cannot be combined with secure_sums=true in [privacy], because"
SINGLE = f"{CANNOT} a shard must not see single contributions: set"
IGNORED = "would be ignored with secure_sums=true in [privacy]"


def build(learners: int = 4, privacy: dict[str, Any] | None = None, **tables: Any) -> RunConfig:
    run = {"max_steps": 100, "learners": learners, **tables.pop("run", {})}
    return RunConfig(run=run, privacy={"secure_sums": True, **(privacy or {})}, **tables)


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"privacy": {"threshold": 5}},
        "threshold=5 in [privacy] exceeds learners=4 in [run], so no sum would ever be opened: "
        "lower threshold or start more learners",
    ),
    (
        {"privacy": {"bits": 25}},
        "bits=25 in [privacy] is out of range: with 4 learners it must be 8 to 24, so that a sum "
        "fits into 32 bits",
    ),
    (
        {"learners": 5000, "privacy": {"bits": 24}},
        "bits=24 in [privacy] is out of range: with 5000 learners it must be 8 to 19, so that a "
        "sum fits into 32 bits",
    ),
    (
        {"sync": {"merge": {"rule": "median"}}},
        f"rule='median' in [sync.merge] {SINGLE} rule='rda' or 'mean'",
    ),
    (
        {"sync": {"merge": {"buffers": "one"}}},
        f"buffers='one' in [sync.merge] {SINGLE} buffers='mean' or 'local'",
    ),
    (
        {"sync": {"participation": "async", "grace_margin": 0.0, "apply": {"missed": "rebase"}}},
        f"participation='async' in [sync] {SINGLE} participation='active' or 'all'",
    ),
    (
        {"syncer": {"record_payloads": True}},
        f"record_payloads=True in [syncer] {SINGLE} record_payloads=false",
    ),
    (
        {"sync": {"codec": {"uplink": "int4"}}},
        f"uplink='int4' in [sync.codec] {IGNORED}, which sends fixed-point numbers: take uplink "
        "out",
    ),
    (
        {"sync": {"merge": {"norm_gate": 5.0}}},
        f"norm_gate=5.0 in [sync.merge] {IGNORED}, whose learners clip their contributions "
        "themselves: take norm_gate out",
    ),
    (
        {"sync": {"late": {"policy": "next"}}},
        f"policy='next' in [sync.late] {IGNORED}, because a masked contribution counts for its own "
        "round only: take policy out",
    ),
    (
        {"trust": {"act": "weigh"}},
        f"act='weigh' in [trust] {CANNOT} a score needs single contributions: leave one of them "
        "out",
    ),
]


@pytest.mark.parametrize(("tables", "sentence"), CASES)
def test_a_mistake_is_one_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(**tables)
    assert str(error.value) == sentence


def test_settings_of_sums_need_sums() -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig(run={"max_steps": 1}, privacy={"threshold": 3})
    assert str(error.value) == (
        "threshold=3 in [privacy] would be ignored without secure_sums=true: take threshold out"
    )


def test_a_split_learner_cannot_mask() -> None:
    with pytest.raises(ConfigError, match=r"sync_ranks='all' in \[learner\] cannot be combined"):
        build(
            learner={"ranks": 2, "parallelism": "fsdp", "sync_ranks": "all"},
            data={"elastic": False},
        )


def test_the_threshold_is_a_quorum_and_reaches_the_learners() -> None:
    config = build(5)
    assert (options_of(config).threshold, options_of(config).quorum) == (3, 3)
    config = build(5, {"threshold": 4}, sync={"quorum": 5})
    assert (options_of(config).threshold, options_of(config).quorum) == (4, 5)
    options = options_of(read_public(public_text(config)))
    assert (options.threshold, options.late, options.norm_gate) == (4, "drop", 0.0)
    assert options_of(RunConfig(run={"max_steps": 1})).threshold == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"needs the package cryptography: run pip install"):
        require_for_sums(None, is_secure=True)


def test_a_learner_whose_parties_require_sums_joins_no_run_without(tmp_path: Path) -> None:
    """A syncer that lies about the settings would get its single contributions."""
    key = create_signing_key(tmp_path / "a.key")
    entry = {"name": "a", "learners": ["a-*"], "key": key.public}
    second = create_signing_key(tmp_path / "b.key")
    other = {"name": "b", "learners": ["b-*"], "key": second.public}
    strict, loose = Parties(parties=[entry, other], least_parties=2), Parties(parties=[entry])
    with pytest.raises(ConfigError, match=r"least_parties=2 in this learner's parties\.toml needs"):
        require_for_sums(OwnParty(strict, strict.parties[0], key), is_secure=False)
    require_for_sums(OwnParty(loose, loose.parties[0], key), is_secure=False)
    require_for_sums(OwnParty(strict, strict.parties[0], key), is_secure=True)
    with pytest.raises(ConfigError, match="needs the private key of party 'a'"):
        require_for_sums(OwnParty(strict, strict.parties[0], None), is_secure=True)
