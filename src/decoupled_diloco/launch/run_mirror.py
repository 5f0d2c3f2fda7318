"""Mirror a run to its object store (``[run] store``), and continue a run from there.

The mirror is a separate process, so a store that is slow or unreachable costs training nothing. It
writes the folder's state every ``store_interval_seconds``, retries forever, and reports its backlog
on the tape. When the run's other processes have ended, it writes a last state. If shards run on
several machines, each folder has a mirror: see `storage.mirror`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.config.settings import shown
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.launch.processes import process_of
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
    StoredFile,
    StoredState,
    newest_state,
    process_of_file,
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

PARTS_SECONDS = 600.0
"""After the end of the run, shard 0's mirror gives up when the parts add nothing for this long."""

STALE_INTERVALS = 3
"""A part is reported if its mirror has written nothing for about this many intervals."""

LAST_SECONDS = 30.0
"""After the end of the run, the mirror gives up when it has uploaded nothing for this long."""

NICENESS = 10
"""Niceness of the mirror: training and merging have priority."""


def require_store_usable(config: RunConfig, *, resume: bool) -> None:
    """Check the store of a run before any process starts.

    A resumed run does not wait for a store that is unreachable: its folder has everything.

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
    shards: int = 0,
) -> None:
    """Mirror until the run is over, and then write the last state.

    Args:
        mirror: The mirror.
        tape: Receives a `StoreMirrored` after each state and each failure.
        interval_seconds: Seconds from the start of one state to the start of the next. If the run
            has several mirrors, each takes half of that: a part's files are in a state of the run
            one state later.
        stop: Set when the run's other processes have ended.
        over: Whether they have ended, where no process sets ``stop``.
        shards: The shards without which the run cannot continue from the store; 0: none.

    Raises:
        ConfigError: Another process has continued the run from the store.
        StorageError: The run is over, and the store is unreachable or lacks the files of a part.
    """
    reporter, whole = _Reporter(mirror, tape), _Completeness(mirror, shards, interval_seconds)
    again_seconds = AGAIN_SECONDS_MIN
    progress: tuple[float, object] = now(), None
    has_waited = False
    with ThreadPoolExecutor(1, thread_name_prefix="ddiloco-mirror") as pool:
        while True:
            started, last = now(), stop.is_set() or over()
            writing, problem = pool.submit(mirror.write, last=last), ""
            while not wait([writing], REPORT_SECONDS).done:
                reporter.report("")
            try:
                written, again_seconds = writing.result(), AGAIN_SECONDS_MIN
                pause = interval_seconds / (2 if mirror.is_divided else 1)
            except (ConfigError, StorageError) as error:
                problem, written = str(error), False
                mirror.look()
                pause = again_seconds = min(interval_seconds, 2 * again_seconds)
            if mirror.is_replaced:
                reporter.report(problem)
                raise ConfigError(problem)
            awaited = "" if problem or not last else whole.awaited()
            lacking = problem or ("" if awaited else whole.lacking(last=last))
            if written or lacking:
                # This changes the tape, so there is a new state while it waits for a new part.
                reporter.report(lacking)
            if last and not (problem or awaited):
                mirror.end()
                return
            if awaited and not has_waited:
                logger.info("%s; waiting for it", awaited)
                has_waited = True
            of_parts = {name: part.number for name, part in mirror.parts.items()}
            done = of_parts if awaited else mirror.sent_bytes
            if done != progress[1] or not last:
                progress = now(), done
            if awaited and now() - progress[0] > PARTS_SECONDS:
                raise StorageError(f"{awaited}; then run ddiloco mirror {mirror.folder}")
            if problem and last and now() - progress[0] > LAST_SECONDS:
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
            logger.info("the problem is over; state %d is complete", mirror.number)
        self._problem = problem


def mirror_folder(
    folder: Path, config: RunConfig, tape: TapeWriter, stop: Event, over: Callable[[], bool]
) -> Mirror:
    """Mirror a run folder until its processes have ended; see `follow`."""
    objects = Objects(config.run.store)
    mirror = Mirror(folder, objects, config.run.name, part_of(folder))
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    shards = config.syncer.shards if config.syncer.persist else 0
    follow(mirror, tape, config.run.store_interval_seconds, stop, over, shards)
    return mirror


def shards_in(folder: Path) -> list[int]:
    """Return the shards whose processes use a run folder, in order."""
    # A shard opens its tape, or its standby does, before it connects to any process.
    found = {process_of_file(f"tape/{path.name}") for path in folder.glob("tape/shard-*")}
    return sorted(int(each.removeprefix("shard-")) for each in found if each)


def part_of(folder: Path) -> str:
    """Return the name of the part that a run folder is; empty if it is that of shard 0."""
    shards, standing = shards_in(folder), Standing.read(folder)
    if not shards or shards[0] == 0:
        return ""
    return (standing.part if standing else "") or process_of(shards[0], standby=False)


class _Completeness:
    """What the newest state of a run lacks because its files come from several folders."""

    def __init__(self, mirror: Mirror, shards: int, interval_seconds: float) -> None:
        self._mirror, self._shards = mirror, shards
        self._stale_seconds = STALE_INTERVALS * interval_seconds
        self._lacks, self._since = "", 0.0
        self._named: dict[str, tuple[int, int]] = {}  # a part's state, and the first one with it

    def lacking(self, *, last: bool) -> str:
        """Return why the run would lose much work if it continued from the store; else ``""``."""
        lacks = self._ahead() if self._mirror.part else self._shards_without_files()
        if lacks != self._lacks:
            self._lacks, self._since = lacks, now()
        if lacks and (last or now() - self._since >= self._stale_seconds):
            return lacks
        return "" if last else self._stale_part()

    def awaited(self) -> str:
        """Return which results other folders or processes have yet to add; else ``""``."""
        mirror, files = self._mirror, _files_of(self._mirror)
        shards = shards_in(mirror.folder) if mirror.part else range(self._shards)
        late = [each for each in shards if f"checkpoints/shard-{each}.safetensors" not in files]
        # Without any result, the run was interrupted.
        if not late or len(late) == len(shards) or "weights.safetensors" in files:
            return ""
        return (
            f"store={mirror.objects.address!r} has no result of {_shards(late)}: run ddiloco "
            "mirror on its machine"
        )

    def _shards_without_files(self) -> str:
        files, address = _files_of(self._mirror), self._mirror.objects.address
        found = {process_of_file(path) for path in files}
        late = [each for each in range(self._shards) if f"shard-{each}" not in found]
        if not late or not any(path.startswith("durable/shard-0/") for path in files):
            return ""  # before the shards train, there is nothing to continue
        return (
            f"store={address!r} cannot continue this run, because it has no state of "
            f"{_shards(late)}: run it with this [run] store, or let it share {self._mirror.folder}"
        )

    def _ahead(self) -> str:
        if not self._mirror.is_ahead:
            return ""
        return (
            f"store={self._mirror.objects.address!r} has states of part {self._mirror.part} that "
            "shard 0's mirror does not use: check that shard 0 and its mirror run"
        )

    def _stale_part(self) -> str:
        state = self._mirror.state
        if state is None:
            return ""
        for name, part in state.parts.items():
            known, first = self._named.get(name, (0, 0))
            if known != part.number:
                self._named[name] = part.number, state.number
            # Both mirrors write two states per interval. Clocks of machines may differ.
            elif state.number - first >= 2 * STALE_INTERVALS:
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part.wall))
                return (
                    f"store={self._mirror.objects.address!r} has files of part {name} from "
                    f"{part.host} as of {at}, older than the rest: check that {name} and its "
                    "mirror run there"
                )
        return ""


def _files_of(mirror: Mirror) -> Mapping[str, StoredFile]:
    return {} if mirror.state is None else mirror.state.files


def _shards(numbers: Sequence[int]) -> str:
    return ", ".join(f"shard {each}" for each in numbers)


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
        StorageError: The store is unreachable, or the folder cannot be written.
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
        Standing.restored(objects, state).write(folder)
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
        DilocoError: The store is unreachable or refuses this process, or the folder cannot be
            written.
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
    Standing.restored(objects, state).write(folder)


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
