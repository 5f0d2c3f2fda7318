"""The launch folder: the files that are submitted to an engine, and the submitted jobs."""

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
from decoupled_diloco.launch.run_folder import is_run_folder, require_ours_or_unused
from decoupled_diloco.launch.secrets import require_relay_certificates
from decoupled_diloco.storage.files import NOT_JSON, write_text
from decoupled_diloco.transport.tokens import is_loopback

GROUP = "decoupled_diloco.engines"
"""The entry-point group of engines: each entry point is a function of the run's settings."""

LAUNCH = ".launch"
"""Suffix of a launch folder's name; the folder is next to the run folder."""

EVERYWHERE = "0.0.0.0"


def launch_folder(run: Path) -> Path:
    """Return the launch folder of a run folder; a launch folder is returned unchanged.

    >>> launch_folder(Path("runs/big")), launch_folder(Path("runs/big.launch"))
    (PosixPath('runs/big.launch'), PosixPath('runs/big.launch'))
    """
    if run.name in ("", ".."):  # such as "." or "/"
        run = run.resolve()
    return run if run.name.endswith(LAUNCH) else run.parent / (run.name + LAUNCH)


def was_launched(run: Path) -> bool:
    """Whether a run was submitted to a cluster from this machine."""
    return (launch_folder(run) / JOBS).exists()


class Launch:
    """One launch folder.

    Args:
        folder: Its path. It must contain the settings.

    Raises:
        ConfigError: It does not.
    """

    def __init__(self, folder: Path) -> None:
        is_run = is_run_folder(folder)
        if is_run or not (folder / SETTINGS).exists():
            what = "a run folder, not" if is_run else "not"
            raise ConfigError(
                f"{folder} is {what} a launch folder: pass the run's TOML file, or the folder "
                "<run folder>.launch that ddiloco launch --dry-run has written"
            )
        self.folder = folder
        self.config = load_config(folder / SETTINGS)
        self.engine = engine_of(self.config)

    @property
    def jobs(self) -> list[Job]:
        """The submitted jobs."""
        path = self.folder / JOBS
        return jobs_in(path) if path.exists() else []

    def states(self) -> list[JobState]:
        """Return the states of the jobs that the engine still has."""
        return list(self.engine.states(self.jobs))

    def submit(self, *, resume: bool = False) -> list[Job]:
        """Submit the files as they are.

        Args:
            resume: Continue the run in the run folder.

        Raises:
            ConfigError: The engine rejects the files, or they are already submitted.
        """
        self.require_idle()
        jobs = list(self.engine.submit(self.config, self.folder, resume=resume))
        listed = [{"name": job.name, "id": job.id} for job in jobs]
        write_text(self.folder / JOBS, json.dumps(listed, indent=1) + "\n")
        return jobs

    def require_idle(self) -> None:
        """Raise `ConfigError` if the engine still has jobs of this launch."""
        alive = self.states()
        if alive:
            raise ConfigError(
                f"{self.folder} is already launched: {alive[0].name} (job {alive[0].id}) is "
                f"{alive[0].state}: run ddiloco stop {self.config.run.folder}, or choose another "
                "name with --set run.name=…"
            )

    def stop(self) -> int:
        """Stop the jobs; return how many the engine still had."""
        alive = {state.id for state in self.states()}
        jobs = [job for job in self.jobs if job.id in alive]
        if jobs:
            self.engine.stop(jobs)
        return len(jobs)


def engine_of(config: RunConfig) -> PlacingEngine:
    """Return the engine of `backend` in `[launch]`, which must not be "local".

    Raises:
        ConfigError: Its distribution is not installed, or cannot be loaded.
    """
    name = config.launch.backend
    found, problem = _installed(config)
    if name not in found:
        raise ConfigError(
            f"backend={name!r} in [launch] {problem.get(name, 'is not installed')}: "
            "run pip install -e packages/engines in the clone"
        )
    return found[name]


def _installed(config: RunConfig) -> tuple[dict[str, PlacingEngine], dict[str, str]]:
    """Return the installed engines, and the reasons why others cannot be loaded, by name."""
    found: dict[str, PlacingEngine] = {}
    problem: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()(config)
        except (ImportError, AttributeError) as error:
            problem[entry.name] = f"cannot be loaded ({error})"
    return found, problem


def write_launch(config: RunConfig) -> Launch:
    """Write the launch folder of a run; replace the files of an earlier launch.

    Raises:
        ConfigError: An earlier launch in the folder still has jobs, or the run folder has other
            files in it.
        StorageError: The folder cannot be written.
    """
    require_ours_or_unused(config.run.folder)
    folder = launch_folder(config.run.folder.absolute())
    if (folder / SETTINGS).exists():
        Launch(folder).require_idle()
    folder.mkdir(parents=True, exist_ok=True)
    placed = placed_config(config, folder)
    require_relay_certificates(placed)
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
    """Return the settings for processes on several machines with a shared file system.

    Paths become absolute. Shards listen on all interfaces and on any free ports, unless the
    settings name a host or port. The run has an auth token: if the settings name none, it is a file
    of the launch folder.
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
    if launch.learner.gpus and learner.device == "auto":  # never use the CPU with a reserved GPU
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
    """Create a secret for this run, readable by this user only; keep an existing one."""
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(24) + "\n")


def _write_private(path: Path, text: str) -> None:
    """Create a file that no other user can read at any time."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def jobs_in(path: Path) -> list[Job]:
    """Return the jobs in a file that `Launch.submit` has written.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [Job(str(each["name"]), str(each["id"])) for each in listed]
    except (OSError, *NOT_JSON) as error:
        raise StorageError(
            f"{path} cannot be read ({error!r:.100}): use the engine's own commands to list jobs"
        ) from error
