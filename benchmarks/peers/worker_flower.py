"""Flower's SuperNode, until the run has ended; what it trains is in `flower_app`.

As Flower's documentation says ("Run Flower with the Deployment Engine"): `flower-supernode` with
the address of the SuperLink. With its default ``--isolation subprocess`` it starts a process for
each message, so in each round Python and PyTorch are loaded anew. The node asks for messages, and
the server for replies, every 3 seconds, which has no setting.
"""

import subprocess
import sys
import time
from pathlib import Path

import torch
from centre_flower import BIN, PORT, environment_of
from common import Task, Training
from flower_app import MODEL


def main() -> None:
    task = Task.read()
    node = subprocess.Popen(
        [
            BIN / "flower-supernode",
            "--insecure",
            f"--superlink={task.centre}:{PORT}",
            f'--node-config=task="{sys.argv[1]}"',
        ],
        env=environment_of(Path(task.folder) / f"home-{task.worker}"),
    )
    final = Path(task.folder) / MODEL
    while not final.exists():
        if node.poll() is not None:
            sys.exit(node.returncode or 1)
        time.sleep(0.2)
    node.terminate()
    training = Training(task)
    training.model.load_state_dict(torch.load(final))
    training.go_to(task.steps)
    training.finish()


if __name__ == "__main__":
    main()
