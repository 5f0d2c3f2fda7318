"""`ddiloco`, and `python -m decoupled_diloco`: where the command line begins.

It is an extra, because a learner in a training job of one's own needs no part of it.
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from typing import NoReturn

from decoupled_diloco.config.toml_files import INSTALL
from decoupled_diloco.errors import ConfigError

NEEDED = ("jinja2", "prometheus_client", "rich", "tomli_w", "typer")
"""The modules of the extra: a run is not to miss one when it is over, and its report is drawn."""


UNICODE = ("utf-8", "utf8")
"""Encodings with a place for every character; an old locale has another one."""


def main() -> NoReturn:
    """The command line, or a sentence that says how to install it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in UNICODE:
            stream.reconfigure(errors="replace")
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        print(f"error: ddiloco needs {', '.join(lacking)}: {INSTALL}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    from decoupled_diloco.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
