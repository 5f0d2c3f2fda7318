"""Targets: messages of peers as they arrive, and the state machines that handle them."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import public_text, read_public
from decoupled_diloco.errors import DilocoError, ProtocolError, StorageError
from decoupled_diloco.learner.transfers import StateBlob
from decoupled_diloco.merge import Layout, layout_of
from decoupled_diloco.merge.codec import BuffersExact, codec, codec_names
from decoupled_diloco.merge.packing import packed, unpacked
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Received
from decoupled_diloco.protocol.wire import decode, encode, number_of
from decoupled_diloco.tape.excerpt import excerpt
from decoupled_diloco.transport import byte_ranges
from decoupled_diloco.transport.channel import decode as decode_text
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.fetch import read_object
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens
from fuzz.harness import Target
from fuzz.mutations import any_bytes, any_json, any_lines, dumped, mutated
from fuzz.valid import messages_of
from unit.protocol.conftest import ShardBench

UNIONS: dict[str, tuple[type, ...]] = {
    "from-learner": (messages.Hello, *get_args(messages.FromLearner)),
    "to-learner": get_args(messages.ToLearner),
    "from-member": (messages.Join, *messages.FROM_MEMBER),
    "to-member": (messages.Admitted, messages.JoinRefused, messages.Referred, *messages.TO_MEMBER),
    "from-shard": (messages.ShardHello, *get_args(messages.FromShard)),
    "to-shard": (messages.ShardAdmitted, *get_args(messages.ToShard)),
}
NUMBERED = '{"type":"Ending","checkpoint":3}'
HEADERS = (
    b"bytes 0-5/10\nbytes=0-5\n0-4,8-9\nBearer secret",
    b"bytes 100-199/1000000\nbytes=3-3\n\nbearer secret",
)
QUORUM = 2
STEPS = 8


def of_wire() -> list[Target]:
    """Return targets for control messages, headers, texts in messages, payloads and states."""
    return [
        *(_message(name, classes) for name, classes in UNIONS.items()),
        Target("machine", _machine, [_conversation()], mutate=_sequence, share=0.3),
        Target("layout", lambda data: Layout.from_json(_json(data)), [_layout()], mutate=any_json),
        Target(
            "settings",
            _settings,
            [public_text(RunConfig(run={"name": "a", "max_steps": 9})).encode()],
            mutate=any_json,
        ),
        Target("headers", _headers, HEADERS, (ProtocolError, RequestRefusal), share=3.0),
        Target("answer", _answer, [b'{"run": "a", "shards": []}'], mutate=any_json, share=2.0),
        Target("codecs", _codecs, _bodies(), share=2.0),
        Target("state-head", _state, [_blob()], (StorageError,), mutate=_two_parts),
        Target(
            "excerpt", lambda data: excerpt(data, detail=False), [_lines()], (), mutate=any_lines
        ),
    ]


def _message(name: str, classes: tuple[type, ...]) -> Target:
    def read(data: bytes) -> None:
        found = decode_text(data.decode("utf-8", "surrogatepass"))
        number_of(found)
        decode(found, classes)

    allowed = (ProtocolError, UnicodeDecodeError)  # aiohttp closes on text that is not UTF-8
    return Target(name, read, messages_of(classes), allowed, any_json, share=2.0)


def _json(data: bytes) -> Any:
    """Decode JSON like all code that reads JSON within JSON."""
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(str(error)[:100]) from None


def _layout() -> bytes:
    model = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5))
    return json.dumps(layout_of(model).to_json()).encode()


def _settings(data: bytes) -> None:
    read_public(data.decode("utf-8", "replace"))


def _headers(data: bytes) -> None:
    text = data.decode("latin-1")
    content, part, received, authorization, *_ = [*text.split("\n"), "", "", "", ""]
    byte_ranges.read_content_range(content)
    byte_ranges.read_range(part)
    byte_ranges.read_list(received)
    Tokens("secret").authorize(authorization, "learner-0")


def _answer(data: bytes) -> None:
    read_object(Document(data), "a syncer")


CODECS = [*codec_names(), "topk-4"]
BASE = torch.arange(3.0, 18.0)
BUFFERS = BuffersExact(codec("bf16"), 3, (5, 1, 9))


def _bodies() -> list[bytes]:
    bodies = [codec(name).encode(torch.arange(8.0)).numpy().tobytes() for name in CODECS]
    short = packed(
        BUFFERS.encode(torch.arange(18.0)), torch.cat([torch.ones(6), BASE[6:]]), BUFFERS
    )
    return [*bodies, short.numpy().tobytes()]


def _codecs(data: bytes) -> None:
    for name in CODECS:
        with contextlib.suppress(ProtocolError):
            codec(name).decode(memoryview(data), 8)
    with contextlib.suppress(ProtocolError):
        BUFFERS.decode(unpacked(memoryview(data), BASE, BUFFERS), 18)


def _blob() -> bytes:
    state = {"a": torch.ones(3), "b": (torch.zeros(2, 2), b"x", 1e300), "c": [None, {1: "x"}]}
    blob = StateBlob.of(
        {**state, "z": torch.ones(2, dtype=torch.complex64), "n": torch.ones(2).numpy()}
    )
    return blob.head() + b"\n" + blob.data.numpy().tobytes()


def _two_parts(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Mutate the head as JSON and the rest as bytes."""
    head, _, data = rng.choice(samples).partition(b"\n")
    if rng.random() < 0.8:
        head = any_json(rng, [head])
    return head + b"\n" + (any_bytes(rng, [data]) if rng.random() < 0.3 else data)


def _state(data: bytes) -> None:
    head, _, rest = data.partition(b"\n")
    blob, _ = StateBlob.open(head, len(rest))
    blob.data[:] = torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else blob.data
    blob.state()


def _lines() -> bytes:
    return b"".join(
        b'{"v":4,"at":1.5,"process":"learner-0","seq":1,"kind":"%s","type":"%s","data":{%s}}\n'
        % each
        for each in (
            (b"start", b"start", b'"wall":1.0,"monotonic":1.0,"pid":7,"header":{"token":"x"}'),
            (b"event", b"StepFinished", b'"step":3'),
            (b"event", b"Connected", b'"nonce":"abc","learner":"a"'),
            (b"effect", b"Holding", b'"learner":"a","fragment":2'),
        )
    )


def _conversation() -> bytes:
    """Return messages of two learners of a shard, each with its sender."""
    sent = [["a", encode(messages.StepReport(step, 10 * step, 0.5))] for step in range(1, STEPS)]
    sent += [["b", json.loads(each)] for each in messages_of(get_args(messages.FromLearner))]
    return json.dumps(sent).encode()


def _sequence(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return a random sequence of these messages, some of them changed."""
    known = json.loads(samples[0])
    sent = [rng.choice(known) for _ in range(rng.randrange(1, 12))]
    return dumped(
        [[process, mutated(rng, each) if rng.random() < 0.4 else each] for process, each in sent]
    )


def _machine(data: bytes) -> None:
    """Decode and handle messages like a shard's session, which drops invalid ones."""
    bench = ShardBench("a", "b", quorum=QUORUM, fragments=2, period=4, overlap=1)
    try:
        conversation = json.loads(data)
    except (ValueError, RecursionError):
        return
    for number, (process, content) in enumerate(conversation):
        try:
            message: Any = decode(content, get_args(messages.FromLearner))
            bench.handle(Received(process, message), at=0.5 * number)
        except DilocoError:
            continue
