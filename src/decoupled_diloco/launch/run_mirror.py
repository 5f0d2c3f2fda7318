"""Mirror a run to its object store (``[run] store``), and continue a run from there.

The mirror is a separate process, so a store that is slow or away costs training nothing. It writes
the folder's state every ``store_interval_seconds``, retries forever, and reports its backlog on the
tape. When the run's other processes have ended, it writes a last state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.config.settings import shown
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.launch.run_folder import (
    TOKEN,
    new_token,
    require_ours_or_unused,
    write_secret,
)
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.storage.mirror import (
    OBJECTS,
    Mirror,
    Standing,
    StoredState,
    newest_state,
    require_continues,
    required_state,
    restore,
)
from decoupled_diloco.storage.object_store import Objects
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import StoreMirrored
from decoupled_diloco.units import format_bytes

logger = logging.getLogger(__name__)

RESTORING = ".restoring"
"""File in a run folder whose files are being copied from a store."""

REPORT_SECONDS = 10.0
"""Interval of reports while one state takes long."""

AGAIN_SECONDS_MIN = 1.0
"""First pause after a failure. It doubles up to ``store_interval_seconds``."""

OF_SHARDS = ("durable/*/*", "coordinator/*.json", "*.ledger", "checkpoints/*/*")
"""The files of a state with which shards and coordinator continue."""

LAST_SECONDS = 30.0
"""After the end of the run, the mirror gives up when it has uploaded nothing for this long."""

NICENESS = 10
"""Niceness of the mirror: training and merging have priority."""


def require_store_usable(config: RunConfig, *, resume: bool) -> None:
    """Check the store of a run before any process starts.

    A resumed run does not wait for a store that is away: its folder has everything.

    Raises:
        ConfigError: The store refuses this process, or it has another run.
        StorageError: A new run cannot reach the store.
    """
    if not config.run.store:
        return
    try:
        objects = Objects(config.run.store)
        require_continues(objects, newest_state(objects), config.run.folder if resume else None)
        probe = f"{OBJECTS}/probe-{secrets.token_hex(6)}"
        objects.put(probe, b"")
        objects.delete([probe])
    except StorageError as error:
        if not resume:
            raise
        logger.warning("%s; the run continues, and the mirror retries", error)


def follow(
    mirror: Mirror,
    tape: TapeWriter,
    interval_seconds: float,
    stop: Event,
    over: Callable[[], bool] = lambda: False,
    lacking: Callable[[], str] = lambda: "",
) -> None:
    """Mirror until the run is over, and then write the last state.

    Args:
        mirror: The mirror.
        tape: Receives a `StoreMirrored` after each state and each failure.
        interval_seconds: Seconds from the start of one state to the start of the next.
        stop: Set when the run's other processes have ended.
        over: Whether they have ended, where no process sets ``stop``.
        lacking: Returns why a run could not continue from the folder; empty if it could.

    Raises:
        ConfigError: Another process has continued the run from the store.
        StorageError: The run is over, and the store is away.
    """
    reporter = _Reporter(mirror, tape)
    again_seconds, progress = AGAIN_SECONDS_MIN, (now(), mirror.sent_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="ddiloco-mirror") as pool:
        while True:
            started, last = now(), stop.is_set() or over()
            writing, problem = pool.submit(mirror.write), ""
            while not wait([writing], REPORT_SECONDS).done:
                reporter.report("")
            try:
                written, pause = writing.result(), interval_seconds
                again_seconds = AGAIN_SECONDS_MIN
            except (ConfigError, StorageError) as error:
                problem, written = str(error), False
                mirror.look()
                pause = again_seconds = min(interval_seconds, 2 * again_seconds)
            if mirror.is_replaced:
                reporter.report(problem)
                raise ConfigError(problem)
            if written or problem:
                reporter.report(problem or lacking())
            if last and not problem:
                return
            if mirror.sent_bytes != progress[1] or not last:
                progress = (now(), mirror.sent_bytes)
            if last and now() - progress[0] > LAST_SECONDS:
                raise StorageError(
                    f"{problem}; {format_bytes(mirror.backlog_bytes)} of {mirror.folder} are not "
                    f"in the store: run ddiloco mirror {mirror.folder} when it is back"
                )
            if last:
                pause = min(pause, LAST_SECONDS / 10)
                Event().wait(pause)
            else:
                _wait(stop, over, started + pause)


def _wait(stop: Event, over: Callable[[], bool], until: float) -> None:
    while (left := until - now()) > 0 and not over():
        if stop.wait(min(left, 1.0)):
            return


class _Reporter:
    """Writes the mirror's progress to the tape and to the log."""

    def __init__(self, mirror: Mirror, tape: TapeWriter) -> None:
        self._mirror, self._tape = mirror, tape
        self._sent_bytes = 0
        self._problem = ""

    def report(self, problem: str) -> None:
        mirror, address = self._mirror, self._mirror.objects.address
        nbytes, self._sent_bytes = mirror.sent_bytes - self._sent_bytes, mirror.sent_bytes
        sample = StoreMirrored(address, mirror.number, nbytes, mirror.backlog_bytes, problem)
        self._tape.sample(now(), sample)
        self._tape.flush()
        mirror.note_backlog()
        backlog = format_bytes(mirror.backlog_bytes)
        if problem and problem != self._problem:
            logger.warning("%s; training continues; backlog %s; retrying", problem, backlog)
        elif self._problem and not problem:
            logger.info("the store answers again; state %d is complete", mirror.number)
        self._problem = problem


