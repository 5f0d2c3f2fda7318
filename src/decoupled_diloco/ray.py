"""A run on a Ray cluster, from Python: ``import decoupled_diloco as dd``, then ``dd.ray.run(…)``.

The run does not need the program that has started it: its actors are detached, and `attach` finds
it again. See docs/how-to/ray.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.files import find_shipped
from decoupled_diloco.config.where import RaySettings
from decoupled_diloco.engines import ray_cluster as cluster
from decoupled_diloco.engines.base import JOBS, JobState
from decoupled_diloco.engines.keeper import SENTENCE, read_notes
from decoupled_diloco.engines.launch import Launch, launch_folder, write_launch
from decoupled_diloco.engines.ray import Ray
from decoupled_diloco.engines.ray_plan import PLAN, read_plan
from decoupled_diloco.errors import ConfigError, Error, TransportError
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import write_text

if TYPE_CHECKING:
    from decoupled_diloco.observe.status import RunStatus

__all__ = ["RayRun", "RunState", "attach", "run", "way_to"]

ATTACH_SECONDS = 60.0
"""How long a run that is being started may take to say where it is."""

HEAD_SECONDS = 30.0
"""How long `RayRun.wait` bears that the head is away; Ray itself bears it for a minute."""

LOOK_SECONDS = 1.0
"""How often `RayRun.wait` looks."""


@dataclass(frozen=True)
class RunState:
    """How a run is.

    Attributes:
        actors: Those that are in the cluster, each with its state and the address of its node.
        run: What the tape says, as `ddiloco status` shows it.
        problem: Why the cluster does not tell its actors, in a sentence; empty: it does.
    """

    actors: tuple[JobState, ...]
    run: RunStatus
    problem: str = ""


class RayRun:
    """A run that was launched on Ray; made by `run` and `attach`.

    Attributes:
        folder: The run folder, which all nodes share.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.folder = launch.config.run.folder

    def status(self) -> RunState:
        """How its actors and its training are; training alone while Ray's head is away.

        Raises:
            StorageError: there is no tape, since nothing has begun to train.
        """
        from decoupled_diloco.observe.run_model import run_of
        from decoupled_diloco.observe.sources import open_source
        from decoupled_diloco.observe.status import status_of

        actors, problem = self._actors()
        source = open_source(str(self.folder), None)
        told = run_of(source.poll(), "run")
        status = status_of(told, source.now(), source.problems(), told.account)
        return RunState(actors, status, problem)

    def _actors(self) -> tuple[tuple[JobState, ...], str]:
        """Those that are there; or why it cannot be found out."""
        try:
            return tuple(self._launch.states()), ""
        except (ConfigError, TransportError) as error:
            return (), str(error)

    def wait(self, timeout: float | None = None) -> Path:
        """Waits until the run is over.

        Args:
            timeout: Seconds, above 0; ``None``: as long as it takes.

        Returns:
            The file of the final weights.

        Raises:
            ConfigError: a part of it was refused; the sentence says why.
            TransportError: ``timeout`` has passed, or Ray's head has been away for 30 s; the
                program is no longer connected to the cluster then, since Ray would end it.
            Error: it was stopped, or ended without a result.
        """
        weights = self.folder / "weights.safetensors"
        began = now()
        while alive := self._known_actors():
            self._refuse_if_refused()
            if timeout is not None and now() > began + timeout:
                raise TransportError(
                    f"the run in {self.folder} is not over after timeout={timeout:g} s "
                    f"({alive[0].name} is {alive[0].state}): wait longer, or stop it"
                )
            time.sleep(LOOK_SECONDS)
        self._refuse_if_refused()
        if weights.exists():
            return weights
        raise Error(
            f"the run in {self.folder} has ended without a result: look into {self.folder}/logs; "
            "run(…, resume=True) goes on with it"
        )

    def _known_actors(self) -> Sequence[JobState]:
        """Those that are there, once the head is."""
        began = now()
        while True:
            try:
                return self._launch.states()
            except TransportError:
                if now() > began + HEAD_SECONDS:
                    cluster.leave()
                    raise
                time.sleep(LOOK_SECONDS)

    def stop(self) -> int:
        """Ends it: learners hand in what they have, then the shards end.

        Returns:
            How many actors there were.
        """
        return self._launch.stop()

    def _refuse_if_refused(self) -> None:
        for name, ending in read_notes(self._launch.folder).items():
            if ending.code not in (0, INTERRUPTED):
                words = ending.words.removeprefix(SENTENCE)
                raise ConfigError(f"{name} was refused: {words}; stop the run")

    def __repr__(self) -> str:
        return f"<run {self._launch.config.run.name!r} on Ray, in {self.folder}>"


