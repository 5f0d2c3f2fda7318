"""torchrun, whose exit code tells ranks that were refused from ranks that failed.

By itself it ends with 1, whatever its ranks have ended with; then a learner whose settings are
wrong would be started again for ever::

    python -m decoupled_diloco.engines.torchrun OPTIONS -m decoupled_diloco.cli learner …
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from decoupled_diloco.errors import ConfigError


def main(arguments: list[str]) -> int:
    """Runs it; returns the exit code: 0, 2 if a rank was refused, 1 if one failed otherwise."""
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(str(error).strip(), file=sys.stderr, flush=True)
        codes = {failure.exitcode for failure in error.failures.values()}
        return ConfigError.exit_code if ConfigError.exit_code in codes else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
