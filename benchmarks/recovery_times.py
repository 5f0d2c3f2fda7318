"""Recovery time of a learner by each path, against the size of its model.

One shard and two learners in one process, over loopback HTTP. The second learner leaves and comes
back three times: from its own checkpoint, from the first one's optimizer state (directly and
through the shard), and from only the published copies. Measured are the seconds inside the
constructor. The cost of a checkpoint has three parts: the copy to fresh memory (as without
`Checkpointer.prepare`), the copy into reused memory, and the write. Only the copies delay a step.

    python benchmarks/recovery_times.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from evidence import keep, options
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from decoupled_diloco import StateSharing
from decoupled_diloco.tape import TapeReader
from integration.real_system import System, patient


class TrainingLearner:
    """A learner with AdamW that steps until it is asked to stop."""

    def __init__(self, system: System, name: str, millions: int, **options: Any) -> None:
        width = round((millions * 1e6 / 4) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        started = time.perf_counter()
        self.learner = system.learner(
            self.model,
            name,
            optimizer=self.optimizer,
            timeouts=patient(disconnect=120.0),
            **options,
        )
        self.seconds = time.perf_counter() - started
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def step(self) -> None:
        """Take one step of AdamW."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.learner.step(tokens=8)

    def _run(self) -> None:
        while not self.stop.is_set():
            self.step()
            time.sleep(0.02)


def run(millions: int) -> dict[str, Any]:
    found: dict[str, Any] = {"million_parameters": millions}
    own = {"run": {"max_steps": 10**6}, "sync": {"fragments": 8, "sync_every": 50}}
    with (
        tempfile.TemporaryDirectory() as name,
        closing(System(Path(name), pool_bytes=1 << 29, **own)) as system,
    ):
        folder = Path(name)
        (folder / "tape").mkdir()
        system.start()
        provider = TrainingLearner(system, "donor", millions)
        for _ in range(3):
            provider.step()
        provider.thread.start()
        joiner = TrainingLearner(system, "joiner", millions, checkpoint=folder / "kept")
        found["donor, relay"] = joiner.seconds
        joiner.step()
        for _ in range(2):  # the first one uses fresh memory unless there was time to prepare it
            future = joiner.learner.checkpoint()
            assert future is not None
            future.result(120)
        joiner.learner.__exit__(RuntimeError, RuntimeError("killed"), None)
        back = TrainingLearner(system, "joiner", millions, checkpoint=folder / "kept")
        found["own checkpoint"] = back.seconds
        back.learner.close()
        fresh = TrainingLearner(system, "fresh", millions, state_sharing=StateSharing(()))
        found["published copies"] = fresh.seconds
        fresh.learner.close()
        provider.stop.set()
        provider.thread.join()
        provider.learner.close()
        tape = list(TapeReader(folder / "tape" / "joiner.jsonl"))
        recoveries = [r.data for r in tape if r.type == "Recovered"]
        assert [each["way"] for each in recoveries] == ["donor", "checkpoint"], recoveries
        found["donor's bytes"] = recoveries[0]["nbytes"]
        first, kept = [r.data for r in tape if r.type == "CheckpointWritten"][:2]
        found["checkpoint: copy to fresh memory"] = first["copy_seconds"]
        found["checkpoint: copy"] = kept["copy_seconds"]
        found["checkpoint: write"] = kept["write_seconds"]
        found["checkpoint's bytes"] = kept["nbytes"]
    return found


def main() -> None:
    arguments = options(millions=[1, 8, 32])
    torch.set_num_threads(1)
    raw = []
    for millions in arguments.millions:
        raw.append(run(millions))
        print(raw[-1])
    keep("recovery", config=vars(arguments), raw=raw, result={"rows": raw})


if __name__ == "__main__":
    main()
