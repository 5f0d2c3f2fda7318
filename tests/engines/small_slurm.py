"""A complete Slurm on this machine, from Debian's packages: controller, nodes and a separate key.

`one_node_slurm` uses this machine as its node. `two_node_slurm` has two nodes with separate
networks and host names, like two machines. Both need root and the packages slurm-wlm and munge;
`missing` reports what is absent. A real Slurm installation on this machine is neither read nor
changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_ports
from network.network_spaces import run_ip, spaces

PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "slurmctld", "slurmd", "munged")

MACHINES = ("ddtest-n1", "ddtest-n2")
BRIDGE, NETWORK = "ddtest-slurm", "10.87.0"

SETTINGS = """\
ClusterName=test
SlurmctldHost={host}({address})
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
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=requeue_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=120
{nodes}
PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=safe Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Return why Slurm cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)" if absent else ""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster; `inside` is the prefix of commands that run on it."""

    name: str
    address: str
    inside: tuple[str, ...] = ()


@contextlib.contextmanager
def one_node_slurm(folder: Path) -> Iterator[None]:
    """Run Slurm while the block runs; environment variables select it for Slurm's commands."""
    with _slurm(folder, "127.0.0.1", [Node(socket.gethostname(), "127.0.0.1")]):
        yield


@contextlib.contextmanager
def two_node_slurm(folder: Path) -> Iterator[None]:
    """The same with two machines that are connected by a network with this one."""
    with _machines(folder / "hosts") as nodes, _slurm(folder, f"{NETWORK}.100", nodes):
        yield


@contextlib.contextmanager
def _slurm(folder: Path, address: str, nodes: Sequence[Node]) -> Iterator[None]:
    for name in ("state", *(f"spool-{node.name}" for node in nodes)):
        (folder / name).mkdir()
    folder.chmod(0o755)
    ports = free_ports(2)
    settings = folder / "slurm.conf"
    lines = [
        f"NodeName={node.name} NodeAddr={node.address} CPUs=8 RealMemory=1000 State=UNKNOWN"
        for node in nodes
    ]
    values = {"folder": folder, "host": socket.gethostname(), "address": address, "ports": ports}
    settings.write_text(SETTINGS.format(nodes="\n".join(lines), **values))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(settings)
    daemons = [_munged(folder, key)]
    try:
        daemons.append(_daemon(folder, "slurmctld", "-D"))
        daemons += [
            _daemon(folder, *node.inside, "slurmd", "-D", "-N", node.name) for node in nodes
        ]
        _wait_until_idle(folder, nodes)
        yield
    finally:
        cancel_all()
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        _kill_processes_of_jobs(settings)
        del os.environ["SLURM_CONF"]
        if before is not None:
            os.environ["SLURM_CONF"] = before


@contextlib.contextmanager
def _machines(hosts: Path) -> Iterator[list[Node]]:
    """Create two machines with separate network, host name and /etc/hosts, on a bridge."""
    nodes = []
    _remove_bridge()
    with spaces(*MACHINES):
        try:
            run_ip("link", "add", BRIDGE, "type", "bridge")
            run_ip("addr", "add", f"{NETWORK}.100/24", "dev", BRIDGE)
            run_ip("link", "set", BRIDGE, "up")
            known = {f"{NETWORK}.{number}": name for number, name in enumerate(MACHINES, 1)}
            known |= {"127.0.0.1": "localhost", f"{NETWORK}.100": socket.gethostname()}
            hosts.write_text("".join(f"{address} {name}\n" for address, name in known.items()))
            begin = (
                f'echo "$0" > /proc/sys/kernel/hostname; mount --bind {hosts} /etc/hosts; exec "$@"'
            )
            for number, name in enumerate(MACHINES, 1):
                run_ip("link", "add", f"dds{number}", "type", "veth", "peer", "eth0", "netns", name)
                run_ip("link", "set", f"dds{number}", "master", BRIDGE, "up")
                run_ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
                run_ip("-n", name, "link", "set", "eth0", "up")
                own = ("unshare", "--uts", "--mount", "sh", "-c", begin, name)
                inside = ("nsenter", f"--net=/run/netns/{name}", *own)
                nodes.append(Node(name, f"{NETWORK}.{number}", inside))
            yield nodes
        finally:
            _remove_bridge()


def _remove_bridge() -> None:
    for device in (BRIDGE, *(f"dds{number}" for number in range(1, len(MACHINES) + 1))):
        subprocess.run(["ip", "link", "del", device], capture_output=True)


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
    with (folder / f"{'-'.join(command[-2:])}.out".replace("/", "_")).open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def _wait_until_idle(folder: Path, nodes: Sequence[Node]) -> None:
    deadline = time.monotonic() + 60
    output = ""
    while time.monotonic() < deadline:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], capture_output=True, text=True
        )
        output = shown.stdout + shown.stderr
        if shown.stdout.split() and set(shown.stdout.split()) == {"idle"}:
            return
        # Slurm drains a node that has fewer cores than configured, so make it idle.
        state = ["nodename=" + ",".join(node.name for node in nodes), "state=idle"]
        subprocess.run(["scontrol", "update", *state], capture_output=True)
        time.sleep(0.5)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    raise RuntimeError(f"Slurm does not start: {output}\n{logs}")


def cancel_all() -> None:
    """Cancel all jobs, so that one test's jobs take no resources from the next test."""
    subprocess.run(["scancel", "--user=root"], capture_output=True, timeout=30)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True)
        if not shown.stdout.strip():
            return
        time.sleep(0.5)


def _kill_processes_of_jobs(settings: Path) -> None:
    """Kill processes that did not end in time; without a syncer a learner trains forever."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            environment = path.read_bytes().split(b"\0")
            of_a_job = any(each.startswith(b"SLURM_JOB_ID=") for each in environment)
            if of_a_job and f"SLURM_CONF={settings}".encode() in environment:
                os.kill(int(path.parent.name), signal.SIGKILL)
