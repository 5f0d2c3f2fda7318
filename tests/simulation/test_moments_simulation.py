"""A run with relays merges the moments that a flat run merges."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco_lab.simulate.training import train_virtually

OPTIONS = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2, "eval_batches": 1}
SITES = ({"name": "a", "learners": [0, 1]}, {"name": "b", "learners": [2]})


def moments_of(every: int, sites: tuple[dict[str, Any], ...]) -> list[Tensor]:
    """Return the published moments of each fragment at the end of a run."""
    config = RunConfig(
        run={"learners": 3, "max_steps": 24, "evaluator": False},
        sync={
            "fragments": 3,
            "sync_every": 6,
            "quorum": 3,
            "codec": {"uplink": "fp32", "downlink": "fp32"},
            "moments": {"every": every, "codec": "fp32"},
        },
        sites=sites,
        data={"elastic": False},
        workload={"name": "gpt", "options": {**OPTIONS, "optimizer": "adamw"}},
    )
    run = train_virtually(config)
    (shard,) = run.system.shards
    entries = sorted(shard.tensors.fragments.items())
    return [entry.published[run.plan.moments_start(p) :] for p, entry in entries]


@pytest.mark.parametrize("every", [1, 2])
def test_relays_send_the_moments_of_their_learners(every: int) -> None:
    flat, relayed = moments_of(every, ()), moments_of(every, SITES)
    for one, other in zip(flat, relayed, strict=True):
        assert one.isfinite().all()
        assert (one != 0).any()
        # Sums of sums round differently, and Adam amplifies that where gradients are near zero.
        assert float((one - other).norm()) < 0.02 * float(one.norm())
