"""A claim is created once, by one process, atomically."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.messages import Condition, NewestLease
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.storage.claims import (
    ClaimStore,
    ObjectClaims,
    create_once,
    newest_number,
    numbered,
)
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.virtual_disk import Loss, SimulatedDisk, remains

RACES = 100

CONTENDER = f"""
import sys
from pathlib import Path
from decoupled_diloco.storage.claims import ClaimStore
store = ClaimStore(Path(sys.argv[1]), sys.argv[2], 5.0, "contender")
for number in range(1, {RACES + 1}):
    sys.stdin.readline()
    print(number if store.claim(number) else 0, flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> ClaimStore:
    (tmp_path / "claims").mkdir()
    return ClaimStore(tmp_path / "claims" / "shard-1", "me", 5.0, "shard-1")


def test_exactly_one_of_several_racing_processes_wins(tmp_path: Path) -> None:
    folder = tmp_path / "shard-1"
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(folder), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("left", "right")
    ]
    won = {"left": 0, "right": 0}
    for number in range(1, RACES + 1):
        for contender in contenders:
            contender.stdin.write("go\n")
            contender.stdin.flush()
        answers = [int(contender.stdout.readline()) for contender in contenders]
        assert sorted(answers) == [0, number]
        winner = "left" if answers[0] else "right"
        assert json.loads(numbered(folder, number).read_text())["nonce"] == winner
        won[winner] += 1
    for contender in contenders:
        contender.communicate()
        assert contender.returncode == 0
    assert sum(won.values()) == newest_number(folder) == RACES
    assert not list(folder.glob(".*")), "nothing is left in the making"


def test_an_empty_store_has_no_claim(store: ClaimStore) -> None:
    assert store.read_newest() == NewestLease(0, "", 0, 0.0, "held")


def test_the_newest_claim_and_its_renewals_are_returned(store: ClaimStore) -> None:
    assert store.claim(1)
    other = ClaimStore(store.folder, "other", 9.0, "shard-1-standby")
    assert not other.claim(1)
    assert other.read_newest() == NewestLease(1, "me", 0, 5.0, "held")
    store.renew(1, 7)
    assert other.read_newest() == NewestLease(1, "me", 7, 5.0, "held")
    assert other.claim(2)
    store.renew(1, 8)
    assert store.newest() == 2
    assert store.read_newest() == NewestLease(2, "other", 0, 9.0, "held")
    other.renew(2, 3, "released")
    assert store.read_newest().condition == "released"


def test_a_missing_claim_cannot_be_renewed(store: ClaimStore) -> None:
    """The storage was unmounted: the mount point is another folder."""
    assert store.claim(1)
    numbered(store.folder, 1).unlink()
    with pytest.raises(StorageError, match=r"00000001\.renewals cannot be written"):
        store.renew(1, 1)


@pytest.mark.parametrize("text", ["", '{"nonce": "x"', "[]", '{"nonce": "x"}'])
def test_a_torn_claim_is_an_error(store: ClaimStore, text: str) -> None:
    assert store.claim(1)
    numbered(store.folder, 2).write_text(text)
    with pytest.raises(StorageError, match=r"00000002\.json cannot be read"):
        store.read_newest()
    assert not store.claim(2)


@pytest.mark.parametrize("text", ["", "\0\0\0", "{}", '{"renewals": 3, "condition": "lent"}'])
def test_a_renewal_that_a_power_loss_has_torn_counts_as_none(store: ClaimStore, text: str) -> None:
    """Renewals are not synced to disk, and a standby must not wait forever."""
    assert store.claim(1)
    store.renew(1, 7)
    (store.folder / "00000001.renewals").write_text(text)
    assert store.read_newest() == NewestLease(1, "me", 0, 5.0, "held")
    store.renew(1, 8)
    assert store.read_newest().renewals == 8


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_failure_a_claim_is_complete_or_absent(tmp_path: Path, seed: int) -> None:
    whole = SimulatedDisk(tmp_path)
    with within(Runtime(whole)):
        assert create_once(tmp_path / "claims" / "00000001.json", "what it says", "me")
    for done in range(len(whole.log) + 1):
        loss = Loss(Choices(seed), writes=1.0, names=0.5 * seed, zeros=0.5)
        found = remains(whole.before, whole.log[:done], loss)
        assert found.get(Path("claims/00000001.json")) in (None, b"what it says")
    assert found.get(Path("claims/00000001.json")) == b"what it says", "it was confirmed"


