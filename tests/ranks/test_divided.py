"""A workload's distributed model computes the same as the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases import long_after
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.rank_split import require_divisible
from ranks import divided_program
from ranks.divided_program import SIZES, measured
from ranks.rank_learners import ranks
from ranks.rank_program import Job

KINDS = [
    *("gpt fsdp", "moe ddp", "vit tp", "gpt ddp", "gpt tp", "vit ddp", "vit fsdp"),
    *("speech ddp", "speech fsdp", "speech tp"),
]


@pytest.mark.parametrize("kind", long_after(3, KINDS))
def test_loss_and_gradients_equal_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    name, parallelism = kind.split()
    with ranks(Job(kind, "", "one", tmp_path), 2, divided_program.main) as learner:
        learner.require_success()
    loss, gradients = torch.load(tmp_path / "found.pt")
    workload = load_workload(name, SIZES[name])
    alone = [measured(workload, workload.model(), n) for n in range(1 + (parallelism != "tp"))]
    assert loss == pytest.approx(alone[0][0], abs=1e-5), "rank 0 has the first batch"
    assert gradients.keys() == alone[0][1].keys()
    for key, gradient in gradients.items():
        parts = [each[1][key] for each in alone]
        mean = sum(torch.zeros(()) if part is None else part for part in parts) / len(parts)
        found = torch.zeros(()) if gradient is None else gradient
        torch.testing.assert_close(found.expand_as(mean), mean, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize(
    ("name", "options", "learner", "reason"),
    [
        (
            "moe",
            {},
            {"ranks": 2, "parallelism": "fsdp"},
            "workload 'moe' cannot be combined with parallelism='fsdp' and ranks=2: an expert "
            "without tokens on a rank has no gradient there, which FSDP2 does not support: use "
            "'ddp'",
        ),
        (
            "moe",
            {},
            {"ranks": 2, "parallelism": "tp"},
            "workload 'moe' cannot be combined with parallelism='tp' and ranks=2: only 'gpt', "
            "'paced', 'speech' and 'vit' support tensor parallel: use 'ddp'",
        ),
        (
            "gpt",
            {"heads": 4},
            {"ranks": 3, "parallelism": "tp"},
            "workload 'gpt' cannot be combined with parallelism='tp' and ranks=3: heads=4 is not "
            "a multiple of ranks: change one of them",
        ),
    ],
)
def test_an_unsupported_parallelism_is_rejected(
    name: str, options: dict[str, object], learner: dict[str, object], reason: str
) -> None:
    config = RunConfig(
        run={"max_steps": 100},
        learner=learner,
        data={"elastic": False},
        workload={"name": name, "options": options},
    )
    with pytest.raises(ConfigError) as refused:
        require_divisible(load_workload(name, config.workload_options()), config)
    assert str(refused.value) == reason
