r"""A complete loop: gradient accumulation, a learning rate schedule, evaluation and checkpoints.

Start a syncer, then any number of learners, each with a different name:

    ddiloco syncer recipes/homelab.toml
    python examples/full_loop.py --syncer http://127.0.0.1:7070 \
        --auth-token-file runs/homelab/token --name a --checkpoints checkpoints

Stop a learner with Ctrl-C or SIGTERM, and start it again under the same name. It continues at the
same step, with the same optimizer state, learning rate and position in the data.
"""

import argparse
import math
import signal
import sys
import sysconfig
import threading
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

import decoupled_diloco as dd

CONTEXT, BATCH, MICRO_BATCHES = 32, 64, 4
RATE, WARMUP_STEPS = 2e-3, 20
EVALUATE_EVERY = 20
HELD_OUT_BYTES = 100_000

parser = argparse.ArgumentParser(description="Train a small byte model as one learner.")
parser.add_argument("--syncer", required=True, help="address of a shard, such as http://host:port")
parser.add_argument(
    "--auth-token-file", type=Path, required=True, help="file with the run's secret"
)
parser.add_argument("--name", required=True, help="this learner's name, the same across restarts")
parser.add_argument("--checkpoints", type=Path, required=True, help="folder for its checkpoints")


class Data:
    """Random windows of a text; batch number i depends only on the seed and i."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self.text, self.seed, self.position = text, seed, 0

    def next(self) -> Tensor:
        """Return the next batch, int64 [BATCH, CONTEXT + 1]."""
        rng = torch.Generator().manual_seed(self.seed * 10**9 + self.position)
        self.position += 1
        starts = torch.randint(len(self.text) - CONTEXT, (BATCH,), generator=rng)
        return self.text[starts[:, None] + torch.arange(CONTEXT + 1)].long()

    def state_dict(self) -> dict[str, int]:
        """Return the state for the learner's checkpoint."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the state of `state_dict`."""
        self.position = state["position"]


def read_text() -> Tensor:
    """Return the source code of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8)


def rate_at(step: int, budget: int) -> float:
    """Return the learning rate: warm-up, then a cosine to a tenth over the whole run."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return RATE * warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / budget)))


def loss_of(model: nn.Module, window: Tensor) -> Tensor:
    """Return the mean cross-entropy of the byte after each window, nats."""
    return nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> float:
    """Return the loss on the same eight batches each time."""
    model.eval()
    data = Data(held_out, seed=0)
    loss = sum(loss_of(model, data.next()).item() for _ in range(8)) / 8
    model.train()
    return loss


def train(syncer: str, auth_token_file: Path, name: str, checkpoints: Path) -> None:
    """Train until the run is over, or until the process receives SIGINT or SIGTERM."""
    stop_requested = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop_requested.set())
    text = read_text()
    data = Data(text[:-HELD_OUT_BYTES], seed=zlib.crc32(name.encode()))
    held_out = text[-HELD_OUT_BYTES:]
    model = nn.Sequential(
        *(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.GELU()),
        nn.Linear(128, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with dd.Learner(
        model,
        syncer,
        auth_token=auth_token_file.read_text(),
        name=name,
        optimizer=optimizer,
        checkpoint=dd.Checkpointing(checkpoints, interval_seconds=10.0, state={"data": data}),
        timeouts=dd.Timeouts(flush=5.0),
    ) as learner:
        budget = learner.run_config["run"]["max_steps"]
        print(f"{name} starts at its step {learner.steps}, batch {data.position}", flush=True)
        running = True
        while running and not stop_requested.is_set():
            step = learner.global_step
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, budget)
            total = 0.0
            for _ in range(MICRO_BATCHES):
                loss = loss_of(model, data.next()) / MICRO_BATCHES
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            # Call step() last: it applies weights and saves checkpoints, which must happen between
            # two steps of the optimizer.
            running = learner.step(total)
            if learner.steps % EVALUATE_EVERY == 0:
                losses = f"loss {total:.3f}, held out {evaluate(model, held_out):.3f}"
                print(f"step {step}, rate {rate_at(step, budget):.6f}: {losses}", flush=True)
    if stop_requested.is_set():
        print(f"{name} stops after its step {learner.steps}, batch {data.position}", flush=True)
    else:
        print(f"{name}: the run's final weights, held out {evaluate(model, held_out):.3f}")


if __name__ == "__main__":
    try:
        train(**vars(parser.parse_args()))
    except (dd.DilocoError, OSError) as error:
        sys.exit(f"error: {error}")
