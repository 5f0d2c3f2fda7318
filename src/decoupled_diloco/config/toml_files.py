"""Configuration files: TOML in, with overrides from the command line; resolved TOML out.

Recipes that come with the package are found by their bare names. They lie in `recipes/` of the
repository, and within the package where it is installed from a wheel. Another distribution may ship
files of another kind.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from decoupled_diloco.config.plugins import load_plugins
from decoupled_diloco.config.renamed import override_for, sentence_for
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.settings import shown
from decoupled_diloco.config.sync import methods_unchecked
from decoupled_diloco.errors import ConfigError

_SCENARIOS_OWN = {"set", "until_seconds", "parameters", "learners", "links", "events", "random"}
"""Keys that only a scenario file has."""

INSTALL = "pip install 'decoupled-diloco[cli]' (in a clone: pip install -e '.[cli]')"
"""How to have the command line, and what else is of its extra."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, plugins: bool = True
) -> RunConfig:
    """Read a run's TOML file, apply overrides, import what it names, and check everything.

    Args:
        overrides: `"table.key=value"` each, later ones win. Values are TOML; what is no TOML value
            is taken as text, so that quotes can be left out. An empty value takes the key out of
            the file: the default holds again.
        plugins: Whether to import the modules that the file names (`[run] imports`, and methods
            such as ``"module:function"``). False: such methods are not checked and cannot be used.

    Raises:
        ConfigError: The file cannot be read, a setting does not fit, or a module cannot be
            imported.
    """
    tables = read_run_tables(Path(path))
    for override in overrides:
        override_key(tables, override)
    if not plugins:
        with methods_unchecked():
            return RunConfig(**tables)
    load_plugins(tables, Path(path).parent)
    return RunConfig(**tables)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML that loads as the same configuration again.

    Every default is written out, except settings that have no effect beside the others.

    Raises:
        ConfigError: What writes TOML is not installed.
    """
    return dump_tables(config.model_dump(mode="json"))


def dump_tables(tables: Mapping[str, Any]) -> str:
    """Tables as TOML. Python itself only reads it.

    Raises:
        ConfigError: What writes TOML is not installed.
    """
    try:
        import tomli_w
    except ImportError:
        raise ConfigError(
            f"settings cannot be written without tomli-w, of the extra cli: {INSTALL}"
        ) from None
    return tomli_w.dumps(tables)


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as they are written.

    Raises:
        ConfigError: The file cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    except ValueError as error:  # a number of thousands of digits is not told as TOML's own error
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deep") from None
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: give the path of a run's TOML file, or the name of a shipped "
            "recipe (`ddiloco recipes` lists them)"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_run_tables(path: Path) -> dict[str, Any]:
    """The tables of a run's TOML file as they are written.

    Raises:
        ConfigError: As `read_tables`; or it is a scenario, which runs in virtual time only.
    """
    tables = read_tables(path)
    run = tables.get("run", {})
    told = not _SCENARIOS_OWN.isdisjoint(tables) or {"name", "seed"} <= tables.keys()
    if isinstance(run, str) or told:
        raise ConfigError(f"{path} is a scenario, not a run: ddiloco simulate {path}")
    if not isinstance(run, dict):
        raise ConfigError(f"run={shown(run)} in {path} is not a table: write it as one")
    return tables


def override_key(tables: dict[str, Any], override: str) -> None:
    """Set or remove one dotted key in place; `load_config` says of what form an override is.

    Raises:
        ConfigError: It is not of that form, or does not fit the tables.
    """
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form table.key=value")
    value = _parse_value(text.strip()) if text.strip() else None
    present = override_for(dotted.strip(), value)
    if present is not None:
        told = "" if value is None else present[1]
        told = json.dumps(told) if isinstance(told, bool) else told
        raise ConfigError(
            f"override {override!r}: {dotted.strip()} is called {present[0]} now: write "
            f"{present[0]}={told}"
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


@dataclass(frozen=True)
class Shipped:
    """TOML files of one kind that come with a distribution, found by their bare names."""

    kind: str
    folder: Path

    def files(self) -> dict[str, Path]:
        """The files by name, in alphabetical order.

        >>> "quickstart" in RECIPES.files()
        True
        """
        return {path.stem: path for path in sorted(self.folder.glob("*.toml"))}

    def find(self, name: str) -> Path:
        """The file that was meant on the command line: a path, or a bare name.

        A file of that name in the current folder goes before a shipped one. Whether it can be read
        is for the reader to find out.

        Raises:
            ConfigError: a bare name that is neither a file nor a shipped one.

        >>> RECIPES.find("quickstart").name, str(RECIPES.find("my/run.toml"))
        ('quickstart.toml', 'my/run.toml')
        """
        path = Path(name)
        if path.is_file() or os.sep in name or path.suffix == ".toml":
            return path
        known = self.files()
        if name not in known:
            raise ConfigError(
                f"{name!r} is neither a file nor a shipped {self.kind}: give the path of a TOML "
                f"file, or one of {', '.join(known)}"
            )
        return known[name]


def _recipes() -> Path:
    package = Path(__file__).parents[1]
    beside = package / "recipes"
    return beside if beside.is_dir() else package.parents[1] / "recipes"


RECIPES = Shipped("recipe", _recipes())


def title_of(path: Path) -> str:
    """The first sentence of the comment that a file begins with.

    >>> title_of(RECIPES.files()["homelab"])
    "A syncer for learners that are started by hand, here or elsewhere, with one's own script."
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#") and line.strip("# "), lines)
    text = " ".join(line.lstrip("# ").rstrip() for line in comment)
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
