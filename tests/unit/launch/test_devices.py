"""The device of a process, and the devices of one machine that each learner gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch import devices
from decoupled_diloco.launch.devices import device_of_process, environment_of, kind_of
from decoupled_diloco.launch.launch_folder import placed_config
from decoupled_diloco.launch.roles import _process_group

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
RANK_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the number of devices of each kind on this machine."""
    for name in (*GPU_VARIABLES, *RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    def has(**here: int) -> None:
        monkeypatch.setattr(devices, "count", lambda kind: {"cpu": 1, **here}.get(kind, 0))

    has()
    return has


def config_of(device: str = "auto", learners: int = 2, **learner: Any) -> RunConfig:
    tables: dict[str, Any] = {"learner": {"device": device, **learner}}
    if learner.get("ranks", 1) != 1:
        tables["data"] = {"elastic": False}
    return RunConfig(run={"max_steps": 1, "learners": learners}, **tables)


def shares(config: RunConfig, **named: int) -> list[dict[str, str]]:
    return [environment_of(config, index, **named) for index in range(config.run.learners)]


@pytest.mark.parametrize(
    ("here", "kind"),
    [
        ({}, "cpu"),
        ({"mps": 1}, "mps"),
        ({"xpu": 2, "mps": 1}, "xpu"),
        ({"cuda": 1, "xpu": 2, "mps": 1}, "cuda"),
    ],
)
def test_auto_takes_the_first_available_kind(machine: Any, here: dict[str, int], kind: str) -> None:
    machine(**here)
    assert kind_of(config_of()) == (kind, None)
    index = None if kind in ("cpu", "mps") else 0
    assert device_of_process(config_of()) == torch.device(kind, index)


@pytest.mark.parametrize(
    ("device", "here", "found"),
    [
        ("cuda", {}, "no cuda device"),
        ("cuda:1", {"cuda": 1}, "1 cuda device"),
        ("cuda:2", {"cuda": 2}, "2 cuda devices"),
        ("xpu:0", {"cuda": 1}, "no xpu device"),
        ("mps", {}, "no mps device"),
        ("gpu", {}, "no GPU"),
    ],
)
def test_a_missing_device_is_an_error(
    machine: Any, device: str, here: dict[str, int], found: str
) -> None:
    machine(**here)
    with pytest.raises(ConfigError, match=f"device='{device}'.*is missing: PyTorch finds {found}"):
        environment_of(config_of(device), 0)
    with pytest.raises(ConfigError, match="is missing"):
        device_of_process(config_of(device))


@pytest.mark.parametrize("device", ["gpu2", "cuda:", "cuda:x", "cuda:-1", "GPU", "mps:1", "cpu:0"])
def test_an_unknown_device_is_rejected_by_the_settings(device: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a valid device: write 'auto'"):
        config_of(device)


def test_learners_share_the_gpus_of_a_machine_in_turn(machine: Any) -> None:
    machine(cuda=2)
    found = [each["CUDA_VISIBLE_DEVICES"] for each in shares(config_of("auto", 5))]
    assert found == ["0", "1", "0", "1", "0"]
    machine(cuda=8)
    found = [each["CUDA_VISIBLE_DEVICES"] for each in shares(config_of("cuda", 2, ranks=[2, 4]))]
    assert found == ["0,1", "2,3,4,5"]
    machine(cuda=3)  # two learners share the first GPU; ranks of one learner never share
    found = [each["CUDA_VISIBLE_DEVICES"] for each in shares(config_of("cuda", 2, ranks=2))]
    assert found == ["0,1", "2,0"]
    machine(xpu=2)
    assert shares(config_of()) == [{"ZE_AFFINITY_MASK": "0"}, {"ZE_AFFINITY_MASK": "1"}]


def test_a_command_that_starts_its_own_ranks_gets_an_equal_share(machine: Any) -> None:
    machine(cuda=8)
    found = [each["CUDA_VISIBLE_DEVICES"] for each in shares(config_of("auto", 3), each=0)]
    assert found == ["0,1", "2,3", "4,5"]
    machine(cuda=1)
    assert shares(config_of("auto", 2), each=0) == [{"CUDA_VISIBLE_DEVICES": "0"}] * 2


@pytest.mark.parametrize(
    ("told", "here", "found"),
    [
        ("3,5", 2, ["3", "5"]),
        ("7", 1, ["7", "7"]),
        ("GPU-8a, MIG-1/2/3", 2, ["GPU-8a", "MIG-1/2/3"]),
        ("1,9", 1, ["1", "1"]),  # the driver stops at a number that does not exist
    ],
)
def test_the_devices_that_the_environment_allows_are_divided(
    machine: Any, monkeypatch: pytest.MonkeyPatch, told: str, here: int, found: list[str]
) -> None:
    machine(cuda=here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(config_of())] == found


@pytest.mark.parametrize(("device", "here"), [("cpu", 4), ("auto", 0), ("cuda:1", 4)])
def test_a_named_device_or_a_cpu_is_not_divided(machine: Any, device: str, here: int) -> None:
    machine(cuda=here)
    assert shares(config_of(device)) == [{}, {}]


def test_a_rank_takes_the_device_of_its_local_rank(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda=2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of_process(config_of(ranks=2)) == torch.device("cuda", 1)
    assert device_of_process(config_of("cpu", ranks=2)) == torch.device("cpu")


def test_a_rank_takes_the_only_device_that_slurm_shows_it(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda=1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert device_of_process(config_of(ranks=4)) == torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["auto", "gpu", "cuda"])
def test_fewer_gpus_than_ranks_is_an_error(
    machine: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    machine(cuda=2)
    config = config_of(device, ranks=3)
    with pytest.raises(ConfigError, match="ranks=3 of learner-0 exceeds the 2 cuda devices"):
        environment_of(config, 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="ranks=3 on this machine exceeds its 2 cuda devices"):
        device_of_process(config)


def test_one_named_device_cannot_be_used_by_several_ranks() -> None:
    with pytest.raises(ConfigError, match=r"names one device, but ranks=2 .*: write device='cuda'"):
        config_of("cuda:1", ranks=2)


def test_a_fork_after_cuda_was_used_is_reported(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cuda=1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ConfigError, match="set fork_server=false"):
        device_of_process(config_of())


def test_a_launch_that_reserves_gpus_uses_them_or_fails(tmp_path: Any) -> None:
    def told(device: str = "auto", gpus: int = 1, ranks: int = 1, hosts: int = 1) -> str:
        tables: dict[str, Any] = {
            "launch": {"backend": "slurm", "learner": {"gpus": gpus, "hosts": hosts}},
            "data": {"elastic": ranks == 1},
            "learner": {"device": device, "ranks": ranks},
        }
        return placed_config(RunConfig(run={"max_steps": 1}, **tables), tmp_path).learner.device

    assert told() == "gpu"
    assert told(gpus=0) == "auto"
    assert told("cuda") == "cuda"
    with pytest.raises(ConfigError, match=r"gpus=1 .* would be idle with device='cpu'"):
        told("cpu")
    with pytest.raises(ConfigError, match=r"gpus=2 .* is too few for learner-0, which has ranks=4"):
        told(gpus=2, ranks=4)
    with pytest.raises(ConfigError, match=r"gpus=3 .* is not a multiple of hosts=2"):
        told(gpus=3, ranks=2, hosts=2)


@pytest.mark.parametrize(
    ("kind", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("mps", "gloo")]
)
def test_ranks_use_the_process_group_backend_of_their_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", asked.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: asked.append("end"))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with _process_group(2, torch.device(kind)):
        pass
    with _process_group(1, torch.device(kind)):
        pass
    assert asked == [backend, "end"], "one rank alone needs no group"
