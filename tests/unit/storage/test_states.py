"""Nested state as tensors and JSON: round trips, and errors for values that cannot be saved."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.storage.states import host_memory, on_host, pack, unpack
from decoupled_diloco.storage.weight_files import load_sealed, save_sealed
from wrapped import Wrapped

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def kept(state: Any, tmp_path: Path) -> Any:
    """Write the state to disk and read it."""
    tensors, text = pack(state)
    save_sealed(tmp_path / "state", on_host(tensors), {"text": text})
    tensors, texts = load_sealed(tmp_path / "state")
    return unpack(tensors, texts["text"])


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        [],
        (),
        {"a": {0: [1, -(2**80), True, None, "ü\n"], 1: (2.5, (), {})}},
        {"bytes": b"\x00\xff", "nested": [[], [{}]]},
        random.Random(7).getstate(),
        OrderedDict(b=1, a=2),
    ],
)
def test_plain_values_round_trip(state: Any, tmp_path: Path) -> None:
    assert kept(state, tmp_path) == state


def test_non_finite_numbers_round_trip(tmp_path: Path) -> None:
    nan, *rest = kept([math.nan, math.inf, -math.inf, -0.0], tmp_path)
    assert math.isnan(nan)
    assert rest == [math.inf, -math.inf, -0.0]
    assert math.copysign(1, rest[-1]) == -1


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_dtype_and_shape_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(6).to(dtype)
    state = {"vector": values, "matrix": values.view(2, 3), "0-dim": values[1].clone()}
    state |= {"empty": values[:0], "turned": values.view(2, 3).t()}
    back = kept(state, tmp_path)
    for name, tensor in state.items():
        assert back[name].dtype == dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name].double(), tensor.double())


def test_complex_tensors_and_arrays_round_trip(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, -3j])
    generator = np.random.default_rng(3)
    state = {
        "complex": values,
        "conjugate": values.conj(),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        "scalar": np.int64(7),
        "rng": np.random.RandomState(3).get_state(),
        "generator": generator.bit_generator.state,
    }
    back = kept(state, tmp_path)
    assert torch.equal(back["complex"], values)
    assert torch.equal(back["conjugate"], values.conj())
    assert np.array_equal(back["array"], state["array"])
    assert back["array"].dtype == np.uint32
    assert type(back["scalar"]) is np.int64
    assert back["scalar"] == 7
    assert np.array_equal(back["rng"][1], state["rng"][1])
    assert back["generator"] == state["generator"]


def test_a_shared_tensor_is_stored_once_and_shared_again(tmp_path: Path) -> None:
    shared = torch.randn(3)
    state = {"a": shared, "b": [shared.view(3)], "part": shared[:2], "equal": shared.clone()}
    assert len(pack(state)[0]) == 3
    back = kept(state, tmp_path)
    assert back["a"] is back["b"][0]
    assert back["equal"] is not back["a"]
    assert torch.equal(back["part"], shared[:2])


def test_the_copy_on_the_host_is_independent(tmp_path: Path) -> None:
    state = {"tensor": torch.ones(2), "list": [1]}
    copy = on_host(state)
    state["tensor"].zero_()
    state["list"].append(2)
    assert copy["tensor"].tolist() == [1, 1]
    assert copy["list"] == [1]


def test_the_next_copy_reuses_matching_memory() -> None:
    state = {"a": torch.ones(3), "b": torch.ones(2, 2).t(), "c": torch.ones(1)}
    memory = host_memory(state)()
    places = {name: tensor.data_ptr() for name, tensor in memory.items()}
    copy = on_host(state, memory)
    assert {name: tensor.data_ptr() for name, tensor in memory.items()} == places
    assert all(torch.equal(copy[name], tensor) for name, tensor in state.items())
    longer = {"a": torch.full((3,), 2.0), "b": torch.full((5,), 2.0)}
    copy = on_host(longer, memory)
    assert all(torch.equal(copy[name], tensor) for name, tensor in longer.items())
    assert memory["0"].data_ptr() == places["0"]
    assert memory.keys() == {"0", "1"}, "what is not needed is given back"


def test_an_optimizer_continues_bit_by_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True) for m in models)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(models[0], one)
    models[1].load_state_dict(kept(models[0].state_dict(), tmp_path))
    other.load_state_dict(kept(one.state_dict(), tmp_path))
    for model, optimizer in zip(models, (one, other), strict=True):
        step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"data": {"queue": deque([1])}}, r"state\['data'\]\['queue'\] is a deque"),
        ([1, {2}], r"state\[1\] is a set"),
        ({"f": print}, r"state\['f'\] is a builtin"),
        ({"d": {(0, 1): 2}}, r"state\['d'\] has the key \(0, 1\)"),
        ({True: 1}, "state has the key True"),
        ({"n": np.array(["a"])}, r"state\['n'\] is a NumPy array of <U1"),
        ({"n": np.array([1j])}, r"state\['n'\] is a NumPy array of complex128"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\] is a torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, r"state\['m'\] is a .* on meta"),
    ],
)
def test_a_value_that_cannot_be_saved_is_named_in_the_error(state: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        pack(state)


def test_a_state_that_contains_itself_is_rejected() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    with pytest.raises(ConfigError, match="or contains itself"):
        pack(state)


@pytest.mark.parametrize("text", ["", "{", '{"tensor": "9"}', '{"module": "os"}', '{"dict": [1]}'])
def test_text_that_is_not_a_state_is_rejected(text: str) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        unpack({}, text)


def test_every_byte_of_a_sealed_file_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "sealed"
    save_sealed(path, {"a": torch.arange(3.0), "b": torch.ones(2)}, {"text": "hello"})
    assert load_sealed(path)[1] == {"text": "hello"}
    whole = path.read_bytes()
    for place in range(len(whole)):
        spoilt = bytearray(whole)
        spoilt[place] ^= 0x04
        path.write_bytes(spoilt)
        try:
            tensors, texts = load_sealed(path)
        except StorageError:
            continue
        # A space of the header's padding, at most.
        assert torch.equal(tensors["a"], torch.arange(3.0))
        assert torch.equal(tensors["b"], torch.ones(2))
        assert texts == {"text": "hello"}
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError, match="sealed"):
            load_sealed(path)


def test_a_file_without_a_seal_is_rejected(tmp_path: Path) -> None:
    from decoupled_diloco.storage.weight_files import save_weights

    save_weights(tmp_path / "w", {"a": torch.ones(1)}, {"text": json.dumps(1)})
    with pytest.raises(StorageError, match="metadata does not match its digest"):
        load_sealed(tmp_path / "w")


def test_wrapper_subclasses_round_trip(tmp_path: Path) -> None:
    """Their memory is inside them: two wrappers with data pointer 0 are not the same tensor."""
    one, other = Wrapped(torch.full((2, 3), 1.5)), Wrapped(torch.zeros(2, 3))
    back = kept({"a": one, "b": [other, one]}, tmp_path)
    assert type(back["a"]) is type(back["b"][0]) is Wrapped
    assert torch.equal(back["a"].inner, one.inner)
    assert torch.equal(back["b"][0].inner, other.inner)
    assert back["a"].inner.data_ptr() == back["b"][1].inner.data_ptr()


def test_a_wrapper_whose_class_cannot_be_looked_up_is_rejected() -> None:
    class Local(Wrapped):
        pass

    with pytest.raises(ConfigError, match=r"state\['m'\] is a .*Local, which cannot be saved: de"):
        pack({"m": Local(torch.ones(2))})


@pytest.mark.parametrize("name", ["os:path", "builtins:object", "no.such:Tensor", "torch:Tensor"])
def test_only_wrapper_subclasses_are_restored(name: str) -> None:
    text = json.dumps({"wrapper": [name, [1], [1], None, {"dict": []}]})
    with pytest.raises(StorageError):
        unpack({}, text)
