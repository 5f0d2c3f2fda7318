import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from decoupled_diloco.config.sync import BITS, bits_of
from decoupled_diloco.errors import ConfigError, MergeError, ProtocolError
from decoupled_diloco.merge import (
    Codec,
    RawCodec,
    as_bytes,
    codec,
    codec_names,
    contribution,
    digest,
    gather,
    layout_of,
    partition,
    publish,
    receive,
    register_codec,
    scatter,
    tensors_of,
)
from decoupled_diloco.merge.blocks import BLOCK
from decoupled_diloco.merge.codec import BuffersExact

GROUPED = {"int8": 130, "int4": 66, "fp4-e3m0": 66, "int2": 34}
"""The codecs with one scale per 128 elements, with the bytes per group."""
SPARSE = {"topk": 144, "topk-4": 11}
"""The codecs that send the largest of 4,096 elements, with the bytes per chunk."""
EVERY = ["fp32", "bf16", *GROUPED, *SPARSE]
MANY = BLOCK + 5


def vector(numel=7):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


class WholeCodec:
    """A codec whose payloads cannot be split: the largest magnitude, then one byte per element."""

    name = "test-int8"
    group = None

    def nbytes(self, numel):
        return 4 + numel

    def encode(self, vector, out=None):
        out = torch.empty(self.nbytes(vector.numel()), dtype=torch.uint8) if out is None else out
        scale = vector.abs().max().clamp_min(1e-30).reshape(1)
        out[:4] = scale.view(torch.uint8)
        out[4:] = (vector / scale * 127).round().to(torch.int8).view(torch.uint8)
        return out

    def decode(self, body, numel, out=None):
        body = as_bytes(body)
        scale = body[:4].clone().view(torch.float32)
        decoded = body[4:].view(torch.int8).float() * scale / 127
        return decoded if out is None else out.copy_(decoded)


