r"""A plain PyTorch training loop as a learner; the lines with `learner` are the only additions.

Start everything on this machine, from the repository root:

    ddiloco train examples/train.toml

Or start a syncer, then any number of learners, each with a different name:

    ddiloco syncer recipes/homelab.toml
    python examples/train.py --syncer http://127.0.0.1:7070 \
        --auth-token-file runs/homelab/token --name a
"""

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn

import decoupled_diloco as dd

CONTEXT, BATCH = 64, 256

parser = argparse.ArgumentParser(description="Train a small byte model as one learner.")
parser.add_argument("--syncer", help="address of a shard, such as http://host:port")
parser.add_argument("--auth-token-file", type=Path, help="file with the run's secret")
parser.add_argument("--name", help="this learner's name, the same across restarts")


def train(syncer: str | None, auth_token_file: Path | None, name: str | None) -> None:
    """Train until the run is over."""
    token = auth_token_file.read_text().strip() if auth_token_file else None
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    model = nn.Sequential(
        *(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 512), nn.GELU()),
        nn.Linear(512, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    learner = dd.Learner(model, syncer, auth_token=token, name=name, optimizer=optimizer)
    rng = torch.Generator().manual_seed(1337 + learner.index)  # different data for each learner
    running, smoothed, print_at = True, 0.0, 0.0
    while running:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=rng)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running = learner.step(loss)
        smoothed += max(0.02, 1 / learner.steps) * (loss.item() - smoothed)
        if time.monotonic() > print_at:
            print_at = time.monotonic() + 5
            print(f"step {learner.global_step}: loss {smoothed:.3f}", flush=True)
    learner.close()
    end = "the model holds the run's final weights" if learner.ended else "the run continues"
    print(f"{learner.name}: {learner.steps} steps; {end}")


try:
    train(**vars(parser.parse_args()))
except (dd.DilocoError, OSError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
