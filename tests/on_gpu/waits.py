"""Waits for the device: how to find them, and how to make some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Makes waiting for the device an error, as far as PyTorch notices it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Sleeper:
    """Keeps the device busy for a while; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._cycles_a_second = 0.0
        for _ in range(20 if self._on_cuda else 0):  # an idle device's clock is slow at first
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            torch.cuda._sleep(10**7)
            ended.record()
            torch.cuda.synchronize()
            rate = 1e7 / (1e-3 * started.elapsed_time(ended))
            self._cycles_a_second = max(self._cycles_a_second, rate)

    def begin(self, seconds: float) -> Callable[[], bool]:
        """Queues a kernel that lasts so long; gives what says whether it is still at work."""
        if not self._on_cuda:
            return lambda: True
        torch.cuda._sleep(int(seconds * self._cycles_a_second))
        ended = torch.cuda.Event()
        ended.record()
        return lambda: not ended.query()
