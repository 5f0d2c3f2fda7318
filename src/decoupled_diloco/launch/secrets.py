"""The secret that each process shows: one for the whole run, or one for each id."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.folder import read_token
from decoupled_diloco.transport.tokens import Tokens


def accepted_tokens(config: RunConfig, token: str | None) -> Tokens:
    """What a shard accepts: the secret of each id if the settings name them, or the run's one."""
    path = config.syncer.principals_file
    return Tokens(token) if path is None else Tokens(principals=read_principals(path))


def own_token(config: RunConfig, name: str, token_file: Path | None = None) -> str | None:
    """What the process of this id shows; a file given by hand goes before the settings.

    Raises:
        ConfigError: a file cannot be read, or has no secret for this id.
    """
    path = config.syncer.principals_file
    if token_file is not None or path is None:
        return read_token(token_file or config.syncer.token_file)
    principals = read_principals(path)
    require_principals(path, principals, [name])
    return principals[name]


def require_principals(path: Path, principals: Mapping[str, str], names: Iterable[str]) -> None:
    """Checks that all of these ids have a secret."""
    for name in names:
        if name not in principals:
            raise ConfigError(
                f"principals_file={str(path)!r} has no secret for {name!r}: add a line "
                f'{name} = "…" with a secret of its own'
            )


def read_principals(path: Path) -> dict[str, str]:
    """The secret of each id.

    Raises:
        ConfigError: the file cannot be read, or is not lines of ``id = "secret"``.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"principals_file={str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:  # TOML and UTF-8 both; the text is secret and is not repeated
        raise ConfigError(
            f'principals_file={str(path)!r} is not TOML: write a line id = "secret" for each id'
        ) from error
    if not table or not all(isinstance(secret, str) for secret in table.values()):
        raise ConfigError(
            f'principals_file={str(path)!r} must hold a line id = "secret" for each id, and '
            "nothing else"
        )
    return table
