"""The page of all settings, from the models that read them: run it to see the page.

python docs/reference/configuration_page.py
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from decoupled_diloco.config import RunConfig, Settings, WorkloadSettings
from decoupled_diloco.workloads import BUILT_IN, OF_THE_LAB, workload_module

HEAD = """\
# Configuration

A run is one TOML file. Every setting is optional except a budget: `run.max_steps`,
`run.max_tokens`, or both. A key that does not exist, a value out of range, and a setting that the
others make pointless are errors. On the command line `--set table.key=value` overrides the file,
also in a table inside a table: `--set sync.codec.uplink=int4`. The resolved file, with all
defaults, is `run.toml` in the run's folder.

P, H, τ, K, γ and the other symbols are those of the [glossary](glossary.md#symbols). *Paper* is
*Decoupled DiLoCo*, arXiv 2604.21428.
"""

WORKLOADS = """\
## `[workload.options]` { #workload-options }

The options of the built-in workloads. Besides these, a workload gets the run's `seed` and, if the
budget is in steps, `total_steps`. A workload of [your own](../how-to/workload.md) gets whatever
this table holds.
"""


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        parts += _table(name, field)
        if model_in(field.annotation) is WorkloadSettings:
            parts += [WORKLOADS, *_workloads()]
    return "\n".join(parts)


def _table(path: str, field: FieldInfo) -> Iterator[str]:
    """One table: its keys, a list of the tables inside it, and then these tables."""
    fields = model_in(field.annotation).model_fields
    inside = {f"{path}.{key}": each for key, each in fields.items() if holds_a_table(each)}
    yield f"## `{_title(path, field)}` {{ #{path} }}\n\n{_text(field)}\n"
    yield from (setting(path, key, each) for key, each in fields.items() if not holds_a_table(each))
    if inside:
        yield f"### Tables inside `{_title(path, field)}`\n"
        yield from (
            f"- [`{_title(name, each)}`](#{name}): {_text(each)}" for name, each in inside.items()
        )
        yield ""
    for name, each in inside.items():
        yield from _table(name, each)


def _title(path: str, field: FieldInfo) -> str:
    return f"[[{path}]]" if typing.get_origin(field.annotation) is tuple else f"[{path}]"


def _workloads() -> Iterator[str]:
    """The options of the built-in workloads, each where it is first met."""
    told: set[tuple[str, str, str]] = set()
    for workload in (*BUILT_IN, *OF_THE_LAB):
        module = workload_module(workload)
        options: type[Settings] = getattr(module, f"{workload.capitalize()}Options")
        rows = [(key, _facts(field), _text(field)) for key, field in options.model_fields.items()]
        known = [key for key, facts, text in rows if (key, facts, text) in told]
        yield f'### `name = "{workload}"` {{ #workload.{workload} }}\n'
        if known:
            yield f"As above: {', '.join(f'`{key}`' for key in known)}.\n"
        yield "| option | value | meaning |\n|---|---|---|"
        for row in rows:
            if row not in told:
                told.add(row)
                yield "| `{}` | {} | {} |".format(*(cell.replace("|", "\\|") for cell in row))
        yield ""


def model_in(annotation: Any) -> type[Settings]:
    """The table that a field holds, or a list of."""
    candidates = [annotation, *typing.get_args(annotation)]
    (model,) = [c for c in candidates if isinstance(c, type) and issubclass(c, Settings)]
    return model


def holds_a_table(field: FieldInfo) -> bool:
    """Whether a setting is a table of settings, or a list of such tables."""
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    return any(isinstance(each, type) and issubclass(each, Settings) for each in kinds)


def setting(table: str, key: str, field: FieldInfo) -> str:
    """One setting: its name, what may be written, its default, its meaning."""
    return f"### `{key}` {{ #{table}.{key} }}\n\n*{_facts(field)}*\n\n{_text(field)}\n"


def _facts(field: FieldInfo) -> str:
    return "; ".join([_kind(field.annotation), *_range(field), _default(field)])


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("<", "&lt;")


def _kind(annotation: Any) -> str:
    """What is written in the file, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{choice}"`' for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in arguments if each is not type(None))
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is Annotated:
        return _kind(arguments[0])
    kind = origin or annotation
    if isinstance(kind, type) and issubclass(kind, Mapping | Settings):
        return "table"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(annotation, "path")


def _range(field: FieldInfo) -> list[str]:
    """The limits that the value is checked against."""
    words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    return [
        f"{text} {getattr(limit, name)}"
        for limit in field.metadata
        for name, text in words.items()
        if getattr(limit, name, None) is not None
    ]


def _default(field: FieldInfo) -> str:
    if "Default:" in (field.description or ""):
        return "default: see below"
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default in ((), {}):
        return "default: empty"
    if field.default in (None, PydanticUndefined):
        return "not set by default"
    value = field.default
    if isinstance(value, bool | tuple):
        value = json.dumps(value)  # as in TOML
    return f"default: `{value}`"


if __name__ == "__main__":
    print(page())