def mirror_folder(
    folder: Path, config: RunConfig, tape: TapeWriter, stop: Event, over: Callable[[], bool]
) -> Mirror:
    """Mirror a run folder until its processes have ended; see `follow`."""
    mirror = Mirror(folder, Objects(config.run.store), config.run.name)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    lacking = partial(_lacking, folder, config)
    follow(mirror, tape, config.run.store_interval_seconds, stop, over, lacking)
    return mirror


def _lacking(folder: Path, config: RunConfig) -> str:
    """Return which shards write to another folder; empty if none does, or before they train."""
    if not config.syncer.persist or not any(folder.glob("durable/shard-0/*.safetensors")):
        return ""
    shards = range(config.syncer.shards)
    # A shard opens its tape, or its standby does, before it connects to any process.
    others = [each for each in shards if not any(folder.glob(f"tape/shard-{each}[.-]*"))]
    names = ", ".join(f"shard {each}" for each in others)
    return names and (
        f"store={config.run.store!r} cannot continue this run, because it has no state of {names}: "
        f"let all shards share {folder}"
    )


def restored_run(address: str, settings: Sequence[str]) -> tuple[Path, list[str], StoredState]:
    """Copy a run from a store into its folder, to be resumed there.

    Args:
        address: The store.
        settings: Overrides of settings; ``run.folder`` chooses the folder. Default: the folder in
            the run's own settings.

    Returns:
        The folder, the other overrides, and the state.

    Raises:
        ConfigError: The store has no run, or the folder is in use by another one.
        StorageError: The store is away, or the folder cannot be written.
    """
    objects = Objects(address, create=False)
    state = required_state(objects)
    folders = [each.partition("=")[2] for each in settings if _key(each) == "run.folder"]
    others = [each for each in settings if _key(each) != "run.folder"]
    if not any(_key(each) == "run.store" for each in others):
        others.append(f"run.store={objects.address}")
    folder = Path(folders[-1].strip().strip("'\"")) if folders else _own_folder(objects, state)
    _require_free(folder, objects, state)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESTORING).write_text(address)
        restore(objects, folder, state)
        if not (folder / TOKEN).exists():  # the store has no secrets, so the run gets a new one
            write_secret(folder / TOKEN, new_token())
        Standing.of(objects, state).write(folder)
        (folder / RESTORING).unlink()
    except DilocoError:
        raise
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be written ({error.strerror or error}): choose "
            "another with --set run.folder=…"
        ) from error
    return folder, others, state


def copy_newest_state(config: RunConfig, folder: Path) -> None:
    """Copy the newest state of a run into a folder that continues an older one, or none.

    A standby without a shared disk calls this when it has its shard's lease, before it serves.

    Raises:
        DilocoError: The store is away or refuses this process, or the folder cannot be written.
    """
    objects = Objects(config.run.store)
    state, standing = newest_state(objects), Standing.read(folder)
    if state is None:
        return
    if standing is not None and standing.run == state.run:
        is_newest = state.number <= standing.number or state.writer == standing.writer
        if is_newest:
            return
    logger.info("copying state %d, written on %s, to %s", state.number, state.host, folder)
    # Files of an older state must not stay beside newer ones with higher or lower numbers.
    for old in (path for part in OF_SHARDS for path in folder.glob(part)):
        if old.relative_to(folder).as_posix() not in state.files:
            old.unlink(missing_ok=True)
    restore(objects, folder, state, lambda path: any(Path(path).match(each) for each in OF_SHARDS))
    Standing.of(objects, state).write(folder)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _own_folder(objects: Objects, state: StoredState) -> Path:
    """Return the folder in the settings of a stored run."""
    with tempfile.TemporaryDirectory() as place:
        restore(objects, Path(place), state, lambda path: path == RUN_FILE)
        try:
            tables = tomllib.loads((Path(place) / RUN_FILE).read_text(encoding="utf-8"))
            return Path(tables["run"]["folder"])
        except (OSError, *NOT_JSON) as error:
            raise StorageError(
                f"store={objects.address!r} has no valid {RUN_FILE} ({shown(str(error))}): name "
                "the folder with --set run.folder=…"
            ) from error


def _require_free(folder: Path, objects: Objects, state: StoredState) -> None:
    if (folder / RESTORING).exists():
        return  # an earlier copy was interrupted
    require_ours_or_unused(folder)
    if (folder / RUN_FILE).exists():
        standing = Standing.read(folder)
        same = standing is not None and standing.run == state.run
        resume = f"continue it there (ddiloco train --resume {folder}), or " if same else ""
        what = "this run" if same else "another run"
        raise ConfigError(
            f"the run folder {folder} already has {what}: {resume}copy {objects.address} to "
            "another folder with --set run.folder=…"
        )