class GroupCodec(RawCodec):
    """A codec with groups of three elements, padded to four bytes each."""

    group = 3

    def nbytes(self, numel):
        return -(-numel // 3) * 4 * 3

    def encode(self, vector, out=None):
        out = torch.empty(self.nbytes(vector.numel()), dtype=torch.uint8) if out is None else out
        out.zero_()
        out[: vector.numel() * 4] = vector.view(torch.uint8)
        return out

    def decode(self, body, numel, out=None):
        return out.copy_(as_bytes(body)[: numel * 4].view(torch.float32))


class TestCodecs:
    @pytest.mark.parametrize(
        ("name", "size"), [("fp32", 28), ("bf16", 14), *GROUPED.items(), *SPARSE.items()]
    )
    def test_size(self, name, size):
        found: Codec = codec(name)
        assert found.name == name
        assert found.nbytes(7) == size
        body = found.encode(vector())
        assert (body.dtype, body.shape) == (torch.uint8, (size,))

    def test_payloads_are_little_endian(self):
        assert bytes(codec("fp32").encode(torch.tensor([1.0])).numpy()) == b"\x00\x00\x80\x3f"
        assert bytes(codec("bf16").encode(torch.tensor([1.0])).numpy()) == b"\x80\x3f"

    def test_fp32_is_lossless(self):
        assert torch.equal(codec("fp32").decode(codec("fp32").encode(vector()), 7), vector())

    def test_bf16_rounds_to_nearest_even(self):
        bits = vector(1000).numpy().view(np.uint32)
        bits = np.concatenate([bits, bits & 0xFFFF0000 | 0x8000]).astype(np.uint32)  # and ties
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        values = torch.from_numpy(bits.view(np.float32).copy())
        found = codec("bf16").decode(codec("bf16").encode(values), values.numel())
        assert np.array_equal(found.numpy().view(np.uint32), rounded.astype(np.uint32))

    @pytest.mark.parametrize("name", EVERY)
    def test_encodes_into_given_memory_even_if_misaligned(self, name):
        plain = codec(name).encode(vector())
        for offset in range(4):
            room = bytearray(plain.numel() + 8)
            view = memoryview(room)[offset : offset + plain.numel()]
            codec(name).encode(vector(), view)
            assert bytes(view) == bytes(plain.numpy())
            out = torch.empty(7)
            assert codec(name).decode(view, 7, out) is out
            assert torch.equal(out, codec(name).decode(plain, 7))
            tensor = torch.zeros(plain.numel() + 8, dtype=torch.uint8)[offset:][: plain.numel()]
            assert torch.equal(codec(name).encode(vector(), tensor), plain)
            assert torch.equal(codec(name).decode(tensor, 7), out)

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_decodes_any_buffer(self, name, kind):
        body = codec(name).encode(vector())
        given = kind(bytes(body.numpy()))
        assert torch.equal(codec(name).decode(given, 7), codec(name).decode(body, 7))

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("body", [b"", b"x" * 13, b"x" * 29])
    def test_a_payload_of_the_wrong_size(self, name, body):
        with pytest.raises(ProtocolError, match=f"{len(body)} bytes, codec '{name}' requires"):
            codec(name).decode(body, 7)

    @pytest.mark.parametrize("name", ["fp32", "bf16", *GROUPED])  # others look at a body's indices
    def test_payloads_and_values_stay_on_their_device(self, name):
        values = torch.empty(7, device="meta")
        body = codec(name).encode(values)
        assert body.device.type == "meta"
        assert codec(name).decode(body, 7).device.type == "meta"
        receive(values, body, codec(name))  # on one device, or torch would refuse
        exact = BuffersExact(codec(name), 5)
        assert exact.decode(exact.encode(values), 7).device.type == "meta"

    def test_a_read_only_buffer_is_not_written_to(self):
        with pytest.raises(AssertionError, match="read-only"):
            codec("fp32").encode(torch.ones(1), memoryview(b"1234"))

    def test_settings_have_the_bits_of_each_codec(self):
        sample = 2**20
        for name, bits in BITS.items():
            assert 8 * codec(name).nbytes(sample) / sample == bits
        assert bits_of("topk-160") == 8 * codec("topk-160").nbytes(sample) / sample

    def test_the_error_for_an_unknown_name_has_the_closest_match(self):
        with pytest.raises(ConfigError, match="'bf-16' is unknown: did you mean 'bf16'"):
            codec("bf-16")

    @pytest.mark.parametrize("name", EVERY)
    def test_every_valid_k_is_accepted(self, name):
        assert codec(name).name == name
        assert (name in codec_names()) == ("topk-" not in name)

    @pytest.mark.parametrize("k", [3, 6, 1028, 123456789])
    def test_an_invalid_k_is_rejected(self, k):
        with pytest.raises(ConfigError, match=f"'topk-{k}' would send {k} of 4096 elements: use"):
            codec(f"topk-{k}")

    @pytest.mark.parametrize("name", ["topk-", "topk-0", "topk-04", "topk-x", "topk-4\n", "topk-٤"])
    def test_a_name_without_a_valid_number_is_rejected(self, name):
        with pytest.raises(ConfigError, match="is unknown: did you mean 'topk'"):
            codec(name)

    def test_a_number_with_too_many_digits_is_rejected(self):
        with pytest.raises(ConfigError, match="is unknown"):
            codec("topk-" + "4" * 5000)

    def test_registering(self, monkeypatch):
        monkeypatch.setattr(sys.modules[RawCodec.__module__], "_codecs", {})
        register_codec(RawCodec("test-fp16", torch.float16))
        assert codec("test-fp16").nbytes(3) == 6
        with pytest.raises(ConfigError, match="already registered"):
            register_codec(RawCodec("test-fp16", torch.float16))


class Half:
    """A minimal custom codec."""

    name = "test-half"
    group = 1

    def nbytes(self, numel):
        return 2 * numel

    def encode(self, vector):
        return vector.half().view(torch.uint8)

    def decode(self, body, numel):
        return body.view(torch.float16).float()


@pytest.fixture
def no_codecs(monkeypatch):
    monkeypatch.setattr(sys.modules[RawCodec.__module__], "_codecs", {})


@pytest.mark.usefixtures("no_codecs")
class TestSimpleCodec:
    def test_it_is_a_whole_codec_once_registered(self):
        register_codec(Half())
        half, values = codec("test-half"), vector(300)
        body = half.encode(values)
        assert torch.equal(half.decode(body, 300), values.half().float())
        room = torch.empty(600, dtype=torch.uint8)
        half.encode(values, room)
        assert torch.equal(room, body)
        assert half.encode(values, memoryview(bytearray(600))).numel() == 600
        odd = memoryview(b"x" + bytes(body.numpy()))[1:]
        assert torch.equal(half.decode(odd, 300), values.half().float())
        out = torch.empty(300)
        assert half.decode(bytes(body.numpy()), 300, out) is out
        assert torch.equal(out, values.half().float())
        assert half.group == 1

    def test_payloads_of_another_size_are_rejected_before_decoding(self):
        register_codec(Half())
        for size in (0, 599, 601):
            with pytest.raises(ProtocolError, match="requires 600"):
                codec("test-half").decode(bytes(size), 300)

    def test_any_exception_rejects_a_payload(self):
        class Strict(Half):
            def decode(self, body, numel):
                if body.any():
                    return super().decode(body, numel)
                raise ValueError("nothing in it")

        register_codec(Strict())
        with pytest.raises(ProtocolError, match="cannot decode a payload: ValueError"):
            codec("test-half").decode(bytes(6), 3)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"name": ""}, "has no name"),
            ({"nbytes": lambda self, n: 2 * n + 1}, r"must return uint8 \[3\]"),
            ({"encode": lambda self, v: v}, r"must return uint8 \[2\]"),
            ({"encode": lambda self, v: v.neg_().half().view(torch.uint8)}, "changed the vector"),
            ({"decode": lambda self, b, n: b.view(torch.float16)}, r"must return float32 \[1\]"),
            ({"decode": lambda self, b, n: torch.full((n,), float("inf"))}, "not finite"),
            ({"decode": lambda self, b, n: torch.rand(n)}, "a second call returned different bits"),
            ({"group": 0}, "group=0"),
            ({"group": 1.5}, "group=1.5"),
            ({"encode": None}, "is a Half without encode"),
            (
                {"encode": lambda self, v: (v - v.mean()).half().view(torch.uint8)},
                "not its parts' payloads",
            ),
        ],
    )
    def test_a_faulty_codec_is_rejected_before_a_run(self, changes, message):
        wrong = type("Half", (Half,), changes)()
        with pytest.raises(ConfigError, match=message):
            register_codec(wrong)
        assert not sys.modules[RawCodec.__module__]._codecs


