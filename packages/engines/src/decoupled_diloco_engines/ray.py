"""Runs on a Ray cluster, from Python: ``from decoupled_diloco_engines import ray as dd_ray``.

A run does not depend on the program that started it. Its actors are detached, and `attach` finds it
again. See docs/how-to/ray.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.launch import RaySettings
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.errors import ConfigError, DilocoError, TransportError
from decoupled_diloco.launch.engine import JOBS, JobState
from decoupled_diloco.launch.launch_folder import Launch, launch_folder, was_launched, write_launch
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import write_text
from decoupled_diloco_engines import ray_cluster as cluster
from decoupled_diloco_engines.node_agent import ERROR_PREFIX, read_notes
from decoupled_diloco_engines.ray_engine import Ray
from decoupled_diloco_engines.ray_plan import PLAN, read_plan

if TYPE_CHECKING:
    from decoupled_diloco.show import status

__all__ = ["RayRun", "RunStatus", "attach", "connect_args", "launch"]

ATTACH_SECONDS = 60.0
"""Time limit for an actor of a starting run to answer."""

HEAD_SECONDS = 30.0
"""Time for which `RayRun.wait` tolerates a missing head; Ray itself ends a program after 60 s."""

POLL_SECONDS = 1.0
"""Polling interval of `RayRun.wait`."""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        actors: The actors in the cluster, each with its state and the address of its node.
        run: The state of the training, as `ddiloco status` shows it.
        problem: Why the cluster does not list its actors; empty if it does.
    """

    actors: tuple[JobState, ...]
    run: status.RunStatus
    problem: str = ""


class RayRun:
    """A run that was launched on Ray; created by `launch` and `attach`.

    Attributes:
        run_dir: The run folder, which all nodes share.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.run_dir = launch.config.run.folder

    def status(self) -> RunStatus:
        """Return the state of its actors and its training; only training while Ray's head is away.

        Raises:
            StorageError: The run has no tape yet, because no process has started.
        """
        from decoupled_diloco.run_model import run_of
        from decoupled_diloco.show.status import status_of
        from decoupled_diloco.tape.sources import open_source

        actors, problem = self._actors()
        source = open_source(str(self.run_dir), None)
        found = run_of(source.poll(), "run")
        status = status_of(found, source.now(), source.problems(), found.account)
        return RunStatus(actors, status, problem)

    def _actors(self) -> tuple[tuple[JobState, ...], str]:
        """Return the actors in the cluster, or the reason why they are unknown."""
        try:
            return tuple(self._launch.states()), ""
        except (ConfigError, TransportError) as error:
            return (), str(error)

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the run is over.

        Args:
            timeout: Seconds, above 0; ``None``: no limit.

        Returns:
            The file with the final weights.

        Raises:
            ConfigError: A part of the run was rejected; the message has the reason.
            TransportError: ``timeout`` has passed, or Ray's head has been away for 30 s. In the
                second case the program is disconnected from the cluster, because Ray would end it.
            DilocoError: The run was stopped, or ended without a result.
        """
        weights = self.run_dir / "weights.safetensors"
        began = now()
        while alive := self._known_actors():
            self._raise_if_rejected()
            if timeout is not None and now() > began + timeout:
                raise TransportError(
                    f"the run in {self.run_dir} is not over after timeout={timeout:g} s "
                    f"({alive[0].name} is {alive[0].state}): wait longer, or stop it"
                )
            time.sleep(POLL_SECONDS)
        self._raise_if_rejected()
        if weights.exists():
            return weights
        raise DilocoError(
            f"the run in {self.run_dir} has ended without a result: look into {self.run_dir}/logs; "
            "launch(…, resume=True) continues it"
        )

    def _known_actors(self) -> Sequence[JobState]:
        """Return the actors in the cluster; wait for a missing head for a limited time."""
        began = now()
        while True:
            try:
                return self._launch.states()
            except TransportError:
                if now() > began + HEAD_SECONDS:
                    # Disconnect, because Ray ends a connected program when the head stays away.
                    cluster.leave()
                    raise
                time.sleep(POLL_SECONDS)

    def stop(self) -> int:
        """Stop the run: learners flush and end, then the shards end.

        Returns:
            The number of actors.
        """
        return self._launch.stop()

    def _raise_if_rejected(self) -> None:
        for name, ending in read_notes(self._launch.folder).items():
            if ending.code not in (0, INTERRUPTED):
                words = ending.words.removeprefix(ERROR_PREFIX)
                raise ConfigError(f"{name} was rejected: {words}; stop the run")

    def __repr__(self) -> str:
        return f"<run {self._launch.config.run.name!r} on Ray, in {self.run_dir}>"


