"""What a device needs: installed bytes, resident memory and bytes per visit, within 512 MB.

A device visits a run three times, each time in a new process whose memory is limited by a cgroup,
or by RLIMIT_DATA where no cgroup can be created. Between its visits, other devices contribute. Its
tape shows what it fetched.

    python benchmarks/device_footprint.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from evidence import keep, options

from decoupled_diloco.protocol.messages import Fetch
from decoupled_diloco.tape import TapeReader

LIMIT = 512 * 1024 * 1024
CGROUPS = Path("/sys/fs/cgroup")

SETTINGS = """
[run]
name = "footprint"
folder = "{folder}/run"
learners = 4
max_tokens = 100_000_000
evaluator = false

[sync]
fragments = 2
sync_every = 64
overlap_steps = 0
quorum = 1
grace_margin = 0.0
participation = "async"

[sync.devices]
history = 64

[sync.codec]
uplink = "int4"
downlink = "int4"

[sync.apply]
missed = "rebase"

[syncer]
port = {port}

[learner]
command = ["true"]
"""

DEVICE = """
import json, os, resource, sys, time
limit, cgroup, name, address, folder, width, steps, alone = json.loads(sys.argv[1])
if cgroup:
    open(cgroup + "/cgroup.procs", "w").write(str(os.getpid()))
elif limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import torch
from torch import nn
import decoupled_diloco as dd

def resident():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(1)
imported = resident()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rng = torch.Generator().manual_seed(os.getpid())

def step():
    x = torch.randn(8, width, generator=rng)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss.detach()

token = open(folder + "/run/token").read()
device = dd.Device(model, address, name=name, checkpoint=folder + "/state", optimizer=optimizer,
    auth_token=token, observability=dd.Observability(event_tape=f"{folder}/{name}-{alone}.jsonl"))
if alone:
    device.train(step, alone, tokens=8)
began = time.monotonic()
with device.visit() as learner:
    fetched = time.monotonic() - began
    for _ in range(steps):
        learner.step(step(), tokens=8)
    stats = learner._party.membership.background.client.stats
print(json.dumps({
    "parameters": sum(p.numel() for p in model.parameters()),
    "imported_bytes": imported, "resident_bytes": resident(),
    "received_bytes": stats.data_bytes_received, "sent_bytes": stats.data_bytes_sent,
    "control_bytes": stats.control_bytes_received + stats.control_bytes_sent,
    "join_seconds": fetched, "seconds": time.monotonic() - began,
    "disk_bytes": max(f.stat().st_size for f in os.scandir(f"{folder}/state/{name}")),
}))
"""


def installed() -> dict[str, int]:
    """Bytes on the disk of this project and of each package that it requires to train."""
    found: dict[str, int] = {}
    todo = ["torch", "numpy", "aiohttp", "pydantic", "safetensors", "xxhash"]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        with suppress(Exception):
            package = distribution(name)
            files = [Path(str(package.locate_file(f))) for f in package.files or ()]
            found[name] = sum(f.stat().st_size for f in files if f.exists())
            needed = (each for each in package.requires or () if "extra ==" not in each)
            todo += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in needed]
    import decoupled_diloco

    source = Path(decoupled_diloco.__file__).parent
    found["decoupled-diloco"] = sum(f.stat().st_size for f in source.rglob("*.py"))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def limited() -> str:
    """Create a cgroup with the limit; empty: this machine does not allow it."""
    for parent in (CGROUPS, CGROUPS / "memory"):
        group = parent / "ddiloco-footprint"
        with suppress(OSError):
            group.mkdir(exist_ok=True)
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (group / name).exists():
                    (group / name).write_text(str(LIMIT))
                    return str(group)
            group.rmdir()
    return ""


def visit(arguments: list[Any]) -> dict[str, Any]:
    """Run one visit in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", DEVICE, json.dumps(arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def fetched(tape: Path) -> dict[str, int]:
    """Copies that a visit has fetched."""
    orders = [r.value() for r in TapeReader(tape) if (r.kind, r.type) == ("effect", "Fetch")]
    whole = sum(order.whole for order in orders if isinstance(order, Fetch))
    return {"whole_copies": whole, "differences": len(orders) - whole}


if __name__ == "__main__":
    given = options(width=512, steps=4, between=3, port=7191)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.toml"
        run.write_text(SETTINGS.format(folder=folder, port=given.port))
        cgroup = ""
        syncer = subprocess.Popen(
            [sys.executable, "-m", "decoupled_diloco", "syncer", str(run)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            address = f"http://127.0.0.1:{given.port}"
            while not (Path(folder) / "run" / "token").exists():
                time.sleep(0.2)
            cgroup, rows, alone = limited(), [], 0
            for number in range(3):
                mine = [LIMIT, cgroup, "phone", address, folder, given.width, given.steps, alone]
                row = {"visit": number + 1, "alone": alone, **visit(mine)}
                rows.append(row | fetched(Path(folder) / f"phone-{alone}.jsonl"))
                print(rows[-1], flush=True)
                for _ in range(given.between):
                    visit([0, "", "other", address, folder, given.width, given.steps, 0])
                alone += 4
        finally:
            syncer.terminate()
            syncer.wait(30)
            if cgroup:
                with suppress(OSError):
                    Path(cgroup).rmdir()
    sizes = installed()
    whole = 4 * rows[0]["parameters"]
    keep(
        "device_footprint",
        config={**vars(given), "limit_bytes": LIMIT, "limit": cgroup or "RLIMIT_DATA"},
        raw={"visits": rows, "installed_bytes": sizes},
        result={
            "visits": [
                {
                    **row,
                    "received_share": row["received_bytes"] / whole,
                    "sent_share": row["sent_bytes"] / whole,
                    "resident_mb": row["resident_bytes"] / 1e6,
                    "imported_mb": row["imported_bytes"] / 1e6,
                    "disk_share": row["disk_bytes"] / row["parameters"],
                }
                for row in rows
            ],
            "installed_mb": sum(sizes.values()) / 1e6,
            "torch_mb": sizes.get("torch", 0) / 1e6,
            "without_torch_mb": (sum(sizes.values()) - sizes.get("torch", 0)) / 1e6,
        },
    )
