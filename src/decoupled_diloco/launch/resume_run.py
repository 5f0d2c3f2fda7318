"""Resume a run from its folder after all of its processes have ended.

Every process loads its newest durable state: shards their checkpoints and journals, the coordinator
its file, learners their own checkpoints. Incarnations and terms increase as after any restart.
Tapes are appended to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.launch.processes import process_of
from decoupled_diloco.learner.learner_checkpoint import (
    CheckpointFolder,
    LearnerCheckpoint,
    beside_of,
    run_checkpoint_of,
)
from decoupled_diloco.protocol.coordinator_state import Phase
from decoupled_diloco.protocol.features.partitions import LeaseBook
from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.coordinator_states import STATES, CoordinatorStates
from decoupled_diloco.storage.data_ledger import FILE as LEDGER
from decoupled_diloco.storage.data_ledger import DataLedger
from decoupled_diloco.storage.files import NOT_JSON, exists, is_folder, names_in, write_text
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.syncer.coordinator_document import document_at_checkpoint, read_state
from decoupled_diloco.syncer.durable import DURABLE, EXACT, lacking
from decoupled_diloco.syncer.result import RESULT
from decoupled_diloco.syncer.run_checkpoints import (
    Manifest,
    checkpoint_folders,
    number_in,
    read_manifest,
)
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import FOLDER_NAME

LEARNERS = "learners"
"""The folder of the learners' own checkpoints in the run folder."""

TAPE_BYTES = 1 << 20
"""Bytes that are read from the end of a tape."""

COPY_BYTES = 1 << 24
"""Bytes of a shard's file that are in memory at a time while it is copied."""

GOING_BACK = "going-back"
"""The file that names the checkpoint while a run is being reset to it."""


@dataclass(frozen=True)
class RunStanding:
    """The progress of a run, according to its folder.

    Attributes:
        phase: The phase of the coordinator; `None` if no learner has joined.
        faults: The number of faults that the launcher has injected.
        weights: The file with the result, if it exists.
    """

    phase: Phase | None
    faults: int
    weights: Path | None

    @property
    def is_finished(self) -> bool:
        return self.phase == "finished" and self.weights is not None


def standing_of(folder: Path, config: RunConfig) -> RunStanding:
    """Return the progress of the run in a folder.

    Args:
        folder: The run folder.
        config: The settings to continue with.

    Raises:
        StorageError: The coordinator's state cannot be read.
        ConfigError: The state is of a run with other settings, or the shards kept no state.
    """
    kept = read_state(folder, config)
    if kept is not None and not config.syncer.persist:
        raise ConfigError(
            f"the run in {folder} cannot be resumed: syncer.persist=false, so the shards kept no "
            "state: start a new run"
        )
    launcher = folder / "tape" / "launcher.jsonl"
    faults = 0
    if launcher.exists():
        faults = sum(record.type == "FaultInjected" for record in TapeReader(launcher))
    weights = folder / RESULT
    phase = None if kept is None else kept.phase
    return RunStanding(phase, faults, weights if weights.exists() else None)


def require_whole(folder: Path, config: RunConfig) -> None:
    """Check that a run to resume lacks no file: not copied, or on a lost disk.

    Missing files would be replaced silently: weights by those of the first learner that joins. A
    learner's own checkpoint may be missing; the learner then starts without it.

    Raises:
        StorageError: A file is missing or truncated.
        ConfigError: The coordinator's state is of a run with other settings.
    """
    if not config.syncer.persist:
        return
    published = {shard: _published(folder, shard) for shard in range(config.syncer.shards)}
    kept = read_state(folder, config)
    if kept is None:
        _require_no_trace(folder, any(published.values()))
        return
    if config.syncer.principals_file is None and config.syncer.token_file is None:
        token = folder / "token"
        if config.tls.client_ca_cert is None and not exists(token):
            raise StorageError(
                _refusal(folder, f"{token} does not exist, and its learners present that token")
            )
    if kept.phase not in ("running", "finished"):
        return
    for shard, versions in published.items():
        problem = lacking(folder / DURABLE / f"shard-{shard}", versions)
        if problem:
            raise StorageError(_refusal(folder, problem))


def _require_no_trace(folder: Path, has_published: bool) -> None:
    """Raise `StorageError` if a run without a coordinator's state has already started."""
    traces = [file for name in (DURABLE, LEARNERS) for file in _files_below(folder / name)]
    traces += checkpoint_folders(folder)
    if exists(folder / LEDGER):
        traces.append(folder / LEDGER)
    if traces or has_published:
        trace = traces[0] if traces else f"{folder}/tape"
        raise StorageError(
            _refusal(folder, f"{folder / STATES} has no state, but {trace} is of a started run")
        )