def launch(
    config: str | Path | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    learners: bool = True,
) -> RayRun:
    """Launch a run on the Ray cluster of its `[launch.ray]` table, and return at once.

    Args:
        config: The run's TOML file, the name of a recipe, a launch folder, or the settings.
        overrides: Settings that replace those of the file: ``{"run.max_steps": 100}``.
        resume: Continue the run in its folder, for example after the cluster was lost. Default:
            an earlier run in the folder is moved aside.
        learners: Whether to start the run's learners; without them, your training loops join the
            run (see `connect_args`).

    Raises:
        ConfigError: A setting is wrong, Ray is not installed or too old, no cluster was found, or
            the cluster already has a run of this name.
    """
    if isinstance(config, (str, Path)):
        if Path(config).is_dir():
            found = Launch(Path(config))
            _require_ray(found.config)
            found.submit(resume=resume)
            return RayRun(found)
        given = [f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()]
        config = load_config(RECIPES.find(str(config)), given)
    elif overrides:
        raise ConfigError(
            f"overrides={dict(overrides)!r} apply to a TOML file only: change the RunConfig itself"
        )
    _require_ray(config)
    Ray(config).require(config)
    written = write_launch(config)
    if not learners:
        plan = read_plan(written.folder).model_copy(update={"placement_groups": ()})
        write_text(written.folder / PLAN, plan.to_json())
    written.submit(resume=resume)
    return RayRun(written)


def _require_ray(config: RunConfig) -> None:
    if config.launch.backend != "ray":
        raise ConfigError(
            f'backend={config.launch.backend!r} in [launch] is not Ray: set backend = "ray", or '
            "use ddiloco launch"
        )


def attach(run: str | Path, *, address: str = "auto", namespace: str = "") -> RayRun:
    """Find a run that any program launched on Ray.

    Args:
        run: Its name in the cluster, or its run folder. The folder also works after its end.
        address: The cluster in which to look for a name, in Ray's format.
        namespace: Ray namespace of its actors. Default: that of `[launch.ray]`.

    Raises:
        ConfigError: The run does not exist.
    """
    folder = launch_folder(Path(run))
    if was_launched(Path(run)):
        found = Launch(folder)
        _require_ray(found.config)
        return RayRun(found)
    if Path(run).is_absolute() or Path(run).exists():
        raise ConfigError(
            f"{run} was not launched ({folder / JOBS} does not exist): give the run folder of a "
            "launched run, or its name in the cluster"
        )
    return RayRun(Launch(_folder_of(str(run), address, namespace or RaySettings().namespace)))


def _folder_of(name: str, address: str, namespace: str) -> Path:
    """Return the launch folder of a run, as reported by one of its actors."""
    ray = cluster.connected(address)
    actors = cluster.actor_names(ray, namespace, name)
    if not actors:
        raise ConfigError(
            f"the cluster has no run {name!r} in namespace {namespace!r}: give the name of a "
            "running run, or its run folder"
        )
    names = [cluster.full_name(name, actor) for actor in actors]
    answer = cluster.first_answer(ray, cluster.handles(ray, namespace, names), ATTACH_SECONDS)
    if answer:
        return Path(answer["launch"])
    raise ConfigError(
        f"no actor of the run {name!r} answered within {ATTACH_SECONDS:g} s (they may wait for "
        "nodes): add nodes, or give its run folder"
    )


def connect_args(run: str | Path, name: str) -> dict[str, Any]:
    """Return the arguments with which a `Learner` in the same cluster joins a run.

    Shards that Ray has restarted elsewhere are found through the run folder. ::

        learner = dd.Learner(model, **dd_ray.connect_args("runs/big", "mine"), optimizer=optimizer)

    Args:
        run: The run folder.
        name: The learner's name.

    Returns:
        ``syncer``, ``name``, ``auth_token`` and ``tls``.

    Raises:
        ConfigError: It is not the folder of a launched run, or has no secret for this name.
    """
    from decoupled_diloco.launch.secrets import own_tls, own_token
    from decoupled_diloco.learner.launched import client_in_run
    from decoupled_diloco.learner.option_groups import SyncerConnection
    from decoupled_diloco.storage.shared_folder import relay_address, shared_addresses

    config = Launch(launch_folder(Path(run))).config
    _require_ray(config)
    auth_token, tls = own_token(config, name), own_tls(config, name)
    folder, ids = config.run.folder, config.learner_ids
    relay = config.relay_of(ids.index(name)) if name in ids else ""
    near = (relay_address(relay, config.tls.scheme),) if relay else ()

    return {
        "syncer": SyncerConnection(
            (*near, *shared_addresses(folder)),
            lambda: client_in_run(name, auth_token, tls, folder=folder, shared=folder),
        ),
        "name": name,
        "auth_token": auth_token,
        "tls": tls,
    }
