"""The device that a process trains on, and the devices of one machine that each learner gets.

The launcher divides a machine's GPUs among its learners with the variable that the driver reads
(`environment_of`). A learner process then takes the first kind of device that it sees, or the one
that `device` in `[learner]` names (`device_of_process`). Nothing here initializes CUDA: such a
process could not fork any more, and would no longer follow `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from decoupled_diloco.config import RunConfig

KINDS = ("cuda", "xpu", "mps", "cpu")
"""The order in which `device = "auto"` looks for a device."""

_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def count(kind: str) -> int:
    """The number of devices of a kind that this process can see."""
    import torch  # the launcher imports it late: it takes seconds

    match kind:
        case "cuda":
            return torch.cuda.device_count()
        case "xpu":
            return torch.xpu.device_count()
        case "mps":
            return int(torch.backends.mps.is_available())
        case _:
            return 1


def kind_of(config: RunConfig) -> tuple[str, int | None]:
    """The kind of device that the learners train on here, and its number if the settings name one.

    Raises:
        ConfigError: This machine lacks the device.
    """
    setting = config.learner.device
    if setting in ("auto", "gpu"):
        kind = next(kind for kind in KINDS if count(kind))
        if (kind, setting) == ("cpu", "gpu"):
            raise ConfigError(
                f"device='gpu' in [learner] is missing: PyTorch finds no GPU on this machine"
                f"{_why_none()}, or set device='auto' to train on the CPU"
            )
        return kind, None
    kind, _, number = setting.partition(":")
    here = count(kind)
    if int(number or 0) >= here:
        found = f"{here} {kind} device{'s' * (here > 1)}" if here else f"no {kind} device"
        raise ConfigError(
            f"device={setting!r} in [learner] is missing: PyTorch finds {found} on this machine"
            f"{_why_none() if not here else ''}, or choose a device that is here, or 'auto'"
        )
    return kind, int(number) if number else None


def environment_of(config: RunConfig, index: int, *, each: int | None = None) -> dict[str, str]:
    """The variable that gives learner `index` its own devices of this machine; empty for a CPU.

    Learners get successive devices and start over when there are fewer devices than learners. If
    the user or the cluster has set the variable already, its devices are the ones that are divided.

    Args:
        config: The run's settings.
        index: Number of the learner, 0 to learners - 1; all learners are on this machine.
        each: Devices per learner. Default: one for each rank, and with a command, whose ranks are
            not known here, 0. 0: an equal share of all devices.

    Raises:
        ConfigError: The device is missing, or a learner has more ranks than there are devices.
    """
    kind, number = kind_of(config)
    if kind not in _VARIABLES or number is not None:
        return {}
    variable, visible = _visible(kind)
    if each is None and config.learner.command:
        each = 0
    if each is None:
        first = sum(config.learner.ranks_of(before) for before in range(index))
        each = config.learner.ranks_of(index)
    else:
        each = each or max(1, len(visible) // config.run.learners)
        first = index * each
    if each > len(visible):
        raise ConfigError(
            f"ranks={each} of learner-{index} exceeds the {len(visible)} {kind} "
            f"device{'s' * (len(visible) > 1)} of this machine: lower ranks, or set device='cpu' "
            "in [learner]"
        )
    return {variable: ",".join(visible[(first + n) % len(visible)] for n in range(each))}


def device_of_process(config: RunConfig) -> torch.device:
    """The device that this process trains on; LOCAL_RANK chooses that of a rank.

    Raises:
        ConfigError: This process does not see the device.
    """
    import torch

    kind, number = kind_of(config)
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    if kind == "cuda" and torch.cuda._is_in_bad_fork():
        raise ConfigError(
            "fork_server=true in [run] cannot be used on this machine, because PyTorch counts its "
            "devices through CUDA instead of NVML: set fork_server=false"
        )
    local, here = int(os.environ.get("LOCAL_RANK", 0)), count(kind)
    if here == 1 and "SLURM_GPUS_PER_TASK" in os.environ:
        local = 0  # Slurm shows each rank its own device alone
    if number is None and local >= here:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", local + 1)
        raise ConfigError(
            f"ranks={ranks} on this machine exceeds its {here} {kind} device{'s' * (here > 1)}: "
            "lower ranks, reserve more devices, or set device='cpu' in [learner]"
        )
    return torch.device(kind, local if number is None else number)


def _visible(kind: str) -> tuple[str, list[str]]:
    """The variable of a kind, and the devices that it allows now, as it names them."""
    import torch

    variable, here = _VARIABLES[kind], count(kind)
    if kind == "cuda" and torch.version.hip and "HIP_VISIBLE_DEVICES" in os.environ:
        variable = "HIP_VISIBLE_DEVICES"
    named = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return variable, named[:here] or [str(number) for number in range(here)]


def _why_none() -> str:
    """A hint for the end of a sentence: the reason why PyTorch finds no GPU, and the fix."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f" (PyTorch {torch.__version__} is a CPU build): install one with GPU support"
    return ": check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
