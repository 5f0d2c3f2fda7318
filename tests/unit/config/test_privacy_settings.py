"""`[privacy.dp]` refuses what would break its bound, with one sentence and the fix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.config.method import options_of, plan_of, public_text, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.shard_role import run_shard
from decoupled_diloco.merge import layout_of

DP = {"clip": 1.0, "noise_multiplier": 20.0, "epsilon_max": 4.0, "delta": 1e-3}
MERGE = {"rule": "mean", "weighting": "uniform", "norm_gate": 0, "buffers": "local"}


def build(dp: dict[str, Any] | None = None, **tables: Any) -> RunConfig:
    told = {"run": {"max_steps": 100, "learners": 100}, "sync": {"merge": MERGE}, **tables}
    return RunConfig(**told, privacy={"dp": DP | (dp or {})})


def merge(**settings: Any) -> dict[str, Any]:
    return {"sync": {"merge": MERGE | settings}}


CANNOT = "cannot be combined with [privacy.dp], because"

CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"clip": 0.0}, {}, "clip=0.0 in [privacy.dp] is out of range: it must be greater than 0.0"),
    (
        {"noise_multiplier": -1.0},
        {},
        "noise_multiplier=-1.0 in [privacy.dp] is out of range: it must be greater than 0.0",
    ),
    (
        {},
        {"sync": {"merge": MERGE, "moments": {}}},
        "[sync.moments] cannot be combined with [privacy.dp], because moments are values without a "
        "bound: take [sync.moments] out",
    ),
    (
        {"clip_quantile": 1.0},
        {},
        "clip_quantile=1.0 in [privacy.dp] is out of range: it must be less than 1.0",
    ),
    (
        {"clip_rate": 0.1},
        {},
        "clip_rate=0.1 in [privacy.dp] would be ignored without clip_quantile: take clip_rate out",
    ),
    (
        {"clip_quantile": 0.5, "clip_rate": 2.0},
        {},
        "clip_rate=2.0 in [privacy.dp] is out of range: it must be at most 1.0",
    ),
    (
        {"delta": 0.01},
        {},
        "delta=0.01 in [privacy.dp] is not below 1 / learners = 0.01, so it would allow publishing "
        "all that one random learner has: write 1e-03 or less",
    ),
    (
        {"noise_multiplier": 0.5},
        {},
        "epsilon_max=4 in [privacy.dp] is spent before the first period ends with noise_multiplier="
        "0.5: raise noise_multiplier to at least 0.823, or raise epsilon_max",
    ),
    (
        {"periods": 10_000},
        {},
        "periods=10000 in [privacy.dp] costs more than epsilon_max=4: it must be at most 590, or "
        "leave it out",
    ),
    (
        {},
        merge(rule="rda"),
        f"rule='rda' in [sync.merge] {CANNOT} one learner changes another rule without bound: set "
        "rule='mean'",
    ),
    (
        {},
        merge(rule="my.rules:median"),
        f"rule='my.rules:median' in [sync.merge] {CANNOT} one learner changes another rule without "
        "bound: set rule='mean'",
    ),
    (
        {},
        merge(weighting="tokens"),
        f"weighting='tokens' in [sync.merge] {CANNOT} the counted tokens are not public: set "
        "weighting='uniform'",
    ),
    (
        {},
        merge(norm_gate=10.0),
        f"norm_gate=10.0 in [sync.merge] {CANNOT} a limit from the norms of others leaks: set "
        "norm_gate=0",
    ),
    (
        {},
        merge(buffers="mean"),
        f"buffers='mean' in [sync.merge] {CANNOT} buffers are values without a bound: set "
        "buffers='local'",
    ),
    (
        {},
        {"sync": {"merge": {"rule": "mean"}, "wait": "at_overlap"}},
        f"wait='at_overlap' in [sync] {CANNOT} learners would wait for one that has spent its ε: "
        "set wait='never'",
    ),
    (
        {},
        {"syncer": {"persist": False}},
        f"persist=False in [syncer] {CANNOT} a restart would forget what was spent: set "
        "persist=true",
    ),
    (
        {},
        {"syncer": {"record_payloads": True}},
        f"record_payloads=True in [syncer] {CANNOT} it would keep what the noise hides, and the "
        "noise itself is never stored: set record_payloads=false",
    ),
    (
        {},
        {"run": {"max_steps": 9, "store": "s3://x/y"}},
        f"store='s3://x/y' in [run] {CANNOT} a mirror may lack what was spent last: take store out",
    ),
    (
        {},
        {"sites": [{"name": "a", "learners": [0, 1]}]},
        f"[[sites]] {CANNOT} a shard cannot clip single contributions in a relay's sum: take "
        "[[sites]] out, or set secure_sums=true",
    ),
]


@pytest.mark.parametrize(("dp", "tables", "sentence"), CASES)
def test_a_mistake_is_one_sentence(
    dp: dict[str, Any], tables: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build(dp, **tables)
    assert str(error.value) == sentence


def secure(bits: int | None = None, scheme: str = "balanced", **dp: Any) -> RunConfig:
    merge = {name: value for name, value in MERGE.items() if name != "norm_gate"}
    return RunConfig(
        run={"max_steps": 100, "learners": 100},
        sync={"merge": merge, "partition": {"scheme": scheme}},
        privacy={"secure_sums": True, "bits": bits, "dp": DP | dp},
    )


@pytest.mark.parametrize(
    ("bits", "dp", "sentence"),
    [
        (
            24,
            {},
            "bits=24 in [privacy] is out of range: with 100 learners and the noise of [privacy.dp] "
            "it must be 8 to 21, so that a sum fits into 32 bits",
        ),
        (
            None,
            {"noise_multiplier": 1e6},
            "a sum of 100 contributions with noise of 6.93e+06 times the clip of a fragment does "
            "not fit into 32 bits: lower noise_multiplier in [privacy.dp], or divide the model "
            "into fewer or more equal fragments",
        ),
        (
            8,
            {"noise_multiplier": 0.05, "epsilon_max": 1000.0},
            "bits=8 in [privacy] is too coarse for noise_multiplier=0.05 in [privacy.dp], of which "
            "each of 100 learners adds a share: set bits to 11 or more, or raise noise_multiplier",
        ),
        (
            None,
            {"periods": 590},
            "periods=590 in [privacy.dp] costs more than epsilon_max=4: it must be at most 489, or "
            "leave it out",
        ),
    ],
)
def test_a_mistake_with_secure_sums_is_one_sentence(
    bits: int | None, dp: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        secure(bits, **dp)
    assert str(error.value) == sentence


def test_a_small_fragment_needs_more_room_for_its_noise() -> None:
    """Its clip is smaller than that of the others, and the noise of each element is the same."""
    config = secure(21, "tensor")
    equal = nn.ParameterList([torch.zeros(50) for _ in range(24)])
    plan = plan_of(layout_of(equal), config)
    assert plan.secure is not None
    assert plan.secure.bits == 21
    uneven = nn.ParameterList([torch.zeros(50) for _ in range(23)] + [torch.zeros(1)])
    with pytest.raises(ConfigError, match="it must be 8 to 18, so that a sum fits into 32 bits"):
        plan_of(layout_of(uneven), config)


def test_noise_in_shares_allows_fewer_periods() -> None:
    """Its account is an upper limit."""
    limits = [each.privacy.dp.periods for each in (build(), secure()) if each.privacy.dp]
    assert limits == [590, 489]
    assert options_of(read_public(public_text(secure()))).merges_max == 489


def test_the_limit_of_merges_is_computed_once_and_travels_with_the_settings() -> None:
    config = build()
    assert config.privacy.dp is not None
    assert config.privacy.dp.periods == options_of(config).merges_max == 590
    assert options_of(read_public(public_text(config))).merges_max == 590
    assert options_of(build({"periods": 5})).merges_max == 5
    assert options_of(RunConfig(run={"max_steps": 9})).merges_max is None


def test_a_learner_needs_no_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    text = public_text(build())
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_mechanism", None)
    assert options_of(read_public(text)).merges_max == 590
    with pytest.raises(ConfigError, match="needs the package dp-accounting"):
        build()


def test_a_shard_needs_the_accountant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A limit that was set by hand may be wrong."""
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_mechanism", None)
    config = build({"periods": 10**6})
    with pytest.raises(ConfigError, match="needs the package dp-accounting"):
        run_shard(config, 0, port=0, addresses=(), folder=tmp_path, token=None)


def test_the_resolved_file_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dump_config(build()))
    assert load_config(file).privacy == build().privacy
