"""Flower's SuperLink with its submitted run, and its SuperNode; `flower_app` trains.

It follows Flower's documentation ("Run Flower with the Deployment Engine"): `flower-superlink`,
``flwr run`` with a connection from `config.toml`, and `flower-supernode` with the address of the
SuperLink. A restarted SuperLink has lost the run, which is then submitted again. With the default
``--isolation subprocess`` the node starts a process for each message, so each round loads Python
and PyTorch again. The node polls for messages, and the server for replies, every 3 seconds; there
is no setting for this.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from common import READY_SECONDS_MAX, Task, Training

PORT = 8000
BIN = Path(sys.executable).parent
HERE = Path(__file__).parent

APP = """
[project]
name = "diloco"
version = "1.0.0"
description = "One period of local steps per round"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "flower_app:server"
clientapp = "flower_app:client"

[tool.flwr.app.config]
task = "{task}"
"""
CONNECTION = """
[superlink]
default = "center"

[superlink.center]
address = "{center}:{port}"
insecure = true
"""


def environment_of(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes, which look up each other's commands in PATH."""
    home.mkdir(exist_ok=True)
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}


def wait_until_it_answers(task: Task) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while True:
        try:
            with socket.create_connection((task.center, PORT), timeout=1.0):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def center(task: Task) -> None:
    app, home = Path(task.folder) / "app", Path(task.folder) / "home-center"
    env = environment_of(home)
    app.mkdir(exist_ok=True)
    shutil.copy(HERE / "flower_app.py", app)
    (app / "pyproject.toml").write_text(APP.format(task=sys.argv[1]))
    (home / "config.toml").write_text(CONNECTION.format(center=task.center, port=PORT))
    settings = ["--insecure", "--host", task.center, "--port", str(PORT)]
    link = subprocess.Popen(
        [BIN / "flower-superlink", *settings, "--disable-runtime-dependency-installation"], env=env
    )
    wait_until_it_answers(task)
    subprocess.run([BIN / "flwr", "run", app, "center"], env=env, check=True)
    sys.exit(link.wait())


def worker(task: Task) -> None:
    import torch
    from flower_app import MODEL

    node = subprocess.Popen(
        [
            BIN / "flower-supernode",
            "--insecure",
            f"--superlink={task.center}:{PORT}",
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
    {"center": center, "worker": worker}[sys.argv[2]](Task.read())
