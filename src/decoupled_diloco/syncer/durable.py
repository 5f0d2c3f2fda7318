"""What a shard keeps on disk: every version that anybody has received survives a crash.

A *checkpoint* holds the master, the published copy and the outer optimizer's state of every owned
fragment, 12 bytes a parameter with momentum. The *journal* behind it has one record for each merge
since: the merged outer gradient, 4 bytes an element, on the disk before anybody hears of the new
version. The same state and gradient give the same bits, so the journal leads from the checkpoint to
what the shard was; the digest of each published copy proves it.

When the journal has grown to ``JOURNAL_CHECKPOINTS_MAX`` times the checkpoint, a new checkpoint is
written and a new journal begun. The pair before is kept until then: a checkpoint that turns out to
be torn is replaced by the one before it and two journals. So the folder holds at most
2 · (1 + JOURNAL_CHECKPOINTS_MAX) checkpoint sizes.

Files: ``<number>.safetensors`` and ``<number>.journal``, numbers ascending.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, MergeError, StorageError
from decoupled_diloco.merge import as_bytes, digest
from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.storage.journal import Journal, JournalRecord, read_journal
from decoupled_diloco.storage.weights import load_metadata, load_weights, save_weights
from decoupled_diloco.syncer.fragments import FragmentTensors, PublishedCopy, ShardTensors

DURABLE = "durable"
"""The folder in the run folder; each shard has its own in it."""

JOURNAL_CHECKPOINTS_MAX = 4
"""Twelve periods of merges: a checkpoint costs a quarter of what the journal between two does, and
replaying one takes about as long as its merges took, without waiting for anybody."""


@dataclass(frozen=True)
class Durable:
    """A fragment as the disk has it."""

    version: Version
    digest: str


class ShardDisk:
    """The durable side of one shard; its merge worker alone uses it.

    Args:
        folder: Where its files are.
        identity: Of the run's settings and layout, in a word: what is of another run is refused.
        tensors: The shard's tensors.

    Attributes:
        problems: What could not be read or written, in words.
    """

    def __init__(self, folder: Path, identity: str, tensors: ShardTensors) -> None:
        self.folder = folder
        self.identity = identity
        self.tensors = tensors
        self.problems: list[str] = []
        self._versions: dict[int, Version] = {}
        self._number = 0
        self._journal: Journal | None = None
        self._journal_bytes_max = 0

    def recover(self) -> dict[int, Durable]:
        """Brings the tensors back to what they were when an earlier process ended.

        Returns:
            The fragments that are there. Empty: nothing was kept, or nothing of it is whole.

        Raises:
            ConfigError: The folder belongs to a run with other settings or another layout.
        """
        numbers = sorted((int(path.stem) for path in self._files(".safetensors")), reverse=True)
        for number in numbers:
            try:
                found = self._load(number)
            except StorageError as error:
                self.problems.append(f"{error}: the one before it is used")
                continue
            for journal in sorted(int(path.stem) for path in self._files(".journal")):
                if journal >= number:
                    self._replay(journal, found)
            return found
        return {}

    def installed(self, versions: Mapping[int, Version]) -> None:
        """All fragments bear these versions now: where the run begins, or goes on after a restart.

        Raises:
            StorageError: They cannot be written; the next merge tries again.
        """
        self._versions = dict(versions)
        self.checkpoint()

    def merge(self, fragment: int, number: int, version: Version) -> PublishedCopy:
        """Merges a round; the disk has it before the tensors take it over.

        Raises:
            MergeError: See `ShardTensors.prepare`.
            StorageError: It cannot be written. The fragment is as it was, and nobody may hear of
                the version.
        """
        step = self.tensors.prepare(fragment, number)
        journal = self._journal_with_room()
        fields = {
            "fragment": fragment,
            "version": str(version),
            "digest": step.copy.digest,
        }
        journal.append(fields, as_bytes(step.gradient).numpy().data)
        self.tensors.commit(fragment, step)
        self._versions[fragment] = version
        return step.copy

    def checkpoint(self) -> None:
        """Writes all fragments, begins a new journal, and deletes what is no longer needed.

        Raises:
            StorageError: It cannot be written; what was there is untouched and goes on.
        """
        before = self._number or max((int(path.stem) for path in self._files()), default=0)
        number = before + 1
        path = self._path(number, ".safetensors")
        state = {
            f"{fragment}.{name}": tensor
            for fragment, entry in self.tensors.fragments.items()
            for name, tensor in _as_tensors(entry).items()
        }
        versions = {str(p): str(v) for p, v in self._versions.items()}
        metadata = {"identity": self.identity, "versions": json.dumps(versions)}
        save_weights(path, state, metadata)
        journal = Journal(self._path(number, ".journal"))
        self.close()
        self._number, self._journal = number, journal
        self._journal_bytes_max = JOURNAL_CHECKPOINTS_MAX * path.stat().st_size
        self._delete_before(before)

    def finish(self) -> None:
        """The run is over: only the last state is kept.

        Raises:
            StorageError: It cannot be written.
        """
        self.checkpoint()
        self._delete_before(self._number)

    def close(self) -> None:
        """Closes the journal."""
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
                self.problems.append(f"{error}: the journal goes on instead")
                self._journal_bytes_max += self._journal_bytes_max // JOURNAL_CHECKPOINTS_MAX
        assert self._journal is not None
        return self._journal

    def _delete_before(self, number: int) -> None:
        for file in self._files():
            if int(file.stem) < number:
                with contextlib.suppress(OSError):  # tried again at the next checkpoint
                    file.unlink()

    # ---- reading

    def _load(self, number: int) -> dict[int, Durable]:
        path = self._path(number, ".safetensors")
        metadata = load_metadata(path)
        if metadata.get("identity") != self.identity:
            raise ConfigError(
                f"{path} is of a run with other settings or another model: train in another "
                "folder, or with the settings of that run"
            )
        state = load_weights(path)
        found: dict[int, Durable] = {}
        for fragment, version in json.loads(metadata["versions"]).items():
            entry = _from_tensors(self.tensors, int(fragment), state)
            self.tensors.fragments[int(fragment)] = entry
            found[int(fragment)] = Durable(Version.read(version), digest(entry.published))
        return found

    def _replay(self, number: int, found: dict[int, Durable]) -> None:
        """Takes the merges of a journal over; a fragment whose digest is wrong stays behind."""
        wrong: set[int] = set()
        for record in read_journal(self._path(number, ".journal")):
            fragment = int(record.fields["fragment"])
            if fragment in wrong or fragment not in found:
                continue
            durable = _durable(record)
            if durable.version <= found[fragment].version:
                continue  # the checkpoint has it already
            try:
                step = self.tensors.step(fragment, _gradient(record))
            except MergeError as error:
                step, problem = None, str(error)
            if step is None or step.copy.digest != durable.digest:
                problem = problem if step is None else "another digest"
                wrong.add(fragment)
                self.problems.append(
                    f"{self._path(number, '.journal')}: version {durable.version} of fragment "
                    f"{fragment} cannot be had from it ({problem}): {found[fragment].version} can"
                )
                continue
            self.tensors.commit(fragment, step)
            found[fragment] = durable

    # ---- files

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:08d}{suffix}"

    def _files(self, *suffixes: str) -> list[Path]:
        wanted = suffixes or (".safetensors", ".journal")
        try:
            found = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        return [path for path in found if path.suffix in wanted and path.stem.isdigit()]


def _as_tensors(entry: FragmentTensors) -> dict[str, Tensor]:
    outer = {f"outer.{name}": tensor for name, tensor in entry.outer.state_dict().items()}
    return {"master": entry.master, "published": entry.published, **outer}


def _from_tensors(
    tensors: ShardTensors, fragment: int, state: dict[str, Tensor]
) -> FragmentTensors:
    prefix = f"{fragment}."
    mine = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    outer = tensors.plan.outer(tensors.plan.fragments[fragment].numel)
    outer.load_state_dict(
        {k.removeprefix("outer."): v for k, v in mine.items() if k.startswith("outer.")}
    )
    return FragmentTensors(mine["master"], mine["published"], outer)


def _durable(record: JournalRecord) -> Durable:
    return Durable(Version.read(record.fields["version"]), str(record.fields["digest"]))


def _gradient(record: JournalRecord) -> Tensor:
    return torch.frombuffer(bytearray(record.body), dtype=torch.float32)
