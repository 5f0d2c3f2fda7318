"""What a program with several ranks needs before it makes a learner."""

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


@pytest.mark.parametrize(("said", "ranks"), [(None, 1), ("1", 1), ("", 1)])
def test_a_program_of_its_own_has_one_rank(
    said: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("WORLD_SIZE", said)
    assert ranks_of_this_job() == ranks


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError) as error:
        Learner(torch.nn.Linear(2, 2), NOWHERE)
    assert str(error.value) == (
        "WORLD_SIZE=4 says that this is one of 4 ranks, and there is no process group: call "
        "torch.distributed.init_process_group() before Learner, or unset WORLD_SIZE if every "
        "process is a learner of its own"
    )


@pytest.mark.parametrize("sync_ranks", [0, 3, "some", None, True, 1.5])
def test_sync_ranks_that_are_not_there_are_refused(sync_ranks: object) -> None:
    with pytest.raises(ConfigError) as error:
        chosen_sync_ranks(sync_ranks, ["here", "there"])
    assert str(error.value) == (
        f"sync_ranks={sync_ranks!r} is out of range: pass 1 to 2, because this learner has 2 "
        "ranks, or 'hosts' (one per host) or 'all'"
    )


def test_a_build_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="this build of PyTorch has no gloo"):
        RankGroup()


def test_a_model_of_fsdp2_is_sharded_after_an_evaluation_too() -> None:
    torch.distributed.init_process_group(store=HashStore(), rank=0, world_size=1, backend="gloo")
    try:
        model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        assert is_sharded(model)
        with torch.no_grad():
            model(torch.ones(2))
        assert not isinstance(model.weight, DTensor), "it has gathered its parameters"
        assert is_sharded(model)
    finally:
        torch.distributed.destroy_process_group()
