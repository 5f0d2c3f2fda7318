r"""A plain PyTorch training loop as a learner of a run: the lines with `learner` are all it takes.

Start everything on this machine, from the root of the repository:

    ddiloco train examples/train.toml

Or start a syncer, then as many learners as you like, each with its own name:

    ddiloco syncer recipes/homelab.toml
    python examples/train.py --syncer http://127.0.0.1:7070 \
        --token-file runs/homelab/token --name a
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
parser.add_argument("--syncer", help="address of a shard, as http://host:port")
parser.add_argument("--token-file", type=Path, help="file with the run's secret")
parser.add_argument("--name", help="this learner's name, the same across restarts")


def train(syncer: str | None, token_file: Path | None, name: str | None) -> None:
    """Trains until the run is over."""
    token = token_file.read_text().strip() if token_file else None
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    model = nn.Sequential(
        *(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 512), nn.GELU()),
        nn.Linear(512, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    learner = dd.Learner(model, syncer, token=token, learner_id=name, optimizer=optimizer)
    rng = torch.Generator().manual_seed(1337 + learner.index)  # every learner reads elsewhere
    going_on, smoothed, tell_at = True, 0.0, 0.0
    while going_on:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=rng)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        going_on = learner.step(tokens=BATCH, loss=loss.item())
        smoothed += max(0.02, 1 / learner.steps) * (loss.item() - smoothed)
        if time.monotonic() > tell_at:
            tell_at = time.monotonic() + 5
            print(f"step {learner.global_step}: loss {smoothed:.3f}", flush=True)
    learner.close()
    end = "the model holds the run's final weights" if learner.over else "the run continues"
    print(f"{learner.name}: {learner.steps} steps; {end}")


try:
    train(**vars(parser.parse_args()))
except (dd.Error, OSError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
