"""Mirrors, leases and checkpoints against servers that are slow or unreachable, or refuse.

Most tests use S3. The clouds differ in their requests and answers, so some tests use each of them.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch import run_mirror
from decoupled_diloco.launch.processes import MIRROR, open_tape
from decoupled_diloco.launch.run_mirror import follow, mirror_folder
from decoupled_diloco.learner.learner_checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.stored_checkpoints import StoredCheckpoints
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.status import StoreStatus, status_of
from decoupled_diloco.storage.claims import ObjectClaims
from decoupled_diloco.storage.mirror import Mirror, newest_state, required_state, restore
from decoupled_diloco.storage.object_store import PART_BYTES, Objects
from decoupled_diloco.syncer.shard_lease import ShardLease
from decoupled_diloco.tape import TapeReader, TapeWriter
from object_server import ObjectServer, object_server
from replay_check import assert_replays

LEASE_SECONDS = 2.0


on_each_cloud = pytest.mark.parametrize(
    "running", ["s3", "gs", "az"], indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    with object_server(getattr(request, "param", "s3")) as found:
        yield found


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    yield running
    running.come_back()
    running.delay_seconds, running.refusal = 0.0, ""


@pytest.fixture
def address(server: ObjectServer) -> str:
    return server.address(uuid4().hex)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for path, content in {
        "run.toml": b"[run]\n",
        "tape/shard-0.jsonl": b"",
        "durable/shard-0/00000001.safetensors": b"w" * 1000,
        "durable/shard-0/00000001.journal": b"record",
    }.items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_bytes(content)
    return run


class Following:
    """A mirror that follows a folder in a thread."""

    def __init__(
        self, folder: Path, address: str, *, retries: int = 0, part: str = "", shards: int = 0
    ) -> None:
        self.folder, self.stop = folder, threading.Event()
        objects = Objects(address, retries=retries, request_seconds=5.0)
        self.mirror = Mirror(folder, objects, "x", part)
        self._pool = ThreadPoolExecutor(1)
        tape = open_tape(folder, MIRROR, {"machine": MIRROR})
        self._tape = tape
        self._ended = self._pool.submit(
            follow, self.mirror, tape, 0.1, self.stop, lambda: False, shards
        )

    def status(self) -> StoreStatus | None:
        if not (self.folder / "tape" / f"{MIRROR}.jsonl").exists():
            return None
        return status_of(read_run(self.folder), time.time()).store

    def until(self, condition: object, seconds: float = 30.0) -> StoreStatus:
        deadline = time.monotonic() + seconds
        while True:
            found = self.status()
            if found is not None and condition(found):  # type: ignore[operator]
                return found
            if time.monotonic() > deadline:
                self.stop.set()  # otherwise, the thread would follow forever
                raise AssertionError(found)
            time.sleep(0.05)

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def end(self) -> None:
        self.stop.set()
        try:
            self._ended.result(timeout=60)
        finally:
            self._tape.close()
            self._pool.shutdown()


@on_each_cloud
def test_the_backlog_of_an_outage_is_reported_and_drains(
    folder: Path, address: str, server: ObjectServer
) -> None:
    following = Following(folder, address)
    following.until(lambda found: found.state >= 1)
    server.go_away()
    journal = folder / "durable/shard-0/00000001.journal"
    journal.write_bytes(journal.read_bytes() + b"x" * 50_000)
    away = following.until(lambda found: found.problem and found.backlog_bytes >= 50_000)
    assert away.problem.startswith(f"store={address!r} is unreachable (")
    server.come_back()
    back = following.until(lambda found: not found.problem and found.state > away.state)
    assert back.backlog_bytes < 50_000
    following.end()
    files = required_state(Objects(address)).files
    assert files["durable/shard-0/00000001.journal"].nbytes == 50_006


def test_a_mirror_without_its_store_at_the_end_names_the_command_that_completes_it(
    folder: Path, address: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_mirror, "LAST_SECONDS", 1.0)
    following = Following(folder, address)
    following.until(lambda found: found.state >= 1)
    server.go_away()
    (folder / "weights.safetensors").write_bytes(b"result")
    with pytest.raises(StorageError, match="are not in the store: run ddiloco mirror"):
        following.end()
    server.come_back()
    again = Following(folder, address)
    again.end()
    assert "weights.safetensors" in required_state(Objects(address)).files


def test_a_shard_without_a_mirror_is_reported(folder: Path, address: str) -> None:
    run = {"max_steps": 8, "folder": folder, "store": address, "store_interval_seconds": 1.0}
    config, stop = RunConfig(run=run, syncer={"shards": 3}), threading.Event()
    (folder / "tape/shard-1-standby.jsonl").write_bytes(b"")
    with open_tape(folder, MIRROR, {"machine": MIRROR}) as tape:
        stop.set()
        mirror_folder(folder, config, tape, stop, lambda: False)
    found = status_of(read_run(folder), time.time()).store
    assert found is not None
    assert found.problem == (
        f"store={address!r} cannot continue this run, because it has no state of shard 2: run it "
        f"with this [run] store, or let it share {folder}"
    )
    assert found.state == 1


def two_folders(folder: Path, address: str) -> tuple[Following, Following]:
    """Return mirrors of shard 0 and of shard 1, whose folder is on another machine."""
    second = folder.with_name("second")
    for path in ("run.toml", "tape/shard-1.jsonl", "durable/shard-1/00000001.safetensors"):
        (second / path).parent.mkdir(parents=True, exist_ok=True)
        (second / path).write_text(path)
    first = Following(folder, address, shards=2)
    part = Following(second, address, part="shard-1")
    deadline = time.monotonic() + 30
    while (state := newest_state(Objects(address))) is None or not state.parts:
        assert time.monotonic() < deadline
        with (folder / "tape/shard-0.jsonl").open("a") as tape:
            tape.write("more\n")
        time.sleep(0.1)
    return first, part


def test_a_part_whose_machine_is_lost_is_named_and_its_last_state_stays(
    folder: Path, address: str, tmp_path: Path
) -> None:
    first, part = two_folders(folder, address)
    part.end()
    (folder.with_name("second") / "tape/shard-1.jsonl").write_text("not in the store")

    def is_named(found: StoreStatus) -> bool:
        with (folder / "tape/shard-0.jsonl").open("a") as tape:
            tape.write("more\n")
        return f"has files of part shard-1 from {socket.gethostname()} as of" in found.problem

    found = first.until(is_named)
    assert found.problem.endswith(
        "older than the rest: check that shard-1 and its mirror run there"
    )
    first.end()
    restore(Objects(address), tmp_path / "other", required_state(Objects(address)))
    assert (tmp_path / "other/tape/shard-1.jsonl").read_text() == "tape/shard-1.jsonl"
    assert (tmp_path / "other/durable/shard-1/00000001.safetensors").is_file()


def test_the_last_state_has_the_results_of_all_parts(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_mirror, "LAST_SECONDS", 1.0)
    first, part = two_folders(folder, address)
    results = [folder / "checkpoints", folder.with_name("second") / "checkpoints"]
    for shard, each in enumerate(results):
        each.mkdir()
        if shard:
            first.stop.set()
            time.sleep(2.0)
            assert not first.has_ended, "it waits for shard 1"
        (each / f"shard-{shard}.safetensors").write_bytes(b"result")
    part.end()
    first.end()
    files = required_state(Objects(address)).files
    assert {f"checkpoints/shard-{shard}.safetensors" for shard in (0, 1)} <= files.keys()


def test_a_result_that_never_arrives_is_named(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_mirror, "LAST_SECONDS", 1.0)
    monkeypatch.setattr(run_mirror, "PARTS_SECONDS", 1.0)
    first, part = two_folders(folder, address)
    part.end()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/shard-0.safetensors").write_bytes(b"result")
    with pytest.raises(StorageError) as caught:
        first.end()
    assert str(caught.value) == (
        f"store={address!r} has no result of shard 1: run ddiloco mirror on its machine; then run "
        f"ddiloco mirror {folder}"
    )


def test_a_slow_store_has_the_newest_state_and_not_each_one(
    folder: Path, address: str, server: ObjectServer
) -> None:
    following = Following(folder, address, retries=2)
    following.until(lambda found: found.state >= 1)
    server.delay_seconds = 0.3
    checkpoint = folder / "learners/learner-0"
    checkpoint.mkdir(parents=True)
    for number in range(1, 30):
        (checkpoint / f"{number:08d}.safetensors").write_bytes(b"c" * 10_000)
        (checkpoint / f"{number - 2:08d}.safetensors").unlink(missing_ok=True)
        time.sleep(0.05)
    server.delay_seconds = 0.0
    following.end()
    assert following.mirror.sent_bytes < 20 * 10_000, "most checkpoints were replaced unsent"
    files = required_state(Objects(address)).files
    stored = sorted(path for path in files if path.startswith("learners/"))
    assert stored == [f"learners/learner-0/{number:08d}.safetensors" for number in (28, 29)]


def test_expired_credentials_are_reported_and_the_mirror_continues_with_new_ones(
    folder: Path, address: str, server: ObjectServer
) -> None:
    following = Following(folder, address)
    following.until(lambda found: found.state >= 1)
    server.refusal = "400 ExpiredToken"
    (folder / "durable/shard-0/00000002.safetensors").write_bytes(b"new")
    found = following.until(lambda found: found.problem)
    assert found.problem == (
        f"store={address!r} refuses this process, because its credentials have expired: renew "
        "them, and start the command again in that environment"
    )
    server.refusal = ""
    following.until(lambda found: not found.problem)
    following.end()
    assert "durable/shard-0/00000002.safetensors" in required_state(Objects(address)).files


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("404 NoSuchBucket", "does not exist: create the bucket, or correct the address"),
        ("403 AccessDenied", "forbids this request: allow this process to list, read, write"),
        ("403 InvalidAccessKeyId", "does not accept the credentials of this process: check AWS_"),
        ("301 PermanentRedirect", "is in another region than the requests: set AWS_REGION"),
        ("400 AuthorizationHeaderMalformed", "is in another region than the requests: set AWS_"),
    ],
)
def test_a_refusal_is_one_sentence_and_nothing_is_written(
    folder: Path, address: str, server: ObjectServer, refusal: str, message: str
) -> None:
    server.refusal = refusal
    mirror = Mirror(folder, Objects(address, retries=0), "x")
    with pytest.raises(ConfigError) as caught:
        mirror.write()
    assert str(caught.value).startswith(f"store={address!r} {message}")
    server.refusal = ""
    assert newest_state(Objects(address)) is None
    assert not (folder / "store.json").exists()


@on_each_cloud
def test_a_bucket_that_does_not_exist_is_named(server: ObjectServer, folder: Path) -> None:
    address = server.address("x", bucket="no-such-bucket")
    mirror = Mirror(folder, Objects(address), "x")
    with pytest.raises(ConfigError) as caught:
        mirror.write()
    what = "container" if server.cloud == "az" else "bucket"
    assert str(caught.value) == (
        f"store={address!r} does not exist: create the {what}, or correct the address"
    )


@on_each_cloud
def test_objects_are_written_read_listed_and_deleted(address: str) -> None:
    objects, odd = Objects(address), "a/ö b+c%d~.json"
    assert objects.get("a/1") is None
    for name in ("a/1", "a/2", "a/3", "ab/4", odd):
        objects.put(name, b"old")
    objects.put("a/1", b"another")
    assert (objects.get("a/1"), objects.get(odd)) == (b"another", b"old")
    found = {each.name: each.nbytes for each in objects.listed("a")}
    assert found == {"a/1": 7, "a/2": 3, "a/3": 3, odd: 3}
    assert {each.name for each in objects.listed("a", after="a/2")} == {"a/3", odd}
    objects.delete(["a/none", "a/1", "a/2", odd])
    assert [each.name for each in objects.listed("a")] == ["a/3"]
    assert objects.create("b", b"first")
    assert not objects.create("b", b"second")
    assert objects.get("b") == b"first"


@pytest.mark.parametrize("running", ["gs"], indirect=True)
def test_a_refused_token_is_named(address: str, server: ObjectServer) -> None:
    server.refusal = "401 AuthenticationRequired"
    with pytest.raises(ConfigError) as caught:
        Objects(address, retries=0).put("a", b"")
    assert str(caught.value) == (
        f"store={address!r} does not accept the credentials of this process: check "
        "GOOGLE_APPLICATION_CREDENTIALS, or the role of this machine"
    )


@pytest.mark.parametrize("running", ["az"], indirect=True)
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            base64.b64encode(b"another key").decode(),
            "does not accept the credentials of this process: check AZURE_STORAGE_ACCOUNT_NAME and "
            "AZURE_STORAGE_ACCOUNT_KEY, or the role of this machine",
        ),
        (
            "not base64!",
            "cannot be used, because the credentials of this process cannot be read: check "
            "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        ),
    ],
    ids=["another", "invalid"],
)
def test_a_wrong_key_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    with pytest.raises(ConfigError) as caught:
        Objects(address, retries=0).put("a", b"")
    assert str(caught.value) == f"store={address!r} {message}"


@on_each_cloud
def test_a_large_file_goes_up_and_down_in_parts(folder: Path, address: str, tmp_path: Path) -> None:
    content = torch.randint(0, 256, (PART_BYTES * 2 + 7,), dtype=torch.uint8).numpy().tobytes()
    (folder / "durable/shard-0/00000002.safetensors").write_bytes(content)
    objects = Objects(address)
    Mirror(folder, objects, "x").write()
    restore(objects, tmp_path / "other", required_state(objects))
    found = tmp_path / "other/durable/shard-0/00000002.safetensors"
    assert found.read_bytes() == content


@on_each_cloud
def test_of_racing_processes_exactly_one_makes_each_claim(address: str) -> None:
    contenders = [ObjectClaims(address, 0, name, 20.0, name) for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        for number in range(1, 11):
            won = list(pool.map(lambda each, number=number: each.claim(number), contenders))
            assert sum(won) == 1
    assert contenders[0].newest() == 10


def contender(folder: Path, address: str, name: str) -> ShardLease:
    store = ObjectClaims(address, 0, name, LEASE_SECONDS, name)
    waits = "standby" in name
    header = {"machine": "lease", "nonce": name, "lease_seconds": LEASE_SECONDS, "waits": waits}
    return ShardLease(store, TapeWriter(folder / "tape", f"shard-0.{name}", header), waits=waits)


@on_each_cloud
async def test_a_standby_takes_over_when_the_first_process_is_silent(
    tmp_path: Path, address: str
) -> None:
    first, second = (contender(tmp_path, address, name) for name in ("first", "standby"))
    assert await first.gained()
    waiting = asyncio.ensure_future(second.gained())
    await asyncio.sleep(LEASE_SECONDS * 1.5)
    assert first.holds()
    assert not waiting.done()
    await first.end(finished=False)  # releases its claim
    assert await asyncio.wait_for(waiting, 10.0)
    assert second.number == 2
    await second.end(finished=True)
    assert assert_replays(tmp_path) > 0


async def test_a_process_that_cannot_reach_the_store_steps_down(
    tmp_path: Path, address: str, server: ObjectServer
) -> None:
    first = contender(tmp_path, address, "first")
    assert await first.gained()
    lost: list[BaseException] = []
    first.when_lost(lost.append)
    server.go_away()
    await asyncio.sleep(1.5 * LEASE_SECONDS)
    assert not first.holds()
    assert "could not be renewed" in str(lost[0])
    server.come_back()
    second = contender(tmp_path, address, "standby")
    assert await second.gained()
    assert second.number == 2
    await first.end(finished=False)
    assert second.holds()
    await second.end(finished=False)


def checkpoint(steps: int, of_run: int | None = None) -> LearnerCheckpoint:
    weights = {"w": torch.full((3,), float(steps))}
    return LearnerCheckpoint("a", "run", 1, steps, 0, 0, steps, (), weights, run_checkpoint=of_run)


@on_each_cloud
def test_a_learner_continues_from_its_checkpoints_in_a_store(
    address: str, server: ObjectServer
) -> None:
    own = StoredCheckpoints(address, "a")
    assert own.newest() is None
    for steps in (1, 2, 3):
        own.save(checkpoint(steps))
    own.save(checkpoint(4, of_run=1))
    other = StoredCheckpoints(address, "a")  # on another machine
    found = other.newest()
    assert found is not None
    assert (found.steps, found.model["w"].tolist()) == (4, [4.0] * 3)
    other.save(checkpoint(5))
    other.forget_checkpoints(lambda number: number == 1)
    names = sorted(each.name for each in Objects(address).listed("a"))
    assert names == ["a/00000003.safetensors", "a/00000005.safetensors"]
    assert StoredCheckpoints(address, "b").newest() is None


def test_a_corrupt_checkpoint_is_skipped_and_an_outage_is_not(
    address: str, server: ObjectServer
) -> None:
    own = StoredCheckpoints(address, "a")
    own.save(checkpoint(1))
    own.save(checkpoint(2))
    Objects(address).put("a/00000002.safetensors", b"torn")
    other = StoredCheckpoints(address, "a")
    found = other.newest()
    assert found is not None
    assert found.steps == 1
    assert "the one before it is used" in other.problems[0]
    server.go_away()
    with pytest.raises(StorageError, match="is unreachable"):
        other.newest()
    with pytest.raises(StorageError, match="is unreachable"):
        own.save(checkpoint(3))


@pytest.mark.long
def test_ten_thousand_objects_are_listed_and_restored_with_bounded_memory(
    folder: Path, address: str, tmp_path: Path
) -> None:
    ranks = folder / "learners/a/00000001.ranks"
    ranks.mkdir(parents=True)
    for number in range(10_000):
        (ranks / f"{number:05d}.distcp").write_bytes(b"%d" % number)
    objects = Objects(address)
    mirror = Mirror(folder, objects, "x")
    assert mirror.write()
    assert sum(1 for _ in objects.listed("objects")) == 10_003
    # Later states upload only what is new, whatever the number of files.
    (folder / "durable/shard-0/00000002.safetensors").write_bytes(b"new")
    started, sent = time.monotonic(), mirror.sent_bytes
    assert mirror.write()
    assert mirror.sent_bytes - sent == 3
    assert time.monotonic() - started < 10
    started = time.monotonic()
    state = required_state(objects)
    assert time.monotonic() - started < 5
    restore(objects, tmp_path / "other", state)
    assert len(list((tmp_path / "other/learners/a/00000001.ranks").iterdir())) == 10_000


def test_reports_are_on_the_tape_of_the_mirror(folder: Path, address: str) -> None:
    following = Following(folder, address)
    following.until(lambda found: found.state >= 1)
    following.end()
    found = [r for r in TapeReader(folder / "tape" / f"{MIRROR}.jsonl") if r.type != "start"]
    assert found[0].data["address"] == address
