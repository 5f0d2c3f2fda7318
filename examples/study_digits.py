"""EXO gym's MNIST example as a study: a small CNN, four learners, two seeds, three strategies.

Run:

    python examples/study_digits.py
    python examples/study_digits.py --steps 30

It uses the small digits of scikit-learn. The strategies are data-parallel training, DiLoCo and
Streaming DiLoCo. SPARTA, which exchanges random parameters, does not exist here.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import nn

from decoupled_diloco import lab

LEARNERS, TRAINED, BATCH = 4, 1500, 32

digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)


def block(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.25),
    ]


def model():
    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 4, 10))


def batches(learner, learners, seed):
    own = torch.arange(learner, TRAINED, learners)
    random = torch.Generator().manual_seed(1000 * seed + learner)
    while True:
        chosen = own[torch.randint(len(own), (BATCH,), generator=random)]
        yield images[chosen], labels[chosen]


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    def rate(step):  # a warm-up, then a cosine to 0
        return min(1.0, (step + 1) / 15) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2

    study = lab.Study(
        model=model,
        batches=batches,
        loss=loss,
        evaluation=lambda: [(images[TRAINED:], labels[TRAINED:])],
        inner=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4),
        rate=rate,
        learners=LEARNERS,
        steps=steps,
        seeds=2,
    )
    study.run("data-parallel")
    study.run("diloco", sync_every=10)
    study.run("streaming-diloco", sync_every=10)
    study.run("decoupled", sync_every=10)
    study.table()


if __name__ == "__main__":
    main()
