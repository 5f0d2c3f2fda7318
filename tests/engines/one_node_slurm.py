"""A whole Slurm on this machine, from Debian's packages: controller, one node, a key of its own.

Needs root and the packages slurm-wlm and munge; `missing` says what is not there. Nothing of a
Slurm that is installed here for real is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "slurmctld", "slurmd", "munged")

SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=requeue_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=safe Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no Slurm here; empty: there can."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(absent)} here (Debian: slurm-wlm, munge)" if absent else ""


@contextlib.contextmanager
def one_node_slurm(folder: Path) -> Iterator[None]:
    """A Slurm as long as the block lasts; its commands find it by this process's environment."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    ports = _free_ports(2)
    settings = folder / "slurm.conf"
    host = socket.gethostname()
    settings.write_text(SETTINGS.format(folder=folder, host=host, ports=ports))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(settings)
    daemons = [_munged(folder, key)]
    try:
        daemons += [_daemon(folder, "slurmctld", "-D"), _daemon(folder, "slurmd", "-D")]
        _wait_until_idle(folder)
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True, timeout=30)
        _wait_until_gone()
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before


def _munged(folder: Path, key: Path) -> subprocess.Popen[bytes]:
    files = {
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munged.seed",
    }
    options = [f"--{option}={folder}/{name}" for option, name in files.items()]
    return _daemon(folder, "munged", "--foreground", "--force", f"--key-file={key}", *options)


def _daemon(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    with (folder / f"{command[0]}.out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def _wait_until_idle(folder: Path) -> None:
    deadline = time.monotonic() + 60
    told = ""
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True
        )
        told = shown.stdout + shown.stderr
        if shown.stdout.split() and set(shown.stdout.split()) == {"idle"}:
            return
        # A node with fewer cores than the settings say is drained at first.
        state = ["nodename=" + socket.gethostname(), "state=idle"]
        subprocess.run(["scontrol", "update", *state], capture_output=True)
        time.sleep(0.5)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"Slurm does not start: {told}\n{logs}")


def _wait_until_gone() -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True)
        if not shown.stdout.strip():
            return
        time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]
