r"""A learner that protects each of its training examples with DP-SGD, by Opacus.

Whatever such a learner sends reveals at most ε about any single example of its data. It needs no
trust in the syncer, and works with two learners as well as with a thousand. Start two of them on
this machine, from the repository root:

    ddiloco train examples/private_examples.toml
"""

import argparse
import sys
from pathlib import Path

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import decoupled_diloco as dd

EXAMPLES, PIXELS, CLASSES, BATCH = 2000, 20, 4, 50
NOISE, CLIP, DELTA = 1.0, 1.0, 1e-4

parser = argparse.ArgumentParser(description="Train a small classifier with DP-SGD.")
parser.add_argument("--syncer", help="address of a shard, such as http://host:port")
parser.add_argument("--auth-token-file", type=Path, help="file with the run's secret")
parser.add_argument("--name", help="this learner's name, the same across restarts")


def examples_of(index: int) -> TensorDataset:
    """Return the data of a learner: noisy images of the same classes for all."""
    centers = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1337 + index)
    labels = torch.randint(CLASSES, (EXAMPLES,), generator=rng)
    return TensorDataset(centers[labels] + torch.randn(EXAMPLES, PIXELS, generator=rng), labels)


def train(syncer: str | None, auth_token_file: Path | None, name: str | None) -> None:
    """Train until the run is over."""
    token = auth_token_file.read_text().strip() if auth_token_file else None
    model = nn.Sequential(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    # The optimizer's state has seen only noisy gradients, so it may be shared.
    learner = dd.Learner(model, syncer, auth_token=token, name=name, optimizer=optimizer)

    # Opacus wraps the model and the optimizer. The learner has the ones inside.
    secret = torch.Generator()
    secret.seed()  # PyTorch's own generator starts with a seed that is known
    engine = PrivacyEngine()
    private, noisy, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(examples_of(learner.index), batch_size=BATCH),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        noise_generator=secret,
    )
    running = True
    while running:
        for images, labels in loader:
            noisy.zero_grad()
            loss = nn.functional.cross_entropy(private(images), labels)
            loss.backward()
            noisy.step()
            # Neither the loss nor the size of a drawn batch has noise, so they stay here.
            running = learner.step(tokens=BATCH)
            if not running:
                break
    learner.close()
    # A restarted learner must go on counting: save `engine.accountant.state_dict()`, too.
    epsilon = engine.get_epsilon(DELTA)
    print(f"{learner.name}: {learner.steps} steps; each example: ε = {epsilon:.2f}, δ = {DELTA}")


try:
    train(**vars(parser.parse_args()))
except (dd.DilocoError, OSError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
