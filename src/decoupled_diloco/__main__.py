"""`python -m decoupled_diloco`: the same as `ddiloco`."""

from decoupled_diloco.cli.main import main

main()
