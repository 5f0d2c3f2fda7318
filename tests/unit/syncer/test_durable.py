"""A shard's state on disk: checkpoint, journal, and recovery from them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.merge import make_outer
from decoupled_diloco.protocol import Version
from decoupled_diloco.storage.weight_files import save_weights
from decoupled_diloco.syncer.durable import JOURNAL_CHECKPOINTS_MAX, Durable
from decoupled_diloco.syncer.result import RESULT, by_name
from unit.syncer.shard_life import FRAGMENTS, Life

Lives = Callable[..., "Life"]


@pytest.fixture
def life_of(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Create processes on one disk; their files are closed at the end."""
    lives: list[Life] = []

    def make(identity: str = "run layout", claim: int = 0) -> Life:
        lives.append(Life(tmp_path, identity, claim))
        return lives[-1]

    yield make
    for life in lives:
        life.disk.close()


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_an_empty_folder_restores_nothing(tmp_path: Path, life_of: Lives) -> None:
    life = life_of()
    assert life.disk.recover() == {}
    assert life.disk.problems == []


@pytest.mark.parametrize("merges", [0, 1, 7, 40])
def test_the_next_process_has_the_same_bits_and_momentum(life_of: Lives, merges: int) -> None:
    life = life_of().begin()
    for number in range(merges):
        life.merge(number % 2)
    after = life_of()
    assert after.disk.recover() == life.durable()
    assert after.disk.problems == []
    assert same(after.values(), life.values())
    for each in (life, after):
        each.rounds, each.versions = 100, dict(life.versions)
    after.disk.installed(after.versions)
    for each in (life, after):
        each.merge(0)
    assert same(after.values(), life.values()), "and continues in the same way"


def test_a_merge_is_on_disk_before_the_tensors_change(
    life_of: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = life_of().begin()
    life.merge(0)
    before = life.values()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            life.merge(1)
    assert same(life.values(), before)
    assert life_of().disk.recover() == life.durable()
    life.merge(1)
    assert life_of().disk.recover() == life.durable(), "with space again, merges continue"


def test_a_journal_truncated_anywhere_restores_all_earlier_merges(
    tmp_path: Path, life_of: Lives
) -> None:
    life = life_of().begin()
    known = [life.durable()]
    (journal,) = tmp_path.glob("*.journal")
    ends = [0]
    for number in range(4):
        life.merge(number % 2)
        known.append(life.durable())
        ends.append(journal.stat().st_size)
    content = journal.read_bytes()
    for length in range(0, len(content) + 1, 37):
        journal.write_bytes(content[:length])
        whole = max(index for index, end in enumerate(ends) if end <= length)
        assert life_of().disk.recover() == known[whole]


def test_a_torn_checkpoint_is_named_and_the_previous_one_gives_the_same_bits(
    tmp_path: Path, life_of: Lives
) -> None:
    life = life_of().begin()
    for number in range(5):
        life.merge(number % 2)
    life.disk.checkpoint()
    life.merge(0)
    newest = max(tmp_path.glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-20])
    after = life_of()
    assert after.disk.recover() == life.durable()
    assert same(after.values(), life.values())
    (problem,) = after.disk.problems
    assert newest.name in problem
    assert "torn" in problem


def test_a_checkpoint_with_wrong_bits_of_the_right_length_is_named_and_not_used(
    tmp_path: Path, life_of: Lives
) -> None:
    """As after a write that the disk confirmed and lost: safetensors itself has no checksum."""
    life = life_of().begin()
    life.merge(0)
    life.disk.checkpoint()
    life.merge(1)
    newest = max(tmp_path.glob("*.safetensors"))
    content = newest.read_bytes()
    newest.write_bytes(content[:-100] + bytes(100))
    after = life_of()
    assert after.disk.recover() == life.durable()
    assert same(after.values(), life.values())
    (problem,) = after.disk.problems
    assert f"{newest} is torn" in problem
    assert "is not what was written: the previous checkpoint is used" in problem


def test_the_next_checkpoint_deletes_one_that_a_crash_interrupted(
    tmp_path: Path, life_of: Lives
) -> None:
    life = life_of().begin()
    (tmp_path / ".00000002.safetensors.1.part").write_bytes(bytes(100))
    life.disk.checkpoint()
    assert not list(tmp_path.glob(".*"))


def test_a_journal_with_a_torn_end_is_reported(tmp_path: Path, life_of: Lives) -> None:
    life = life_of().begin()
    life.merge(0)
    (journal,) = tmp_path.glob("*.journal")
    journal.write_bytes(journal.read_bytes()[:-5])
    after = life_of()
    after.disk.recover()
    (problem,) = after.disk.problems
    assert "bytes after its last whole record are skipped" in problem


