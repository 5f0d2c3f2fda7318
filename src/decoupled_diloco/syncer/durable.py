"""The durable state of a shard: every version that another process has received survives a crash.

A *checkpoint* holds the master, the published copy and the outer optimizer's state of every owned
fragment: 12 bytes per parameter with momentum, and 4 more with an average of the master. The
*journal* after it has one record per merge: the merged outer gradient, 4 bytes per element. The
record is on disk before any process is notified of the new version. The same state and gradient
give the same bits, so checkpoint and journal together reproduce the shard's state. The digest of
each published copy verifies it.

When the journal is ``JOURNAL_CHECKPOINTS_MAX`` times as large as the checkpoint, a new journal is
created, and then a new checkpoint is written. Merges continue in the new journal even if the
checkpoint fails. So from any whole checkpoint, the journals from its number on lead to the present.
The previous pair is kept: a torn checkpoint is replaced by the one before it and two journals. So
the folder holds at most 2 · (1 + JOURNAL_CHECKPOINTS_MAX) checkpoint sizes, and one more while a
checkpoint is being written.

After a run, its result contains the published copies. The launcher then removes them from the
checkpoint (`ShardDisk.leave_to`), and 8 bytes per parameter stay.

Files: ``<number>.safetensors`` and ``<number>.journal``, in ascending order. A process that acts
for the shard by a claim has a separate range of numbers, above those of all earlier claims. So an
earlier process that still writes cannot touch its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.resume import identity_of
from decoupled_diloco.errors import ConfigError, MergeError, StorageError
from decoupled_diloco.merge import Layout, as_bytes, digest, values_digest
from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, exists, names_in, size_of
from decoupled_diloco.storage.journal import Journal, JournalReader, JournalRecord, fields_in
from decoupled_diloco.storage.weight_files import load_metadata, load_weights, save_weights
from decoupled_diloco.syncer.result import RESULT, values_in
from decoupled_diloco.syncer.shard_tensors import (
    Factors,
    FragmentTensors,
    PublishedCopy,
    ShardTensors,
)

Json = dict[str, Any]

EXACT = "exact"
"""Name of a file that marks the checkpoint next to it as a part of the run checkpoint to which the
run returns.

No newer state that any process holds may replace this checkpoint.
"""

DURABLE = "durable"
"""Subfolder of the run folder that contains one folder per shard."""

JOURNAL_CHECKPOINTS_MAX = 4
"""Largest size of a journal in checkpoint sizes: twelve periods of merges.

A checkpoint then costs a quarter of the journal's writes. A replay takes about as long as the
merges took, without waits for other processes.
"""

NUMBERS_PER_CLAIM = 1_000_000
"""Checkpoint numbers per process; at one checkpoint per minute they last almost two years."""


@dataclass(frozen=True)
class Durable:
    """A fragment's version and the digest of its published copy, as on disk."""

    version: Version
    digest: str


@dataclass(frozen=True)
class ShardPart:
    """Everything that a shard needs to continue from one moment.

    Attributes:
        state: Tensors that are never written to again.
        metadata: Identity, versions and memory, as JSON texts.
    """

    state: dict[str, Tensor]
    metadata: dict[str, str]

    def write(self, path: Path) -> str:
        """Write the part, and return the digest over all of it.

        Raises:
            StorageError: The part cannot be written.
        """
        digests = {name: digest(tensor) for name, tensor in self.state.items()}
        metadata = self.metadata | {"digests": json.dumps(digests)}
        save_weights(path, self.state, metadata)
        return _seal(metadata)


def part_digest(path: Path) -> str:
    """Return the digest over a file of `ShardPart.write`, after a check of every byte.

    Raises:
        StorageError: The file is missing, torn or corrupt.
    """
    metadata = load_metadata(path)
    _load_checked(path, metadata)
    return _seal(metadata)


