"""The plan that is submitted to Ray: named actors, as data that you can read and edit.

Each *part* of a run is kept running by one actor per host. The parts are in `ray.json` of the
launch folder, and are submitted as they are there.

Commands of a part have placeholders for values that only its node knows: `{port}`, a free port;
`{host}`, the node's address; `{addresses}`, the current addresses of all shards; `{meeting}`, the
rendezvous address of a multi-host learner; `{first}`, whether this is its first host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.launch import RoleResources
from decoupled_diloco.config.run import SiteSettings
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.engine import SETTINGS
from decoupled_diloco.launch.processes import EVALUATOR, LOGGER, process_of, relay_process
from decoupled_diloco.storage.files import NOT_JSON

PLAN = "ray.json"

DDILOCO = "decoupled_diloco.cli"
TORCHRUN = "decoupled_diloco_engines.torchrun"


class RayProcess(Settings):
    """One process of a part."""

    table: ClassVar[str] = "a command of ray.json"

    module: str = DDILOCO
    """Module that Python runs."""

    arguments: tuple[str, ...] = Field(strict=False)
    """Command-line arguments."""


class RayPart(Settings):
    """A part that is kept running: a shard, a relay, the evaluator, or a learner."""

    table: ClassVar[str] = "a part of ray.json"

    name: str
    """Name in the run, such as "learner-0"."""

    bundles: tuple[dict[str, float], ...] = Field(strict=False, min_length=1)
    """Resources of each of its hosts, as Ray counts them: CPU, GPU, memory (bytes)."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that its nodes must have."""

    commands: dict[str, RayProcess]
    """Processes by name. The part is over when the process with the part's name is."""

    @property
    def actors(self) -> tuple[str, ...]:
        """Names of its actors, one per host.

        >>> RayPart(name="learner-0", bundles=[{"CPU": 1}] * 2, commands={}).actors
        ('learner-0.0', 'learner-0.1')
        """
        if len(self.bundles) == 1:
            return (self.name,)
        return tuple(f"{self.name}.{host}" for host in range(len(self.bundles)))


