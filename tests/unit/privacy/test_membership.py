"""The best attack on the published weights finds out no more about a learner than ε and δ allow."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.merge import body_digest
from decoupled_diloco.privacy.accountant import epsilon_spent
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from unit.plans import plan_of

N, CLIP, PERIODS, DELTA, TRIALS = 12, 0.7, 4, 0.01, 1500
SURE = 1e-6
"""Probability with which an honest implementation fails; the seed is fixed besides."""


class Seeded(Runtime):
    """The real runtime with repeatable noise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def random_bytes(self, count: int) -> bytes:
        """See `Runtime`."""
        return self._random.randbytes(count)


def published(z: float, target: Tensor | None) -> Tensor:
    """The weights after some merges of three learners; without a target, one sends zeros."""
    plan = plan_of(nn.Linear(N, 1, bias=False), "fp32", "mean")
    tensors = ShardTensors(plan, (0,), mechanism=Mechanism(CLIP, z, N))
    tensors.install(0, torch.zeros(N))
    uplink = plan.uplink_of(0)
    for period in range(PERIODS):
        for learner in range(3):
            values = torch.full((N,), 0.01 * learner)
            if learner == 2:
                values = torch.zeros(N) if target is None else target
            ask, body = Asking(1, 3 * period + learner), uplink.encode(values)
            tensors.verify(0, ask, body, body_digest(body, uplink))
            tensors.fold(0, ask, 1.0, 1.0)
        tensors.merge(0)
    return tensors.whole(0)


def scores(
    z: float, target: Tensor | None, direction: Tensor
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the attacker's best statistic for each trial.

    The attacker knows everything except whether the learner took part.
    """
    return np.array([float(published(z, target) @ direction) for _ in range(TRIALS)])


def excess(z: float) -> float:
    """By how much the attack surely beats e^ε · false positives + δ, at its best threshold."""
    direction = torch.ones(N) / math.sqrt(N)
    with within(Seeded(25)):
        present, absent = scores(z, 100 * direction, direction), scores(z, None, direction)
    # Dvoretzky, Kiefer and Wolfowitz: no share of the trials is further from its probability.
    error = math.sqrt(math.log(4 / SURE) / (2 * TRIALS))
    epsilon = epsilon_spent(CLAIMED, PERIODS, DELTA, discrete=False)
    found = []
    for threshold in np.concatenate((present, absent)):
        true, false = (present >= threshold).mean(), (absent >= threshold).mean()
        found.append(true - error - math.exp(epsilon) * (false + error) - DELTA)
    return max(found)


CLAIMED = 4.0


def test_the_attack_stays_below_epsilon() -> None:
    assert excess(CLAIMED) <= 0


@pytest.mark.parametrize("z", [CLAIMED / 4])
def test_the_attack_succeeds_with_too_little_noise(z: float) -> None:
    """So the test above can fail."""
    assert excess(z) > 0
