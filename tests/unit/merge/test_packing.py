"""Packed payloads omit unchanged buffers and unpack to the same bits."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge import codec
from decoupled_diloco.merge.codec import BuffersExact
from decoupled_diloco.merge.packing import BufferHistory, packed, packed_sizes, unpacked

PARAMETERS = 5
SIZES = (16, 1, 3, 40)
WIRE = BuffersExact(codec("bf16"), PARAMETERS, SIZES)
N = PARAMETERS + sum(SIZES)


def body_of(buffers: Tensor, wire: BuffersExact = WIRE) -> Tensor:
    return wire.encode(torch.cat([torch.linspace(-1, 1, wire.parameters_numel), buffers]))


def changed(buffers: Tensor, *which: int, by: float = 0.25) -> Tensor:
    """Return the buffers with one element changed in some of them."""
    result = buffers.clone()
    for index in which:
        result[sum(SIZES[: index + 1]) - 1] += by
    return result


BASE = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("which", [(), (0,), (1,), (3,), (0, 2), (1, 2, 3)])
def test_a_packed_payload_includes_the_buffers_that_differ(which: tuple[int, ...]) -> None:
    body = body_of(changed(BASE, *which))
    short = packed(body, BASE, WIRE)
    assert short.numel() == 2 * PARAMETERS + 1 + 4 * sum(SIZES[index] for index in which)
    assert torch.equal(unpacked(short, BASE, WIRE), body)
    assert short.numel() in packed_sizes(WIRE, N)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "int2", "topk-4"])
@pytest.mark.parametrize("numel", [0, 1, 7, 300])
def test_packing_works_with_every_parameter_codec(name: str, numel: int) -> None:
    """Some payloads have odd sizes before the buffers; some fragments have only buffers."""
    wire = BuffersExact(codec(name), numel, SIZES)
    body = body_of(changed(BASE, 2), wire)
    short = packed(body, BASE, wire)
    assert short.numel() == codec(name).nbytes(numel) + 1 + 4 * 3
    assert torch.equal(unpacked(short, BASE, wire), body)
    assert torch.equal(short[: wire.parameters_nbytes], body[: wire.parameters_nbytes])


def test_a_payload_with_only_changed_buffers_is_not_packed() -> None:
    body = body_of(changed(BASE, 0, 1, 2, 3))
    assert packed(body, BASE, WIRE) is body
    assert unpacked(body, None, WIRE) is body
    assert packed_sizes(WIRE, N)[-1] == body.numel() == WIRE.nbytes(N)


def test_a_payload_that_would_not_become_shorter_is_not_packed() -> None:
    """Its size shows that it is not packed: 32 flags take as many bytes as one number saves."""
    wire = BuffersExact(codec("fp32"), 0, (1,) * 32)
    base = torch.arange(32.0)
    body = wire.encode(torch.cat([base[:1], base[1:] + 1]))
    assert packed(body, base, wire) is body


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, -0.0), (math.nan, 1.0), (-math.inf, math.inf), (1.0, 1.0 + 2**-23)],
    ids=["sign of zero", "not a number", "infinite", "last bit"],
)
def test_packing_compares_bits_and_not_values(before: float, after: float) -> None:
    base, values = torch.full((60,), before), torch.full((60,), before)
    assert packed(body_of(values), base, WIRE).numel() == 2 * PARAMETERS + 1
    values[16] = after
    short = packed(body_of(values), base, WIRE)
    assert short.numel() == 2 * PARAMETERS + 1 + 4
    assert torch.equal(unpacked(short, base, WIRE), body_of(values))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda body: body[:10], "has 10 bytes, the fragment requires 11 to 250"),
        (lambda body: body[:-1], "has 14 bytes, its parameters and buffers require 15"),
        (
            lambda body: torch.cat([body, body[:4]]),
            "has 19 bytes, its parameters and buffers require",
        ),
        (lambda body: torch.cat([body] * 30), "has 450 bytes, the fragment requires 11 to 250"),
        (lambda body: body.index_fill(0, torch.tensor([10]), 0xF2), "includes more buffers than"),
        (lambda body: body.index_fill(0, torch.tensor([10]), 0x0F), "buffers require 251"),
    ],
    ids=["no flags", "short", "long", "too long", "unused flag", "all named"],
)
def test_an_invalid_packed_payload_is_rejected(damage: object, problem: str) -> None:
    short = packed(body_of(changed(BASE, 1)), BASE, WIRE)
    assert callable(damage)
    with pytest.raises(ProtocolError, match=problem):
        unpacked(damage(short), BASE, WIRE)


def test_a_packed_payload_without_its_base_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="its base version is not known"):
        unpacked(packed(body_of(BASE), BASE, WIRE), None, WIRE)


@pytest.mark.parametrize("seed", range(20))
def test_a_history_returns_the_buffers_of_earlier_versions(seed: int) -> None:
    rng = random.Random(seed)
    history, buffers = BufferHistory(SIZES, earlier=3), BASE
    known: list[Tensor] = []
    for version in range(8):
        which = rng.sample(range(len(SIZES)), rng.randint(0, len(SIZES)))
        buffers = changed(buffers, *which)
        known.append(buffers.clone())
        before = history.add(version, buffers)
        assert (before is None) == (version == 0)
        for each, values in enumerate(known):
            found = history.of(each)
            if each < version - 3:
                assert found is None
            else:
                assert found is not None
                assert torch.equal(found, values)
    assert history.of("another") is None


def test_a_history_of_constant_buffers_uses_almost_no_memory() -> None:
    sizes = (1 << 16, 4)
    history, mask = BufferHistory(sizes, earlier=32), torch.ones(1 << 16)
    for version in range(40):
        history.add(version, torch.cat([mask, torch.full((4,), float(version))]))
    assert sum(left.numel() for left in history._before.values()) == 32 * (1 + 16)
