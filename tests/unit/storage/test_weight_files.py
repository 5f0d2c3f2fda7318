"""Weights on disk: atomic writes, tied weights written once, errors with the file's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from decoupled_diloco.errors import StorageError
from decoupled_diloco.storage import weight_files
from decoupled_diloco.storage.weight_files import load_metadata, load_weights, save_weights


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "weights.safetensors"
    tensors = {
        "matrix": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
    }
    save_weights(path, tensors, {"step": "7"})
    loaded = load_weights(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert load_metadata(path) == {"step": "7"}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_without_metadata(tmp_path: Path) -> None:
    save_weights(tmp_path / "w", {"a": torch.zeros(1)})
    assert load_metadata(tmp_path / "w") == {}


def test_tied_weights_are_written_once_and_restored(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    path = tmp_path / "tied.safetensors"
    save_weights(path, model.state_dict(), {"step": "1"})
    assert list(load_file(path)) == ["embedding.weight"]
    loaded = load_weights(path)
    assert loaded["head.weight"] is loaded["embedding.weight"]
    model.load_state_dict(loaded)
    assert load_metadata(path) == {"step": "1"}


def test_views_of_one_storage_are_separate_tensors(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"row": whole[1], "column": whole[:, 1], "turned": whole.t(), "whole": whole}
    save_weights(tmp_path / "w", tensors)
    loaded = load_weights(tmp_path / "w")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "w").stat().st_size < 1000


def test_loaded_tensors_are_independent_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_weights(path, {"a": torch.ones(1000)})
    loaded = load_weights(path)
    loaded["a"][0] = 5
    with path.open("r+b") as file:
        file.truncate(10)
    assert loaded["a"].sum() == 1004


def test_saving_leaves_gradients_and_tensors_alone(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    save_weights(tmp_path / "w", {"a": parameter})
    assert parameter.requires_grad
    assert not load_weights(tmp_path / "w")["a"].requires_grad


def test_a_missing_file_raises(tmp_path: Path) -> None:
    for load in (load_weights, load_metadata):
        with pytest.raises(StorageError) as error:
            load(tmp_path / "none")
        assert str(error.value) == f"{tmp_path / 'none'} does not exist"


@pytest.mark.parametrize("kept", [0, 4, 20, 200, 4000])
def test_a_torn_file_raises(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "torn"
    save_weights(path, {"a": torch.ones(1000), "b": torch.ones(10)})
    with path.open("r+b") as file:
        file.truncate(kept)
    with pytest.raises(StorageError, match=r"torn is torn or not a safetensors file: "):
        load_weights(path)


@pytest.mark.parametrize("content", [b"PK\x03\x04 a pickle in a zip archive", b"\x80\x04." * 100])
def test_another_kind_of_file_raises(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"model\.pt is torn or not a safetensors file: "):
        load_weights(path)


def test_a_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is torn or not a safetensors file: "):
        load_weights(tmp_path)


@pytest.mark.parametrize("aliases", ["[1]", "{", '{"b": "nowhere"}', '{"b": [1]}'])
def test_invalid_aliases_raise(tmp_path: Path, aliases: str) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "w", {weight_files.ALIASES_KEY: aliases})
    with pytest.raises(StorageError, match="w is torn or not a safetensors file"):
        load_weights(tmp_path / "w")


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w"
    save_weights(path, {"a": torch.zeros(1)})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError) as error:
        save_weights(path, {"a": torch.ones(1)})
    assert str(error.value) == f"{path} cannot be written: [Errno 28] No space left on device"
    assert load_weights(path)["a"].item() == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["w"]


def test_a_folder_at_the_path_raises(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    with pytest.raises(StorageError, match="w cannot be written: "):
        save_weights(tmp_path / "w", {"a": torch.ones(1)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["w"]


def test_a_file_in_place_of_the_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written: "):
        save_weights(tmp_path / "file" / "w", {"a": torch.ones(1)})
