r"""Custom Lightning Fabric loop as a learner of a run, with one or several processes.

    pip install -e '.[lightning]'        # in the clone
    ddiloco syncer homelab
    python examples/loop_fabric.py --syncer http://127.0.0.1:7070 \
        --auth-token-file runs/homelab/token --name a

With `--devices 2` Fabric starts two processes, which are one learner.
"""

import argparse
import sysconfig
import zlib
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import decoupled_diloco as dd

CONTEXT, BATCH, ACCUMULATED = 64, 64, 2

parser = argparse.ArgumentParser(description="Train a small byte model as one learner.")
parser.add_argument("--syncer", required=True, help="address of a shard, such as http://host:port")
parser.add_argument("--auth-token-file", type=Path, help="file with the run's secret")
parser.add_argument("--name", required=True, help="this learner's name, the same across restarts")
parser.add_argument("--devices", default="auto", help="number of devices; all are one learner")


def windows(seed: int) -> TensorDataset:
    """Return windows of a text's bytes, in this learner's random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    order = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (100_000,), generator=order)
    return TensorDataset(text[starts[:, None] + torch.arange(CONTEXT + 1)].long())


def main() -> None:
    """Train until the run is over."""
    given = parser.parse_args()
    token = given.auth_token_file.read_text() if given.auth_token_file else None
    fabric = Fabric(devices=given.devices)
    fabric.launch()
    net = nn.Sequential(
        *(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 512), nn.GELU()),
        nn.Linear(512, 256),
    )
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=2e-3))
    data = windows(zlib.crc32(given.name.encode()))
    batches = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH))
    learner = dd.Learner(
        model, given.syncer, auth_token=token, name=given.name, optimizer=optimizer
    )
    while not learner.ended:  # the run's budget ends the training
        for number, (window,) in enumerate(learner.wrap(batches), start=1):
            accumulating = number % ACCUMULATED != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
                fabric.backward(loss / ACCUMULATED)
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
    fabric.print(f"{given.name}: {learner.steps} steps; the model holds the run's final weights")


if __name__ == "__main__":
    main()
