"""torchrun whose exit code distinguishes rejected ranks from failed ranks.

torchrun itself exits with 1 whatever its ranks' exit codes are. Then a learner with wrong settings
would restart forever::

    python -m decoupled_diloco_engines.torchrun OPTIONS -m decoupled_diloco.cli learner …
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from decoupled_diloco.errors import FINAL_EXIT_CODES


def main(arguments: list[str]) -> int:
    """Run torchrun; return 0, a final exit code if a rank ended with one, or 1 after a failure."""
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(str(error).strip(), file=sys.stderr, flush=True)
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in FINAL_EXIT_CODES if code in codes), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