def _files_below(folder: Path) -> list[Path]:
    """Return the checkpoints and journals in the folders of a folder."""
    below = [each for path in names_in(folder) if is_folder(path) for each in names_in(path)]
    return sorted(path for path in below if path.suffix in (".safetensors", ".journal"))


def _refusal(folder: Path, problem: str) -> str:
    back = (
        "go back to a checkpoint of it (--checkpoint last), " if checkpoint_folders(folder) else ""
    )
    return (
        f"{folder} cannot be resumed: {problem}. Copy the whole run folder again, {back}or start a "
        "new run in another folder"
    )


def _published(folder: Path, shard: int) -> dict[int, Version]:
    """Return the newest version of each fragment that a shard has published, from its tapes."""
    found: dict[int, Version] = {}
    for name in (process_of(shard, standby=standby) for standby in (False, True)):
        for line in _last_lines(folder / FOLDER_NAME / f"{name}.jsonl"):
            if b'"Published"' not in line:
                continue
            with contextlib.suppress(*NOT_JSON):
                message = json.loads(line)["data"]["message"]
                version = message["version"]
                version = Version.read(f"{version['term']}.{version['counter']}")
                fragment = int(message["fragment"])
                found[fragment] = max(version, found.get(fragment, version))
    return found


def _last_lines(path: Path) -> list[bytes]:
    try:
        with runtime().disk.reading(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAPE_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def require_over(folder: Path) -> None:
    """Check that a run in a folder cannot be resumed, so that a new run may replace it.

    A new run would have a new secret and reject the learners of the old one.

    Raises:
        ConfigError: The run has not ended.
        StorageError: The coordinator's state cannot be read.
    """
    config = load_config(folder / RUN_FILE)
    if not config.syncer.persist:
        return  # it kept no state to resume from
    standing = standing_of(folder, config)
    if standing.phase is not None and not standing.is_finished:
        raise ConfigError(
            f"the run in {folder} has not ended: resume it with ddiloco syncer --resume {folder}, "
            "and its learners continue; or move it aside with --new and start a new run, which has "
            "a new secret"
        )


def go_back(folder: Path, config: RunConfig, which: str) -> str:
    """Reset a run to a consistent checkpoint, and set newer files aside.

    A process or a machine may fail at any instant. Until everything is on the disk, `half_way`
    returns the checkpoint, and a second call completes the first.

    Args:
        folder: The run folder.
        config: The settings to continue with.
        which: The number of a checkpoint, or "last". If the last one is torn or corrupt, the one
            before it is used.

    Returns:
        A description of what was done, with the checkpoints that could not be used.

    Raises:
        ConfigError: ``which`` is not valid, or the run has standbys or `[privacy.dp]`.
        StorageError: The checkpoint is missing or not whole, or the folder cannot be changed.
    """
    if config.syncer.standby:
        raise ConfigError("--checkpoint cannot be combined with syncer.standby: leave it out")
    if config.privacy.dp is not None:
        raise ConfigError(
            "--checkpoint cannot be combined with [privacy.dp], because the account of what was "
            "published since would be lost: leave it out to continue from the newest state"
        )
    manifest, problems = _chosen(folder, which)
    # Written first and removed last: a reset that is interrupted in between must be completed.
    write_text(folder / GOING_BACK, str(manifest.number))
    aside = _free(folder / "set-aside")
    try:
        _put_processes_back(folder, manifest, aside)
        _put_coordinator_back(folder, config, manifest)
        runtime().disk.remove(folder / GOING_BACK)
        runtime().disk.sync(folder)
    except DilocoError:
        raise
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be reset to checkpoint {manifest.number} ({error}): free disk space "
            "or correct the permissions, and resume the run again, which completes the reset"
        ) from error
    missing = f", without {', '.join(manifest.missing)}" if manifest.missing else ""
    words = f"back to checkpoint {manifest.number}{missing}; newer files are in {aside}"
    return "; ".join([*problems, words])


