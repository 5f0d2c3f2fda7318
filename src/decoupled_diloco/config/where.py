"""`[where]`: on what a run's processes are placed by `ddiloco launch`, and what each of them gets.

`ddiloco train` and the other commands look at nothing in here: one file serves a laptop and a
cluster.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import GIB, KIB, MIB, TIB

Engine = Literal["local", "slurm", "kubernetes", "ray"]

_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_MEMORY = re.compile(r"([1-9][0-9]*)(KiB|MiB|GiB|TiB)")


class RoleResources(Settings):
    """What one process of a role gets."""

    cpus: int = Field(default=1, ge=1)
    """Processor cores, at least 1."""

    memory: str = ""
    """Memory, as "64GiB"; KiB, MiB, GiB or TiB. Default: what the engine gives."""

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, text: str) -> str:
        if text and not _MEMORY.fullmatch(text):
            raise ConfigError(
                f'memory={text!r} in {cls.table} is no amount of memory: write it as "64GiB"'
            )
        return text

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory; ``None``: as the engine gives.

        >>> SyncerResources(memory="2GiB").memory_bytes
        2147483648
        """
        found = _MEMORY.fullmatch(self.memory)
        return int(found[1]) * _UNITS[found[2]] if found else None


class SyncerResources(RoleResources):
    """`[where.syncer]`: what each shard gets. A shard has no GPU."""

    table: ClassVar[str] = "[where.syncer]"

    folder_gib: int = Field(default=50, ge=1)
    """Disk for the run folder of each shard where it gets a volume of its own (Kubernetes), GiB, at
    least 1. A shard keeps 12 to 120 bytes a parameter of its fragments, and the tape."""


class LearnerResources(RoleResources):
    """`[where.learner]`: what each learner gets, all its ranks together."""

    table: ClassVar[str] = "[where.learner]"

    gpus: int = Field(default=0, ge=0)
    """GPUs, 0 and up; usually one for each rank of the learner."""

    hosts: int = Field(default=1, ge=1)
    """Machines that its ranks are spread over evenly, at least 1. `cpus`, `gpus` and `memory` are
    those of all of them together."""


class SlurmSettings(Settings):
    """`[where.slurm]`: how jobs are submitted to Slurm."""

    table: ClassVar[str] = "[where.slurm]"

    partition: str = ""
    """Partition of the learners' jobs. Default: the cluster's."""

    syncer_partition: str = ""
    """Partition of the syncer's job, which should be one whose jobs are not preempted. Default:
    `partition`."""

    account: str = ""
    """Account that is charged. Default: one's own."""

    qos: str = ""
    """Quality of service. Default: the partition's."""

    time: str = ""
    """Time limit of each job, as Slurm writes it ("2-00:00:00"). A learner that reaches it hands in
    what it has and is queued again. Default: the partition's."""

    notice_seconds: int = Field(default=60, ge=10, le=65_535)
    """How long before the time limit a learner is told to go, 10 to 65535 seconds. Slurm may tell
    it up to a minute earlier."""

    directives: tuple[str, ...] = Field(default=(), strict=False)
    """Further options of sbatch, each as on its command line: "--constraint=h100"."""


class KubernetesSettings(Settings):
    """`[where.kubernetes]`: the cluster's objects."""

    table: ClassVar[str] = "[where.kubernetes]"

    namespace: str = "default"
    """Namespace of all objects."""

    image: str = "decoupled-diloco:latest"
    """Container image of all processes; the repository's Dockerfile builds it."""

    storage_class: str = ""
    """Class of the shards' volumes. Default: the cluster's."""

    learners: Literal["job", "jobset", "trainjob"] = "job"
    """What the learners are: "job", one Indexed Job (learners of one host); "jobset" or "trainjob",
    one for each learner, whose hosts are started again together. They need the JobSet or Kubeflow
    Trainer operator."""

    learner_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that learners may run on: {"cloud.google.com/gke-spot" = "true"}."""

    tolerated: tuple[str, ...] = Field(default=(), strict=False)
    """Taints of nodes that learners may run on in spite of them, "key" or "key=value":
    "nvidia.com/gpu"."""

    sources: tuple[str, ...] = Field(default=(), strict=False)
    """Networks outside of the cluster that may reach the shards: "203.0.113.0/24"."""


class RaySettings(Settings):
    """`[where.ray]`: the Ray cluster, and its nodes."""

    table: ClassVar[str] = "[where.ray]"

    address: str = "auto"
    """Address of the cluster's head as Ray takes it, "10.0.0.1:6379". "auto": the cluster that this
    machine belongs to."""

    namespace: str = "ddiloco"
    """Ray namespace of the run's actors."""

    syncer_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that shards and the evaluator may run on:
    {"ray.io/market-type" = "on-demand"}."""

    learner_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that learners may run on: {"ray.io/market-type" = "spot"}."""


class WhereSettings(Settings):
    """`[where]`: the engine that places the processes, and what they get."""

    table: ClassVar[str] = "[where]"

    engine: Engine = "local"
    """"local": this machine; "slurm", "kubernetes" or "ray": a cluster that has it."""

    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Lines of shell before each process (Slurm): "module load cuda", "source .venv/bin/activate".
    Default: the environment of the command that launches."""

    workdir: Path | None = Field(default=None, strict=False)
    """Folder that processes are started in, on every machine. Default: where the command is."""

    syncer: SyncerResources = Field(default_factory=SyncerResources)
    """What each shard gets."""

    learner: LearnerResources = Field(default_factory=LearnerResources)
    """What each learner gets."""

    slurm: SlurmSettings = Field(default_factory=SlurmSettings)
    """For Slurm alone."""

    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    """For Kubernetes alone."""

    ray: RaySettings = Field(default_factory=RaySettings)
    """For Ray alone."""

    @model_serializer(mode="wrap")
    def _tell_what_was_chosen(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Tables of engines that the run does not use would only be in the way."""
        told, default = dump(self), type(self).model_construct()
        return {
            k: v
            for k, v in told.items()
            if v and (k == "engine" or getattr(self, k) != getattr(default, k))
        }
