"""Copies between a CUDA device and pinned host memory, on a stream beside the one that trains.

The host waits for none of them: the side stream waits for what the training stream has made, and
the training stream for what the side stream has brought. Only a copy's own event is waited for, in
the background.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SideStream:
    """See the module; safe to use from several threads.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Is reached when the device has done what this thread's stream was given up to now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def download(
        self, tensors: Sequence[Tensor], after: torch.cuda.Event
    ) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begins to copy tensors of the device to pinned memory.

        Args:
            after: The copies begin when it is reached.

        Returns:
            The copies, and the event of their end. A thread that waits for it sleeps.
        """
        copies = [
            torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True)
            for each in tensors
        ]
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for copy, each in zip(copies, tensors, strict=True):
                copy.copy_(each, non_blocking=True)
                each.record_stream(self._stream)
            done.record(self._stream)
        return copies, done

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the device; this thread's stream waits for them, the host does not.

        Args:
            tensors: In pinned memory; what is not is copied there first. What is on the device
                already is given back.
        """
        training = torch.cuda.current_stream(self._device)
        found = []
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for each in tensors:
                source = each if each.is_cuda or each.is_pinned() else each.pin_memory()
                found.append(source.to(self._device, non_blocking=True))
        training.wait_stream(self._stream)
        for before, after in zip(tensors, found, strict=True):
            if after is not before:
                after.record_stream(training)
        return found
