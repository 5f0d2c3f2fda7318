"""A state that one learner sends to another, and the errors of an invalid one."""

from __future__ import annotations

import json

import pytest
import torch

from decoupled_diloco.errors import StorageError
from decoupled_diloco.learner.transfers import StateBlob
from decoupled_diloco.merge import digest

WHOLE = b"\0" * 16
TEXT = '{"tensor": "0"}'


def test_a_state_is_restored_unchanged() -> None:
    state = {"a": torch.arange(5.0), "b": [1, torch.tensor(3, dtype=torch.int64)]}
    sent = StateBlob.of(state)
    blob, digests = StateBlob.open(sent.head(), sent.data.numel())
    blob.data.copy_(sent.data)
    assert digests == [digest(chunk) for chunk in blob.chunks()]
    got = blob.state()
    assert torch.equal(got["a"], state["a"])
    assert got["b"] == [1, torch.tensor(3)]


@pytest.mark.parametrize(
    "head",
    [
        b"\xff",
        b"[1, 2]",
        b"[" * 100_000,
        json.dumps([TEXT, [], 3]).encode(),
        json.dumps([TEXT, [["0", "float32", [400], 0]], ["d"]]).encode(),
        json.dumps([TEXT, [["0", "nn", [4], 0]], ["d"]]).encode(),
        json.dumps([TEXT, [["0", "float32", [4], 0]], ["d", "d"]]).encode(),
    ],
)
def test_an_invalid_head_is_an_error_of_the_provider(head: bytes) -> None:
    with pytest.raises(StorageError):
        StateBlob.open(head, len(WHOLE))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (TEXT, ["0", "float32", [-4], 0]),
        (TEXT, ["0", "float32", [2], 1]),
        (TEXT, ["0", "float32", [2], -3]),
        ('{"complex": "0"}', ["0", "float32", [3], 0]),
        ('{"bytes": 3}', ["0", "float32", [2], 0]),
        ('{"odd": 3}', ["0", "float32", [2], 0]),
    ],
)
def test_an_invalid_state_is_an_error_of_the_provider(text: str, place: list[object]) -> None:
    with pytest.raises(StorageError):  # noqa: PT012  # some raise when they are opened
        blob, _ = StateBlob.open(json.dumps([text, [place], ["d"]]).encode(), len(WHOLE))
        blob.state()
