"""Targets: files that a disk corrupted, another program wrote, or another person sent."""

from __future__ import annotations

import contextlib
import json
import lzma
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash

from decoupled_diloco.config.method import plan_of, read_public
from decoupled_diloco.config.parties import load_parties
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.config.signing_keys import PublicKey, create_signing_key
from decoupled_diloco.config.toml_files import dump_config, load_config, override_key
from decoupled_diloco.config.toml_tables import read_tables
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.export.export_folder import read_facts
from decoupled_diloco.export.run_weights import _versions
from decoupled_diloco.launch.audit_run import audit_run
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.launch.launch_folder import jobs_in
from decoupled_diloco.launch.run_folder import is_run_folder, launcher_of, read_token
from decoupled_diloco.launch.secrets import read_principals
from decoupled_diloco.learner.learner_checkpoint import CheckpointFolder, LearnerCheckpoint
from decoupled_diloco.merge import digest
from decoupled_diloco.protocol.messages import Asking, KeepCheckpoint, Merge, Version
from decoupled_diloco.protocol.syncer_state import Ask
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.status import status_of
from decoupled_diloco.storage.claims import ClaimStore, numbered
from decoupled_diloco.storage.coordinator_states import STATES, CoordinatorStates
from decoupled_diloco.storage.data_ledger import DataLedger, read_ledger
from decoupled_diloco.storage.journal import Journal, JournalReader
from decoupled_diloco.storage.shared_folder import read_addresses
from decoupled_diloco.storage.states import pack, unpack
from decoupled_diloco.storage.vector_ranges import keep_ranges, kept_range
from decoupled_diloco.storage.weight_files import (
    load_sealed,
    load_weights,
    save_sealed,
    save_weights,
)
from decoupled_diloco.syncer.audit_trail import AUDIT, AuditTrail, SignedRecord
from decoupled_diloco.syncer.coordinator_document import read_document
from decoupled_diloco.syncer.payload_archive import read_layout
from decoupled_diloco.syncer.result import read_layout as read_layout_of_share
from decoupled_diloco.syncer.result import read_shares
from decoupled_diloco.syncer.run_checkpoints import checkpoint_folder, read_manifest, write_manifest
from decoupled_diloco.tape.reader import Follower
from decoupled_diloco.transport import tls
from decoupled_diloco.transport.tls import LiveTls, ServerTLSConfig, TLSConfig
from decoupled_diloco_lab import SCENARIOS
from decoupled_diloco_lab.simulate.scenario import load_scenario
from fuzz.harness import Target
from fuzz.mutations import any_bytes, any_json, any_lines, dumped, is_json, mutated
from fuzz.valid import small_run, thinned
from unit.learner.checkpoints import checkpoint
from unit.syncer.shard_life import Life

HEAD = struct.Struct("<4sIQ16s")


def of_files(folder: Path) -> list[Target]:
    """Return targets for all files in a run folder, and for files passed to commands."""
    run = small_run(folder / "run")
    here = folder / "fuzzed"
    here.mkdir()
    return [
        *_tapes(run, here),
        *_journals(run, here),
        *_tensors(run, here),
        *_documents(run, here),
        *_settings(here),
        _audit_trail(run, here),
        *_secrets(here),
    ]


