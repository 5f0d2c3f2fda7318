"""The audit trail of a shard: a signed record of each merge, chained to the one before it.

A record names the version, the digest of its published copy, and each contribution in it: learner,
request, digest of the payload, and weight. It contains the hash of the previous record, so a record
that is removed, moved, changed or added breaks the chain. `check_chain` names it. The digests are
those of the run (xxh3-128): they detect a change that was not made to fit the digest. With secure
sums, a record says that the payloads are masked: the digest proves which one is in the sum.

A record is in the shard's journal before the merge is published, and then in the trail. So after a
power failure, what the trail lacks is copied from the journals. Every process of the shard adds a
record when it begins. A process that has lost its claim may have added records after that one; no
process has received their versions.

Files: ``audit/shard-0.jsonl``; with a standby, ``audit/shard-0.<claim>.jsonl`` for each claim. One
line is ``{"record": …, "signature": BASE64}``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from decoupled_diloco.config.signing_keys import PublicKey, SigningKey
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.protocol.messages import Asking, Merge
from decoupled_diloco.protocol.syncer_state import Ask
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, exists, names_in
from decoupled_diloco.storage.journal import fields_in

AUDIT = "audit"
"""Subfolder of the run folder."""

ANNOUNCED_MAX = 1 << 16
"""Announced payloads whose digests are kept; the oldest are forgotten first."""

Json = dict[str, Any]


@dataclass(frozen=True)
class SignedRecord:
    """A line of a trail.

    Attributes:
        record: The record's fields.
        signature: The signature of its text.
        file: The name of the file.
    """

    record: Json
    signature: bytes
    file: str = ""

    @property
    def hash(self) -> str:
        """SHA-256 of the record and its signature, which the next record contains."""
        return hashlib.sha256(_text(self.record) + self.signature).hexdigest()

    @property
    def json(self) -> Json:
        """The line as JSON values."""
        signature = base64.b64encode(self.signature).decode()
        return {"record": self.record, "signature": signature}

    @classmethod
    def of(cls, value: Any, file: str = "") -> SignedRecord:
        """Return the line with these JSON values.

        Raises:
            ValueError, LookupError, TypeError: It has another form.
        """
        record = dict(value["record"])
        kinds = (("number", int), ("previous", str), ("kind", str))
        if not all(type(record[name]) is kind for name, kind in kinds):
            raise TypeError("a record has another form")
        return cls(record, base64.b64decode(value["signature"], validate=True), file)


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


class AuditTrail:
    """Writes the trail of one shard; only its merge worker uses it, except for `announced`.

    Args:
        run: The run folder.
        shard: The shard's number.
        key: The shard's private key.
        journals: The folder of the shard's journals.
        about: Fields of the record of this process: the run, and the digest of its parties.
        claim: The claim by which this process acts for the shard; 0 if no other process can.
        is_masked: Whether the payloads are masked.

    Raises:
        StorageError: The trail cannot be read or written.
    """

    def __init__(
        self,
        run: Path,
        shard: int,
        key: SigningKey,
        *,
        journals: Path,
        about: Mapping[str, str],
        claim: int = 0,
        is_masked: bool = False,
    ) -> None:
        self._masked = {"masked": True} if is_masked else {}
        self._key, self._digests = key, OrderedDict[Asking, str]()
        name = f"shard-{shard}.{claim}.jsonl" if claim else f"shard-{shard}.jsonl"
        self._path = run / AUDIT / name
        lines, _ = read_trail(run, shard)
        self._head = lines[-1].hash if lines else ""
        self._number: int = lines[-1].record["number"] if lines else 0
        self._file = self._opened()
        for line in _in_journals(journals):
            if line.record["number"] > self._number and line.record["previous"] == self._head:
                self.keep(line)
        begin = {"kind": "begin", "shard": shard, "key": str(key.public), "claim": claim, **about}
        self.keep(self._signed(begin))

    def announced(self, ask: Asking, digest: str) -> None:
        """Note the digest that a learner has announced of its payload."""
        self._digests[ask] = digest
        while len(self._digests) > ANNOUNCED_MAX:
            self._digests.popitem(last=False)

    def merged(self, order: Merge, asks: Iterable[Ask], digest: str) -> SignedRecord:
        """Return the signed record of a merge, which `keep` adds once the merge is durable.

        Args:
            order: The order to merge.
            asks: The requests whose contributions are in it.
            digest: The digest of the published copy.
        """
        contributions = [
            [ask.learner, str(ask.name), self._digests.pop(ask.name, ""), ask.weight, via(ask)]
            for ask in asks
        ]
        return self._signed(
            {
                "kind": "merge",
                "round": order.round,
                "fragment": order.fragment,
                "version": str(order.version),
                "base": str(order.base),
                "digest": digest,
                "contributions": contributions,
                "factors": [list(each) for each in order.factors],
                **self._masked,
            }
        )

    def _signed(self, fields: Mapping[str, Any]) -> SignedRecord:
        record = {"number": self._number + 1, "previous": self._head, **fields}
        return SignedRecord(record, self._key.sign(_text(record)))

    def keep(self, line: SignedRecord) -> None:
        """Add a record.

        Raises:
            StorageError: It cannot be written.
        """
        text = json.dumps(line.json, separators=(",", ":")).encode() + b"\n"
        try:
            runtime().disk.write(self._file, text)
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}: free disk space"
            ) from error
        self._head, self._number = line.hash, line.record["number"]

    def settle(self) -> None:
        """Make all records durable, before the journals that also have them are removed.

        Raises:
            StorageError: The disk fails.
        """
        try:
            runtime().disk.sync_file(self._file)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()

    def _opened(self) -> BinaryIO:
        disk = runtime().disk
        try:
            disk.make_folder(self._path.parent)
            whole = 0
            if disk.exists(self._path):
                content = disk.read(self._path)
                whole = content.rfind(b"\n") + 1  # a crash may have torn the last line
            file = disk.open(self._path)
            disk.truncate(file, whole)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be opened: {error.strerror}") from error
        return file


def via(ask: Ask) -> str:
    """Return the relay whose sum brought a contribution; empty: it came alone."""
    return ask.sums[-1][0] if ask.sums else ""


def _in_journals(folder: Path) -> Iterator[SignedRecord]:
    """Yield the records in a shard's journals, the oldest first."""
    for path in sorted(p for p in names_in(folder) if p.suffix == ".journal"):
        for fields in fields_in(path):
            if fields.get("audit"):
                try:
                    yield SignedRecord.of(fields["audit"])
                except NOT_JSON:
                    return


