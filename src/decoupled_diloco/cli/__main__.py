"""`python -m decoupled_diloco.cli`: the same as `ddiloco`."""

from decoupled_diloco.__main__ import main

main()
