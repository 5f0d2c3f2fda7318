"""Valid samples: the messages and files of a small real run."""

from __future__ import annotations

import dataclasses
import json
import random
import types
import typing
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from decoupled_diloco.protocol.wire import encode
from integration.real_system import Model, System, Trainer, training

TEXT = ("learner-0", "a", "/bodies/shard-0/1/2", "0984748b2e711515551990b516c749e3", "bf16")


def instance(cls: type, rng: random.Random) -> Any:
    """Create an instance of a dataclass with random valid values."""
    hints = typing.get_type_hints(cls)
    return cls(**{f.name: _value(hints[f.name], rng) for f in dataclasses.fields(cls)})


def _value(hint: Any, rng: random.Random) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return rng.choice(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(_value(arguments[0], rng) for _ in range(rng.randrange(3)))
    if origin is tuple:
        return tuple(_value(argument, rng) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return _value(rng.choice(arguments), rng)
    if dataclasses.is_dataclass(hint):
        return instance(typing.cast("type", hint), rng)
    plain = {int: rng.randrange(4), float: rng.random(), str: rng.choice(TEXT), bool: True}
    return None if hint is type(None) else plain[hint]


@cache
def messages_of(classes: tuple[type, ...]) -> tuple[bytes, ...]:
    """Return some messages of each class as JSON."""
    rng = random.Random(1)
    return tuple(
        json.dumps(encode(instance(cls, rng))).encode() for cls in classes for _ in range(4)
    )


def small_run(folder: Path) -> Path:
    """Run two learners and one shard to the end, with all files kept, and return the folder."""
    system = System(folder, run={"max_steps": 16}, syncer={"shards": 1, "record_payloads": True})
    try:
        system.start()
        trainers = [Trainer(system, f"learner-{index}", Model(seed=index)) for index in range(2)]
        with training(*trainers):
            for trainer in trainers:
                trainer.end()
            system.wait_finished()
    finally:
        system.close()
    return folder


def thinned(lines: Iterable[bytes], each: int = 1) -> bytes:
    """Reduce a tape to a few lines of each kind, so that reading it takes a millisecond."""
    seen: dict[object, int] = {}
    kept = []
    for line in lines:
        record = json.loads(line)
        inner = record["data"].get("message")
        key = (record["type"], inner["type"] if isinstance(inner, dict) else None)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= each:
            kept.append(line)
    return b"".join(kept)
