"""The page of all settings, from the models that read them: run it to see the page.

python docs/reference/configuration.py
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from decoupled_diloco.config import RunConfig, Settings, WorkloadSettings
from decoupled_diloco.workloads import BUILT_IN

HEAD = """\
# Configuration

A run is one TOML file. Every setting is optional except a budget: `run.budget_steps`,
`run.budget_tokens`, or both. Errors are: a key that does not exist, a value out of range, and a
setting that the others would make pointless. On the command line `--set table.key=value` overrides
the file. The resolved file, with all defaults, is `run.toml` in the run's folder.

P, H, τ, K, γ and the other symbols are those of the [notation](../notation.md). *Paper* is
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
        model = model_in(field.annotation)
        many = typing.get_origin(field.annotation) is tuple
        title = f"[[{name}]]" if many else f"[{name}]"
        parts.append(f"## `{title}` {{ #{name} }}\n\n{field.description}\n")
        for key, each in model.model_fields.items():
            parts.append(setting(name, key, each))
            if (inner := _table_in(each.annotation)) is not None:
                keys = inner.model_fields.items()
                parts += [f"- `{k}` (*{_facts(f)}*): {_text(f)}" for k, f in keys]
                parts.append("")
        if model is WorkloadSettings:
            parts += [WORKLOADS, *_workloads()]
    return "\n".join(parts)


def _workloads() -> Iterator[str]:
    """The options of the built-in workloads, each where it is first met."""
    told: set[tuple[str, str, str]] = set()
    for workload in BUILT_IN:
        module = importlib.import_module(f"decoupled_diloco.workloads.{workload}")
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


def _table_in(annotation: Any) -> type[Settings] | None:
    """The tables that a setting is a list of."""
    kinds = [each for each in typing.get_args(annotation) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, Settings)), None)


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
    value = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"default: `{value}`"


if __name__ == "__main__":
    print(page())