def _put_processes_back(folder: Path, manifest: Manifest, aside: Path) -> None:
    """Restore the files of shards and learners; they are on the disk when this returns."""
    disk = runtime().disk
    for part in manifest.shards:
        durable = folder / DURABLE / part.process
        if disk.exists(durable):
            _move(durable, aside / DURABLE / part.process)
        disk.make_folder(durable)
        own = durable / "00000001.safetensors"
        with disk.reading(manifest.part(part.process)) as source, disk.open(own) as target:
            while block := source.read(COPY_BYTES):
                disk.write(target, block)
            disk.sync_file(target)
        disk.open(durable / EXACT).close()
        disk.sync(durable)
    for learner in names_in(folder / LEARNERS):
        for file in names_in(learner):
            if file.suffix != ".safetensors" or run_checkpoint_of(file) == manifest.number:
                continue
            for each in (file, beside_of(file)):
                if disk.exists(each):
                    _move(each, aside / LEARNERS / learner.name / each.name)


def half_way(folder: Path) -> str:
    """Return the checkpoint of an interrupted reset of a run; empty if there is none."""
    file = folder / GOING_BACK
    return file.read_text() if file.exists() else ""


def _chosen(folder: Path, which: str) -> tuple[Manifest, list[str]]:
    if which != "last" and not which.isdecimal():
        raise ConfigError(
            f"--checkpoint {which!r} is neither 'last' nor the number of a checkpoint"
        )
    there = checkpoint_folders(folder)
    found = [path for path in there if which == "last" or number_in(path) == int(which)]
    problems: list[str] = []
    for path in found:
        try:
            manifest = read_manifest(path)
            manifest.check()
            _check_learners(folder, manifest)
            return manifest, problems
        except StorageError as error:
            problems.append(f"{error}: checkpoint {number_in(path)} is not used")
    wanted = "checkpoint" if which == "last" else f"checkpoint {which}"
    others = ", ".join(str(number_in(path)) for path in reversed(there) if path not in found)
    raise StorageError(
        f"{folder} has no whole {wanted} to go back to"
        f"{''.join(f'; {problem}' for problem in problems)}: "
        f"{f'choose one of {others}, or ' if others else ''}leave --checkpoint out to continue "
        "with the newest state of every process"
    )


def _check_learners(folder: Path, manifest: Manifest) -> None:
    """Check the learners' checkpoints that are in this folder; other learners run elsewhere.

    Raises:
        StorageError: One is missing or corrupt.
    """
    for part in manifest.learners:
        own = folder / LEARNERS / part.process
        if own.exists():
            files = [
                file
                for file in own.glob("*.safetensors")
                if run_checkpoint_of(file) == manifest.number
            ]
            if not files:
                raise StorageError(f"{own} has no file of checkpoint {manifest.number}")
            LearnerCheckpoint.read(files[0])


def _put_coordinator_back(folder: Path, config: RunConfig, manifest: Manifest) -> None:
    """Restore the coordinator's state, but keep all incarnations, terms and lease numbers.

    They must not be reused: learners, tapes and journals already contain them.
    """
    newest = read_state(folder, config)
    ledger = DataLedger(folder, LeaseBook())
    if newest is not None:
        newest = replace(newest, data=ledger.book)
    document, state = document_at_checkpoint(manifest.coordinator, newest)
    if ledger.book.entries or state.data.entries:
        ledger.go_back(state.data)
    ledger.close()
    states = CoordinatorStates(folder, runtime().unique_id())
    states.read()
    states.write(document)


def _move(source: Path, target: Path) -> None:
    """Move a file or a folder, one name after the other; sync the new names to the disk."""
    disk = runtime().disk
    if disk.is_folder(source):
        disk.make_folder(target)
        for each in disk.names(source):
            _move(each, target / each.name)
        disk.remove_folder(source)
    else:
        disk.make_folder(target.parent)
        disk.rename(source, target)
        disk.sync(target.parent)
    disk.sync(source.parent)


def _free(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


logger = logging.getLogger(__name__)


def keep_the_rest(run: Path, learners: Iterable[str], weights: Path) -> None:
    """Keep only the newest ordinary checkpoint of each learner, without the weights of the result.

    To continue after the budget is raised, a learner needs its inner optimizer and its user's
    objects; the result already has the weights. With AdamW this is half of a checkpoint. An older
    checkpoint protects against a torn write, and nothing writes any more.

    Args:
        run: The run folder.
        learners: The learners whose processes have ended.
        weights: The file with the result.
    """
    try:
        names = load_weights(weights).keys()
        for learner in learners:
            folder = CheckpointFolder(run / LEARNERS / learner, keep=1)
            newest = folder.newest()
            if newest is not None and newest.fragments:
                folder.save(newest.rest(names))
    except StorageError as error:
        logger.warning("%s; the learners' checkpoints are not reduced", error)
