"""The errors of this package are Python's own kinds as well, and are not taken for them inside."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    DilocoError,
    LeaseError,
    MergeError,
    NotJoinedError,
    ProtocolError,
    RunEndedError,
    StorageError,
    TransportError,
)
from decoupled_diloco.storage.weight_files import opened, save_weights
from decoupled_diloco.syncer.run_checkpoints import MANIFEST, read_manifest

KINDS = {
    AccessError: ConnectionError,
    ConfigError: ValueError,
    LeaseError: Exception,
    MergeError: Exception,
    NotJoinedError: ConnectionError,
    ProtocolError: Exception,
    RunEndedError: ConnectionError,
    StorageError: OSError,
    TransportError: ConnectionError,
}


@pytest.mark.parametrize(("kind", "builtin"), KINDS.items(), ids=lambda kind: kind.__name__)
def test_a_program_may_catch_the_built_in_kind(kind: type[DilocoError], builtin: type) -> None:
    with pytest.raises(builtin) as caught:
        raise kind("disk: full")
    error = caught.value
    assert isinstance(error, DilocoError)
    assert str(error) == "disk: full"
    assert repr(pickle.loads(pickle.dumps(error))) == repr(error)


def test_a_refused_setting_is_one_sentence_without_the_validators_words() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(run={})
    assert str(caught.value).startswith("[run] has no budget")
    with pytest.raises(ConfigError) as both:
        RunConfig(run={}, workload=3)
    first, second = str(both.value).splitlines()
    assert first.startswith("[run] has no budget")
    assert second.startswith("workload=3")


def test_an_error_inside_a_block_that_reads_a_file_keeps_its_words(tmp_path: Path) -> None:
    """The block's own handlers for `OSError` and `ValueError` must not take it."""
    import torch

    save_weights(tmp_path / "w.safetensors", {"a": torch.zeros(2)})
    for error in (ConfigError("mine"), StorageError("mine"), TransportError("mine")):
        with pytest.raises(type(error), match=r"^mine$"), opened(tmp_path / "w.safetensors"):
            raise error
    (tmp_path / MANIFEST).write_text('{"format": 999}')
    with pytest.raises(StorageError, match="has format=999, but this version reads"):
        read_manifest(tmp_path)