def lacking(folder: Path, published: Mapping[int, Version]) -> str:
    """Return what is missing from a shard's folder, as far as names and headers show.

    Args:
        folder: The folder of one shard whose run has begun.
        published: Versions that the shard has sent to learners, and that were on its disk before.

    Returns:
        The file and the problem, in words; empty if nothing is known to be missing.

    Raises:
        StorageError: The folder cannot be read.
    """
    numbers = sorted(
        (int(path.stem) for path in names_in(folder) if _is_own(path, ".safetensors")), reverse=True
    )
    problems = []
    for number in numbers:
        path = folder / f"{number:08d}.safetensors"
        try:
            versions = json.loads(load_metadata(path)["versions"])
            known = {int(p): Version.read(version) for p, version in versions.items()}
            break
        except (StorageError, *NOT_JSON) as error:
            problems.append(f"{path}: {error}")
    else:
        return problems[0] if problems else f"{folder} has no checkpoint of its shard"
    if exists(folder / EXACT):
        return ""  # a resume has just restored this checkpoint
    if not exists(journal := folder / f"{number:08d}.journal"):
        return f"{journal} does not exist, though the checkpoint beside it does"
    later = sorted(int(p.stem) for p in names_in(folder) if _is_own(p, ".journal"))
    for each in later[later.index(number) :]:
        journal = folder / f"{each:08d}.journal"
        for fields in fields_in(journal):
            with contextlib.suppress(*NOT_JSON):
                fragment, version = int(fields["fragment"]), Version.read(fields["version"])
                known[fragment] = max(version, known.get(fragment, version))
    for fragment, version in sorted(published.items()):
        if fragment not in known or known[fragment] < version:
            return (
                f"{journal} ends with version {known.get(fragment)} of fragment {fragment}, though "
                f"{version} was published: it is truncated, or a later file is missing"
            )
    return ""


def _is_own(path: Path, suffix: str) -> bool:
    return path.suffix == suffix and path.stem.isdigit()


def identity_of_shard(config: RunConfig, layout: Layout) -> str:
    """Return the identity of a shard's files: the run's lasting settings and the model's layout."""
    return f"{identity_of(config)} {layout.fingerprint}"


