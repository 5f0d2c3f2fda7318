"""What is submitted to Ray: named actors, as data that people read and edit.

Each *part* of a run is kept running by one actor, or by one on each of its hosts. They lie in
`ray.json` of the launch folder, and are submitted as they are there.

In a part's commands stand for what is known only on its node: `{port}`, a free port there;
`{host}`, the node's address; `{addresses}`, where all shards are by now; `{meeting}`, where the
hosts of a learner meet; `{first}`, whether this is the first of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.config.where import RoleResources
from decoupled_diloco.engines.base import SETTINGS
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.processes import EVALUATOR, LOGGER, process_of
from decoupled_diloco.storage.files import NOT_JSON

PLAN = "ray.json"

DDILOCO = "decoupled_diloco.cli"
TORCHRUN = "decoupled_diloco.engines.torchrun"


class RayProcess(Settings):
    """One process of a part."""

    table: ClassVar[str] = "a command of ray.json"

    module: str = DDILOCO
    """The module that Python runs."""

    arguments: tuple[str, ...] = Field(strict=False)
    """What it is told."""


class RayPart(Settings):
    """Something that is kept running: a shard, the evaluator, a learner."""

    table: ClassVar[str] = "a part of ray.json"

    name: str
    """Its name in the run: "learner-0"."""

    bundles: tuple[dict[str, float], ...] = Field(strict=False, min_length=1)
    """Resources of each of its hosts, as Ray counts them: CPU, GPU, memory (bytes)."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that its nodes must have."""

    commands: dict[str, RayProcess]
    """Its processes, by name. When the one with the part's own name is over, the part is."""

    @property
    def actors(self) -> tuple[str, ...]:
        """One name for each host.

        >>> RayPart(name="learner-0", bundles=[{"CPU": 1}] * 2, commands={}).actors
        ('learner-0.0', 'learner-0.1')
        """
        if len(self.bundles) == 1:
            return (self.name,)
        return tuple(f"{self.name}.{host}" for host in range(len(self.bundles)))