class RayPlan(Settings):
    """Everything that is submitted for one run."""

    table: ClassVar[str] = "ray.json"

    run: str
    """Name of the run; its actors are called ``RUN:PART``."""

    namespace: str
    """Ray namespace of the actors."""

    settings: Path = Field(strict=False)
    """File with the run's settings, on a file system that all nodes share."""

    actors: tuple[RayPart, ...] = Field(default=(), strict=False)
    """Shards, relays and evaluator: one detached actor each."""

    placement_groups: tuple[RayPart, ...] = Field(default=(), strict=False)
    """Learners: a placement group each, with a detached actor on each of its hosts."""

    @property
    def parts(self) -> tuple[RayPart, ...]:
        return (*self.actors, *self.placement_groups)

    def to_json(self) -> str:
        """Return the text of the file in the launch folder."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n"


def read_plan(folder: Path) -> RayPlan:
    """Return the plan of a launch folder, as it was written or edited.

    Raises:
        ConfigError: The file is not valid JSON, or has an invalid value.
        StorageError: It cannot be read.
    """
    path = folder / PLAN
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except NOT_JSON as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error!s:.80}): correct it, or write it again with "
            "ddiloco launch RUN.toml --dry-run"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} is not a JSON object: write it again with ddiloco launch RUN.toml --dry-run"
        )
    return RayPlan(**found)


def plan_of(config: RunConfig, folder: Path) -> RayPlan:
    """Return the plan of a run, with the settings of its launch folder.

    Raises:
        ConfigError: The run has a setting that Ray does not support.
    """
    _require_placeable(config)
    learners = [_learner(config, folder, index) for index in range(config.run.learners)]
    shards = [_shard(config, folder, shard) for shard in range(config.syncer.shards)]
    relays = [_relay(config, folder, site) for site in config.sites]
    evaluator = [_evaluator(config, folder)] if config.run.evaluator else []
    return RayPlan(
        run=config.run.name,
        namespace=config.launch.ray.namespace,
        settings=folder / SETTINGS,
        actors=(*shards, *relays, *evaluator),
        placement_groups=tuple(learners),
    )


def _require_placeable(config: RunConfig) -> None:
    launch = config.launch
    if config.syncer.standby:
        raise ConfigError(
            "standby=true in [syncer] cannot be combined with Ray, which restarts a shard on "
            "another node itself: leave standby out"
        )
    if config.syncer.addresses:
        raise ConfigError(
            f"addresses={list(config.syncer.addresses)!r} in [syncer] would be ignored, because on "
            "Ray a shard may run on any node and writes its address to the run folder: leave "
            "addresses out"
        )
    if config.learner.max_preemptions is not None:
        raise ConfigError(
            f"max_preemptions={config.learner.max_preemptions} in [learner] would be ignored, "
            "because Ray does not report why an actor was lost: leave max_preemptions out"
        )
    if launch.setup:
        raise ConfigError(
            f"setup={list(launch.setup)!r} in [launch] would be ignored, because processes use the "
            "environment of the Ray cluster's workers: leave setup out"
        )


def _shard(config: RunConfig, folder: Path, shard: int) -> RayPart:
    name = process_of(shard, standby=False)
    arguments = ["syncer", str(folder / SETTINGS), "--shard", str(shard)]
    arguments += ["--port", "{port}", "--addresses", "{addresses}", *_secret(config)]
    # The actor of shard 0 starts the logger, not the shard.
    arguments += ["--set", "run.trackers=[]"]
    commands = {name: RayProcess(arguments=tuple(arguments))}
    if config.run.trackers and shard == 0:
        places = [word for place in config.run.trackers for word in ("--to", place)]
        commands[LOGGER] = RayProcess(arguments=("track", str(config.run.folder), *places))
    ray, syncer = config.launch.ray, config.launch.syncer
    return RayPart(
        name=name, bundles=_bundles(syncer), labels=dict(ray.syncer_nodes), commands=commands
    )


def _relay(config: RunConfig, folder: Path, site: SiteSettings) -> RayPart:
    name = relay_process(site.name)
    place = ("--name", site.name, "--port", str(site.port), "--host", "{host}")
    arguments = _with_syncer(config, folder, "relay", *place, option="--upstream")
    return RayPart(
        name=name,
        bundles=_bundles(config.launch.syncer),
        labels=_labels(config, site),
        commands={name: RayProcess(arguments=arguments)},
    )


def _labels(config: RunConfig, site: SiteSettings | None) -> dict[str, str]:
    """Return the labels of the nodes for a learner or for the relay of its site."""
    return config.launch.ray.learner_nodes | (site.nodes if site else {})


def _evaluator(config: RunConfig, folder: Path) -> RayPart:
    arguments = _with_syncer(config, folder, EVALUATOR)
    return RayPart(
        name=EVALUATOR,
        bundles=_bundles(config.launch.syncer),
        labels=dict(config.launch.ray.syncer_nodes),
        commands={EVALUATOR: RayProcess(arguments=arguments)},
    )


def _learner(config: RunConfig, folder: Path, index: int) -> RayPart:
    name, gets = config.learner_ids[index], config.launch.learner
    command = RayProcess(arguments=_with_syncer(config, folder, "learner", "--index", str(index)))
    if gets.hosts > 1:
        ranks = config.learner.ranks_of(index) // gets.hosts
        command = _over_hosts(config, name, ranks, command.arguments)
    return RayPart(
        name=name,
        bundles=_bundles(gets, gets.gpus, gets.hosts),
        labels=_labels(config, config.site_of(index)),
        commands={name: command},
    )


def _over_hosts(config: RunConfig, name: str, ranks: int, arguments: tuple[str, ...]) -> RayProcess:
    """Return one torchrun per host. If a rank fails, all ranks end and all hosts restart."""
    torchrun = (
        f"--nnodes={config.launch.learner.hosts}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={config.run.name}-{name}",
        "--rdzv-endpoint={meeting}",
        "--rdzv-conf=is_host={first}",
        "--local-addr={host}",
        "--max-restarts=0",
    )
    return RayProcess(module=TORCHRUN, arguments=(*torchrun, "-m", DDILOCO, *arguments))


def _with_syncer(
    config: RunConfig, folder: Path, *role: str, option: str = "--syncer"
) -> tuple[str, ...]:
    """Return the arguments of a process that finds the shards by the run folder."""
    command, *options = role
    arguments = [command, str(folder / SETTINGS), *options, option, str(config.run.folder)]
    return (*arguments, *_secret(config))


def _secret(config: RunConfig) -> list[str]:
    secret = config.syncer.token_file
    if config.syncer.principals_file is not None or secret is None:
        return []
    return ["--auth-token-file", str(secret)]


def _bundles(gets: RoleResources, gpus: int = 0, hosts: int = 1) -> tuple[dict[str, float], ...]:
    each: dict[str, float] = {"CPU": max(1, gets.cpus // hosts)}
    if gpus:
        each["GPU"] = gpus // hosts
    if gets.memory_bytes:
        each["memory"] = gets.memory_bytes // hosts
    return (each,) * hosts


def describe_resources(bundle: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Describe resources and labels.

    >>> describe_resources({"CPU": 4, "memory": 2**31}, {"zone": "a"})
    'CPU 4, memory 2 GiB, label zone=a'
    """
    words = [
        f"{name} {amount / 2**30:g} GiB" if name == "memory" else f"{name} {amount:g}"
        for name, amount in bundle.items()
    ]
    return ", ".join([*words, *(f"label {key}={value}" for key, value in labels.items())])
