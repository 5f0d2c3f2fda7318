"""The launch folder: what is submitted to an engine, and what has become of it."""

from __future__ import annotations

import json
import os
import secrets
from importlib.metadata import entry_points
from pathlib import Path

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.toml_files import load_config
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.engine import JOBS, SETTINGS, TOKEN, Job, JobState, PlacingEngine
from decoupled_diloco.launch.run_folder import require_ours_or_unused
from decoupled_diloco.storage.files import NOT_JSON, write_text
from decoupled_diloco.transport.tokens import is_loopback

GROUP = "decoupled_diloco.engines"
"""The entry points in which distributions name engines: a function of the run's settings each."""

LAUNCH = ".launch"
"""The end of a launch folder's name, which is beside the run folder."""

EVERYWHERE = "0.0.0.0"


def launch_folder(run: Path) -> Path:
    """The launch folder of a run folder; of itself, if it is one.

    >>> launch_folder(Path("runs/big")), launch_folder(Path("runs/big.launch"))
    (PosixPath('runs/big.launch'), PosixPath('runs/big.launch'))
    """
    return run if run.name.endswith(LAUNCH) else run.with_name(run.name + LAUNCH)


def was_launched(run: Path) -> bool:
    """Whether a run was submitted to a cluster from this machine."""
    return (launch_folder(run) / JOBS).exists()


class Launch:
    """One launch folder.

    Args:
        folder: It must hold the settings.

    Raises:
        ConfigError: it does not.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / SETTINGS).exists():
            raise ConfigError(
                f"{folder} is no launch folder: give the run's TOML file, or the folder "
                "<run folder>.launch that ddiloco launch --dry-run has written"
            )
        self.folder = folder
        self.config = load_config(folder / SETTINGS)
        self.engine = engine_of(self.config)

    @property
    def jobs(self) -> list[Job]:
        """What was submitted."""
        path = self.folder / JOBS
        return jobs_in(path) if path.exists() else []

    def states(self) -> list[JobState]:
        """How the jobs are that are not gone yet."""
        return list(self.engine.states(self.jobs))

    def submit(self, *, resume: bool = False) -> list[Job]:
        """Submits the files as they are; ``resume``: to go on with the run in its folder.

        Raises:
            ConfigError: the engine refuses them, or they are submitted already.
        """
        self.require_idle()
        jobs = list(self.engine.submit(self.config, self.folder, resume=resume))
        told = [{"name": job.name, "id": job.id} for job in jobs]
        write_text(self.folder / JOBS, json.dumps(told, indent=1) + "\n")
        return jobs

    def require_idle(self) -> None:
        """Refuses if jobs of it are there."""
        alive = self.states()
        if alive:
            raise ConfigError(
                f"{self.folder} is launched already: {alive[0].name} (job {alive[0].id}) is "
                f"{alive[0].state}: ddiloco stop {self.config.run.folder}, or choose another name "
                "with --set run.name=…"
            )

    def stop(self) -> int:
        """Ends what was submitted; returns how many jobs there were."""
        alive = {state.id for state in self.states()}
        jobs = [job for job in self.jobs if job.id in alive]
        if jobs:
            self.engine.stop(jobs)
        return len(jobs)


def engine_of(config: RunConfig) -> PlacingEngine:
    """The engine of `[launch]`, which is not "local".

    Raises:
        ConfigError: the distribution that brings it is not installed, or cannot be loaded.
    """
    name = config.launch.backend
    found, problem = _installed(config)
    if name not in found:
        raise ConfigError(
            f"backend={name!r} in [launch] {problem.get(name, 'is not installed')}: pip install "
            "'decoupled-diloco[engines]' (in a clone: pip install -e packages/engines)"
        )
    return found[name]


def _installed(config: RunConfig) -> tuple[dict[str, PlacingEngine], dict[str, str]]:
    """The engines that are here, and why others cannot be loaded, by name."""
    found: dict[str, PlacingEngine] = {}
    problem: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()(config)
        except (ImportError, AttributeError) as error:
            problem[entry.name] = f"cannot be loaded ({error})"
    return found, problem


def write_launch(config: RunConfig) -> Launch:
    """Writes the launch folder of a run; files of an earlier launch are replaced.

    Raises:
        ConfigError: a launch in the folder is under way, or the run folder is not for this.
        StorageError: it cannot be written.
    """
    require_ours_or_unused(config.run.folder)
    folder = launch_folder(config.run.folder.absolute())
    if (folder / SETTINGS).exists():
        Launch(folder).require_idle()
    folder.mkdir(parents=True, exist_ok=True)
    placed = placed_config(config, folder)
    if placed.syncer.token_file == folder / TOKEN:
        _write_secret(folder / TOKEN)
    engine = engine_of(placed)
    files = {SETTINGS: dump_config(placed), **engine.files(placed, folder)}
    engines, _ = _installed(placed)
    for pattern in (JOBS, *(each for any_engine in engines.values() for each in any_engine.leaves)):
        for path in folder.glob(pattern):
            path.unlink()
    for name, text in files.items():
        write_text(folder / name, text)
    for name, path in engine.copies(placed).items():
        _write_private(folder / name, path.read_text())
    return Launch(folder)


def placed_config(config: RunConfig, folder: Path) -> RunConfig:
    """The settings of a run whose processes share a file system, but no machine.

    Paths become absolute. Shards listen on all interfaces, and on any free ports, unless the file
    says otherwise. There is a secret.
    """
    run, syncer, launch = config.run, config.syncer, config.launch
    host = EVERYWHERE if is_loopback(syncer.host) else syncer.host
    port = syncer.port if "port" in syncer.model_fields_set else 0
    paths = {
        name: path and path.absolute()
        for name, path in (
            ("token_file", syncer.token_file),
            ("principals_file", syncer.principals_file),
        )
    }
    if syncer.principals_file is None and syncer.token_file is None:
        paths["token_file"] = folder / TOKEN
    weights = config.sync.initial_weights
    tls = {name: path and path.absolute() for name, path in dict(config.tls).items()}
    learner = config.learner
    if launch.learner.gpus and learner.device == "auto":  # never on a CPU beside a reserved GPU
        learner = learner.model_copy(update={"device": "gpu"})
    return config.model_copy(
        update={
            "run": run.model_copy(update={"folder": run.folder.absolute()}),
            "sync": config.sync.model_copy(
                update={"initial_weights": weights and weights.absolute()}
            ),
            "syncer": syncer.model_copy(update={"host": host, "port": port, **paths}),
            "tls": config.tls.model_copy(update=tls),
            "learner": learner,
            "launch": launch.model_copy(update={"workdir": launch.workdir or Path.cwd()}),
        }
    )


def _write_secret(path: Path) -> None:
    """A secret of this run's own, readable by this user only; one that is there is kept."""
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(24) + "\n")


def _write_private(path: Path, text: str) -> None:
    """A new file that nobody else can read, from the first byte on."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def jobs_in(path: Path) -> list[Job]:
    """The jobs in a file that `Launch.submit` has written.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return [Job(str(each["name"]), str(each["id"])) for each in told]
    except (OSError, *NOT_JSON) as error:
        raise StorageError(
            f"{path} cannot be read ({error!r:.100}): the engine's own commands show what runs"
        ) from error
