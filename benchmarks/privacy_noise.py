"""Loss with differential privacy for several numbers of learners, with the merge code of a shard.

Each learner has 20 images of digits, and trains 10 steps of SGD per period from the published
weights. The noise is that for a given ε over all periods.

    python benchmarks/privacy_noise.py
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
from evidence import keep, options
from sklearn.datasets import load_digits
from torch import Tensor, nn
from virtual import interval

from decoupled_diloco.merge import body_digest, layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.privacy.accountant import noise_multiplier_for
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.syncer.shard_tensors import ShardTensors

EPSILONS = (1.0, 4.0, 16.0, math.inf)
IMAGES, STEPS, RATE = 20, 10, 0.5
PIXELS, CLASSES, HELD_OUT = 64, 10, 360
NUMEL = CLASSES * (PIXELS + 1)


def local(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Return the changes of all learners in one period, [n, N]."""
    learners = len(images)
    start = weights.expand(learners, NUMEL).reshape(learners, CLASSES, PIXELS + 1)
    theta = start.clone()
    for _ in range(STEPS):
        p = (images @ theta.transpose(1, 2)).softmax(-1) - nn.functional.one_hot(labels, CLASSES)
        theta -= RATE / IMAGES * p.transpose(1, 2) @ images
    return (theta - start).reshape(learners, NUMEL)


def trained(learners: int, epsilon: float, periods: int, seed: int) -> dict[str, Any]:
    """Train and return the result of one run."""
    digits = load_digits()
    images = torch.cat([torch.tensor(digits.data / 16), torch.ones(len(digits.data), 1)], 1).float()
    labels = torch.tensor(digits.target)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=rng)
    held, rest = order[:HELD_OUT], order[HELD_OUT:]
    own = rest[torch.randint(len(rest), (learners, IMAGES), generator=rng)]
    # Two fragments: half of the elements each.
    model = nn.ParameterList([torch.zeros(NUMEL // 2), torch.zeros(NUMEL - NUMEL // 2)])
    plan = MergePlan.make(
        layout_of(model),
        fragments=2,
        strategy="balanced",
        uplink="fp32",
        downlink="fp32",
        method="mean",
        weighting="uniform",
        outer=make_outer("sgd", 1.0, 0.0),
    )
    z, delta = 0.0, 0.1 / learners
    if math.isfinite(epsilon):
        z = noise_multiplier_for(periods, epsilon, delta, discrete=False)
    first = local(torch.zeros(NUMEL), images[own], labels[own])
    clip = float(first.norm(dim=1).median())
    tensors = ShardTensors(plan, (0, 1), mechanism=Mechanism(clip, z, NUMEL))
    cut = [slice(0, plan.fragments[0].numel), slice(plan.fragments[0].numel, NUMEL)]
    for fragment in (0, 1):
        tensors.install(fragment, torch.zeros(plan.fragments[fragment].numel))
    numbers, uplink = count(), plan.uplink
    for _ in range(periods):
        weights = torch.cat([tensors.whole(0), tensors.whole(1)])
        for change in local(weights, images[own], labels[own]):
            for fragment in (0, 1):
                ask, body = Asking(1, next(numbers)), uplink.encode(change[cut[fragment]])
                tensors.verify(fragment, ask, body, body_digest(body, uplink))
                tensors.fold(fragment, ask, 1.0, 1.0)
        for fragment in (0, 1):
            tensors.merge(fragment)
    weights = torch.cat([tensors.whole(0), tensors.whole(1)]).reshape(CLASSES, PIXELS + 1)
    logits = images[held] @ weights.T
    return {
        "learners": learners,
        "epsilon": "none" if math.isinf(epsilon) else f"{epsilon:g}",
        "seed": seed,
        "clip": clip,
        "noise_multiplier": z,
        "noise_in_clips": math.sqrt(NUMEL) * z / learners,
        "loss": float(nn.functional.cross_entropy(logits, labels[held])),
        "accuracy": float((logits.argmax(1) == labels[held]).float().mean()),
    }


def main() -> None:
    given = options(learners=[8, 64, 1000], periods=30, seeds=[1, 2, 3, 4, 5])
    torch.set_num_threads(1)
    raw = [
        trained(learners, epsilon, given.periods, seed)
        for learners in given.learners
        for epsilon in EPSILONS
        for seed in given.seeds
    ]
    rows = []
    for start in range(0, len(raw), len(given.seeds)):
        runs = raw[start : start + len(given.seeds)]
        rows.append(
            {key: runs[0][key] for key in ("learners", "epsilon", "noise_multiplier")}
            | {"noise_in_clips": runs[0]["noise_in_clips"]}
            | {key: interval([run[key] for run in runs]) for key in ("loss", "accuracy")}
        )
    keep("privacy", config=vars(given), raw=raw, result={"rows": rows})


if __name__ == "__main__":
    main()
