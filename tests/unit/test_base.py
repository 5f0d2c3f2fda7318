"""Where the extra of the command line is not installed a learner trains, and the rest says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.__main__ import NEEDED
from decoupled_diloco.launch.ports import free_ports

REFUSING = f"import sys; sys.modules.update(dict.fromkeys({NEEDED}))\n"

TRAINING = """
import os, signal, urllib.error, urllib.request
from pathlib import Path
import torch
import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.shard_role import run_shard

folder, port = Path(sys.argv[1]), int(sys.argv[2])
address = f"http://127.0.0.1:{port}"
config = RunConfig(
    run={"name": "base", "folder": folder, "learners": 1, "max_steps": 12, "evaluator": False},
    sync={"fragments": 2, "sync_every": 2, "overlap_steps": 1},
    syncer={"shards": 1},
)
try:
    dump_config(config)
except dd.ConfigError as error:
    print(error)

sys.stdout.flush()
if not (shard := os.fork()):
    signal.alarm(240)  # should nobody train
    run_shard(config, 0, port=port, addresses=(address,), folder=folder, token="hush")
    os._exit(0)

model = torch.nn.Linear(4, 4)
reported = dd.Observability(metrics_address="127.0.0.1:9400")
try:
    dd.Learner(model, address, auth_token="hush", observability=reported)
except dd.ConfigError as error:
    print(error)
learner = dd.Learner(model, address, auth_token="hush")
asked = urllib.request.Request(f"{address}/metrics", headers={"Authorization": "Bearer hush"})
try:
    urllib.request.urlopen(asked)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
more = True
while more:
    model(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():  # torch.optim takes seconds to import
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()
    more = learner.step(tokens=8)
learner.close()
print(learner.global_step >= 12, os.waitstatus_to_exitcode(os.waitpid(shard, 0)[1]))
"""

RUNNING = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a process does that can import nothing of the extra."""
    command = [sys.executable, "-c", REFUSING + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def told(extra: str) -> str:
    return f"run pip install -e '.[{extra}]' in the clone"


def test_a_learner_trains_with_a_syncer_that_python_has_started(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", (0,))
    done = python(TRAINING, str(tmp_path / "run"), str(port))
    assert done.returncode == 0, done.stderr
    settings, learner, shard, end = done.stdout.splitlines()
    assert (
        settings
        == f"settings cannot be written without tomli-w, which is in the extra cli: {told('cli')}"
    )
    assert learner == f"metrics_address='127.0.0.1:9400' needs prometheus-client: {told('metrics')}"
    assert shard == f"404 metrics need prometheus-client: {told('metrics')}"
    assert end == "True 0"


@pytest.mark.parametrize("module", ["decoupled_diloco", "decoupled_diloco.cli"])
@pytest.mark.parametrize("arguments", [(), ("train", "quickstart")])
def test_the_command_says_how_to_install_it(module: str, arguments: tuple[str, ...]) -> None:
    done = python(RUNNING, module, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: ddiloco needs {', '.join(NEEDED)}: {told('cli')}\n"
