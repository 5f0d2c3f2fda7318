"""A training loop whose learner takes checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco import Checkpointing, Learner
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.tape import TapeReader
from integration.real_system import (
    Model,
    System,
)

Make = Callable[..., System]
ALONE = {"sync": {"quorum": 2}, "run": {"max_steps": 1000}}
"""Nothing is ever merged, because the second learner does not join."""


class Thread(threading.Thread):
    """A function in a thread; its result or error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work, self.found, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.work()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.join(60)
        if self.error is not None:
            raise self.error
        return self.found


@contextmanager
def stepping(loop: Loop) -> Iterator[None]:
    """Let the loop continue in a separate thread meanwhile."""
    stop = threading.Event()

    def train() -> None:
        while not (stop.is_set() or loop.dead):
            try:
                loop.steps(1)
            except ConfigError:
                assert loop.dead, "it ended between two steps"
            time.sleep(0.01)

    thread = Thread(train)
    try:
        yield
    finally:
        stop.set()
        thread.result()


class Position:
    """The position of a data loader."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Loop:
    """One incarnation of a learner with checkpoints, steps of AdamW and a position in the data."""

    def __init__(
        self, system: System, folder: Path | str, seed: int = 0, width: int = 6, **options: Any
    ) -> None:
        self.dead = False
        self.model = Model(seed, width)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=0.01)
        self.position = Position()
        name = options.pop("name", "learner-0")
        seconds = options.pop("interval_seconds", 60.0)
        self.learner: Learner = system.learner(
            self.model,
            name,
            optimizer=self.optimizer,
            checkpoint=Checkpointing(folder, seconds, {"data": self.position}),
            **options,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.position.batches)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step()
            self.model.seen += 1
            self.position.batches += 1
            assert self.learner.step(tokens=8)

    def keep(self) -> None:
        future = self.learner.checkpoint()
        assert future is not None
        future.result(10)

    def die(self) -> None:
        """End like SIGKILL, except that the tape is complete."""
        self.learner.__exit__(RuntimeError, RuntimeError("killed"), None)


def recovered(system: System, name: str = "learner-0") -> list[dict[str, Any]]:
    """Return how the incarnations of a learner began, from its tape."""
    records = TapeReader(system.folder / "tape" / f"{name}.jsonl")
    return [record.data for record in records if record.type == "Recovered"]