class RayPlan(Settings):
    """All that is submitted for one run."""

    table: ClassVar[str] = "ray.json"

    run: str
    """Name of the run; its actors are called ``RUN:PART``."""

    namespace: str
    """Their Ray namespace."""

    settings: Path = Field(strict=False)
    """The run's settings, on a file system that all nodes share."""

    actors: tuple[RayPart, ...] = Field(default=(), strict=False)
    """Shards and evaluator: one detached actor each."""

    placement_groups: tuple[RayPart, ...] = Field(default=(), strict=False)
    """Learners: a placement group each, with a detached actor on each of its hosts."""

    @property
    def parts(self) -> tuple[RayPart, ...]:
        return (*self.actors, *self.placement_groups)

    def to_json(self) -> str:
        """As it is written into the launch folder."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"


def read_plan(folder: Path) -> RayPlan:
    """The plan of a launch folder, as it was written or edited.

    Raises:
        ConfigError: it is no JSON, or says something that cannot be.
        StorageError: it cannot be read.
    """
    path = folder / PLAN
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except NOT_JSON as error:
        raise ConfigError(
            f"{path} is no JSON ({error!s:.80}): correct it, or have it written again with "
            "ddiloco launch RUN.toml --dry-run"
        ) from None
    if not isinstance(told, dict):
        raise ConfigError(
            f"{path} is no object in braces: have it written again with ddiloco launch RUN.toml "
            "--dry-run"
        )
    return RayPlan(**told)


def plan_of(config: RunConfig, folder: Path) -> RayPlan:
    """What a run asks of Ray, with the settings of its launch folder.

    Raises:
        ConfigError: the run asks for something that Ray does not do.
    """
    _require_placeable(config)
    learners = [_learner(config, folder, index) for index in range(config.run.learners)]
    shards = [_shard(config, folder, shard) for shard in range(config.syncer.shards)]
    evaluator = [_evaluator(config, folder)] if config.run.evaluator else []
    return RayPlan(
        run=config.run.name,
        namespace=config.where.ray.namespace,
        settings=folder / SETTINGS,
        actors=(*shards, *evaluator),
        placement_groups=tuple(learners),
    )


def _require_placeable(config: RunConfig) -> None:
    where, learner = config.where, config.where.learner
    if config.syncer.standbys:
        raise ConfigError(
            "standbys=1 in [syncer] does not go with Ray, which starts a shard again on another "
            "node by itself: leave standbys out"
        )
    if config.syncer.addresses:
        raise ConfigError(
            f"addresses={list(config.syncer.addresses)!r} in [syncer] would be ignored: on Ray a "
            "shard may run on any node, and is found by the run folder: leave addresses out"
        )
    if where.setup:
        raise ConfigError(
            f"setup={list(where.setup)!r} in [where] would be ignored: processes have the "
            "environment of the Ray cluster's workers: leave setup out"
        )
    if learner.gpus % learner.hosts:
        raise ConfigError(
            f"gpus={learner.gpus} in [where.learner] cannot be spread evenly over "
            f"hosts={learner.hosts}: choose a multiple"
        )


def _shard(config: RunConfig, folder: Path, shard: int) -> RayPart:
    name = process_of(shard, standby=False)
    told = ["syncer", str(folder / SETTINGS), "--shard", str(shard)]
    told += ["--port", "{port}", "--addresses", "{addresses}", *_secret(config)]
    told += ["--set", "run.log=[]"]  # not shard 0 starts the logger, but its actor
    commands = {name: RayProcess(arguments=tuple(told))}
    if config.run.log and shard == 0:
        places = [word for place in config.run.log for word in ("--to", place)]
        commands[LOGGER] = RayProcess(arguments=("log", str(config.run.folder), *places))
    ray, syncer = config.where.ray, config.where.syncer
    return RayPart(
        name=name, bundles=_bundles(syncer), labels=dict(ray.syncer_nodes), commands=commands
    )


def _evaluator(config: RunConfig, folder: Path) -> RayPart:
    told = _dialled(config, folder, EVALUATOR)
    return RayPart(
        name=EVALUATOR,
        bundles=_bundles(config.where.syncer),
        labels=dict(config.where.ray.syncer_nodes),
        commands={EVALUATOR: RayProcess(arguments=told)},
    )


def _learner(config: RunConfig, folder: Path, index: int) -> RayPart:
    name, gets = config.learner_ids[index], config.where.learner
    command = RayProcess(arguments=_dialled(config, folder, "learner", "--index", str(index)))
    if gets.hosts > 1:
        ranks = config.learner.ranks_of(index) // gets.hosts
        command = _over_hosts(config, name, ranks, command.arguments)
    return RayPart(
        name=name,
        bundles=_bundles(gets, gets.gpus, gets.hosts),
        labels=dict(config.where.ray.learner_nodes),
        commands={name: command},
    )


def _over_hosts(config: RunConfig, name: str, ranks: int, told: tuple[str, ...]) -> RayProcess:
    """One torchrun on each host. When ranks fail all end, and all hosts begin again."""
    torchrun = (
        f"--nnodes={config.where.learner.hosts}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={config.run.name}-{name}",
        "--rdzv-endpoint={meeting}",
        "--rdzv-conf=is_host={first}",
        "--local-addr={host}",
        "--max-restarts=0",
    )
    return RayProcess(module=TORCHRUN, arguments=(*torchrun, "-m", DDILOCO, *told))


def _dialled(config: RunConfig, folder: Path, *role: str) -> tuple[str, ...]:
    """A process that finds the shards by what they write into the run folder."""
    who, *options = role
    told = [who, str(folder / SETTINGS), *options, "--syncer", str(config.run.folder)]
    return (*told, *_secret(config))


def _secret(config: RunConfig) -> list[str]:
    secret = config.syncer.token_file
    if config.syncer.principals_file is not None or secret is None:
        return []
    return ["--token-file", str(secret)]


def _bundles(gets: RoleResources, gpus: int = 0, hosts: int = 1) -> tuple[dict[str, float], ...]:
    each: dict[str, float] = {"CPU": max(1, gets.cpus // hosts)}
    if gpus:
        each["GPU"] = gpus // hosts
    if gets.memory_bytes:
        each["memory"] = gets.memory_bytes // hosts
    return (each,) * hosts


def told_of(bundle: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Resources in words.

    >>> told_of({"CPU": 4, "memory": 2**31}, {"zone": "a"})
    'CPU 4, memory 2 GiB, label zone=a'
    """
    words = [
        f"{name} {amount / 2**30:g} GiB" if name == "memory" else f"{name} {amount:g}"
        for name, amount in bundle.items()
    ]
    return ", ".join([*words, *(f"label {key}={value}" for key, value in labels.items())])
