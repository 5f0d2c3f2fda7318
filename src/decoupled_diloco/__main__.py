"""`ddiloco`, and `python -m decoupled_diloco`: where the command line begins."""

from decoupled_diloco.cli.main import main

if __name__ == "__main__":
    main()
