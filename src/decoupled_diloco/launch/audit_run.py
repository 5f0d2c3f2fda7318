"""Check a run's audit trail: its chain, and whether tape, journals, weights and payloads agree.

Each source that is on the disk is compared. The end of a process may cut off its tape, which is not
written at once. Merges that are not on the tape for this reason are noted, not refused.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.method import options_of, plan_of
from decoupled_diloco.config.parties import Parties
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.merge import body_digest, values_digest
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Done, Made
from decoupled_diloco.protocol.quotas import weight_of
from decoupled_diloco.storage.journal import fields_in
from decoupled_diloco.storage.weight_files import load_metadata, load_weights
from decoupled_diloco.syncer.audit_trail import AUDIT, ChainCheck, check_chain, named, read_trail
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.syncer.payload_archive import PAYLOADS, read_body, read_layout
from decoupled_diloco.syncer.result import share_file
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record

Place = tuple[int, str]
"""A fragment and a version."""


@dataclass(frozen=True)
class AuditedContribution:
    """One contribution of a learner to a version.

    Attributes:
        shard: The shard's number.
        fragment: The fragment.
        version: The version that contains it.
        learner: The learner.
        ask: The name of its request.
        digest: The digest of its payload.
        weight: Its weight in the merge, before the factor of its party.
        relay: The relay whose sum brought it; empty: it came alone.
        is_masked: Whether its payload is masked, so that the syncer has received a sum only.
    """

    shard: int
    fragment: int
    version: str
    learner: str
    ask: str
    digest: str
    weight: float
    relay: str
    is_masked: bool


@dataclass
class ShardAudit:
    """The result for one shard.

    Attributes:
        shard: Its number.
        keys: The keys that sign, in order.
        pinned: Whether parties.toml names the key.
        contributions: All contributions in the chain.
        versions: Number of versions in the chain.
        compared: By source, the number of records or contributions that agree with it.
        problems: Sentences about what does not agree.
        notes: Sentences about what is unusual or could not be compared.
    """

    shard: int
    keys: list[PublicKey]
    pinned: bool
    contributions: list[AuditedContribution] = field(default_factory=list)
    versions: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def audit_run(run: Path, parties: Parties | None = None) -> list[ShardAudit]:
    """Check the trail of every shard.

    Args:
        run: The run folder.
        parties: A party's own copy of parties.toml, whose `syncer_key` must have signed. Default:
            the one in the run's settings.

    Raises:
        ConfigError: The run has no audit trail.
        StorageError: A file cannot be read.
    """
    if not (run / AUDIT).is_dir():
        raise ConfigError(
            f"{run} has no audit trail: a run writes one with parties in [privacy], or with "
            "signing_key in [syncer]"
        )
    config = load_config(run / RUN_FILE, plugins=False)
    agreed = parties or config.privacy.agreed
    pinned = None if agreed is None else agreed.syncer_key
    tapes = _tapes(run, config)
    return [_shard(run, config, n, pinned, tapes.get(n)) for n in range(config.syncer.shards)]


def _shard(
    run: Path, config: RunConfig, shard: int, pinned: PublicKey | None, tape: _ShardTape | None
) -> ShardAudit:
    lines, unread = read_trail(run, shard)
    chain = check_chain(lines, pinned)
    found = ShardAudit(shard, chain.keys, pinned is not None)
    found.problems += [*unread, *chain.problems]
    found.notes += chain.notes
    if not lines:
        found.problems.append(f"shard-{shard} has no records: they were removed")
    records: dict[Place, dict[str, Any]] = {}
    for record in chain.merges:
        place = record["fragment"], record["version"]
        records[place] = record
        is_masked = record.get("masked") is True
        if is_masked != config.privacy.secure_sums:
            found.problems.append(
                f"{named(record)}: its contributions are {'' if is_masked else 'not '}masked, "
                "unlike those of the run"
            )
        for learner, ask, digest, weight, relay in record["contributions"]:
            found.contributions.append(
                AuditedContribution(shard, *place, learner, ask, digest, weight, relay, is_masked)
            )
    found.versions = len(records)
    if tape is None:
        found.notes.append(f"the tape of shard-{shard} is not here: it was not compared")
    else:
        _compare_tape(found, chain, records, tape, config)
        _compare_payloads(found, run, config, tape)
    _compare_digests(found, records, "journal", _journals(run / DURABLE / f"shard-{shard}"))
    _compare_digests(found, records, "weights", _weights(share_file(run, shard)))
    return found


# The event tape


@dataclass
class _ShardTape:
    """What the tapes of a shard's processes report.

    Attributes:
        done: Each finished merge, with the digest of its copy and the requests in it.
        ordered: Each ordered merge.
        digests: The announced digests, by request.
        folds: The order to fold each request.
        paths: The path and the codec of each request's payload.
    """

    done: dict[Place, tuple[str, frozenset[Asking]]] = field(default_factory=dict)
    ordered: set[Place] = field(default_factory=set)
    digests: dict[Asking, str] = field(default_factory=dict)
    folds: dict[Asking, messages.Fold] = field(default_factory=dict)
    paths: dict[Asking, tuple[str, str]] = field(default_factory=dict)


def _tapes(run: Path, config: RunConfig) -> dict[int, _ShardTape]:
    found: dict[int, _ShardTape] = {}
    lives: dict[str, _TapedShard] = {}
    for record in TapeReader(run):
        if record.kind == "start":
            header = record.data.get("header", {})
            lives.pop(record.process, None)
            if header.get("machine") == "shard":
                tape = found.setdefault(header["shard"], _ShardTape())
                lives[record.process] = _TapedShard(tape)
        elif record.process in lives:
            lives[record.process].take(record)
    return found


class _TapedShard:
    """One process of a shard, on the tape."""

    def __init__(self, tape: _ShardTape) -> None:
        self._tape = tape
        self._folded: defaultdict[int, list[Asking]] = defaultdict(list)
        self._sums: dict[tuple[int, str, int], tuple[Asking, ...]] = {}
        self._merging: dict[int, tuple[Place, frozenset[Asking]]] = {}

    _KINDS = frozenset(
        ("Received", "Done", "Expect", "Fold", "SumArrived", "FoldSum", "ForgetSum", "Merge")
    )

    def take(self, record: Record) -> None:
        if record.kind == "sample" or record.type not in self._KINDS:
            return
        tape, value = self._tape, record.value()
        match value:
            case messages.Received(_, messages.Upload() as message):
                tape.digests[message.ask] = message.digest
            case messages.Expect():
                tape.paths[value.ask] = value.path, value.codec
            case messages.Fold():
                tape.folds[value.ask] = value
                if not value.relay:
                    self._folded[value.fragment].append(value.ask)
            case messages.SumArrived(relay, fragment, number, asks):
                self._sums[fragment, relay, number] = asks
            case messages.FoldSum(fragment, relay, number, at):
                self._folded[fragment] += () if at else self._sums.pop((fragment, relay, number))
            case messages.ForgetSum(fragment):
                self._folded.pop(fragment, None)
            case messages.Merge(number, fragment, version):
                place = fragment, str(version)
                tape.ordered.add(place)
                self._merging[number] = place, frozenset(self._folded.pop(fragment, ()))
            case Done(messages.Merge(number), Made(digest)) if number in self._merging:
                place, merged = self._merging.pop(number)
                tape.done[place] = digest, merged


def _compare_tape(
    found: ShardAudit,
    chain: ChainCheck,
    records: Mapping[Place, dict[str, Any]],
    tape: _ShardTape,
    config: RunConfig,
) -> None:
    agree, newest = 0, max((records[p]["number"] for p in tape.done if p in records), default=0)
    for (fragment, version), (digest, asks) in tape.done.items():
        record = records.get((fragment, version))
        if record is None:
            found.problems.append(
                f"version {version} of fragment {fragment} is on the tape, but has no record: it "
                "was removed or altered"
            )
            continue
        problem = ""
        if record["digest"] != digest:
            problem = f"its copy has the digest {record['digest']}, and {digest} on the tape"
        elif {str(ask) for ask in asks} != {each[1] for each in record["contributions"]}:
            problem = "the tape has other contributions in it"
        else:
            problem = _problem_of_contributions(record, asks, tape, config)
        if problem:
            found.problems.append(f"{named(record)}: {problem}")
        agree += not problem
    unknown = [record for place, record in records.items() if place not in tape.done]
    added = [
        record
        for record in unknown
        if record["number"] < newest and (record["fragment"], record["version"]) not in tape.ordered
    ]
    found.problems += [f"{named(record)} is not on the tape: it was added" for record in added]
    if late := len(unknown) - len(added):
        found.notes.append(f"the tape ends before {late} of the merges: their process had ended")
    found.compared["tape"] = agree


def _problem_of_contributions(
    record: Mapping[str, Any], asks: Iterable[Asking], tape: _ShardTape, config: RunConfig
) -> str:
    by_name, weighting = {str(ask): ask for ask in asks}, options_of(config).weighting
    for learner, name, digest, weight, _ in record["contributions"]:
        fold = tape.folds[by_name[name]]
        expected = weight_of(weighting, fold.steps, fold.tokens, fold.discount)
        if fold.learner != learner:
            return f"request {name} is of {learner}, and of {fold.learner} on the tape"
        if digest != tape.digests.get(by_name[name], digest):
            return f"the payload of {learner} for request {name} has another digest on the tape"
        if not math.isclose(weight, expected, rel_tol=1e-9):
            return f"{learner} has the weight {weight:g}, and {expected:g} on the tape"
    return ""


# Journals, weights and payloads


def _journals(folder: Path) -> Iterator[tuple[int, str, str]]:
    for path in sorted(folder.glob("*.journal")):
        for fields in fields_in(path):
            if {"fragment", "version", "digest"} <= fields.keys():
                yield fields["fragment"], fields["version"], fields["digest"]


def _weights(path: Path) -> Iterator[tuple[int, str, str]]:
    if not path.exists():
        return
    versions = json.loads(load_metadata(path).get("versions", "{}"))
    weights = load_weights(path)
    for fragment, version in versions.items():
        yield int(fragment), version, values_digest(weights[f"fragment.{fragment}"])


def _compare_digests(
    found: ShardAudit,
    records: Mapping[Place, dict[str, Any]],
    what: str,
    theirs: Iterable[tuple[int, str, str]],
) -> None:
    agree = 0
    try:
        theirs = list(theirs)
    except StorageError as error:
        # The other records are still worth an answer.
        found.problems.append(f"the {what} cannot be compared: {error}")
        return
    # A shard that restarts gives its newest copy the next term's name, with the same counter.
    renamed = {(place[0], record["digest"]) for place, record in records.items()}
    for fragment, version, digest in theirs:
        record = records.get((fragment, version))
        if record is None and version.endswith(".0"):
            continue  # the initial weights
        if record is None and (fragment, digest) not in renamed:
            found.problems.append(
                f"version {version} of fragment {fragment} is in the {what}, but has no record: it "
                "was removed or altered"
            )
        elif record is not None and record["digest"] != digest:
            found.problems.append(f"{named(record)}: its copy has another digest in the {what}")
        else:
            agree += 1
    found.compared[what] = agree


def _compare_payloads(found: ShardAudit, run: Path, config: RunConfig, tape: _ShardTape) -> None:
    folder = run / PAYLOADS / f"shard-{found.shard}"
    if not folder.is_dir():
        return
    plan = plan_of(read_layout(folder), config)
    asks = {str(ask): ask for ask in tape.paths}
    agree = lacking = 0
    for each in found.contributions:
        path, codec = tape.paths[asks[each.ask]] if each.ask in asks else ("", "")
        body = read_body(folder, path) if path and not each.relay else None
        if body is None:
            lacking += 1
        elif body_digest(body, plan.uplink_of(each.fragment, codec)) == each.digest:
            agree += 1
        else:
            found.problems.append(
                f"the payload of {each.learner} in version {each.version} of fragment "
                f"{each.fragment} ({path}) has another digest than its record"
            )
    found.compared["payloads"] = agree
    if lacking:
        found.notes.append(f"{lacking} payloads were not recorded, so they were not compared")
