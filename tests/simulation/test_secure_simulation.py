"""A run with secure sums gives the weights of the same run without them (rule 24)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.messages import RoundFinished
from decoupled_diloco_lab.simulate.spec import LearnerSpec, RelaySpec
from decoupled_diloco_lab.simulate.system import System

SITES = (RelaySpec("site-a"), RelaySpec("site-b"))
SIZES = [40, 50, 30]

SECRET = {"SumClaim": "keys", "SumShares": "shares", "SumOpening": "shares", "SumStep": "text"}
"""The field of each message that only its receiver may have."""


def run(
    folder: Path,
    privacy: dict[str, Any],
    rule: str,
    relays: Sequence[RelaySpec] = (),
    leap: float = 0.0,
) -> tuple[list[Tensor], set[tuple[int, int, tuple[str, ...]]]]:
    """Return the weights, and the participants of each merged round before the end.

    The shard's clock jumps ahead by ``leap`` seconds on the way.
    """
    folder.mkdir()
    run = {"name": "secure", "learners": 4, "max_steps": 24, "folder": folder}
    codec = {"downlink": "fp32"} | ({} if privacy else {"uplink": "fp32"})
    config = RunConfig(
        run=run | {"evaluator": False, "checkpoint_interval_seconds": 0},
        sync={
            "fragments": 3,
            "sync_every": 6,
            "overlap_steps": 2,
            "quorum": 4,
            "codec": codec,
            "merge": {"rule": rule},
        },
        learner={"checkpoint_interval_seconds": 0},
        privacy=privacy,
        workload={},
    )
    specs = [
        LearnerSpec(
            f"learner-{n}",
            latency=0.002,
            tokens_per_step=8 + n,
            relay=relays[n // 2].name if relays else "",
        )
        for n in range(4)
    ]
    system = System(config, specs, folder, seed=1, sizes=SIZES, relays=relays, tapes=folder)
    merged = set[tuple[int, int, tuple[str, ...]]]()

    def on_event(process: str, now: float, event: object, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, RoundFinished) and effect.verdict == "merged":
                folded = sorted(p.learner for p in effect.participants if p.state == "folded")
                merged.add((effect.fragment, effect.tick, tuple(folded)))

    system.recorders.append(on_event)
    try:
        if leap:
            system.run(until=500.0, stop=lambda: min_clock(system) >= 8)
            system.shards[0].leap(leap)
        # Before the end, whose closing sweep takes what is under way in another order.
        system.run(until=500.0, stop=lambda: min_clock(system) >= 20)
        assert system.error is None
        return [system.shards[0].tensors.whole(p).clone() for p in range(3)], merged
    finally:
        system.close()


def min_clock(system: System) -> int:
    machine = system.shards[0].machine
    return 0 if machine is None else machine.state.clock


@pytest.mark.parametrize("rule", ["rda", "mean"])
@pytest.mark.parametrize("relays", [(), SITES], ids=["flat", "sites"])
def test_the_weights_are_those_of_a_run_without_secure_sums(
    rule: str, relays: Sequence[RelaySpec], tmp_path: Path
) -> None:
    plain, merged = run(tmp_path / "plain", {}, rule)
    secure, also = run(tmp_path / "secure", {"secure_sums": True}, rule, relays)
    assert also == merged, "the same learners are in the same rounds"
    assert len(merged) >= 8
    for ours, theirs in zip(secure, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_clock_that_jumps_costs_a_secure_sum_at_most_its_open_rounds(tmp_path: Path) -> None:
    privacy = {"secure_sums": True}
    _, usual = run(tmp_path / "usual", privacy, "rda")
    _, merged = run(tmp_path / "leap", privacy, "rda", leap=1000.0)
    assert len(merged) >= len(usual) - len(SIZES)
    assert {learners for _, _, learners in merged} == {tuple(f"learner-{n}" for n in range(4))}
    assert max(tick for _, tick, _ in merged) >= 18, "rounds go on after the jump"


def test_the_tapes_have_no_keys_and_no_shares(tmp_path: Path) -> None:
    """Otherwise a reader of the run folder could open the payloads that it may have recorded."""
    run(tmp_path / "run", {"secure_sums": True}, "rda")
    seen = Counter[str]()
    for path in (tmp_path / "run").rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            message = json.loads(line)["data"].get("message")
            kind = message.get("type") if isinstance(message, dict) else None
            if kind in SECRET:
                seen[kind] += 1
                assert message[SECRET[kind]] == "", line
    assert seen.keys() == SECRET.keys()
