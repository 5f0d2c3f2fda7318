"""TOML files as tables, unchecked."""

from __future__ import annotations

import codecs
import tomllib
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import ConfigError

_MARKS = {
    codecs.BOM_UTF8: "begins with a byte order mark",
    codecs.BOM_UTF16_LE: "is UTF-16 text",
    codecs.BOM_UTF16_BE: "is UTF-16 text",
}
"""What a file is, by its first bytes."""


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file, unchanged and unchecked.

    Raises:
        ConfigError: The file cannot be read, or is not valid TOML.
    """
    try:
        return tomllib.loads(_read_text(path))
    except ConfigError:
        raise
    except ValueError as error:  # not TOMLDecodeError: int() raises this for thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deep") from None
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: pass the path of a run's TOML file, or the name of a shipped "
            "recipe (`ddiloco recipes` lists them)"
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder: pass the path of a TOML file, such as {path / 'run.toml'}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _read_text(path: Path) -> str:
    if "\0" in str(path):
        raise ConfigError(f"{str(path)!r} is not a path: take the character NUL out")
    content = path.read_bytes()
    for mark, name in _MARKS.items():
        if content.startswith(mark):
            raise ConfigError(f"{path} {name}: save it as UTF-8 without a byte order mark")
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: save it as UTF-8, because byte {error.start + 1} does not "
            "fit"
        ) from None