def _reads(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a reader that writes an input to its file and reads the file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def written(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return written


# Tapes.


def _tapes(run: Path, here: Path) -> list[Target]:
    lines: list[bytes] = []
    for tape in sorted((run / "tape").glob("*.jsonl")):
        lines += tape.read_bytes().splitlines(keepends=True)
    text = thinned(lines)
    packed = lzma.compress(text)

    def read(path: Path) -> None:
        model = read_run(path)
        status_of(model, model.latest).to_json()

    def follow(path: Path) -> None:
        follower = Follower(path)
        follower.poll()
        follower.poll()

    def unpacked(data: bytes) -> None:
        segments = here / "packed.segments"
        shutil.rmtree(segments, ignore_errors=True)
        segments.mkdir()
        (segments / f"{len(text):012d}.jsonl.xz").write_bytes(data)
        with contextlib.suppress(StorageError):
            read_run(here / "packed.jsonl")

    return [
        Target("tape", _reads(here / "tape.jsonl", read), [text], mutate=any_lines, share=0.1),
        Target(
            "tape-followed",
            _reads(here / "live.jsonl", follow),
            [text],
            mutate=any_lines,
            share=0.2,
        ),
        Target("tape-packed", unpacked, [packed], share=0.3),
        Target(
            "tape-bomb", unpacked, [_bomb(b"\0", 128 << 20), _bomb(b"\n{", 1 << 18)], share=0.001
        ),
    ]


def _bomb(unit: bytes, count: int) -> bytes:
    """Return a few bytes that unpack to many."""
    packer, piece = lzma.LZMACompressor(preset=1), unit * (count // 64)
    parts = [packer.compress(piece) for _ in range(64)]
    return b"".join([*parts, packer.flush()])


# Journals and ledgers.


def _journals(run: Path, here: Path) -> list[Target]:
    path = here / "sample.journal"
    journal = Journal(path)
    for number in range(3):
        journal.append({"fragment": 0, "version": f"1.{number}"}, bytes(16))
    journal.close()

    def reopened(path: Path) -> None:
        list(JournalReader(path))
        journal = Journal(path)
        journal.append({"fragment": 1})
        journal.close()
        assert [record.fields for record in JournalReader(path)][-1] == {"fragment": 1}

    ledger = here / "data.ledger"
    DataLedger(here, _book()).close()

    def entered(path: Path) -> None:
        list(read_ledger(path))
        DataLedger(path.parent, _book()).close()

    shard = here / "durable" / "shard-0"
    life = Life(shard).begin()
    for fragment in (0, 1, 0):
        life.merge(fragment)
    life.disk.close()
    checkpoint = next(shard.glob("*.safetensors"))
    written = next(shard.glob("*.journal"))

    def recovered(path: Path) -> None:
        other = Life(shard)
        other.disk.recover()
        other.disk.close()

    return [
        Target(
            "journal", _reads(here / "a.journal", reopened), [path.read_bytes()], mutate=_sealed
        ),
        Target(
            "ledger",
            _reads(here / "ledger" / "data.ledger", entered),
            [ledger.read_bytes()],
            mutate=_sealed,
        ),
        Target(
            "shard-journal",
            _restoring(checkpoint, _reads(written, recovered)),
            [written.read_bytes()],
            mutate=_sealed,
            share=0.3,
        ),
        Target(
            "shard-checkpoint",
            _restoring(written, _reads(checkpoint, recovered)),
            [checkpoint.read_bytes()],
            mutate=_tensors_or_texts,
            share=0.3,
        ),
    ]


def _restoring(path: Path, read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return a reader that restores another file before each input."""
    kept = path.read_bytes()

    def restored(data: bytes) -> object:
        path.write_bytes(kept)
        return read(data)

    return restored


def _book() -> Any:
    from decoupled_diloco.protocol.features.partitions import LeaseBook

    return LeaseBook(entries=1)


def _sealed(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return records with changed JSON and a valid digest, or bytes as of a torn disk."""
    if rng.random() < 0.4:
        return any_bytes(rng, samples)
    data, out = rng.choice(samples), bytearray()
    at = 0
    while at + HEAD.size <= len(data):
        magic, text_bytes, body_bytes, _ = HEAD.unpack_from(data, at)
        at += HEAD.size
        text, body = (
            data[at : at + text_bytes],
            data[at + text_bytes : at + text_bytes + body_bytes],
        )
        at += text_bytes + body_bytes
        if rng.random() < 0.5:
            text = any_json(rng, [text])
        if rng.random() < 0.2:
            body = any_bytes(rng, [body, bytes(3)])
        out += HEAD.pack(magic, len(text), len(body), xxhash.xxh3_128(text + body).digest())
        out += text + body
    return bytes(out)


def _audit_trail(run: Path, here: Path) -> Target:
    """Return a target for a trail whose signer is hostile, and for one that was changed."""
    run = Path(shutil.copytree(run, here / "audited"))  # other targets damage the files of the run
    key = create_signing_key(here / "audit.key")
    trail = AuditTrail(here, 0, key, journals=here / "none", about={"run": "r"})
    for counter in range(1, 4):
        name, base = Asking(1, counter), Version(1, counter - 1)
        ask = Ask(name, 0, "learner-0", 1, "/up", base, 0.0, 1, False, weight=2.0)
        order = Merge(counter, 0, Version(1, counter), base, "all", (("a", 0.5),))
        trail.announced(name, "payload")
        trail.keep(trail.merged(order, [ask], "copy"))
    trail.close()
    file = run / AUDIT / "shard-0.jsonl"
    settings = (CoordinatorStates(run).read() or {})["settings"]
    (run / RUN_FILE).write_text(dump_config(read_public(settings)))

    def signed(rng: random.Random, samples: Sequence[bytes]) -> bytes:
        if rng.random() < 0.3:
            return any_lines(rng, samples)
        lines, head = [], ""
        for line in rng.choice(samples).splitlines():
            record = {**json.loads(line)["record"], "previous": head}
            if rng.random() < 0.4:
                changed = mutated(rng, record)
                record = changed if isinstance(changed, dict) else record
            try:
                text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
                lines.append(dumped(SignedRecord(record, key.sign(text)).json))
                head = SignedRecord(record, key.sign(text)).hash
            except (TypeError, ValueError, RecursionError):
                lines.append(line)
        return b"\n".join([*lines, b""])

    def audited(path: Path) -> None:
        audit_run(path.parents[1])

    samples = [(here / AUDIT / "shard-0.jsonl").read_bytes()]
    return Target("audit-trail", _reads(file, audited), samples, mutate=signed, share=0.5)


# safetensors.


def _tensors(run: Path, here: Path) -> list[Target]:
    weights = here / "sample.safetensors"
    tied = torch.ones(2, 3)
    save_weights(weights, {"a": tied, "b": tied, "c": torch.zeros(4)}, {"versions": '{"0": "1.2"}'})
    sealed = here / "sealed.safetensors"
    save_sealed(sealed, {"x": torch.ones(3)}, {"record": "{}"})
    learner = CheckpointFolder(here / "learner").save(checkpoint())
    keep_ranges(here / "ranges", 0, {(0, 0): torch.ones(4), (0, 4): torch.ones(4)})
    ranges = here / "ranges" / "published-0.safetensors"
    share = next(run.glob("checkpoints/shard-0.safetensors"))
    settings = (CoordinatorStates(run).read() or {})["settings"]
    plan = plan_of(read_layout_of_share(run), read_public(settings))

    def read(path: Path) -> None:
        _versions(path)
        load_weights(path)

    def newest(path: Path) -> None:
        CheckpointFolder(path.parent).newest()
        LearnerCheckpoint.read(path)

    def shares(path: Path) -> None:
        read_layout_of_share(path.parents[1])
        read_shares(path.parents[1], plan, 1)

    text = json.dumps(["", *pack({"a": torch.ones(2), "b": (1, 1e300, b"x", None)})[1:]])
    state = {"0": torch.ones(2), "1": torch.ones(2, 2)}
    own = here / "own" / "00000001.safetensors"
    taken = (learner.read_bytes(), _tensors_or_texts)
    return [
        Target(
            "weights",
            _reads(here / "w.safetensors", read),
            [weights.read_bytes()],
            mutate=_tensors_or_texts,
        ),
        Target(
            "sealed",
            _reads(here / "s.safetensors", load_sealed),
            [sealed.read_bytes()],
            mutate=_tensors_or_texts,
        ),
        Target("learner-checkpoint", _reads(own, newest), [taken[0]], mutate=_resealed, share=0.5),
        Target(
            "ranges",
            _reads(ranges, lambda path: kept_range(path.parent, 0, 1, 7)),
            [ranges.read_bytes()],
            mutate=_tensors_or_texts,
        ),
        Target(
            "share", _reads(share, shares), [share.read_bytes()], (DilocoError,), _tensors_or_texts
        ),
        Target(
            "packed-state",
            lambda data: unpack(state, json.loads(data)[1]),
            [text.encode()],
            (StorageError, ValueError, RecursionError, IndexError, KeyError),
            mutate=_state_text,
            share=2.0,
        ),
    ]


def _state_text(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    text = json.loads(rng.choice(samples))[1]
    changed = dumped(mutated(rng, json.loads(text))).decode("utf-8", "replace")
    return json.dumps(["", changed]).encode()


def _tensors_or_texts(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a file with a changed JSON head of the right length, or bytes as of a torn disk."""
    data = rng.choice(samples)
    if rng.random() < 0.4:
        return any_bytes(rng, [data])
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    if rng.random() < 0.6 and head.get("__metadata__"):
        texts = head["__metadata__"]
        name = rng.choice(list(texts))
        texts[name] = _other_text(rng, texts[name])
        changed = json.dumps(head).encode("utf-8", "surrogatepass")
    else:
        changed = any_json(rng, [json.dumps(head).encode()])
    return len(changed).to_bytes(8, "little") + changed + data[8 + size :]


def _other_text(rng: random.Random, text: str) -> str:
    if is_json(text):
        return dumped(mutated(rng, json.loads(text))).decode("utf-8", "replace")
    return any_bytes(rng, [text.encode()]).decode("utf-8", "replace")


def _resealed(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a sealed file with changed texts and a valid seal."""
    from decoupled_diloco.storage.weight_files import SEAL_KEY

    data = rng.choice(samples)
    if rng.random() < 0.3:
        return _tensors_or_texts(rng, samples)
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    texts = head["__metadata__"]
    names = [name for name in texts if name not in (SEAL_KEY, "decoupled_diloco.digests")]
    name = rng.choice(names)
    texts[name] = _other_text(rng, texts[name])
    aliased = "decoupled_diloco.aliases"
    entries = {name: text for name, text in texts.items() if name not in (SEAL_KEY, aliased)}
    texts[SEAL_KEY] = digest(json.dumps(dict(sorted(entries.items())), sort_keys=True).encode())
    changed = json.dumps(head).encode()
    return len(changed).to_bytes(8, "little") + changed + data[8 + size :]


# JSON documents.


def _documents(run: Path, here: Path) -> list[Target]:
    kept = CoordinatorStates(run).read()
    assert kept is not None
    document, layout = json.dumps(kept).encode(), kept["layout"].encode()
    config = read_public(kept["settings"])
    state = numbered(here / STATES, 1)
    state.parent.mkdir()
    claims = here / "claims" / "shard-0"
    store = ClaimStore(claims, "nonce", 5.0, "me")
    claims.parent.mkdir()
    store.claim(1)
    store.renew(1, 3)
    checkpoint_folder(here, 3).mkdir(parents=True)
    write_manifest(here, KeepCheckpoint(3, (), (), (), "why"), {"state": {}})
    manifest = next(here.rglob("manifest.json"))
    facts = here / "facts" / "export.json"

    def look(path: Path) -> None:
        ClaimStore(path.parent, "other", 5.0, "them").read_newest()

    def coordinator(path: Path) -> None:
        with contextlib.suppress(ConfigError):
            read_document(CoordinatorStates(path.parent.parent), config)

    claim, renewals = claims / "00000001.json", claims / "00000001.renewals"
    told = [b'[{"name": "a", "id": "12"}]', b"[]"]
    return [
        Target("coordinator", _reads(state, coordinator), [document], mutate=any_json),
        Target(
            "layout-file",
            _reads(here / "payloads" / "layout.json", lambda p: read_layout(p.parent)),
            [layout],
            mutate=any_json,
        ),
        Target(
            "claim",
            _restoring(renewals, _reads(claim, look)),
            [claim.read_bytes()],
            mutate=any_json,
            share=1.5,
        ),
        Target(
            "renewals",
            _restoring(claim, _reads(renewals, look)),
            [renewals.read_bytes()],
            mutate=any_json,
        ),
        Target(
            "manifest",
            _reads(manifest, lambda p: read_manifest(p.parent)),
            [manifest.read_bytes()],
            mutate=any_json,
        ),
        Target(
            "facts",
            _reads(facts, lambda p: read_facts(p.parent)),
            [b'{"run": "a"}'],
            mutate=any_json,
        ),
        Target("jobs", _reads(here / "jobs.json", jobs_in), told, mutate=any_json),
    ]


# TOML.


def _settings(here: Path) -> list[Target]:
    root = Path(__file__).parents[2]
    recipes = [path.read_bytes() for path in sorted((root / "recipes").glob("*.toml"))]
    scenarios = [path.read_bytes() for path in SCENARIOS.files().values()]

    def run_file(path: Path) -> None:
        load_config(path)

    def override(data: bytes) -> None:
        override_key({"run": {"name": "a"}}, data.decode("utf-8", "replace"))

    def run_folder(path: Path) -> None:
        is_run_folder(path.parent)

    (here / "folder" / "tape").mkdir(parents=True)
    return [
        Target("run-file", _reads(here / "run.toml", run_file), recipes, (ConfigError,), any_toml),
        Target(
            "scenario",
            _reads(here / "scenario.toml", load_scenario),
            scenarios,
            (ConfigError,),
            any_toml,
            share=0.1,
        ),
        Target(
            "override", override, [b"sync.sync_every=48", b'run.name="a"'], (ConfigError,), any_toml
        ),
        Target(
            "run-folder",
            _reads(here / "folder" / "run.toml", run_folder),
            recipes[:2],
            (),
            any_toml,
        ),
        Target(
            "tables", _reads(here / "t.toml", read_tables), recipes[:2], (ConfigError,), any_toml
        ),
        Target(
            "parties",
            _reads(here / "parties.toml", lambda path: load_parties(path).digest),
            [_parties()],
            (ConfigError,),
            any_toml,
        ),
    ]


def _parties() -> bytes:
    entries = [
        f'[[parties]]\nname = "{name}"\nlearners = ["{name}-*"]\nshare_max = 0.5\n'
        f'key = "{PublicKey(name.encode() * 32)}"\n'
        for name in "ab"
    ]
    return "\n".join([f'syncer_key = "{PublicKey(b"c" * 32)}"', *entries]).encode()


_TOML = (
    *(b"[" * 100, b"[" * 5_000, b"9" * 5_000, b"nan", b"-inf", b"1e999", b"1979-05-27T07:32:00Z"),
    *(
        b"{a = " * 2_000,
        b'"""',
        b"'\xff'",
        b"[[run]]",
        b"a.b.c.d = 1",
        b"\xef\xbb\xbf",
        b'"\\ud800"',
    ),
    *(b"0x" + b"f" * 5_000, b"{}", b"[]", b"true", b'""', b"[1, [2, [3]]]", b'"\\u0000"'),
)


def any_toml(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a settings file with changed values."""
    lines = rng.choice(samples).split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(lines))
        name, equals, _ = lines[place].partition(b"=")
        how = rng.random()
        if equals and how < 0.6:
            lines[place] = name + b"= " + rng.choice(_TOML)
        elif how < 0.8:
            lines.insert(rng.randrange(len(lines) + 1), lines[place])
        else:
            lines[place] = rng.choice(_TOML)
    data = b"\n".join(lines)
    return any_bytes(rng, [data]) if rng.random() < 0.4 else data


# Secrets and certificates.


def _secrets(here: Path) -> list[Target]:
    folder = CertificateFolder(here / "tls")
    folder.begin(["syncer.example"], 30)
    pem, key = (folder.path / f"syncer.{kind}" for kind in ("pem", "key"))
    authority = folder.path / "authority.pem"
    kept = [path.read_bytes() for path in (pem, key, authority)]

    def load(files: TLSConfig | ServerTLSConfig) -> None:
        with mock.patch.object(tls, "EXCHANGE_SECONDS", 0.0):  # nothing is being renewed here
            LiveTls(files).context()

    def listen(path: Path) -> None:
        try:
            load(ServerTLSConfig(pem, key, authority))
            folder.listing()
        finally:
            for other, data in zip((pem, key, authority), kept, strict=True):
                if other != path:
                    other.write_bytes(data)

    def dial(path: Path) -> None:
        load(TLSConfig(path))

    token, principals = here / "token", here / "principals.toml"
    run = here / "started"
    known = b'learner-0 = "long text"\nlearner-1 = "another"\n'
    return [
        Target("certificate", _reads(pem, listen), [kept[0]], mutate=_pem, share=0.5),
        Target(
            "private-key", _restoring(pem, _reads(key, listen)), [kept[1]], mutate=_pem, share=0.3
        ),
        Target("authority", _reads(here / "authority.pem", dial), [kept[2]], mutate=_pem),
        Target("token", _reads(token, read_token), [b"s3cret\n"], (ConfigError,), share=2.0),
        Target(
            "principals", _reads(principals, read_principals), [known], (ConfigError,), any_toml
        ),
        Target(
            "addresses",
            _reads(run / "addresses", lambda p: read_addresses(p.parent)),
            [b"http://a:1\n"],
            share=2.0,
        ),
        Target("launcher", _reads(run / "launcher", _launcher), [b"12 elsewhere\n"], share=2.0),
    ]


def _launcher(path: Path) -> None:
    try:
        launcher_of(path.parent, "ddiloco stop")
    except ConfigError as error:
        if "was launched on" not in str(error):  # read well: it names another machine
            raise


def _pem(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return PEM with changed DER, or changed text."""
    import base64

    data = rng.choice(samples)
    if rng.random() < 0.4:
        return any_bytes(rng, [data])
    begin, *lines, end = data.strip().splitlines()
    der = any_bytes(rng, [base64.b64decode(b"".join(lines))])
    return begin + b"\n" + base64.encodebytes(der) + end + b"\n"
