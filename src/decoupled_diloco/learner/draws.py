"""Notices that a loop draws random numbers in every step, and from which states.

Two learners whose generators are in one state after equally many steps of their own have the same
seed and see the same batches, however far apart they have started. Only generators that move in
every step count: a data loader that shuffles once an epoch does not choose its batches by them.
"""

from __future__ import annotations

import random
import sys
import zlib

import torch

FIRST_STEP, LAST_STEP = 8, 16
"""The steps of this process after which the generators are looked at: later is too late to help,
and the first ones may draw for something else."""


class Draws:
    """Follows the generators of this process from `FIRST_STEP` to `LAST_STEP`."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}

    def stepped(self, step: int) -> tuple[str, ...]:
        """Looks after a step of this process; about 30 µs in 9 steps, nothing in all others.

        Returns:
            After `LAST_STEP`: generator and state of those that moved in every step, else nothing.
        """
        if not FIRST_STEP <= step <= LAST_STEP:
            return ()
        states, before = _states(), self._states
        if step > FIRST_STEP:
            moved = {name for name, state in states.items() if before.get(name, state) != state}
            states = {name: states[name] for name in sorted(moved)}
        self._states = states
        if step < LAST_STEP:
            return ()
        return tuple(f"{name}:{state:08x}" for name, state in states.items())


def _states() -> dict[str, int]:
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    states = {"torch": zlib.crc32(torch_state), "random": hash(random.getstate()) & 0xFFFFFFFF}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, key, position, *_ = numpy.random.get_state()
        states["numpy"] = zlib.crc32(key.tobytes(), position)
    return states
