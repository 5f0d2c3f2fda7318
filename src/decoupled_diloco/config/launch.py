"""`[launch]`: where `ddiloco launch` places a run's processes, and which resources each one gets.

`ddiloco train` and the other commands ignore this table, so one file serves a laptop and a cluster.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.units import GIB, KIB, MIB, TIB

Backend = Literal["local", "slurm", "kubernetes", "ray"]

_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_MEMORY = re.compile(r"([1-9][0-9]*)(KiB|MiB|GiB|TiB)")


class RoleResources(Settings):
    """The resources of one process of a role."""

    cpus: int = Field(default=1, ge=1)
    """Number of processor cores, at least 1."""

    memory: str = ""
    """Memory with its unit KiB, MiB, GiB or TiB, such as "64GiB". Default: the default of the
    backend."""

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, text: str) -> str:
        if text and not _MEMORY.fullmatch(text):
            raise ConfigError(
                f'memory={text!r} in {cls.table} is not a valid amount of memory: write "64GiB"'
            )
        return text

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of memory; ``None`` for the default of the backend.

        >>> SyncerResources(memory="2GiB").memory_bytes
        2147483648
        """
        found = _MEMORY.fullmatch(self.memory)
        return int(found[1]) * _UNITS[found[2]] if found else None


class SyncerResources(RoleResources):
    """`[launch.syncer]`: the resources of each shard, relay and evaluator, which have no GPU."""

    table: ClassVar[str] = "[launch.syncer]"

    folder_gib: int = Field(default=50, ge=1)
    """Size of each shard's volume for its run folder (Kubernetes), GiB, at least 1. A shard keeps
    24 to 120 bytes per parameter of its fragments, and the event tape."""


class LearnerResources(RoleResources):
    """`[launch.learner]`: the resources of each learner, for all its ranks together."""

    table: ClassVar[str] = "[launch.learner]"

    gpus: int = Field(default=0, ge=0)
    """Number of GPUs, 0 and up; usually one for each rank of the learner."""

    hosts: int = Field(default=1, ge=1)
    """Number of machines over which the ranks are spread evenly, at least 1. `cpus`, `gpus` and
    `memory` are the totals of all these machines."""


class SlurmSettings(Settings):
    """`[launch.slurm]`: the options of jobs on Slurm."""

    table: ClassVar[str] = "[launch.slurm]"

    partition: str = ""
    """Slurm partition of the learners' jobs. Default: the cluster's default partition."""

    syncer_partition: str = ""
    """Slurm partition of the syncer's job. Choose one without preemption. Default: `partition`."""

    account: str = ""
    """Account that is charged. Default: your default account."""

    qos: str = ""
    """Quality of service. Default: that of the partition."""

    time: str = ""
    """Time limit of each job, in Slurm's format ("2-00:00:00"). A learner that reaches it flushes
    and is queued again. Default: that of the partition."""

    notice_seconds: int = Field(default=60, ge=10, le=65_535)
    """Seconds before the time limit at which a learner is asked to stop, 10 to 65535. Slurm may
    send the signal up to a minute earlier."""

    directives: tuple[str, ...] = Field(default=(), strict=False)
    """Further options for sbatch, each as on its command line: "--constraint=h100"."""


class KubernetesSettings(Settings):
    """`[launch.kubernetes]`: the options of the objects on Kubernetes."""

    table: ClassVar[str] = "[launch.kubernetes]"

    namespace: str = "default"
    """Namespace of all objects."""

    image: str = "decoupled-diloco:latest"
    """Container image of all processes. The repository's Dockerfile builds it."""

    storage_class: str = ""
    """Storage class of the shards' volumes. Default: the cluster's default class."""

    learners: Literal["job", "jobset", "trainjob"] = "job"
    """Kind of the learners' objects. "job" is one Indexed Job for all learners, with one host each.
    "jobset" and "trainjob" are one object per learner, whose hosts restart together. They need the
    JobSet or the Kubeflow Trainer operator."""

    learner_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which learners may run: {"cloud.google.com/gke-spot" = "true"}."""

    tolerations: tuple[str, ...] = Field(default=(), strict=False)
    """Taints of nodes that learners tolerate, "key" or "key=value": "nvidia.com/gpu"."""

    allowed_networks: tuple[str, ...] = Field(default=(), strict=False)
    """Networks outside the cluster that may connect to shards and relays: "203.0.113.0/24"."""


class RaySettings(Settings):
    """`[launch.ray]`: the Ray cluster and its nodes."""

    table: ClassVar[str] = "[launch.ray]"

    address: str = "auto"
    """Address of the cluster's head node in Ray's format, "10.0.0.1:6379". "auto" is the cluster of
    this machine."""

    namespace: str = "ddiloco"
    """Ray namespace of the run's actors."""

    syncer_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which shards and the evaluator may run:
    {"ray.io/market-type" = "on-demand"}."""

    learner_nodes: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which learners may run: {"ray.io/market-type" = "spot"}."""


class LaunchSettings(Settings):
    """`[launch]`: the backend that starts the processes, and their resources."""

    table: ClassVar[str] = "[launch]"

    backend: Backend = "local"
    """"local" is this machine; "slurm", "kubernetes" and "ray" are clusters."""

    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Lines of shell before each process (Slurm): "module load cuda", "source .venv/bin/activate".
    Default: the environment of the command that launches."""

    workdir: Path | None = Field(default=None, strict=False)
    """Folder in which processes start, on every machine (Slurm, Ray). Default: the folder where the
    command starts."""

    syncer: SyncerResources = Field(default_factory=SyncerResources)
    """The resources of each shard, relay and evaluator."""

    learner: LearnerResources = Field(default_factory=LearnerResources)
    """The resources of each learner."""

    slurm: SlurmSettings = Field(default_factory=SlurmSettings)
    """The options for Slurm only."""

    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    """The options for Kubernetes only."""

    ray: RaySettings = Field(default_factory=RaySettings)
    """The options for Ray only."""

    @model_serializer(mode="wrap")
    def _keep_what_was_chosen(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out the tables of backends that the run does not use."""
        told, default = dump(self), type(self).model_construct()
        return {
            k: v
            for k, v in told.items()
            if v and (k == "backend" or getattr(self, k) != getattr(default, k))
        }
