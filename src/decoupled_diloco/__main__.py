"""Entry point of the command line: `ddiloco`, or `python -m decoupled_diloco`.

The command line is an extra, because a learner in a user's training job does not need it.
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from typing import NoReturn

from decoupled_diloco.config.toml_files import INSTALL
from decoupled_diloco.errors import ConfigError

NEEDED = ("jinja2", "prometheus_client", "rich", "tomli_w", "typer")
"""Modules of the extra. They are checked at the start, so that a run does not fail at its end, when
its report needs one of them."""


UNICODE = ("utf-8", "utf8")
"""Encodings that can represent every character; an old locale may have another one."""


def main() -> NoReturn:
    """Run the command line, or print how to install it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in UNICODE:
            stream.reconfigure(errors="replace")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"error: ddiloco needs {', '.join(missing)}: {INSTALL}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    from decoupled_diloco.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
