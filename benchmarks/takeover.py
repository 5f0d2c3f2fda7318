"""Kill or stop a shard that has a standby, and measure the time until its next version.

Two paced learners (0.1 s per step), two shards with standbys. The standby's tape gives the times of
its takeover, of the first learner that it admitted, and of the first version that it announced.

    python benchmarks/takeover.py
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bench_runs import carry_out, paced
from evidence import keep, options, spread

from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.tape import TapeReader

CASES = (
    ("shard 1", 1, signal.SIGKILL, 2.0),
    ("shard 1", 1, signal.SIGKILL, 5.0),
    ("shard 1", 1, signal.SIGSTOP, 5.0),
    ("shard 0 and the coordinator", 0, signal.SIGKILL, 2.0),
    ("shard 0 and the coordinator", 0, signal.SIGKILL, 5.0),
)


def run(shard: int, number: signal.Signals, lease_seconds: float) -> dict[str, float]:
    with paced(
        step_seconds=0.1,
        run={"name": "takeover", "learners": 2, "max_steps": 100_000},
        sync={"fragments": 8, "sync_every": 8, "overlap_steps": 2},
        syncer={"shards": 2, "standby": True, "lease_seconds": lease_seconds},
    ) as config:
        tapes = Path(config.run.folder) / "tape"
        first, second = (tapes / f"shard-{shard}{which}.jsonl" for which in ("", "-standby"))
        struck: list[float] = []

        def script(run: LocalRun) -> Iterator[None]:
            while not run.used_budget() or len(merged_at(first)) < 8:
                yield
            child = run.supervisor.children[f"shard-{shard}"]
            assert child.process is not None
            child.restarts = False
            child.process.send_signal(number)
            struck.append(time.time())
            while not merged_at(second):
                yield

        carry_out(config, script)
        records = list(TapeReader(second))
        taken, greeted = (
            next(r.wall for r in records if r.type == t) for t in ("TookOver", "Accept")
        )
        return {
            "claim_seconds": taken - struck[0],
            "first_learner_seconds": greeted - struck[0],
            "next_version_seconds": merged_at(second)[0] - struck[0],
        }


def merged_at(tape: Path) -> list[float]:
    """Return the times at which merged versions were announced."""
    records = TapeReader(tape) if tape.exists() else ()
    return [r.wall for r in records if r.type == "Done" and r.data["order"]["type"] == "Merge"]


def main() -> None:
    arguments = options(runs=3)
    raw: dict[str, list[dict[str, float]]] = {}
    for what, shard, number, lease_seconds in CASES:
        key = f"{what}, {number.name}, lease {lease_seconds:g} s"
        raw[key] = [run(shard, number, lease_seconds) for _ in range(arguments.runs)]
        print(key, raw[key], flush=True)
    fields = {"the claim": "claim_seconds", "the next version": "next_version_seconds"}
    result = {
        f"{key}: seconds until {name}": spread(row[field] for row in rows)
        for key, rows in raw.items()
        for name, field in fields.items()
    }
    keep("takeover", config=vars(arguments), raw=raw, result=result)


if __name__ == "__main__":
    main()
