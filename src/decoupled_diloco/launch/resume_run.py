"""Going on with a run in its folder after all of its processes have ended.

Nothing is begun anew: every process takes up its newest durable state (shards their checkpoints and
journals, the coordinator its file, learners their own checkpoints), epochs and terms are raised as
after any restart, and tapes are appended to.
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
"""How much of the end of an event log is read."""

COPY_BYTES = 1 << 24
"""Of a shard's part in memory at a time."""

GOING_BACK = "going-back"
"""The file that names the checkpoint while a run is being put back to it."""


@dataclass(frozen=True)
class RunStanding:
    """How far a run has come, by what is in its folder; no phase: no learner has joined."""

    phase: Phase | None
    faults: int
    weights: Path | None

    @property
    def is_finished(self) -> bool:
        return self.phase == "finished" and self.weights is not None


def standing_of(folder: Path, config: RunConfig) -> RunStanding:
    """Reads how far the run in a folder has come, given the settings it is to go on with.

    Raises:
        StorageError: The coordinator's state cannot be read.
        ConfigError: It is of a run with other settings, or shards keep nothing.
    """
    kept = read_state(folder, config)
    if kept is not None and not config.syncer.persist:
        raise ConfigError(
            f"the run in {folder} kept nothing, because syncer.persist is false: begin a new one"
        )
    launcher = folder / "tape" / "launcher.jsonl"
    faults = 0
    if launcher.exists():
        faults = sum(record.type == "FaultInjected" for record in TapeReader(launcher))
    weights = folder / RESULT
    phase = None if kept is None else kept.phase
    return RunStanding(phase, faults, weights if weights.exists() else None)


def require_whole(folder: Path, config: RunConfig) -> None:
    """Refuses to resume a run of which a part is missing: not copied, or on a disk that is lost.

    What is missing would be replaced without a word: the weights by those of the learner that
    joins first. What a learner keeps of itself may be missing: then it starts without it.

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
                _refusal(folder, f"{token} does not exist, and its learners present what it held")
            )
    if kept.phase not in ("running", "finished"):
        return
    for shard, versions in published.items():
        problem = lacking(folder / DURABLE / f"shard-{shard}", versions)
        if problem:
            raise StorageError(_refusal(folder, problem))


def _require_no_trace(folder: Path, has_published: bool) -> None:
    """Raises unless a run without a coordinator's state has never begun."""
    traces = [file for part in (DURABLE, LEARNERS) for file in _files_below(folder / part)]
    traces += checkpoint_folders(folder)
    if exists(folder / LEDGER):
        traces.append(folder / LEDGER)
    if traces or has_published:
        trace = traces[0] if traces else f"{folder}/tape"
        raise StorageError(
            _refusal(folder, f"{folder / STATES} has no state, though {trace} is of a started run")
        )


def _files_below(folder: Path) -> list[Path]:
    """The files in the folders of a folder."""
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
    """The newest versions that a shard has sent to learners, by the ends of its event logs."""
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
    """Spares a run that can go on: its learners would be refused by a new one's secret.

    Raises:
        ConfigError: It has not ended.
        StorageError: The coordinator's state cannot be read.
    """
    config = load_config(folder / RUN_FILE)
    if not config.syncer.persist:
        return  # it has kept nothing to go on from
    standing = standing_of(folder, config)
    if standing.phase is not None and not standing.is_finished:
        raise ConfigError(
            f"the run in {folder} has not ended: ddiloco syncer --resume {folder} goes on with it, "
            "and so do its learners; --new moves it aside and begins a new one, with a new secret"
        )


def go_back(folder: Path, config: RunConfig, which: str) -> str:
    """Puts a run back to a consistent checkpoint, "last" or its number; what is newer is set aside.

    A last one that is torn or corrupt is named, and the one before it is used. Says what was done.
    A process or a machine may fail at any instant: until everything is on the disk, `half_way`
    names the checkpoint, and going back again completes it.

    Raises:
        ConfigError: ``which`` is neither.
        StorageError: There is no such checkpoint, whole; or the folder cannot be changed.
    """
    if config.syncer.standby:
        raise ConfigError("--checkpoint is not built for runs with syncer.standby: leave it out")
    manifest, problems = _chosen(folder, which)
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
            f"{folder} cannot be put back to checkpoint {manifest.number} ({error}): free space or "
            "correct its permissions, and resume it again, which completes this"
        ) from error
    missing = f", without {', '.join(manifest.missing)}" if manifest.missing else ""
    words = f"back to checkpoint {manifest.number}{missing}; what is newer is in {aside}"
    return "; ".join([*problems, words])


def _put_processes_back(folder: Path, manifest: Manifest, aside: Path) -> None:
    """Gives shards and learners their parts; all of it is on the disk when this returns."""
    disk = runtime().disk
    for part in manifest.shards:
        durable = folder / DURABLE / part.who
        if disk.exists(durable):
            _move(durable, aside / DURABLE / part.who)
        disk.make_folder(durable)
        own = durable / "00000001.safetensors"
        with disk.reading(manifest.part(part.who)) as source, disk.open(own) as target:
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
    """The checkpoint that an interrupted run was being put back to; empty: there is none."""
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
        f"{f'give one of {others}, or ' if others else ''}leave --checkpoint out to go on with "
        "the newest state of every process"
    )


def _check_learners(folder: Path, manifest: Manifest) -> None:
    """Learners' parts, as far as they are here; one that trains elsewhere has its own."""
    for part in manifest.learners:
        own = folder / LEARNERS / part.who
        if own.exists():
            files = [
                file
                for file in own.glob("*.safetensors")
                if run_checkpoint_of(file) == manifest.number
            ]
            if not files:
                raise StorageError(f"{own} lacks its part of checkpoint {manifest.number}")
            LearnerCheckpoint.read(files[0])


def _put_coordinator_back(folder: Path, config: RunConfig, manifest: Manifest) -> None:
    """Its part, with every epoch, term and lease number that was ever given out."""
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
    """Moves a file or a folder, one name after the other; the disk has the new ones."""
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
    """Leaves of each learner's ordinary checkpoints the newest, without what the weights have.

    The weights are in the result, so a learner's own checkpoint need not have them twice more: what
    it needs to train on, should the budget be raised, is its inner optimizer and its user's
    objects. With AdamW that is half of a checkpoint, and no second one is kept, as nothing is being
    written any more. ``learners``: those whose processes have ended.
    """
    try:
        names = load_weights(weights).keys()
        for learner in learners:
            folder = CheckpointFolder(run / LEARNERS / learner, keep=1)
            newest = folder.newest()
            if newest is not None and newest.fragments:
                folder.save(newest.rest(names))
    except StorageError as error:
        logger.warning("%s: the learners' checkpoints stay as they are", error)