def test_replaced_initial_weights_do_not_use_the_previous_journal(
    tmp_path: Path, life_of: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second attempt to begin, on a full disk: nothing is merged onto the first one's file."""
    life = life_of().begin()
    life.tensors.install(0, torch.ones(life.numel(0)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError):
            life.disk.installed(life.versions)
        with pytest.raises(StorageError):
            life.merge(0)
    life.merge(0)
    after = life_of()
    assert after.disk.recover() == life.durable()
    assert same(after.values(), life.values())


def test_the_folder_stays_bounded_and_old_journals_are_deleted(
    tmp_path: Path, life_of: Lives
) -> None:
    life = life_of().begin()
    sizes = []
    for number in range(300):
        life.merge(number % 2)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    checkpoints = list(tmp_path.glob("*.safetensors"))
    assert len(checkpoints) == 2
    size = max(path.stat().st_size for path in checkpoints)
    record = 4 * life.numel(0) + 300
    assert max(sizes) <= 2 * ((1 + JOURNAL_CHECKPOINTS_MAX) * size + record)
    assert life_of().disk.recover() == life.durable()


def test_a_version_that_the_journal_does_not_reproduce_is_not_restored(
    tmp_path: Path, life_of: Lives
) -> None:
    """As after a PyTorch update that computes other bits: learners may hold the right ones."""
    life = life_of().begin()
    life.merge(0)
    known = life.durable()
    life.merge(1)
    life.merge(0)
    other = life_of()
    other.tensors.plan = life.tensors.plan
    outer = make_outer("nesterov", 0.7000001, 0.5)
    object.__setattr__(other.tensors.plan, "outer", outer)
    found = other.disk.recover()
    assert found == {p: Durable(Version(1, 0), d.digest) for p, d in found.items()}
    assert len(other.disk.problems) == 2
    assert "version 1.1 of fragment 0" in other.disk.problems[0]
    assert known[0] != found[0]


def test_the_folder_of_another_run_is_rejected(tmp_path: Path, life_of: Lives) -> None:
    life_of().begin()
    with pytest.raises(ConfigError, match="belongs to a run with other settings or another model"):
        life_of("another").disk.recover()


def test_after_the_run_only_the_last_state_is_kept(tmp_path: Path, life_of: Lives) -> None:
    life = life_of().begin()
    for number in range(6):
        life.merge(number % 2)
    life.disk.finish()
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert life_of().disk.recover() == life.durable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_the_result_are_not_kept_twice(tmp_path: Path, dtype: torch.dtype) -> None:
    run, folder = tmp_path, tmp_path / "durable" / "shard-0"
    life = Life(folder).begin()
    life.merge(0)
    life.disk.finish()
    life.disk.close()
    plan = life.tensors.plan
    named = by_name(plan, {p: life.tensors.whole(p) for p in FRAGMENTS})
    save_weights(run / RESULT, {name: values.to(dtype) for name, values in named.items()})
    [file] = folder.glob("*.safetensors")
    before = file.stat().st_size
    life.disk.leave_to(run / RESULT)
    assert (file.stat().st_size < 0.8 * before) == (dtype is torch.float32), (
        "if the result has these bits"
    )
    after = Life(folder)
    assert after.disk.recover() == life.durable()
    assert same(after.values(), life.values())


@pytest.mark.parametrize("harm", ["moved away", "another"])
def test_a_missing_result_is_named_in_the_error(tmp_path: Path, harm: str) -> None:
    run, folder = tmp_path, tmp_path / "durable" / "shard-0"
    life = Life(folder).begin()
    life.disk.finish()
    life.disk.close()
    named = by_name(life.tensors.plan, {p: life.tensors.whole(p) for p in FRAGMENTS})
    save_weights(run / RESULT, named)
    life.disk.leave_to(run / RESULT)
    if harm == "another":
        save_weights(run / RESULT, {name: values + 1 for name, values in named.items()})
    else:
        (run / RESULT).rename(run / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{RESULT}.*restore the result of this run"):
        Life(folder).disk.recover()


@pytest.mark.parametrize("claims", [(1, 2), (0, 1), (1, 0)])
def test_files_of_a_replaced_process_are_not_read(life_of: Lives, claims: tuple[int, int]) -> None:
    """It writes separate checkpoints and journals; the next process reads only the newer ones."""
    old = life_of(claim=claims[0]).begin()
    for number in range(5):
        old.merge(number % 2)
    new = life_of(claim=claims[1])
    assert new.disk.recover() == old.durable()
    for p in FRAGMENTS:
        new.versions[p] = Version(2, old.versions[p].counter)
    new.disk.installed(new.versions)
    if all(claims):  # without a claim, no other process exists
        for number in range(40):
            old.merge(number % 2)
        old.disk.checkpoint()
    after = life_of(claim=3)
    assert after.disk.recover() == new.durable()
    assert same(after.values(), new.values())
