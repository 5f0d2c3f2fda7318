"""Configuration files: TOML in, with overrides from the command line; resolved TOML out.

Recipes that come with the package are found by their bare names. They lie in `recipes/` of the
repository, and within the package where it is installed from a wheel. Another distribution may ship
files of another kind.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from decoupled_diloco.config.parties import read_members
from decoupled_diloco.config.plugins import load_plugins
from decoupled_diloco.config.renamed import override_for, sentence_for, toml_text
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.settings import nearest, shown
from decoupled_diloco.config.sync import methods_unchecked
from decoupled_diloco.config.toml_tables import read_tables
from decoupled_diloco.errors import ConfigError

_SCENARIOS_OWN = {"set", "until_seconds", "parameters"}
"""Keys that only a scenario file has."""

_SCENARIOS_LISTS = {"learners", "links", "events", "random"}
"""Lists that only a scenario file has."""

_BARE = re.compile(r"(?!(true|false|inf|nan)$)[A-Za-z][\w./:-]*", re.ASCII)
"""Texts that an override may write without quotes."""

INSTALL = "run pip install -e '.[cli]' in the clone"
"""How to install the extra of the command line."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, plugins: bool = True
) -> RunConfig:
    """Read a run's TOML file, apply overrides, import what it names, and check everything.

    Args:
        path: The file.
        overrides: Texts `"table.key=value"`; later ones win. Values are TOML. A value that is not
            valid TOML is a text, so quotes can be left out. An empty value removes the key from
            the file, which restores its default.
        plugins: Whether to import the modules that the file names (`[run] imports`, and methods
            such as ``"module:function"``). False: such methods are not checked and cannot be used.

    Raises:
        ConfigError: The file or that of its parties cannot be read, a setting is not valid, or a
            module cannot be imported.
    """
    tables = read_run_tables(Path(path))
    for override in overrides:
        override_key(tables, override)
    if not tables:
        raise ConfigError(
            f"{path} is empty: write the settings of a run, at least [run] with max_steps"
        )
    read_members(tables)
    if not plugins:
        with methods_unchecked():
            return RunConfig(**tables)
    load_plugins(tables, Path(path).parent)
    return RunConfig(**tables)


def dump_config(config: RunConfig) -> str:
    """Return the resolved configuration as TOML, which loads as the same configuration.

    It contains every default, except settings that have no effect with the other settings.

    Raises:
        ConfigError: `tomli-w` is not installed.
    """
    return dump_tables(config.model_dump(mode="json"))


def dump_tables(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML text. Python's standard library can only read TOML.

    Raises:
        ConfigError: `tomli-w` is not installed.
    """
    try:
        import tomli_w
    except ImportError:
        raise ConfigError(
            f"settings cannot be written without tomli-w, which is in the extra cli: {INSTALL}"
        ) from None
    return tomli_w.dumps(tables)


def read_run_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a run's TOML file, unchanged and unchecked.

    Raises:
        ConfigError: As for `read_tables`, or the file is a scenario, which runs in virtual time.
    """
    tables = read_tables(path)
    run = tables.get("run", {})
    lists = {key for key in _SCENARIOS_LISTS & tables.keys() if isinstance(tables[key], list)}
    own = lists if isinstance(tables.get("run"), dict) else _SCENARIOS_LISTS
    is_scenario = not (_SCENARIOS_OWN | own).isdisjoint(tables) or {"name", "seed"} <= tables.keys()
    if isinstance(run, str) or is_scenario:
        raise ConfigError(f"{path} is a scenario, not a run: ddiloco simulate {path}")
    if not isinstance(run, dict):
        raise ConfigError(f"run={shown(run)} in {path} is not a table: write it as one")
    return tables


def override_key(tables: dict[str, Any], override: str) -> None:
    """Set or remove one dotted key in place; see `load_config` for the form of an override.

    Raises:
        ConfigError: The override has another form, or does not fit the tables.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form table.key=value")
    value = _parse_value(text.strip()) if text.strip() else None
    present = override_for(dotted.strip(), value)
    if present is not None:
        new = f"{present[0]}={'' if value is None else _value_text(present[1])}"
        raise ConfigError(
            f"override {override!r}: {dotted.strip()} is called {present[0]} now: write "
            f"{shlex.quote(new)}"
        )
    table = tables
    for depth, key in enumerate(keys[:-1], start=1):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            earlier = sentence_for(f"[{'.'.join(keys[: depth - 1])}]", key, table)
            raise ConfigError(
                earlier
                or f"override {override!r} does not fit: {'.'.join(keys[:depth])} is not a table"
            )
    if value is None:
        table.pop(keys[-1], None)
    else:
        table[keys[-1]] = value


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _value_text(value: Any) -> str:
    """Return the value of an override, as `_parse_value` reads it."""
    if value in ("True", "False"):
        return str(value).lower()
    return value if isinstance(value, str) and _BARE.fullmatch(value) else toml_text(value)


@dataclass(frozen=True)
class Shipped:
    """TOML files of one kind that a distribution contains; users refer to them by name.

    Attributes:
        kind: The kind, for error messages.
        folder: The folder with the files.
    """

    kind: str
    folder: Path

    def files(self) -> dict[str, Path]:
        """Return the files by name, in alphabetical order.

        >>> "quickstart" in RECIPES.files()
        True
        """
        return {path.stem: path for path in sorted(self.folder.glob("*.toml"))}

    def find(self, name: str) -> Path:
        """Return the file for a path or a bare name on the command line.

        A file with that name in the current folder takes precedence over a shipped one. The file
        may not exist or not be readable.

        Raises:
            ConfigError: The bare name is neither a file nor a shipped one.

        >>> RECIPES.find("quickstart").name, str(RECIPES.find("my/run.toml"))
        ('quickstart.toml', 'my/run.toml')
        """
        path = Path(name)
        if path.is_file() or os.sep in name or path.suffix == ".toml":
            return path
        known = self.files()
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"{name!r} is neither a file nor a shipped {self.kind}: "
                + (
                    f"did you mean {near!r}?"
                    if near
                    else f"pass the path of a TOML file, or one of {', '.join(known)}"
                )
            )
        return known[name]


def _recipes() -> Path:
    package = Path(__file__).parents[1]
    beside = package / "recipes"
    return beside if beside.is_dir() else package.parents[1] / "recipes"


RECIPES = Shipped("recipe", _recipes())


def title_of(path: Path) -> str:
    """Return the first sentence of the comment at the start of a file.

    >>> title_of(RECIPES.files()["homelab"])
    'A syncer for learners that you start by hand with your own script, on any machine.'
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#") and line.strip("# "), lines)
    text = " ".join(line.lstrip("# ").rstrip() for line in comment)
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
