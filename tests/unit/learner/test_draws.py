"""Random generators from which a loop draws in every step are recognized and reported."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from decoupled_diloco.learner.reports import LAST_STEP, Draws


def reported(draw: Callable[[int], object], seed: int = 1) -> tuple[str, ...]:
    """Return the report for a loop whose first steps may have been before the join."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        draws, found = Draws(), list[tuple[str, ...]]()
        for step in range(1, 3 * LAST_STEP):
            draw(step)
            found.append(draws.stepped(step))
    assert not any(found[: LAST_STEP - 1] + found[LAST_STEP:]), "it is reported once"
    return found[LAST_STEP - 1]


def test_equal_seeds_give_equal_states_and_others_do_not() -> None:
    draw = lambda step: torch.randint(10, (3,))  # noqa: E731
    assert reported(draw) == reported(draw)
    assert reported(draw) != reported(draw, seed=2)
    assert [state.split(":")[0] for state in reported(draw)] == ["torch"]


def test_each_generator_is_reported_separately() -> None:
    loop = lambda step: (random.random(), np.random.rand())  # noqa: E731
    assert [state.split(":")[0] for state in reported(loop)] == ["numpy", "random"]


def test_an_occasional_shuffle_is_not_a_draw_in_every_step() -> None:
    assert reported(lambda step: torch.randperm(5) if step % 5 == 0 else None) == ()
    generator = torch.Generator().manual_seed(1)
    assert reported(lambda step: torch.randn(3, generator=generator)) == ()