class ShardDisk:
    """The durable state of one shard; only its merge worker uses it.

    Args:
        folder: The folder of its files.
        identity: The identity of the run's settings and layout; files of another run are rejected.
        tensors: The shard's tensors.
        claim: The claim by which this process acts for the shard; 0 if no other process can.

    Attributes:
        problems: Descriptions of failed reads and writes.
        memory: The shard's other knowledge at the last merge, as JSON values.
        before_checkpoint: Called before a checkpoint, after which older journals are deleted.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        tensors: ShardTensors,
        *,
        claim: int = 0,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.tensors = tensors
        self.problems: list[str] = []
        self.memory: Json | None = None
        self._versions: dict[int, Version] = {}
        self._claim = claim
        self.before_checkpoint: Callable[[], None] = lambda: None
        self._whole = 0
        self._journal: Journal | None = None
        self._journal_bytes_max = 0

    def recover(self) -> dict[int, Durable]:
        """Restore the tensors to their values at the end of an earlier process.

        Returns:
            The restored fragments. Empty: nothing was stored, or none of it is whole.

        Raises:
            ConfigError: The folder belongs to a run with other settings or another layout, or the
                run's result lacks copies that were left to it.
        """
        numbers = sorted((int(path.stem) for path in self._files(".safetensors")), reverse=True)
        for number in numbers:
            try:
                found = self._read(number)
            except StorageError as error:
                self.problems.append(f"{error}: the previous checkpoint is used")
                continue
            self._whole = number
            self._replay_from(number, found)
            return found
        return {}

    @property
    def is_exact(self) -> bool:
        """Whether a resume put the checkpoint here to return to it; see `EXACT`."""
        return exists(self.folder / EXACT)

    def installed(self, versions: Mapping[int, Version], memory: Json | None = None) -> None:
        """Store all fragments with these versions, at the run's begin or after a restart.

        Args:
            versions: The versions of all owned fragments.
            memory: The shard's other knowledge, as JSON values; stored unchanged.

        Raises:
            StorageError: They cannot be written; the next merge tries again.
        """
        self.close()  # no journal leads from the old state to this one
        self._versions, self.memory = dict(versions), memory
        self.checkpoint()
        with contextlib.suppress(FileNotFoundError):
            runtime().disk.remove(self.folder / EXACT)

    def merge(
        self,
        fragment: int,
        version: Version,
        memory: Json | None = None,
        factors: Factors = (),
        audit: Callable[[str], Json] | None = None,
    ) -> PublishedCopy:
        """Merge what was folded; merge and memory are on disk before the tensors change.

        Args:
            fragment: The fragment.
            version: The new version.
            memory: The shard's other knowledge, as JSON values.
            factors: Factors of the weights of parties.
            audit: Returns the line of the audit trail for a digest of the published copy.

        Raises:
            MergeError: See `ShardTensors.prepare`.
            StorageError: The merge cannot be written. The fragment is unchanged, and no process may
                be notified of the version.
        """
        step = self.tensors.prepare(fragment, factors)
        journal = self._journal_with_room()
        fields = {
            "fragment": fragment,
            "version": str(version),
            "digest": step.copy.digest,
            "memory": memory,
        }
        if self.tensors.mechanism is not None:
            fields["clip"] = step.after.clip
        if audit is not None:
            fields["audit"] = audit(step.copy.digest)
        # break: journal-one-merge-late, commit-before-journal
        journal.append(fields, as_bytes(step.gradient).numpy().data)
        self.tensors.commit(fragment, step)
        self._versions[fragment], self.memory = version, memory
        return step.copy

    def checkpoint(self) -> None:
        """Begin a new journal, write all fragments, and delete files that are not needed any more.

        Raises:
            StorageError: The checkpoint cannot be written; the existing files stay in use.
        """
        self.before_checkpoint()
        if self._journal is not None:  # break: checkpoint-deleted-early
            self._journal.settle()
        number = self._free_number()
        journal = Journal(self._path(number, ".journal"))
        begun = self._journal is not None
        # Switch first: a checkpoint whose write fails may still be whole on disk. Recovery would
        # then start from it and its journal, and ignore merges that went into the old journal.
        if begun:  # break: old-journal-after-failure
            self._begin(journal)
        try:
            nbytes = self._save(self._path(number, ".safetensors"))
        except StorageError:
            if not begun:
                journal.close()
            raise
        self._begin(journal)
        self._journal_bytes_max = JOURNAL_CHECKPOINTS_MAX * nbytes
        self._delete_before(self._whole)  # break: previous-checkpoint-deleted
        self._whole = number

    def _free_number(self) -> int:
        numbers = [int(path.stem) for path in self._files()]
        if not self._claim:
            return max(numbers, default=0) + 1
        first, last = self._claim * NUMBERS_PER_CLAIM, (self._claim + 1) * NUMBERS_PER_CLAIM - 1
        own = [number for number in numbers if first <= number <= last]
        return max(own, default=first - 1) + 1

    def _begin(self, journal: Journal) -> None:
        if journal is not self._journal:
            self.close()
            self._journal = journal

    def _save(self, path: Path) -> int:
        """Write a checkpoint, and return its size in bytes."""
        self.part(self.memory).write(path)
        return size_of(path)

    def part(self, memory: Json | None) -> ShardPart:
        """Return the current fragments, to be written elsewhere by any thread.

        The tensors are shared, not copied: a merge replaces a fragment's tensors and never writes
        to them.

        Args:
            memory: The shard's other knowledge.
        """
        state = {
            f"{fragment}.{name}": tensor
            for fragment, entry in self.tensors.fragments.items()
            for name, tensor in as_tensors(entry).items()
        }
        metadata = {
            "identity": self.identity,
            "versions": json.dumps({str(p): str(v) for p, v in self._versions.items()}),
            "memory": json.dumps(memory),
        }
        return ShardPart(state, metadata)

    def finish(self) -> None:
        """Keep only the final state, after the run.

        Raises:
            StorageError: It cannot be written.
        """
        self.checkpoint()
        self._delete_before(self._whole)

    def leave_to(self, weights: Path) -> None:
        """Remove the published copies that a file of weights contains from the last checkpoint.

        Args:
            weights: The run's result: `recover` reads it from the run folder.

        Raises:
            StorageError: A file cannot be read or written; the checkpoint is unchanged.
        """
        path = self._path(max(int(p.stem) for p in self._files(".safetensors")), ".safetensors")
        metadata = load_metadata(path)
        state = _load_checked(path, metadata)
        digests = json.loads(metadata["digests"])
        for fragment, values in values_in(weights, self.tensors.plan, self.tensors.owned).items():
            if digests.get(_published(fragment)) == digest(values):
                state.pop(_published(fragment), None)
        save_weights(path, state, metadata)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _journal_with_room(self) -> Journal:
        if self._journal is None:
            self.checkpoint()
        elif self._journal.nbytes > self._journal_bytes_max:
            try:
                self.checkpoint()
            except StorageError as error:
                self.problems.append(f"{error}: the journal grows instead")
                self._journal_bytes_max += self._journal_bytes_max // JOURNAL_CHECKPOINTS_MAX
        assert self._journal is not None
        return self._journal

    def _delete_before(self, number: int) -> None:
        """Delete older pairs, and temporary files of a checkpoint that a crash interrupted."""
        older = [file for file in self._files() if int(file.stem) < number]
        torn = [file for file in names_in(self.folder) if file.match(".*.part")]
        for file in (*older, *torn):
            with contextlib.suppress(OSError):  # tried again at the next checkpoint
                runtime().disk.remove(file)

    def _read(self, number: int) -> dict[int, Durable]:
        try:
            return self._load(number)
        except ConfigError:
            raise
        except NOT_JSON as error:
            path = self._path(number, ".safetensors")
            raise StorageError(f"{path} is not a shard's checkpoint: {error!r:.200}") from error

    def _load(self, number: int) -> dict[int, Durable]:
        path = self._path(number, ".safetensors")
        metadata = load_metadata(path)
        if metadata.get("identity") != self.identity:
            raise ConfigError(
                f"{path} belongs to a run with other settings or another model: train in another "
                "folder, or with the settings of that run"
            )
        state = self._with_published(path, _load_checked(path, metadata), metadata)
        self.memory = json.loads(metadata.get("memory", "null"))
        found: dict[int, Durable] = {}
        for fragment, version in json.loads(metadata["versions"]).items():
            entry = from_tensors(self.tensors, int(fragment), state)
            self.tensors.fragments[int(fragment)] = entry
            found[int(fragment)] = Durable(Version.read(version), values_digest(entry.published))
        return found

    def _with_published(
        self, path: Path, state: dict[str, Tensor], metadata: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Return the state with the published copies that `leave_to` left to the run's result."""
        versions, digests = json.loads(metadata["versions"]), json.loads(metadata["digests"])
        left = [int(p) for p in versions if _published(p) not in state]
        result = self.folder.parents[1] / RESULT
        try:
            found = values_in(result, self.tensors.plan, left) if left else {}
            wrong = [p for p, values in found.items() if digest(values) != digests[_published(p)]]
            problem = f"{result} has other values" if wrong else ""
        except StorageError as error:
            problem = str(error)
        if problem:
            raise ConfigError(
                f"{path} needs the published copies in the run's result, but {problem}: restore "
                "the result of this run"
            )
        return state | {_published(p): values for p, values in found.items()}

    def _replay_from(self, number: int, found: dict[int, Durable]) -> None:
        """Replay the merges in the journals from a checkpoint's number on."""
        journals = sorted(int(p.stem) for p in self._files(".journal") if int(p.stem) >= number)
        last: dict[tuple[int, str], int] = {}
        # A version that was written again later had not been announced before: only its last
        # record counts.
        if len(journals) > 1:
            for journal in journals:
                for record in filter(_is_merge, JournalReader(self._path(journal, ".journal"))):
                    last[record.fields["fragment"], record.fields["version"]] = journal
        wrong: set[int] = set()
        for journal in journals:
            records = JournalReader(self._path(journal, ".journal"))
            for record in records:
                if not _is_merge(record):
                    self.problems.append(f"{records.path}: a record is not a merge and is skipped")
                    continue
                place = (record.fields["fragment"], record.fields["version"])
                if last.get(place, journal) == journal:
                    self._replay(journal, record, found, wrong)
            if records.torn_bytes:
                self.problems.append(
                    f"{records.path}: {records.torn_bytes} bytes after its last whole record are "
                    "skipped: a merge that was never announced, unless the disk lost more"
                )

    def _replay(
        self, number: int, record: JournalRecord, found: dict[int, Durable], wrong: set[int]
    ) -> None:
        """Replay a merge; a fragment with a wrong digest stays at its previous version."""
        fragment, durable = int(record.fields["fragment"]), _durable(record)
        if fragment in wrong or fragment not in found:
            return
        if durable.version <= found[fragment].version:
            return  # the checkpoint has it already
        try:
            step = self.tensors.step(fragment, _gradient(record))
            # break: replay-digest-unchecked
            problem = "" if durable.digest == step.copy.digest else "the digest differs"
        except MergeError as error:
            problem = str(error)
        if problem:
            wrong.add(fragment)
            self.problems.append(
                f"{self._path(number, '.journal')}: version {durable.version} of fragment "
                f"{fragment} cannot be restored ({problem}): "
                f"version {found[fragment].version} is used"
            )
            return
        # break: clip-forgotten
        step.after.clip = float(record.fields.get("clip", step.after.clip))
        self.tensors.commit(fragment, step)
        found[fragment] = durable
        self.memory = record.fields.get("memory", self.memory)

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:08d}{suffix}"

    def _files(self, *suffixes: str) -> list[Path]:
        wanted = suffixes or (".safetensors", ".journal")
        found = names_in(self.folder)
        return [path for path in found if any(_is_own(path, each) for each in wanted)]