class TestDigest:
    def test_known_value(self):
        assert digest(b"") == "99aa06d3014798d86001c324468d497f"

    def test_the_same_bytes_in_any_type_have_the_same_digest(self):
        tensor = vector(6)
        raw = tensor.numpy().tobytes()
        for body in (raw, bytearray(raw), memoryview(raw), tensor.view(2, 3), as_bytes(tensor)):
            assert digest(body) == digest(raw)
        assert digest(tensor.to(torch.bfloat16)) != digest(raw)

    def test_one_bit_changes_it(self):
        assert digest(b"\x00") != digest(b"\x01")

    def test_nothing_is_copied(self):
        tensor = vector()
        assert as_bytes(tensor).data_ptr() == tensor.data_ptr()
        raw = b"12345678"
        assert as_bytes(raw).data_ptr() == np.frombuffer(raw, np.uint8).ctypes.data

    def test_a_view_keeps_its_buffer_alive(self):
        view = as_bytes(bytes(range(200)))
        assert view.tolist() == list(range(200))


class TestContribution:
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 6),
            nn.Linear(6, 5, dtype=torch.bfloat16),
            nn.Linear(5, 4, dtype=torch.float16),
            nn.Linear(4, 3, dtype=torch.float64),
        )

    def test_no_training_contributes_exactly_zero_in_every_dtype(self):
        model = self.model()
        layout = layout_of(model)
        tensors = tensors_of(model, layout)
        for fragment in partition(layout, 3):
            published = vector(fragment.numel)
            scatter(fragment, published, tensors)
            d = contribution(fragment, layout, gather(fragment, tensors), published)
            assert d.dtype == torch.float32
            assert torch.equal(d, torch.zeros(fragment.numel))

    def test_returns_the_change_of_training(self):
        model = self.model()
        layout = layout_of(model)
        (fragment,) = partition(layout, 1)
        tensors = tensors_of(model, layout)
        published = vector(fragment.numel)
        scatter(fragment, published, tensors)
        before = gather(fragment, tensors)
        scatter(fragment, before + 1, tensors)
        theta = gather(fragment, tensors)
        d = contribution(fragment, layout, theta, published)
        assert torch.equal(d, theta - before)
        assert contribution(fragment, layout, theta, published, out=theta) is theta
        assert torch.equal(theta, d)

    def test_longer_than_a_block(self):
        model = nn.Linear(MANY, 1, bias=False, dtype=torch.bfloat16)
        layout = layout_of(model)
        (fragment,) = partition(layout, 1)
        published = vector(MANY)
        theta = published.to(torch.bfloat16).float() + 1
        d = contribution(fragment, layout, theta, published)
        torch.testing.assert_close(d, torch.ones(MANY), rtol=1e-5, atol=1e-5)

    def test_sizes_must_match(self):
        layout = layout_of(nn.Linear(2, 2))
        (fragment,) = partition(layout, 1)
        with pytest.raises(AssertionError, match="N=6"):
            contribution(fragment, layout, torch.zeros(5), torch.zeros(5))


