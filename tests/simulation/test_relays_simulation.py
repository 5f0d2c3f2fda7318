"""A run with relays gives the result of a flat run, and sends less over the long link (rule 22)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.messages import RoundFinished, RunOver
from decoupled_diloco.protocol.syncer_state import SiteTraffic
from decoupled_diloco.run_model import run_of
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.system import System

FLAT: tuple[RelaySpec, ...] = ()
SITES = (RelaySpec("site-a"), RelaySpec("site-b"))
ENDING_SECONDS_MAX = 3.0
"""Longest time from the end of the run at the last learner until all processes have ended."""

NESTED = (RelaySpec("top"), RelaySpec("site-a", "top"), RelaySpec("site-b", "top"))


@dataclass
class Result:
    """The end of a run: weights, the participants of its rounds, and bytes at the shards."""

    weights: list[Tensor] = field(default_factory=list)
    rounds: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    received: int = 0
    sent: int = 0
    ending_seconds: float = 0.0
    counted: list[dict[str, SiteTraffic]] = field(default_factory=list)


def run(
    folder: Path,
    relays: Sequence[RelaySpec],
    sizes: list[int],
    learners: int,
    ranks: int = 1,
    **sync: Any,
) -> Result:
    folder.mkdir()
    run = {"name": "tree", "learners": learners, "max_steps": 40, "folder": folder}
    config = RunConfig(
        run=run | {"evaluator": False, "checkpoint_interval_seconds": 0},
        sync={"fragments": len(sizes), "sync_every": 8, "overlap_steps": 2, **sync},
        syncer={"shards": 2},
        learner={"checkpoint_interval_seconds": 0},
        data={"elastic": ranks == 1},
        workload={},
    )
    specs = [
        LearnerSpec(
            f"learner-{n}",
            latency=0.002,
            tokens_per_step=8 + n,
            relay=("site-a" if n < learners // 2 else "site-b") if relays else "",
            ranks=ranks,
            sync_ranks=ranks,
        )
        for n in range(learners)
    ]
    tapes = folder if relays else None
    system = System(config, specs, folder, seed=1, sizes=sizes, relays=relays, tapes=tapes)
    result = Result()
    over: list[float] = []

    def on_event(process: str, now: float, event: object, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, RoundFinished):
                folded = sorted(p.learner for p in effect.participants if p.state == "folded")
                result.rounds.append((effect.fragment, effect.tick, tuple(folded)))
            if isinstance(effect, RunOver):
                over.append(now)

    system.recorders.append(on_event)
    try:
        system.run(until=500.0, stop=lambda: system.finished)
        assert system.error is None
        assert system.finished
        result.ending_seconds = system.clockwork.now - max(over)
        for fragment in range(len(sizes)):
            result.weights.append(system.shards[fragment % 2].tensors.whole(fragment).clone())
        stats = [host.role.acting._server.stats for host in system.shards if host.role]
        result.received = sum(each.data_bytes_received for each in stats)
        result.sent = sum(each.data_bytes_sent for each in stats)
        result.counted = [
            host.role.acting.machine.state.sites for host in system.shards if host.role
        ]
    finally:
        system.close()
    return result


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("relays", [SITES, NESTED], ids=["two-sites", "relays-of-relays"])
@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_the_result_is_that_of_a_flat_run(
    rule: str, relays: Sequence[RelaySpec], ranks: int, tmp_path: Path
) -> None:
    settings = {"quorum": 4, "codec": {"uplink": "fp32", "downlink": "fp32"}}
    settings |= {"merge": {"rule": rule}}
    sizes = [40, 50, 30, 20]
    flat = run(tmp_path / "flat", FLAT, sizes, 4, ranks, **settings)
    tree = run(tmp_path / "tree", relays, sizes, 4, ranks, **settings)
    assert sorted(tree.rounds) == sorted(flat.rounds), "the same learners are in the same rounds"
    assert any(len(learners) == 4 for _, _, learners in flat.rounds)
    for ours, theirs in zip(tree.weights, flat.weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert max(flat.ending_seconds, tree.ending_seconds) < ENDING_SECONDS_MAX
    model = run_of(TapeReader(tmp_path / "tree"))
    for site, log in model.sites.items():
        by_shard = [dataclasses.astuple(counted[site]) for counted in tree.counted]
        assert dataclasses.astuple(log.traffic) == tuple(map(sum, zip(*by_shard, strict=True)))
        assert log.traffic.saved_bytes > 0
    assert model.sites.keys() == {relay.name for relay in relays}
    assert {shard.relays["site-a"] for shard in model.shards.values()} == {
        next(relay.upstream for relay in relays if relay.name == "site-a")
    }


DILOCO = {"overlap_steps": 0, "quorum": 16, "grace_margin": 0.0, "wait": "at_overlap"}


@pytest.mark.parametrize("settings", [{}, DILOCO], ids=["overlapping", "diloco"])
@pytest.mark.parametrize(
    ("relays", "divided_by"),
    [
        pytest.param(SITES, 8, id="two-sites"),
        pytest.param(NESTED, 16, id="relays-of-relays", marks=pytest.mark.long),
    ],
)
def test_the_long_link_carries_one_sum_and_one_copy(
    relays: Sequence[RelaySpec], divided_by: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Two sites of eight learners: within 5 %, without the seed's copy of the initial weights."""
    sizes = [4000] * 4
    flat = run(tmp_path / "flat", FLAT, sizes, 16, **settings)
    tree = run(tmp_path / "tree", relays, sizes, 16, **settings)
    seed = 4 * sum(sizes)
    for ratio in ((flat.received - seed) / (tree.received - seed), flat.sent / tree.sent):
        assert 0.95 * divided_by < ratio < 1.05 * divided_by
