r"""A nanoGPT-like loop under torchrun: DDP, gradient accumulation, a learning rate schedule.

All ranks of one torchrun job are one learner. From the repository root:

    ddiloco train examples/train_ddp.toml

The lines with `learner` make it a learner. Without an address, `dd.Learner(model)` finds its run
through the launcher's environment variables.
"""

import argparse
import contextlib
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decoupled_diloco as dd

CONTEXT, WIDTH, RATE, WARMUP_STEPS = 32, 64, 2e-3, 20

parser = argparse.ArgumentParser(description="Train a small GPT as one multi-rank learner.")
parser.add_argument("--batch", type=int, default=16, help="windows per rank and micro-batch")
parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches per step")


class Gpt(nn.Module):
    """A byte-level transformer with one block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, window: Tensor) -> Tensor:
        """Return the mean cross-entropy of each next byte, nats.

        Args:
            window: int64 [batch, CONTEXT + 1].
        """
        before, after = window[:, :-1], window[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=window.device)
        hidden = self.bytes(before) + self.places.weight
        logits = self.head(self.block(hidden, src_mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), after.flatten())


def read_text() -> Tensor:
    """Return the source code of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch_of(text: Tensor, size: int, rng: torch.Generator) -> Tensor:
    """Return random windows of the text, int64 [size, CONTEXT + 1]."""
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=rng)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def main() -> None:
    """Train until the run is over."""
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(1337)  # the same weights on all ranks
    model = DistributedDataParallel(Gpt().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    learner = dd.Learner(model, optimizer=optimizer)
    budget = learner.run_config["run"]["max_steps"]
    # Different data for every rank of every learner.
    rng = torch.Generator().manual_seed(1337 + learner.index * dist.get_world_size() + rank)
    text = read_text()
    running = True
    while running:
        step = learner.global_step
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warmup * (0.55 + 0.45 * math.cos(math.pi * min(1, step / budget)))
        for micro in range(given.micro_batches):
            last = micro == given.micro_batches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(batch_of(text, given.batch, rng).to(device)) / given.micro_batches
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens = given.batch * given.micro_batches * CONTEXT
        running = learner.step(given.micro_batches * loss.item(), tokens=tokens)
        if rank == 0 and learner.steps % 10 == 0:
            print(f"step {step}: loss {given.micro_batches * loss.item():.3f}")
    learner.close()
    if rank == 0:
        end = "the model holds the run's final weights" if learner.ended else "the run continues"
        print(f"{learner.name}: {learner.steps} steps; {end}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
