"""Ray engine: a detached actor for each shard and relay, and a placement group for each learner.

The actors run the run's processes (`node_agent`), and Ray restarts the actors. When a node dies,
its actors restart on another node with free resources. All processes share the run folder, to which
each shard and relay writes its address.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.engine import Job, JobState
from decoupled_diloco.launch.run_folder import RunFolder, enter_run_folder
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.shared_folder import RELAY
from decoupled_diloco_engines import ray_cluster as cluster
from decoupled_diloco_engines.node_agent import ENDED, SHARD
from decoupled_diloco_engines.ray_plan import PLAN, RayPlan, plan_of, read_plan

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
"""Time for learners, and then for shards, to end before they are killed, plus `leave_seconds_max`.
"""

STOP_SECONDS = 20.0
"""Time for actors to answer; one that does not is considered dead, and is not asked to end."""

_WAITING = ("PENDING", "RESCHEDULING")


class Ray:
    """Ray engine; see `PlacingEngine`. A job is an actor; its id is ``namespace/run:actor``.

    Args:
        config: The run's settings.
    """

    leaves = (PLAN, f"{ENDED}/*.json")

    def __init__(self, config: RunConfig) -> None:
        self._address = config.launch.ray.address
        self._leave_seconds = config.learner.leave_seconds_max

    def require(self, config: RunConfig) -> None:
        """Check the cluster; warn about parts for which it has no node yet."""
        plan = plan_of(config, Path("/nowhere.launch"))
        ray = self._connected()
        cluster.require_unused(ray, plan)
        for part, bundle in cluster.unplaceable(ray, plan.parts):
            table = "[launch.learner]" if part in plan.placement_groups else "[launch.syncer]"
            logger.warning(
                "%s waits until the cluster has %s: add nodes, or lower the request in %s",
                part.name,
                cluster.in_words(part, bundle),
                table,
            )

    def files(self, config: RunConfig, folder: Path) -> Mapping[str, str]:
        return {PLAN: plan_of(config, folder).to_json()}

    def copies(self, config: RunConfig) -> dict[str, Path]:
        """Return no files: all nodes share the file system."""
        return {}

    def logs(self, config: RunConfig, folder: Path) -> str:
        return f"{config.run.folder}/logs"

    def submit(self, config: RunConfig, folder: Path, *, resume: bool = False) -> list[Job]:
        """Start the actors of shards and relays, then the others."""
        plan = read_plan(folder)
        ray = self._connected()
        cluster.require_unused(ray, plan)
        # Like any command that starts a run, move aside an earlier run in the folder.
        with RunFolder(config.run.folder, resume=resume):
            if resume:
                from decoupled_diloco.launch.resume_run import require_whole  # torch is slow

                require_whole(config.run.folder, config)
            enter_run_folder(config)
        for note in (folder / ENDED).glob("*.json"):
            note.unlink()
        jobs = _jobs_of(plan)
        try:
            for part in plan.actors:
                cluster.start_actor(ray, plan, part)
            for part in plan.placement_groups:
                cluster.start_group(ray, plan, part)
        except ValueError as error:  # Ray rejects an edited plan.
            _end_by_force(ray, plan.namespace, jobs)
            raise ConfigError(f"Ray rejects {folder / PLAN}: {error}: correct it") from error
        return jobs

    def states(self, jobs: Sequence[Job]) -> list[JobState]:
        if not jobs:
            return []
        ray = self._connected()
        namespace = _namespace_of(jobs)
        names = {_name_of(job): job for job in jobs}
        there = cluster.handles(ray, namespace, names)
        answers = cluster.answers(ray, there)
        groups = cluster.group_states(ray, namespace) if len(answers) < len(there) else {}
        found = []
        for name in there:
            job, answer = names[name], answers.get(name, {})
            state = answer.get("state") or _state_from(groups.get(_group_of(name), ("", ""))[0])
            found.append(JobState(job.name, job.id, state, answer.get("node", "")))
        return found

    def stop(self, jobs: Sequence[Job]) -> None:
        """Ask the learners to flush and end, then the others; kill those that do not end."""
        ray, namespace = self._connected(), _namespace_of(jobs)
        servers = [job for job in jobs if job.name.startswith((SHARD, RELAY))]
        for some in ([job for job in jobs if job not in servers], servers):
            self._end(ray, namespace, some)
            _end_by_force(ray, namespace, some)

    def _end(self, ray: ModuleType, namespace: str, jobs: Sequence[Job]) -> None:
        """Ask actors to end, and wait for those that are alive."""
        # Actors without a node cannot answer, and waiting for them would use the whole time limit.
        groups = cluster.group_states(ray, namespace)
        waiting = {name for name, (state, _) in groups.items() if state in _WAITING}
        names = [name for name in map(_name_of, jobs) if _group_of(name) not in waiting]
        there = cluster.handles(ray, namespace, names)
        alive = cluster.answers(ray, there, STOP_SECONDS)
        for actor in cluster.handles(ray, namespace, alive).values():
            actor.end.remote()
        deadline = now() + self._leave_seconds + DRAIN_SECONDS
        while cluster.handles(ray, namespace, alive) and now() < deadline:
            time.sleep(0.2)

    def _connected(self) -> ModuleType:
        return cluster.connected(self._address)


def _end_by_force(ray: ModuleType, namespace: str, jobs: Sequence[Job]) -> None:
    """Kill actors that hang or still wait for resources, and remove their groups."""
    names = list(map(_name_of, jobs))
    for actor in cluster.handles(ray, namespace, names).values():
        ray.kill(actor, no_restart=True)
    groups = cluster.group_states(ray, namespace)
    for name in {_group_of(name) for name in names} & groups.keys():
        cluster.remove_group(ray, groups[name][1])


def _jobs_of(plan: RayPlan) -> list[Job]:
    return [
        Job(actor, f"{plan.namespace}/{cluster.full_name(plan.run, actor)}")
        for part in plan.parts
        for actor in part.actors
    ]


def _namespace_of(jobs: Sequence[Job]) -> str:
    return jobs[0].id.partition("/")[0] if jobs else ""


def _name_of(job: Job) -> str:
    return job.id.partition("/")[2]


def _group_of(name: str) -> str:
    """Return the full name of an actor's part: without the number of its host."""
    run, _, actor = name.rpartition(":")
    return f"{run}:{actor.partition('.')[0]}"


def _state_from(group: str) -> str:
    """Return the state of an actor that does not answer, from its placement group's state."""
    return "waiting for a node" if group in _WAITING else "starting"
