"""Scores of learners, from recorded payloads and the shards' tapes (rule 26)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.launch.scoring import Scorer
from decoupled_diloco.merge import as_bytes, layout_of
from decoupled_diloco.protocol.messages import Asking, BodyArrived, Expect, Version
from decoupled_diloco.syncer.payload_archive import PAYLOADS
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.records import FOLDER_NAME

CHANGES = {"a": 1.0, "b": 0.9, "far": 3.0, "bad": -1.0}
"""Each learner's change, on the way from 0 to the held-out optimum at 1."""


class Quadratic:
    """The held-out loss is the squared distance from 1."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        (weights,) = model.parameters()
        return {"loss": float((weights.detach() - 1).square().mean())}


def test_a_gain_is_that_of_a_share_of_a_merge(tmp_path: Path) -> None:
    """A whole contribution that leads beyond the optimum would raise the loss."""
    config = RunConfig(
        run={"max_steps": 9},
        sync={"fragments": 1, "sync_every": 4},
        trust={"act": "show", "score_every": 2},
    )
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    scorer = Scorer(config, tmp_path, cast("Any", Quadratic()), model)
    assert scorer.gains(0, ("1.0",)) is None, "it only starts"
    uplink = plan_of(layout_of(model), config).uplink_of(0)
    with TapeWriter(tmp_path / FOLDER_NAME, "shard-0") as tape:
        for number, (learner, change) in enumerate(CHANGES.items()):
            ask, path = Asking(1, number), f"up/{learner}"
            expect = Expect(path, learner, 1, 1, 0, ask, "", "bf16")
            tape.effects(0.0, 0, [expect])
            body = as_bytes(uplink.encode(torch.full((16,), change))).numpy().tobytes()
            file = tmp_path / PAYLOADS / "shard-0" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(body)
            arrived = BodyArrived(learner, 1, 0, ask, Version(1, 0), 4, 40, len(body))
            tape.event(0.0, arrived)
    measured = scorer.gains(16, ("1.1",))
    assert measured is not None
    gains = dict(measured.gains)
    assert gains.keys() == CHANGES.keys()
    for learner, change in CHANGES.items():
        assert abs(gains[learner] - (1 - (1 - change / 4) ** 2)) < 0.01
    assert gains["far"] > gains["a"] > 0 > gains["bad"]
    assert not model.weight.any(), "the model has its weights again"
