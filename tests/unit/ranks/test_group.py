"""Requirements that a program with several ranks must meet before it creates a learner."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.ranks.group import (
    RankGroup,
    chosen_sync_ranks,
    is_sharded,
    ranks_of_this_job,
)

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(("value", "ranks"), [(None, 1), ("1", 1), ("", 1)])
def test_a_program_without_a_process_group_has_one_rank(
    value: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("WORLD_SIZE", value)
    assert ranks_of_this_job() == ranks


def test_ranks_without_a_process_group_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError) as error:
        Learner(torch.nn.Linear(2, 2), NOWHERE)
    assert str(error.value) == (
        "WORLD_SIZE=4, but no process group is initialized: call "
        "torch.distributed.init_process_group() before Learner, or unset WORLD_SIZE if every "
        "process is a separate learner"
    )


@pytest.mark.parametrize("sync_ranks", [0, 3, "some", None, True, 1.5])
def test_an_invalid_number_of_sync_ranks_is_rejected(sync_ranks: object) -> None:
    with pytest.raises(ConfigError) as error:
        chosen_sync_ranks(sync_ranks, ["here", "there"])
    assert str(error.value) == (
        f"sync_ranks={sync_ranks!r} is out of range: pass 1 to 2, because this learner has 2 "
        "ranks, or 'hosts' (one per host) or 'all'"
    )


def test_one_rank_can_only_be_the_sync_rank() -> None:
    with pytest.raises(ConfigError, match=r"sync_ranks=2 .*: pass 1, because this learner has 1 r"):
        chosen_sync_ranks(2, ["here"])


def test_a_build_without_gloo_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="this build of PyTorch has no gloo"):
        RankGroup()


def test_an_fsdp2_model_counts_as_sharded_after_an_evaluation() -> None:
    torch.distributed.init_process_group(store=HashStore(), rank=0, world_size=1, backend="gloo")
    try:
        model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        assert is_sharded(model)
        with torch.no_grad():
            model(torch.ones(2))
        assert not isinstance(model.weight, DTensor), "the evaluation did not gather the parameters"
        assert is_sharded(model)
    finally:
        torch.distributed.destroy_process_group()
