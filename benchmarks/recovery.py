"""How long a learner takes to come back, by each way, against the size of its model.

One shard and two learners in one process, over loopback HTTP. The second learner leaves and comes
back from its own checkpoint, then from the first one's optimizer (straight and through the shard),
then with the published copies alone; seconds from the constructor's call to its return, and what a
checkpoint costs: the copy that a step waits for, into fresh memory as without
`Checkpointer.prepare` and into what the one before lay in, and the write that no step waits for.

    python benchmarks/recovery.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from evidence import keep
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from decoupled_diloco.observe.tape import read_tape
from integration.system import System

ESTIMATE = (
    "per million fp32 parameters: published copies 4 MB, so 10 ms; a donor's AdamW state 8 MB "
    "more, copied, hashed twice and fetched in chunks, so 25 ms straight and 40 ms by a relay; own "
    "checkpoint 16 MB read and hashed, so 25 ms; each with some 50 ms for joining. The copy of a "
    "checkpoint: 12 MB at 5 GB/s, 2.5 ms; its write 16 MB with fsync, 30 ms"
)


class Life:
    """One learner with AdamW that steps until it is told to stop."""

    def __init__(self, system: System, name: str, millions: int, **options: Any) -> None:
        width = round((millions * 1e6 / 4) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        started = time.perf_counter()
        self.learner = system.learner(
            self.model, name, optimizer=self.optimizer, give_up_seconds=120.0, **options
        )
        self.seconds = time.perf_counter() - started
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._go_on)

    def step(self) -> None:
        """One step of AdamW."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.learner.step(tokens=8)

    def _go_on(self) -> None:
        while not self.stop.is_set():
            self.step()
            time.sleep(0.02)


def run(millions: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    (folder / "tape").mkdir()
    system = System(
        folder, run={"budget_steps": 10**6}, sync={"fragments": 8, "period": 50}, pool_bytes=1 << 29
    )
    found: dict[str, Any] = {"million_parameters": millions}
    try:
        system.start()
        for way, listen in (("relay", None), ("direct", "127.0.0.1:0")):
            donor = Life(system, f"donor-{way}", millions, listen=listen)
            for _ in range(3):
                donor.step()
            donor.thread.start()
            joiner = Life(system, f"joiner-{way}", millions, checkpoint=folder / "kept")
            found[f"donor, {way}"] = joiner.seconds
            joiner.step()
            for _ in range(2):  # the first one's memory is fresh unless there was time to get it
                future = joiner.learner.checkpoint()
                assert future is not None
                future.result(120)
            joiner.learner._leave("", abrupt=True)
            back = Life(system, f"joiner-{way}", millions, checkpoint=folder / "kept")
            found["own checkpoint"] = back.seconds
            back.learner.close()
            fresh = Life(system, f"fresh-{way}", millions, donate=())
            found["published copies"] = fresh.seconds
            fresh.learner.close()
            donor.stop.set()
            donor.thread.join()
            donor.learner.close()
            tape = list(read_tape(folder / "tape" / f"joiner-{way}.jsonl"))
            ways = [r.data for r in tape if r.type == "Recovered"]
            assert [each["way"] for each in ways] == ["donor", "checkpoint"], ways
            found["donor's bytes"] = ways[0]["nbytes"]
            first, kept = [r.data for r in tape if r.type == "CheckpointWritten"][:2]
            found["checkpoint: copy to fresh memory"] = first["copy_seconds"]
            found["checkpoint: copy"] = kept["copy_seconds"]
            found["checkpoint: write"] = kept["write_seconds"]
            found["checkpoint's bytes"] = kept["nbytes"]
    finally:
        system.close()
        shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    raw = [run(millions) for millions in arguments.millions]
    for row in raw:
        print(row)
    keep(
        "recovery",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result={"rows": raw},
        not_measured="links other than loopback; CUDA; a machine without other work: others' tests "
        "ran meanwhile; each number is one run; importing torch (2 to 3 s) is not in it",
    )


if __name__ == "__main__":
    main()
