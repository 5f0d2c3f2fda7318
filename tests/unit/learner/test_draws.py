"""Generators that a loop draws from in every step are told from others."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from decoupled_diloco.learner.reports import LAST_STEP, Draws


def told(draw: Callable[[int], object], seed: int = 1) -> tuple[str, ...]:
    """What is told of a loop, whose first steps may come before this process joined."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        draws, found = Draws(), list[tuple[str, ...]]()
        for step in range(1, 3 * LAST_STEP):
            draw(step)
            found.append(draws.stepped(step))
    assert not any(found[: LAST_STEP - 1] + found[LAST_STEP:]), "it is told once"
    return found[LAST_STEP - 1]


def test_equal_seeds_give_equal_states_and_others_do_not() -> None:
    draw = lambda step: torch.randint(10, (3,))  # noqa: E731
    assert told(draw) == told(draw)
    assert told(draw) != told(draw, seed=2)
    assert [state.split(":")[0] for state in told(draw)] == ["torch"]


def test_every_generator_counts_for_itself() -> None:
    loop = lambda step: (random.random(), np.random.rand())  # noqa: E731
    assert [state.split(":")[0] for state in told(loop)] == ["numpy", "random"]


def test_a_shuffle_now_and_then_is_not_a_draw_in_every_step() -> None:
    assert told(lambda step: torch.randperm(5) if step % 5 == 0 else None) == ()
    generator = torch.Generator().manual_seed(1)
    assert told(lambda step: torch.randn(3, generator=generator)) == ()
