"""Flower's SuperLink, and the run that is submitted to it.

As Flower's documentation says ("Run Flower with the Deployment Engine"): `flower-superlink`, and
``flwr run`` with a connection from `config.toml`. Started again, the SuperLink knows nothing of
the run, which is then submitted again.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from common import READY_SECONDS_MAX, Task

PORT = 8000
BIN = Path(sys.executable).parent
HERE = Path(__file__).parent

APP = """
[project]
name = "diloco"
version = "1.0.0"
description = "One period of local steps a round"
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
default = "centre"

[superlink.centre]
address = "{centre}:{port}"
insecure = true
"""


def environment_of(home: Path) -> dict[str, str]:
    """Of Flower's processes: they find each other's commands in the path."""
    home.mkdir(exist_ok=True)
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}


def wait_until_it_answers(task: Task) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while True:
        try:
            with socket.create_connection((task.centre, PORT), timeout=1.0):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main() -> None:
    task = Task.read()
    app, home = Path(task.folder) / "app", Path(task.folder) / "home-centre"
    env = environment_of(home)
    app.mkdir(exist_ok=True)
    shutil.copy(HERE / "flower_app.py", app)
    (app / "pyproject.toml").write_text(APP.format(task=sys.argv[1]))
    (home / "config.toml").write_text(CONNECTION.format(centre=task.centre, port=PORT))
    settings = ["--insecure", "--host", task.centre, "--port", str(PORT)]
    link = subprocess.Popen(
        [BIN / "flower-superlink", *settings, "--disable-runtime-dependency-installation"], env=env
    )
    wait_until_it_answers(task)
    subprocess.run([BIN / "flwr", "run", app, "centre"], env=env, check=True)
    sys.exit(link.wait())


if __name__ == "__main__":
    main()