def test_an_unfinished_claim_does_not_count(store: ClaimStore) -> None:
    """A process died while it wrote the file."""
    assert store.claim(1)
    (store.folder / ".00000002.json.other.part").write_text('{"nonce": "oth')
    assert store.read_newest().number == 1
    assert store.claim(2)


def test_a_file_is_created_once_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "states" / "00000001.json"
    assert create_once(path, "one", "a")
    assert not create_once(path, "two", "b")
    assert path.read_text() == "one"


def test_a_storage_failure_raises(tmp_path: Path) -> None:
    (tmp_path / "shard-1").write_text("no folder")
    store = ClaimStore(tmp_path / "shard-1", "me", 5.0, "shard-1")
    with pytest.raises(StorageError, match="cannot be created"):
        store.claim(1)
    with pytest.raises(StorageError, match="cannot be read"):
        store.read_newest()


def test_an_empty_mount_point_is_an_error(store: ClaimStore) -> None:
    """Otherwise a process would create a first claim there, in addition to the real one."""
    assert store.claim(1)
    shutil.rmtree(store.folder.parent)
    for ask in (store.read_newest, store.newest, lambda: store.claim(2)):
        with pytest.raises(StorageError, match="mount the storage"):
            ask()
    assert not store.folder.parent.exists()


@pytest.mark.parametrize(
    ("before", "after"), [("finished", "released"), ("released", "released"), ("held", "held")]
)
def test_a_finished_run_can_be_reopened(
    store: ClaimStore, before: Condition, after: Condition
) -> None:
    store.reopen()
    assert store.newest() == 0
    assert store.claim(1)
    store.renew(1, 5, before)
    store.reopen()
    assert store.read_newest() == NewestLease(1, "me", 5, 5.0, after)


@pytest.fixture
def stored(tmp_path: Path) -> ObjectClaims:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[store]'")
    return ObjectClaims(f"file://{tmp_path}/bucket", 1, "me", 5.0, "shard-1")


def test_claims_in_an_object_store_are_those_in_a_folder(stored: ObjectClaims) -> None:
    assert stored.read_newest() == NewestLease(0, "", 0, 0.0, "held")
    assert stored.claim(1)
    assert stored.claim(1), "the answer to the first attempt may have been lost"
    place = stored.place.removesuffix("/claims/shard-1")
    other = ObjectClaims(place, 1, "other", 9.0, "shard-1-standby")
    assert not other.claim(1)
    stored.renew(1, 7)
    assert other.read_newest() == NewestLease(1, "me", 7, 5.0, "held")
    assert other.claim(2)
    assert stored.newest() == 2
    assert stored.read_newest() == NewestLease(2, "other", 0, 9.0, "held")
    other.renew(2, 3, "finished")
    stored.reopen()
    assert stored.read_newest() == NewestLease(2, "other", 3, 9.0, "released")
    assert other.of_shard(0).newest() == 0


def test_claims_that_have_vanished_from_a_store_are_noticed(
    stored: ObjectClaims, tmp_path: Path
) -> None:
    assert stored.claim(1)
    assert stored.newest() == 1
    shutil.rmtree(tmp_path / "bucket")
    with pytest.raises(StorageError, match="no longer has claim 1"):
        stored.renew(1, 1)
    assert stored.newest() == 0