def _published(fragment: int | str) -> str:
    return f"{fragment}.published"


def _load_checked(path: Path, metadata: Mapping[str, str]) -> dict[str, Tensor]:
    state = load_weights(path)
    digests = json.loads(metadata.get("digests", "{}"))
    # break: checkpoint-digests-unchecked
    wrong = [name for name, tensor in state.items() if digests.get(name) != digest(tensor)]
    if wrong:
        raise StorageError(f"{path} is torn: {wrong[0]} is not what was written")
    return state


def _seal(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode()).hexdigest()


def as_tensors(entry: FragmentTensors) -> dict[str, Tensor]:
    """Return a fragment's state as tensors by name."""
    outer = {f"outer.{name}": tensor for name, tensor in entry.outer.state_dict().items()}
    state = {"master": entry.master, "published": entry.published, **outer}
    if entry.clip != 1.0:
        state["clip"] = torch.tensor([entry.clip], dtype=torch.float64, device="cpu")
    return state


def from_tensors(tensors: ShardTensors, fragment: int, state: dict[str, Tensor]) -> FragmentTensors:
    """Return a fragment's state from a checkpoint's tensors."""
    prefix = f"{fragment}."
    mine = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    outer = tensors.plan.outer_of(fragment)
    outer.load_state_dict(
        {k.removeprefix("outer."): v for k, v in mine.items() if k.startswith("outer.")}
    )
    clip = float(mine["clip"]) if "clip" in mine else 1.0
    return FragmentTensors(mine["master"], mine["published"], outer, clip)


def _is_merge(record: JournalRecord) -> bool:
    """Whether a record has the fields and the body size that `ShardDisk.merge` writes."""
    fragment, version, digest = (record.fields.get(n) for n in ("fragment", "version", "digest"))
    try:
        Version.read(version)  # type: ignore[arg-type]  # other types raise
    except NOT_JSON:
        return False
    return (
        type(fragment) is int
        and isinstance(digest, str)
        and len(record.body) % 4 == 0 < len(record.body)
    )


def _durable(record: JournalRecord) -> Durable:
    return Durable(Version.read(record.fields["version"]), str(record.fields["digest"]))


def _gradient(record: JournalRecord) -> Tensor:
    return torch.frombuffer(bytearray(record.body), dtype=torch.float32)
