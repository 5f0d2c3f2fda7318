"""The settings of a run from the arguments of `Study.run`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.plugins import load_plugins, method_named, register_method
from decoupled_diloco.config.settings import is_own
from decoupled_diloco.config.toml_files import RECIPES, read_run_tables
from decoupled_diloco.errors import ConfigError, a_kind
from decoupled_diloco_lab.study.functions import source_digest

Part = str | Callable[..., Any]
"""A shipped method's name, ``"module:function"``, or the function or class itself."""

KINDS = {
    "merge": ("merge rule", "sync.merge.rule"),
    "outer": ("outer optimizer", "outer.optimizer"),
    "codec": ("codec", "sync.codec.uplink"),
    "schedule": ("schedule", "sync.schedule"),
    "participation": ("participation rule", "sync.participation"),
}
"""Each argument of `Study.run` that may be a function: its kind, and its setting."""


def settings_of_recipe(name: str, learners: int) -> dict[str, Any]:
    """Return the method of a shipped recipe for a number of learners, by dotted keys.

    A recipe that waits for all of its learners waits for all of these.
    """
    tables = read_run_tables(RECIPES.files()[name])
    if tables["sync"].get("quorum") == tables["run"]["learners"]:
        tables["sync"]["quorum"] = learners
    return {
        f"{key}.{inner}": value
        for key in ("sync", "outer")
        for inner, value in tables.get(key, {}).items()
    }


@dataclass(frozen=True)
class Method:
    """A method of a study.

    Attributes:
        tables: Its settings, as the tables of a run's file.
        digests: The digest of the source of each of its functions, by the setting.
        faults: Plans faults of a run before it starts, if there are any.
    """

    tables: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    faults: Callable[[Any], None] | None = None

    @classmethod
    def make(
        cls,
        parts: Mapping[str, Part | None],
        settings: Mapping[str, Any],
        faults: Callable[[Any], None] | None = None,
    ) -> Method:
        """Register the functions of a method, after a trial of each.

        Args:
            parts: By the names of `KINDS`.
            settings: Values by dotted keys of a run's file, such as ``"sync.sync_every"``.
            faults: See `Study.run`.

        Raises:
            ConfigError: A function fails its trial, or a module cannot be imported.
        """
        tables: dict[str, Any] = {"run": {}}
        digests: dict[str, str] = {} if faults is None else {"faults": source_digest(faults)}
        for name, part in parts.items():
            if part is None:
                continue
            kind, key = KINDS[name]
            if isinstance(part, str):
                _set(tables, key, part)
                if is_own(part):
                    load_plugins(tables, Path.cwd())
                    digests[key] = source_digest(method_named(part))
            elif callable(part):
                digests[key] = source_digest(part)
                own = name_of(part, digests[key])
                register_method(kind, own, part)
                _set(tables, key, own)
            else:
                raise ConfigError(
                    f"{name}={part!r} is {a_kind(part)}: pass a name, a function or a class"
                )
        for key, value in settings.items():
            _set(tables, key, value)
        return cls({name: table for name, table in tables.items() if table}, digests, faults)

    def config(self, **given: Mapping[str, Any]) -> RunConfig:
        """Return the whole configuration of a run.

        Args:
            given: Tables to add, with values that the method may replace.

        Raises:
            ConfigError: A setting is not known or not valid.
        """
        tables: dict[str, Any] = {name: dict(table) for name, table in given.items()}
        for name, table in self.tables.items():
            own = {k: v for k, v in table.items() if (name, k) != ("run", "imports_from")}
            tables[name] = {**tables.get(name, {}), **own}
        return RunConfig(**tables)


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted key."""
    *path, last = key.split(".")
    if not path:
        raise ConfigError(
            f"settings has the key {key!r}: write it with its table, such as 'sync.sync_every'"
        )
    for name in path:
        tables = tables.setdefault(name, {})
    tables[last] = value


def name_of(part: object, digest: str) -> str:
    """Return a function's name in settings and on the tape, with the start of its digest.

    Another function of the same name thus has another name: a notebook defines functions again.
    """
    named = getattr(part, "func", part)  # of a `functools.partial`
    module = getattr(named, "__module__", None) or type(named).__module__
    name = getattr(named, "__qualname__", type(named).__qualname__)
    name = re.sub(r"\W+", "_", name.rpartition("<locals>.")[2], flags=re.ASCII).strip("_")
    return f"{module}:{name}_{digest[:8]}"
