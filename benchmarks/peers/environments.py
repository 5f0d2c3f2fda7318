"""Makes the environments of the peers: one for each, with exact versions.

    python benchmarks/peers/environments.py                  # all of them, below .venv/peers
    python benchmarks/peers/environments.py --into DIR torchft

What the workload needs has the versions of ``constraints.txt``; what else a peer brings is its own
choice. Ask pip for PyTorch's CPU build if yours would take another one (``PIP_INDEX_URL`` or
``PIP_EXTRA_INDEX_URL``). No communication, DDP and decoupled-diloco run in the environment that
runs the comparison.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTO = ROOT / ".venv" / "peers"
WORKLOAD = ("torch==2.13.0", "numpy==2.4.6", "pydantic==2.14.3")
"""What `common` needs."""

PEERS = {
    "torchft": ("torchft==0.2.0",),
    "hivemind": ("hivemind==1.1.12",),
    "flower": ("flwr==1.42.0",),
}
"""Tried with Python 3.11; flwr needs 3.11 or later. hivemind's wheel, with the daemon that talks
to other peers, is for Linux on x86-64."""


def make(name: str, into: Path) -> None:
    """One environment; does nothing to packages that are there already."""
    folder = into / name
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *WORKLOAD, *PEERS[name]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", nargs="*", default=list(PEERS), metavar="|".join(PEERS))
    parser.add_argument("--into", type=Path, default=INTO)
    arguments = parser.parse_args()
    unknown = set(arguments.peer) - set(PEERS)
    if unknown:
        sys.exit(f"no such peer: {', '.join(sorted(unknown))}: choose from {', '.join(PEERS)}")
    for name in arguments.peer:
        print(name, flush=True)
        make(name, arguments.into)


if __name__ == "__main__":
    main()
