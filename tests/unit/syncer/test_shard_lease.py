"""Acting by a claim: one process at a time, fenced, and never without the storage."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import LeaseError, StorageError
from decoupled_diloco.protocol.lease_machine import ShardLeaseMachine
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco.storage.claims import ClaimStore
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, ShardLease
from decoupled_diloco.tape import TapeWriter
from replay_check import assert_replays

LEASE_SECONDS = 0.6


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "claims").mkdir()
    yield tmp_path
    assert assert_replays(tmp_path) > 0


def contender(folder: Path, name: str, lease_seconds: float = LEASE_SECONDS) -> ShardLease:
    store = ClaimStore(folder / "claims" / "shard-1", name, lease_seconds, name)
    waits = "standby" in name
    header = {"machine": "lease", "nonce": name, "lease_seconds": lease_seconds, "waits": waits}
    return ShardLease(store, TapeWriter(folder / "tape", f"shard-1.{name}", header), waits=waits)


async def test_two_processes_act_one_after_the_other(folder: Path) -> None:
    first, second = contender(folder, "first"), contender(folder, "standby")
    waiting = asyncio.ensure_future(second.gained())
    assert await first.gained()
    assert (first.number, first.holds()) == (1, True)
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert first.holds()
    assert not waiting.done()
    await first.end(finished=False)
    assert not first.holds()
    assert await waiting
    assert (second.number, second.holds()) == (2, True)
    await second.end(finished=True)


async def test_a_waiting_process_ends_with_the_run(folder: Path) -> None:
    first, second = contender(folder, "first"), contender(folder, "standby")
    assert await first.gained()
    waiting = asyncio.ensure_future(second.gained())
    await asyncio.sleep(0.1)
    await first.end(finished=True)
    assert not await waiting
    assert second.run_over
    await second.end(finished=True)


async def test_a_waiting_process_ends_when_asked_to(folder: Path) -> None:
    first, second = contender(folder, "first"), contender(folder, "standby")
    assert await first.gained()
    waiting = asyncio.ensure_future(second.gained())
    await asyncio.sleep(0.1)
    second.give_up()
    assert not await waiting
    assert not second.run_over
    await second.end(finished=False)
    await first.end(finished=False)


async def test_a_process_without_storage_steps_down_and_another_one_may_act(folder: Path) -> None:
    first = contender(folder, "first")
    assert await first.gained()
    lost: list[BaseException] = []
    first.when_lost(lost.append)
    (folder / "claims").rename(folder / "unmounted")
    await asyncio.sleep(1.5 * LEASE_SECONDS)
    assert not first.holds()
    assert "could not be renewed" in str(lost[0])
    (folder / "unmounted").rename(folder / "claims")
    second = contender(folder, "standby")
    assert await second.gained()
    assert second.number == 2
    await first.end(finished=False)
    assert second.holds()
    await second.end(finished=False)


BROKEN = ValueError("a fault of the program")
"""An error that is not an answer of the storage."""


def broken(*arguments: object) -> object:
    raise BROKEN


@pytest.mark.parametrize("order", ["read_newest", "claim"])
async def test_an_unexpected_failure_of_an_order_ends_the_wait_for_a_claim(
    folder: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Without an answer, a standby would wait forever."""
    monkeypatch.setattr(ClaimStore, order, broken)
    shard_lease = contender(folder, "standby")
    with pytest.raises(ValueError) as raised:
        await asyncio.wait_for(shard_lease.gained(), 30.0)
    assert raised.value is BROKEN
    await shard_lease.end(finished=False)  # reported already


async def failure_of(shard_lease: ShardLease) -> list[BaseException]:
    """Return the errors with which a lease ended the process that acts by it."""
    failed, errors = asyncio.Event(), list[BaseException]()

    def end(error: BaseException) -> None:
        errors.append(error)
        failed.set()

    shard_lease.when_lost(end)
    await asyncio.wait_for(failed.wait(), 30.0)
    return errors


@pytest.mark.parametrize(
    ("owner", "part"),
    [(ClaimStore, "renew"), (ShardLeaseMachine, "handle"), (ShardLeaseMachine, "deadline")],
    ids=["in a task", "in the machine", "for the next timer"],
)
async def test_a_failed_lease_ends_its_acting_process_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, part: str
) -> None:
    shard_lease = contender(folder, "first")
    assert await shard_lease.gained()
    with monkeypatch.context() as patched:
        patched.setattr(owner, part, broken)
        errors = await failure_of(shard_lease)
    await shard_lease.end(finished=False)
    assert errors == [BROKEN]


