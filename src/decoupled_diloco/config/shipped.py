"""The recipes and scenarios that come with the package, found by their bare names.

They lie in `recipes/` and `scenarios/` of the repository, and within the package where it
is installed from a wheel.
"""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path
from typing import Literal

from decoupled_diloco.errors import ConfigError

Kind = Literal["recipes", "scenarios"]

_PACKAGE = Path(__file__).parents[1]
_REPOSITORY = _PACKAGE.parents[1]


def shipped(kind: Kind) -> dict[str, Path]:
    """The files of a kind by name, in alphabetical order.

    >>> "quickstart" in shipped("recipes")
    True
    """
    return {path.stem: path for path in sorted(_folder(kind).glob("*.toml"))}


def find_shipped(kind: Kind, name: str) -> Path:
    """The file that was meant on the command line.

    Args:
        kind: Where a bare name is looked up.
        name: A path, or a bare name such as ``quickstart``. A file of that name in the current
            folder goes before a shipped one.

    Returns:
        A path; whether it can be read is for the reader to find out.

    Raises:
        ConfigError: a bare name that is neither a file nor a shipped one.

    >>> find_shipped("recipes", "quickstart").name, str(find_shipped("recipes", "my/run.toml"))
    ('quickstart.toml', 'my/run.toml')
    """
    path = Path(name)
    if path.is_file() or os.sep in name or path.suffix == ".toml":
        return path
    known = shipped(kind)
    if name not in known:
        raise ConfigError(
            f"{name!r} is neither a file nor a shipped {kind.removesuffix('s')}: give the path of "
            f"a TOML file, or one of {', '.join(known)}"
        )
    return known[name]


def title_of(path: Path) -> str:
    """The first sentence of the comment that a file begins with.

    >>> title_of(shipped("recipes")["homelab"])
    "A syncer for learners that are started by hand, here or elsewhere, with one's own script."
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#") and line.strip("# "), lines)
    text = " ".join(line.lstrip("# ").rstrip() for line in comment)
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _folder(kind: Kind) -> Path:
    beside = _PACKAGE / kind
    return beside if beside.is_dir() else _REPOSITORY / kind
