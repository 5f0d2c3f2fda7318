"""The corpus and its partitions."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.text import (
    FOLDERS_LEFT_OUT,
    batch_at,
    held_out_batches,
    load_corpus,
    region,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(100):
        path = tmp_path / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# file {number}\n" * 20)
    return tmp_path


def ramp(count: int) -> Tensor:
    """Return a text of at most 256 bytes in which each byte is its own position."""
    return torch.arange(count, dtype=torch.uint8)


def test_the_standard_library_is_the_text_without_its_tests() -> None:
    corpus = load_corpus()
    names = corpus.train_files + corpus.held_out_files
    assert "argparse.py" in names
    assert not [name for name in names if FOLDERS_LEFT_OUT & set(Path(name).parts)]
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.held_out) / len(corpus.train) < 0.2
    assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8


def test_the_same_files_give_the_same_corpus(library: Path) -> None:
    first, second = load_corpus(root=library), load_corpus(root=library)
    assert first.digest == second.digest
    assert torch.equal(first.train, second.train)
    (library / "package0" / "module0.py").write_text("changed")
    assert load_corpus(root=library).digest != first.digest


def test_whole_files_are_held_out(library: Path) -> None:
    corpus = load_corpus(root=library)
    train, held_out = set(corpus.train_files), set(corpus.held_out_files)
    assert len(train | held_out) == 100
    assert not train & held_out
    assert 1 <= len(held_out) <= 15
    lines = {bytes(text.numpy()) for text in (corpus.train, corpus.held_out)}
    trained, evaluated = (set(text.replace(b"\0", b"").splitlines()) for text in lines)
    assert not trained & evaluated


def test_a_new_file_moves_no_other_file_to_another_set(library: Path) -> None:
    before = load_corpus(root=library)
    (library / "new.py").write_text("new\n")
    after = load_corpus(root=library)
    assert set(before.train_files) - set(after.train_files) == set()
    assert set(before.held_out_files) - set(after.held_out_files) == set()


@pytest.mark.parametrize("folder", ["test", "tests", "idle_test", "site-packages", "config-3-x"])
def test_some_folders_are_left_out(library: Path, folder: str) -> None:
    before = load_corpus(root=library)
    (library / "package0" / folder).mkdir()
    (library / "package0" / folder / "x.py").write_text("tested\n")
    (library / "_sysconfigdata__linux.py").write_text("paths\n")
    (library / "data.txt").write_text("text\n")
    assert load_corpus(root=library).digest == before.digest


def test_the_limit_truncates_both_sets_and_empties_neither(library: Path) -> None:
    whole, limited = load_corpus(root=library), load_corpus(1000, root=library)
    assert len(limited.train) == 1000
    assert len(limited.held_out) == 100
    assert torch.equal(limited.train, whole.train[:1000])
    assert torch.equal(limited.held_out, whole.held_out[:100])


def test_a_library_without_source_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="has 0 Python files with 0 bytes for training and 0 held"
    ):
        load_corpus(root=tmp_path)


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 12_345_677])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_regions_cover_the_text_once_and_evenly(count: int, parts: int) -> None:
    regions = [region(count, part, parts) for part in range(parts)]
    assert regions[0].start == 0
    assert regions[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(regions))
    assert max(map(len, regions)) - min(map(len, regions)) <= 1


def batch(part: int, step: int, *, parts: int = 3, seed: int = 0, count: int = 250) -> Tensor:
    return batch_at(
        ramp(count), part=part, parts=parts, step=step, batch_size=8, context=4, seed=seed
    )


def test_a_batch_depends_only_on_seed_partition_and_step() -> None:
    assert torch.equal(batch(1, 5), batch(1, 5))
    others = [batch(1, 6), batch(1, 5, seed=1), batch(0, 5) + 83]
    assert not any(torch.equal(batch(1, 5), other) for other in others)


def test_a_batch_has_windows_of_adjacent_bytes() -> None:
    windows = batch(1, 5)
    assert windows.dtype == torch.int64
    assert windows.shape == (8, 5)
    assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)


def test_partitions_are_disjoint_and_used_completely() -> None:
    seen = [set(torch.cat([batch(k, i) for i in range(200)]).flatten().tolist()) for k in range(3)]
    assert seen == [set(region(250, part, 3)) for part in range(3)]


def test_a_region_of_exactly_one_window_is_enough() -> None:
    assert batch(2, 0, parts=50).tolist() == [[10, 11, 12, 13, 14]] * 8


def test_a_region_smaller_than_a_window_is_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        batch(1, 0, count=12)
    assert str(error.value) == (
        "partition 1 of 3 has 4 bytes of text, fewer than context=4 + 1: "
        "lower learners or context, or raise corpus_bytes_max"
    )


def test_held_out_windows_are_spread_over_the_text() -> None:
    batches = held_out_batches(ramp(105), count=3, batch_size=2, context=4)
    assert [one[:, 0].tolist() for one in batches] == [[0, 20], [40, 60], [80, 100]]
    assert batches[-1][-1].tolist() == [100, 101, 102, 103, 104]


def test_a_held_out_text_smaller_than_a_window_is_rejected() -> None:
    with pytest.raises(ConfigError, match="the held-out text has 4 bytes, fewer than context=4"):
        held_out_batches(ramp(4), count=1, batch_size=1, context=4)
