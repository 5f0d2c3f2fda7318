"""The page of the event tape's records, from the dataclasses that are written: run it to see it.

python docs/reference/tape_page.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, Union

from decoupled_diloco.protocol import messages
from decoupled_diloco.tape import records
from decoupled_diloco.tape.samples import Sample

HEAD = """\
# Event tape

Each process of a run has its own file, `RUN/tape/<process>.jsonl`. It appends what it received,
decided and measured. Reports, displays, replay and checks read nothing else. This is schema
{schema}. A program reads only tapes of its own schema.

When a file has 4 MiB, it becomes a compressed *segment*. Its name,
`RUN/tape/<process>.segments/000004194411.jsonl.xz`, has the position in the whole text at which it
ends. At the end of the run the rest becomes a segment, too, if it is longer than 256 KiB. All
commands read both kinds of files. For other programs, `ddiloco events RUN` prints the records of
all processes in order of time. `xzcat RUN/tape/shard-0.segments/*.xz` prints the compressed records
of one process. A killed process loses the records of at most the last half second. It loses no
segment.

A line is one JSON object:

```json
{{"v":{schema},"at":12.5,"process":"learner-0","seq":7,"kind":"event","type":"Tick","data":{{}}}}
```

| field | meaning |
|---|---|
{fields}

| `kind` | meaning |
|---|---|
| `start` | The process started. `data` has both clocks (`wall`, `monotonic`) and a description. |
| `event` | A state machine received a fact. |
| `effect` | The machine gave an order. `cause` is the `seq` of the event. |
| `sample` | A measurement that no state machine receives. |

Fresh state machines give the same effects for the same events.

Below, *integer* is 0 to 2^53, and *null* means a missing value.
"""

SECTIONS = (
    ("Samples", "Measurements, and what the launcher records.", (Sample,)),
    ("Events of a shard", "", (messages.SyncerEvent,)),
    ("Events of a learner", "", (messages.LearnerEvent,)),
    ("Events of the coordinator", "", (messages.CoordinatorEvent,)),
    ("Effects of a shard", "", (messages.SyncerEffect,)),
    ("Effects of a learner", "", (messages.LearnerEffect,)),
    ("Effects of the coordinator", "", (messages.CoordinatorEffect,)),
    (
        "Messages",
        "What processes send to each other. The field `message` of the events and effects above "
        "holds them, as an object with its `type`.",
        (
            messages.ToLearner,
            messages.FromLearner,
            messages.ToMember,
            messages.FromMember,
            messages.ToShard,
            messages.FromShard,
        ),
    ),
)


def page() -> str:
    """The page, in Markdown."""
    fields = "\n".join(f"| `{name}` | {text} |" for name, text in _attributes(records.Record))
    parts = [HEAD.format(schema=records.SCHEMA, fields=fields)]
    told: set[type] = set()
    for title, text, unions in SECTIONS:
        parts.append(f"## {title}\n\n{text}\n")
        members = [cls for union in unions for cls in typing.get_args(union)]
        parts += [_record(cls, told) for cls in _unique(members)]
    parts.append("## Parts of the above\n")
    parts += [_record(cls, told) for cls in _unique(_nested(told)) if cls not in told]
    return "\n".join(parts)


def _unique(classes: Iterable[type]) -> list[type]:
    return list(dict.fromkeys(classes))


def _attributes(cls: type) -> Iterable[tuple[str, str]]:
    """The fields that a line has, from the docstring of the record."""
    written = ("at", "process", "seq", "kind", "type", "data", "cause")
    yield "v", "The schema's version."
    lines = inspect.getdoc(cls).partition("Attributes:\n")[2].splitlines()  # type: ignore[union-attr]
    for line in lines:
        name, _, text = line.strip().partition(": ")
        if name in written:
            yield name, _code(text)


def _record(cls: type, told: set[type]) -> str:
    """One dataclass: what it means, and its fields."""
    first = cls not in told
    told.add(cls)
    anchor = f" {{ #{cls.__name__} }}" if first else ""
    hints = typing.get_type_hints(cls)
    rows = [f"| `{field.name}` | {_kind(hints[field.name])} |" for field in dataclasses.fields(cls)]
    table = "\n".join(["| field | value |", "|---|---|", *rows]) if rows else "No fields."
    return f"### {cls.__name__}{anchor}\n\n{_code(inspect.getdoc(cls) or '')}\n\n{table}\n"


def _code(text: str) -> str:
    """Docstrings write code in two backquotes, as reStructuredText does."""
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("<", "&lt;")


def _kind(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f'`"{choice}"`' for choice in arguments)
    if origin in (Union, types.UnionType):
        kinds = ["null" if each is type(None) else _kind(each) for each in arguments]
        is_message = set(arguments) <= set(typing.get_args(messages.Message))
        return "one of the [messages](#messages)" if is_message else " or ".join(kinds)
    if origin is tuple:
        inner = arguments[:1] if Ellipsis in arguments else arguments
        return "list of " + ", ".join(_kind(each) for each in inner)
    if dataclasses.is_dataclass(hint):
        name = hint.__name__  # type: ignore[union-attr]
        return f"[{name}](#{name})"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[hint]


def _nested(told: set[type]) -> Iterable[type]:
    """The dataclasses that only stand inside others."""
    waiting = sorted(told, key=lambda cls: cls.__name__)
    seen = set(waiting)
    while waiting:
        for hint in typing.get_type_hints(waiting.pop(0)).values():
            for cls in _dataclasses_in(hint):
                if cls not in seen:
                    seen.add(cls)
                    waiting.append(cls)
                    yield cls


def _dataclasses_in(hint: Any) -> Iterable[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for each in typing.get_args(hint):
        yield from _dataclasses_in(each)


if __name__ == "__main__":
    print(page())