def run(
    config: str | Path | RunConfig,
    settings: Sequence[str] = (),
    *,
    resume: bool = False,
    learners: bool = True,
) -> RayRun:
    """Launches a run on the Ray cluster of its `[where.ray]` table, and returns at once.

    Args:
        config: The run's TOML file, the name of a recipe, a launch folder, or the settings.
        settings: Overrides as ``--set`` takes them: ``"run.budget_steps=100"``.
        resume: Go on with the run in its folder, for example after the cluster was lost. Default:
            an earlier run in the folder is moved aside.
        learners: Whether the run's own learners are started; without them one's own training loops
            join it (see `way_to`).

    Raises:
        ConfigError: a setting is wrong, Ray is not installed or too old, there is no cluster, or it
            has a run of this name.
    """
    if isinstance(config, (str, Path)):
        if Path(config).is_dir():
            launch = Launch(Path(config))
            _require_ray(launch.config)
            launch.submit(resume=resume)
            return RayRun(launch)
        config = load_config(find_shipped("recipes", str(config)), settings)
    elif settings:
        raise ConfigError(
            f"settings={list(settings)!r} change a TOML file: change the RunConfig itself"
        )
    _require_ray(config)
    Ray(config).require(config)
    launch = write_launch(config)
    if not learners:
        plan = read_plan(launch.folder).model_copy(update={"placement_groups": ()})
        write_text(launch.folder / PLAN, plan.to_json())
    launch.submit(resume=resume)
    return RayRun(launch)


def _require_ray(config: RunConfig) -> None:
    if config.where.engine != "ray":
        raise ConfigError(
            f'engine={config.where.engine!r} in [where] is not Ray: write engine = "ray", or use '
            "ddiloco launch"
        )


def attach(run: str | Path, *, address: str = "auto", namespace: str = "") -> RayRun:
    """Finds a run again that was launched on Ray, by whatever program.

    Args:
        run: Its name in the cluster, or its run folder, also when it is over.
        address: The cluster in which to look for a name, as Ray takes it.
        namespace: Ray namespace of its actors. Default: that of `[where.ray]`.

    Raises:
        ConfigError: there is no such run.
    """
    folder = launch_folder(Path(run))
    if (folder / JOBS).exists():
        launch = Launch(folder)
        _require_ray(launch.config)
        return RayRun(launch)
    if Path(run).is_absolute() or Path(run).exists():
        raise ConfigError(
            f"{run} was not launched (there is no {folder / JOBS}): give the run folder of a run "
            "that was, or its name in the cluster"
        )
    return RayRun(Launch(_folder_of(str(run), address, namespace or RaySettings().namespace)))


def _folder_of(name: str, address: str, namespace: str) -> Path:
    """The launch folder of a run, by what one of its actors says."""
    ray = cluster.connected(address)
    actors = cluster.actor_names(ray, namespace, name)
    if not actors:
        raise ConfigError(
            f"the cluster has no run {name!r} in its namespace {namespace!r}: give the name of one "
            "that is under way, or its run folder"
        )
    names = [cluster.full_name(name, actor) for actor in actors]
    told = cluster.first_answer(ray, cluster.handles(ray, namespace, names), ATTACH_SECONDS)
    if told:
        return Path(told["launch"])
    raise ConfigError(
        f"no actor of the run {name!r} answers within {ATTACH_SECONDS:g} s (they may wait for "
        "nodes): add nodes, or give its run folder"
    )


def way_to(run: str | Path, learner_id: str) -> dict[str, Any]:
    """How a training loop of one's own, in the same cluster, gets to a run: arguments of `Learner`.

    Shards that Ray has started again elsewhere are found there, as the run folder says. ::

        learner = dd.Learner(model, **dd.ray.way_to("runs/big", "mine"), optimizer=optimizer)

    Args:
        run: The run folder.
        learner_id: As `Learner` takes it; it is among the arguments.

    Returns:
        ``syncer``, ``token``, ``tls``, ``client`` and ``learner_id``.

    Raises:
        ConfigError: it is no run folder of a run that was launched, or has no secret for this id.
    """
    from decoupled_diloco.launch.secrets import own_tls, own_token
    from decoupled_diloco.storage.shared_folder import SharedFolder, recorded_end, shared_addresses
    from decoupled_diloco.transport.http_client import HttpClient

    config = Launch(launch_folder(Path(run))).config
    _require_ray(config)
    token, tls = own_token(config, learner_id), own_tls(config, learner_id)
    folder = config.run.folder

    def client() -> HttpClient:
        return HttpClient(
            token=token,
            principal=learner_id,
            tls=tls,
            locator=SharedFolder(folder),
            ended=lambda: recorded_end(folder),
        )

    return {
        "syncer": shared_addresses(folder),
        "token": token,
        "tls": tls,
        "client": client,
        "learner_id": learner_id,
    }
