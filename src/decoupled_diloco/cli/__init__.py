"""The command line, `ddiloco`.

Exit codes: 0 done; 1 other failures; 2 wrong configuration or usage; 3 protocol; 4 transport;
5 access refused; 6 storage; 7 merge; 8 another process acts for the shard; 130 interrupted.
"""

from decoupled_diloco.cli.main import main

__all__ = ["main"]
