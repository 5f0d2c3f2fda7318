"""Create the environments of the peers, one each, with exact versions.

    python benchmarks/peers/environments.py                  # all of them, in .venv/peers
    python benchmarks/peers/environments.py torchft hivemind

The workload's requirements have the versions of ``constraints.txt``. Each peer selects the versions
of its other requirements. Configure pip for PyTorch's CPU build if it would select another one
(``PIP_INDEX_URL`` or ``PIP_EXTRA_INDEX_URL``). No communication, DDP and decoupled-diloco run in
the environment that runs the comparison.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

INTO = Path(__file__).parents[2] / ".venv" / "peers"
WORKLOAD = ("torch==2.13.0", "numpy==2.4.6", "pydantic==2.14.3")
"""Requirements of `common`."""

PEERS = {
    "torchft": "torchft==0.2.0",
    "hivemind": "hivemind==1.1.12",
    "flower": "flwr[simulation]==1.42.0",
}
"""Tested with Python 3.11; flwr needs 3.11 or later. hivemind's wheel, which has the daemon for
peer-to-peer communication, is for Linux on x86-64."""


def main() -> None:
    for name in sys.argv[1:] or PEERS:
        if name not in PEERS:
            sys.exit(f"peer {name!r} is unknown: choose from {', '.join(PEERS)}")
        print(name, flush=True)
        python = INTO / name / "bin" / "python"
        if not python.exists():
            venv.create(INTO / name, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", *WORKLOAD, PEERS[name]]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
