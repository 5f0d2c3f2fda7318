"""Vectors that several processes write in ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decoupled_diloco.errors import StorageError
from decoupled_diloco.storage.vector_ranges import keep_ranges, kept_range


def test_any_range_can_be_read(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    keep_ranges(tmp_path, 0, {(0, 0): whole[:4], (1, 0): whole})
    keep_ranges(tmp_path, 1, {(0, 4): whole[4:]})
    assert torch.equal(kept_range(tmp_path, 0, 2, 7), whole[2:7])
    assert torch.equal(kept_range(tmp_path, 1, 0, 10), whole)


def test_a_process_without_a_part_does_no_harm(tmp_path: Path) -> None:
    keep_ranges(tmp_path, 0, {(0, 0): torch.ones(3)})
    keep_ranges(tmp_path, 1, {})
    assert torch.equal(kept_range(tmp_path, 0, 0, 3), torch.ones(3))
    assert kept_range(tmp_path, 0, 3, 3).numel() == 0


def test_missing_elements_raise(tmp_path: Path) -> None:
    keep_ranges(tmp_path, 0, {(0, 0): torch.ones(3)})
    with pytest.raises(StorageError, match="has 3 of 5 elements of vector 0"):
        kept_range(tmp_path, 0, 0, 5)