def read_trail(run: Path, shard: int) -> tuple[list[SignedRecord], list[str]]:
    """Return the lines of a shard's trail in their order, and what could not be read.

    Raises:
        StorageError: A file cannot be read.
    """
    folder, lines, problems = run / AUDIT, list[SignedRecord](), list[str]()
    for _, path in sorted(_files(folder, shard)):
        try:
            content = runtime().disk.read(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        *whole, _ = content.split(b"\n")
        for number, text in enumerate(whole, start=1):
            try:
                lines.append(SignedRecord.of(json.loads(text), path.name))
            except NOT_JSON:
                problems.append(f"line {number} of {path.name} is not a record: it was altered")
    return lines, problems


def _files(folder: Path, shard: int) -> Iterator[tuple[int, Path]]:
    for path in names_in(folder) if exists(folder) else ():
        name, _, rest = path.name.partition(".")
        claim = rest.removesuffix("jsonl").removesuffix(".")
        if name == f"shard-{shard}" and rest.endswith("jsonl") and (not claim or claim.isdigit()):
            yield int(claim or 0), path


@dataclass
class ChainCheck:
    """The result of `check_chain`.

    Attributes:
        merges: The records of merges that belong to the chain.
        keys: The keys that sign it, in order.
        problems: Sentences, one for each record that is missing, changed, moved or added.
        notes: Sentences about what is unusual but allowed.
    """

    merges: list[Json] = field(default_factory=list)
    keys: list[PublicKey] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def named(record: Mapping[str, Any]) -> str:
    """Return a record's name in a sentence."""
    if record["kind"] != "merge":
        return f"record {record['number']} (a process began)"
    what = f"version {record.get('version')} of fragment {record.get('fragment')}"
    return f"record {record['number']} ({what})"


def check_chain(lines: Iterable[SignedRecord], pinned: PublicKey | None = None) -> ChainCheck:
    """Check the signatures and the order of a trail.

    Args:
        lines: The lines, as `read_trail` returns them.
        pinned: The only key that may sign; `None`: the one that the trail names.
    """
    found, known = ChainCheck(), dict[str, str]()
    head, number, file, broken = "", 0, "", False
    for line in lines:
        record, name = line.record, named(line.record)
        if record["kind"] == "begin":
            _begin(found, record, name, pinned)
        key = found.keys[-1] if found.keys else None
        is_signed = key is not None and key.verifies(line.signature, _text(record))
        if not is_signed:
            found.problems.append(f"{name} was altered or added: its signature is not valid")
        elif record["previous"] != head and not broken:  # break: removed-record-unnoticed
            at = record["number"]
            if line.hash in known:
                found.problems.append(f"{name} was added: it occurs twice")
                continue
            if known.get(record["previous"], file) != line.file:
                # A process that had lost its claim added records after its successor began.
                found.merges = [m for m in found.merges if m["number"] < at]
                found.notes.append(f"records {at} to {number} of {file} were never published")
            elif at > number + 1:
                lost = f"record {number + 1} was removed"
                if at > number + 2:
                    lost = f"records {number + 1} to {at - 1} were removed"
                found.problems.append(f"{lost}: {name} follows record {number}")
            elif at <= number:
                found.problems.append(f"{name} is not in its place: it follows record {number}")
            else:
                found.problems.append(f"{name} does not continue record {number}: it was replaced")
        if record["kind"] == "merge" and is_signed:
            if _is_merge(record):
                found.merges.append(record)
            else:
                found.problems.append(f"{name} is not that of a merge: its signer has altered it")
        broken = not is_signed  # its hash is unknown, so the next record cannot be compared
        head, number, file = line.hash, record["number"], line.file
        known[head] = file
    return found


def _is_merge(record: Json) -> bool:
    """Whether the record has the fields that `AuditTrail.merged` writes."""
    texts = (record.get("version"), record.get("base"), record.get("digest"))
    contributions = record.get("contributions")
    if type(record.get("fragment")) is not int or not isinstance(contributions, list):
        return False
    kinds: tuple[Any, ...] = (str, str, str, (int, float), str)
    return all(isinstance(text, str) for text in texts) and all(
        isinstance(each, list)
        and len(each) == len(kinds)
        and all(isinstance(value, kind) for value, kind in zip(each, kinds, strict=True))
        for each in contributions
    )


def _begin(found: ChainCheck, record: Json, name: str, pinned: PublicKey | None) -> None:
    try:
        key = PublicKey.parse(str(record.get("key")))
    except ConfigError:
        found.problems.append(f"{name} was altered: it has no valid key")
        return
    if pinned is not None and key != pinned:
        found.problems.append(f"{name} names the key {key}, but parties.toml has {pinned}")
        key = pinned
    elif found.keys and key != found.keys[-1]:
        found.notes.append(f"from {name} on, another key signs: {key}")
    if not found.keys or key != found.keys[-1]:
        found.keys.append(key)