async def test_a_lease_that_fails_early_ends_its_process_when_that_acts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_lease = contender(folder, "first")
    assert await shard_lease.gained()
    failed = asyncio.Event()

    def fail(*arguments: object) -> object:
        failed.set()
        raise BROKEN

    monkeypatch.setattr(ShardLeaseMachine, "handle", fail)
    await asyncio.wait_for(failed.wait(), 30.0)
    assert await failure_of(shard_lease) == [BROKEN]
    await shard_lease.end(finished=False)


async def test_an_unexpected_error_in_the_release_of_a_claim_is_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_lease = contender(folder, "first", lease_seconds=60.0)
    assert await shard_lease.gained()
    shard_lease.when_lost(lambda error: pytest.fail("the process that acted has ended"))
    monkeypatch.setattr(ClaimStore, "renew", broken)
    with pytest.raises(ValueError) as raised:
        await shard_lease.end(finished=True)
    assert raised.value is BROKEN


QUESTIONS = ("is_folder", "names", "read")


def fail_once(monkeypatch: pytest.MonkeyPatch, question: str, code: int) -> list[str]:
    """Make the disk's next answer an error; the returned list has the requested paths."""
    asked: list[str] = []
    answer = getattr(Disk, question)

    def ask(disk: Disk, path: Path) -> object:
        asked.append(str(path))
        if len(asked) == 1:
            raise OSError(code, os.strerror(code), str(path))
        return answer(disk, path)

    monkeypatch.setattr(Disk, question, ask)
    return asked


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_standby_takes_over_after_a_read_that_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, question: str, code: int
) -> None:
    first = contender(folder, "first")
    assert await first.gained()
    await first.end(finished=False)
    asked = fail_once(monkeypatch, question, code)
    second = contender(folder, "standby")
    assert await asyncio.wait_for(second.gained(), 30.0)
    assert len(asked) > 1
    await second.end(finished=False)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("question", ["is_folder", "names"])
async def test_an_acting_shard_reports_failed_storage_as_a_storage_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, question: str, code: int
) -> None:
    """Its merge is tried again: any other error would end the process."""
    shard_lease = contender(folder, "first", lease_seconds=60.0)
    assert await shard_lease.gained()
    fail_once(monkeypatch, question, code)
    with pytest.raises(StorageError, match=os.strerror(code)):
        shard_lease.fenced(lambda: None)()
    assert shard_lease.fenced(lambda: "done")() == "done"
    fail_once(monkeypatch, question, code)
    assert not await shard_lease.ended()
    await shard_lease.end(finished=False)


async def test_a_fenced_task_is_not_run_once_there_is_a_newer_claim(folder: Path) -> None:
    """Independent of the clock: this process's lease has not expired."""
    shard_lease = contender(folder, "first", lease_seconds=60.0)
    assert await shard_lease.gained()
    done: list[str] = []
    assert shard_lease.fenced(lambda: done.append("in time"))() is None
    assert ClaimStore(shard_lease.store.folder, "other", 60.0, "other").claim(2)
    with pytest.raises(LeaseError, match="claim 1 is over"):
        shard_lease.fenced(lambda: done.append("late"))()
    assert done == ["in time"]
    await shard_lease.end(finished=False)


async def test_a_result_of_a_task_during_a_newer_claim_is_not_announced(folder: Path) -> None:
    shard_lease = contender(folder, "first", lease_seconds=60.0)
    assert await shard_lease.gained()
    other = ClaimStore(shard_lease.store.folder, "other", 60.0, "other")
    with pytest.raises(LeaseError, match="claim 1 is over"):
        shard_lease.fenced(lambda: other.claim(2))()
    await shard_lease.end(finished=False)


async def test_storage_that_fails_for_a_moment_does_not_end_the_process(folder: Path) -> None:
    shard_lease = contender(folder, "first", lease_seconds=60.0)
    assert await shard_lease.gained()
    (folder / "claims").rename(folder / "unmounted")
    with pytest.raises(StorageError, match="mount the storage"):
        shard_lease.fenced(lambda: pytest.fail("it cannot be known whether it may"))()
    (folder / "unmounted").rename(folder / "claims")
    assert shard_lease.fenced(lambda: "done")() == "done"
    with pytest.raises(LeaseError, match="cannot be confirmed"):
        shard_lease.fenced(lambda: shutil.rmtree(folder / "claims"))()
    await shard_lease.end(finished=False)


def test_a_single_process_has_no_fence() -> None:
    assert NO_STANDBY.holds()
    assert NO_STANDBY.fenced(lambda: 7)() == 7