@pytest.mark.parametrize("numel", [1, 2, 5, 127, 129])
@pytest.mark.parametrize("name", GROUPED)
def test_feedback_sends_a_short_last_group_in_few_rounds(name, numel):
    given, rest = vector(numel), torch.zeros(numel)
    total = torch.zeros(numel)
    for _ in range(64):
        sent = codec(name).decode(codec(name).encode(given + rest), numel)
        rest += given - sent
        total += sent
    assert float((total / 64 - given).norm()) < 0.1 * float(given.norm())


CODECS = [*map(codec, EVERY), WholeCodec(), GroupCodec("test-group", torch.float32)]
COARSE = ["int4", "fp4-e3m0", "int2", *SPARSE]


@pytest.mark.parametrize("used", CODECS, ids=lambda used: used.name)
class TestPublish:
    def test_sender_and_receivers_have_the_same_bits(self, used):
        master, sent = vector(MANY), torch.zeros(MANY)
        received = sent.clone()
        for step in range(3):
            master += 0.1 * vector(MANY).roll(step)
            receive(received, publish(master, sent, used), used)
            assert torch.equal(sent, received)

    def test_the_rounding_error_is_sent_next_time(self, used):
        master, published = vector(MANY), torch.zeros(MANY)
        errors, norms = [], [float(master.norm())]
        for _ in range(4):
            publish(master, published, used)
            errors.append(float((master - published).abs().max()))
            norms.append(float((master - published).norm()))
        assert norms == sorted(norms, reverse=True)
        if used.name not in COARSE:
            assert errors[0] < 0.05
            assert errors[-1] <= 2**-22  # half a unit in the last place of the largest element

    def test_a_diverged_master_raises_and_changes_nothing(self, used):
        for bad in (math.nan, math.inf):
            master, published = torch.ones(MANY), torch.zeros(MANY)
            master[-1] = bad
            with pytest.raises(MergeError, match="the outer step diverged"):
                publish(master, published, used)
            assert torch.equal(published, torch.zeros(MANY))

    def test_a_payload_of_the_wrong_size_changes_nothing(self, used):
        published = torch.zeros(9)
        with pytest.raises(ProtocolError, match="payload has 3 bytes"):
            receive(published, b"123", used)
        assert torch.equal(published, torch.zeros(9))

    def test_the_payload_is_the_encoded_difference(self, used):
        master, published = vector(9), vector(9).roll(1)
        expected = used.encode(master - published)
        room = torch.zeros(used.nbytes(9), dtype=torch.uint8)
        body = publish(master, published, used, room)
        assert torch.equal(body, expected)
        assert body.data_ptr() == room.data_ptr()


def test_the_payload_of_a_long_vector_is_its_parts_payloads():
    for used in map(codec, EVERY):
        master = vector(MANY)
        assert torch.equal(publish(master, torch.zeros(MANY), used), used.encode(master))


def test_bf16_overflow_raises():
    with pytest.raises(MergeError, match="more than codec 'bf16' can hold"):
        publish(torch.full((3,), 3.4e38), torch.zeros(3), codec("bf16"))
