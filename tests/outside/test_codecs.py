"""Compare the low-bit codecs with a model that was written only from their docs."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.merge import codec
from outside import codec_model as model

GROUPED = ["int8", "int4", "fp4-e3m0", "int2"]
SPARSE = ["topk", "topk-4", "topk-1024"]
ALL = [*GROUPED, *SPARSE]
LENGTHS = [0, 1, 2, 127, 128, 129, 4095, 4096, 4097]
LARGE = 2**18 + 4096 + 131
"""More than one block, with an incomplete group at the end."""


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy(numel: int) -> Tensor:
    return normal(numel, 1) / normal(numel, 2)


def sparse(numel: int) -> Tensor:
    return normal(numel, 3) * (normal(numel, 4) > 2)


def outlier(numel: int) -> Tensor:
    return normal(numel, 5).index_fill(0, torch.arange(min(numel, 1)), -1e12)


def halves(numel: int) -> Tensor:
    """Return many elements halfway between two levels, and many equal elements."""
    return (4 * normal(numel, 6)).round() / 2


def mixed(numel: int) -> Tensor:
    """Return elements of sizes from 1e-30 to 1e30, with a different size per group."""
    powers = torch.randint(-30, 31, (numel // 128 + 1,), generator=torch.Generator().manual_seed(7))
    return normal(numel, 8) * 10.0 ** powers.repeat_interleave(128)[:numel]


FINITE = {
    "normal": lambda numel: normal(numel, 0),
    "heavy tails": heavy,
    "mostly zeros": sparse,
    "all equal": lambda numel: torch.full((numel,), -0.3),
    "all equal, as bf16 holds it": lambda numel: torch.full((numel,), 1.0078125),
    "one outlier": outlier,
    "halves": halves,
    "mixed": mixed,
    "just above a scale": lambda numel: torch.full((numel,), 127.0).nextafter(torch.tensor(200.0)),
    "1e-34": lambda numel: 1e-34 * normal(numel, 9),
    "1e-36": lambda numel: 1e-36 * normal(numel, 13),
    "1e-38": lambda numel: 1e-38 * normal(numel, 10),
    "denormal": lambda numel: torch.full((numel,), 1e-45) * normal(numel, 11).sign(),
    "1e34": lambda numel: 1e34 * normal(numel, 12),
    "zeros": lambda numel: torch.zeros(numel),
    "negative zeros": lambda numel: -torch.zeros(numel),
}

every_codec = pytest.mark.parametrize("name", ALL)
every_kind = pytest.mark.parametrize("kind", FINITE)


def bits(values: Tensor | list[float]) -> np.ndarray:
    """Return the bits of fp32 values, with the same bits for all NaN values."""
    array = torch.as_tensor(values, dtype=torch.float32).numpy()
    return np.where(np.isnan(array), np.float32(math.nan), array).view(np.uint32)


def encode(name: str, values: Tensor) -> bytes:
    return codec(name).encode(values).numpy().tobytes()


def check_decoding(name: str, body: bytes, numel: int) -> Tensor:
    found = codec(name).decode(body, numel)
    expected = bits(model.decode(name, body, numel))
    wrong = np.flatnonzero(bits(found) != expected)
    assert not len(wrong), f"elements {wrong[:5]} of {numel}: {found[wrong[:5]]}"
    return found


def in_parts(name: str, values: Tensor) -> Tensor:
    """Return fp64 [records, elements per record], padded with zeros."""
    size = model.span(name)
    return torch.nn.functional.pad(values.double(), (0, -len(values) % size)).view(-1, size)


@every_codec
class TestBodies:
    @pytest.mark.parametrize("numel", LENGTHS)
    def test_size_and_bits_of_every_length(self, name, numel):
        body = encode(name, normal(numel, numel))
        assert len(body) == codec(name).nbytes(numel) == model.nbytes(name, numel)
        check_decoding(name, body, numel)

    @every_kind
    def test_encoding_and_decoding_match_the_model(self, name, kind):
        for numel in (200, 4097):
            values = FINITE[kind](numel)
            body = encode(name, values)
            check_decoding(name, body, numel)
            if name in GROUPED:
                records = model.groups(name, body)
                right = model.group_is_right
            else:
                records = model.chunks(name, body)
                right = model.chunk_is_right
            parts = model.parts(values.tolist(), model.span(name))
            for number, (part, record) in enumerate(zip(parts, records, strict=True)):
                count = min(model.span(name), numel - number * model.span(name))
                assert right(name, part, record, count), f"record {number} of {numel}: {record}"

    def test_a_long_vector(self, name):
        values = normal(LARGE, 20)
        check_decoding(name, encode(name, values), LARGE)

    def test_parts_of_a_payload_are_the_payloads_of_the_parts(self, name):
        values = torch.cat([heavy(4096 * 3), mixed(4096 * 4), normal(2**18 + 300, 21)])
        group = codec(name).group
        for cut in (group, 3 * group, 4096 * 33):
            parts = encode(name, values[:cut]) + encode(name, values[cut:])
            assert parts == encode(name, values)

    def test_out_at_any_offset(self, name):
        for numel in (5, 131, 4097 + 131):
            values = normal(numel + 9, 22)
            whole = codec(name).encode(values[3 : 3 + numel].clone())
            for offset in range(6):
                room = torch.full((len(whole) + 8,), 7, dtype=torch.uint8)
                view = room[offset : offset + len(whole)]
                assert codec(name).encode(values[3 : 3 + numel], view).data_ptr() == view.data_ptr()
                assert torch.equal(view, whole)
                given = torch.full((numel + 8,), 7.0)
                out = given[offset : offset + numel]
                assert codec(name).decode(view, numel, out) is out
                assert torch.equal(out, codec(name).decode(whole, numel))
                for written, around in ((view, room), (out, given)):
                    written.fill_(7)
                    assert (around == 7).all()  # nothing beside it was written

    def test_buffers_at_any_address(self, name):
        for numel in (5, 4097 + 131):
            whole = encode(name, normal(numel, 23))
            for offset in range(4):
                room = bytearray(len(whole) + 8)
                view = memoryview(room)[offset : offset + len(whole)]
                codec(name).encode(normal(numel, 23), view)
                assert bytes(view) == whole
                assert torch.equal(
                    codec(name).decode(view, numel), codec(name).decode(whole, numel)
                )

    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite_stay_so(self, name, bad):
        for numel, place in ((1, 0), (129, 128), (9000, 0), (9000, 5000), (9000, 8999)):
            values = normal(numel, 24)
            values[place] = bad
            body = encode(name, values)
            found = check_decoding(name, body, numel)
            size = model.span(name)
            broken = ~torch.isfinite(found)
            told = broken[place // size * size :][:size]
            assert told.all() if name in GROUPED else told.any()
            assert not broken[: place // size * size].any()  # others are as they were
            assert not broken[(place // size + 1) * size :].any()

    def test_a_whole_vector_that_is_not_finite(self, name):
        for bad in (math.nan, math.inf, -math.inf):
            values = torch.full((5000,), bad)
            assert not torch.isfinite(codec(name).decode(encode(name, values), 5000)).all()

    def test_zeros_give_zeros(self, name):
        for zero in (0.0, -0.0):
            body = encode(name, torch.full((5000,), zero))
            assert torch.equal(codec(name).decode(body, 5000), torch.zeros(5000))

    @pytest.mark.parametrize("off", [-1, 1])
    def test_a_payload_of_a_wrong_size_is_refused(self, name, off):
        size = model.nbytes(name, 200)
        with pytest.raises(ProtocolError, match=f"{size + off} bytes, codec '{name}' requires"):
            codec(name).decode(bytes(size + off), 200)

    @pytest.mark.parametrize("kind", ["mixed", "1e-34", "1e-36", "1e-38"])
    def test_machines_that_flush_denormal_numbers_to_zero(self, name, kind):
        body = encode(name, FINITE[kind](4097))
        expected = codec(name).decode(body, 4097)
        try:
            assert torch.set_flush_denormal(True)
            found = codec(name).decode(body, 4097)
        finally:
            torch.set_flush_denormal(False)
        assert (bits(found) == bits(expected)).all()


class TestStrangeBodies:
    @pytest.mark.parametrize("name", GROUPED)
    def test_any_bytes_are_a_valid_payload(self, name):
        generator = np.random.default_rng(30)
        for numel in (1, 129, 128 * 200):
            check_decoding(name, generator.bytes(model.nbytes(name, numel)), numel)

    @pytest.mark.parametrize("name", SPARSE)
    def test_any_levels_and_codes(self, name):
        """Elements equal the record's levels even for NaN, infinities, a above b, or negatives."""
        generator = np.random.default_rng(31)
        cut = 4 + 3 * model.kept(name) // 2
        for numel in (1, 4096 * 40, 4097):
            body = np.frombuffer(encode(name, normal(numel, 32)), np.uint8).copy()
            records = body.reshape(-1, model.record_bytes(name))
            noise = np.frombuffer(generator.bytes(len(body)), np.uint8).reshape(records.shape)
            records[:, :4], records[:, cut:] = noise[:, :4], noise[:, cut:]
            check_decoding(name, body.tobytes(), numel)

    @pytest.mark.parametrize("name", SPARSE)
    def test_indices_that_do_not_ascend(self, name):
        numel = 4096 * 2 + 5
        body = encode(name, normal(numel, 33))
        size, k = model.record_bytes(name), model.kept(name)
        for chunk, place, less in product((0, 1, 2), (1, k - 1), (0, 1)):
            indices = model.chunks(name, body)[chunk].indices
            indices[place] = max(0, indices[place - 1] - less)
            at = chunk * size + 4
            bad = body[:at] + model.pack(indices, 12) + body[at + 3 * k // 2 :]
            with pytest.raises(ProtocolError, match="indices that do not ascend"):
                codec(name).decode(bad, numel)
            with pytest.raises(model.Refused):
                model.decode(name, bad, numel)


class TestBounds:
    @every_kind
    @pytest.mark.parametrize("name", ["int8", "int4", "fp4-e3m0"])
    def test_the_error_of_an_element(self, name, kind):
        values = FINITE[kind](4096 * 8 + 5)
        x = in_parts(name, values)
        body = encode(name, values)
        off = (x - in_parts(name, codec(name).decode(body, len(values)))).abs()
        scale = torch.tensor([[group.scale] for group in model.groups(name, body)]).double()
        bound = (scale / 2).expand_as(x)
        if name == "fp4-e3m0":
            bound = torch.maximum(0.336 * x.abs(), scale / 85)
        allowed = torch.where(scale > 0, bound * (1 + 1e-4), model.TOP[name] * model.NO_SCALE)
        assert (off <= allowed).all(), float((off / allowed).max())

    @every_codec
    def test_huge_values_are_close_or_not_finite(self, name):
        for size in (1e36, 3e37, 1e38, 3.38e38, 3.4e38):
            values = size * normal(4097, 25).clamp(-1, 1)
            x = in_parts(name, values)
            found = in_parts(name, codec(name).decode(encode(name, values), 4097))
            finite = torch.isfinite(found).all(1)
            assert (x - found)[finite].square().sum() <= x[finite].square().sum()
            if name in model.TOP and size < 3.37e38:
                assert finite.all()

    @every_kind
    @pytest.mark.parametrize("name", ["int2", *SPARSE])
    def test_the_residual_is_smaller_than_the_input(self, name, kind):
        values = FINITE[kind](4096 * 8 + 5)
        x = in_parts(name, values)
        off = x - in_parts(name, codec(name).decode(encode(name, values), len(values)))
        left, held = off.square().sum(1), x.square().sum(1)
        if name == "int2":
            counts = in_parts(name, torch.ones(len(values))).sum(1)
            taken = (x.abs().sum(1) / counts).square() * counts / 2
            held_back = model.GROUP * model.NO_SCALE**2  # a scale that counts as 0 takes nothing
        else:
            taken = x.abs().amax(1).square() / model.kept(name) * (1 - 2**-15)
            held_back = model.CHUNK * 2.0**-260  # bf16 has few bits for denormal numbers
        assert (left <= held - taken + held_back).all()
