"""Kill a shard that has a standby, and stop one: how long until its next version is told.

Two paced learners (0.1 s a step), two shards with standbys. From the standby's tape: its claim, the
first learner that it let in, and the first version that it told of.

    python benchmarks/takeover.py
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from evidence import keep, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.observe.tape import TapeReader

ESTIMATE = (
    "killed: the claim is silent for 1.1 leases less the time since its last renewal (at most a "
    "quarter of one), so 0.85 to 1.25 leases with the look that sees it; then 0.2 s to read the "
    "disk, up to 2.5 s until a learner dials again, 2 s that the shard waits for other holders, "
    "1 s for a round: 7 to 11 s at a lease of 5 s, 4.5 to 8 s at 2 s. Stopped: learners give the "
    "connection up after 10 s only, so 13 to 17 s at either lease"
)

SHARD_OF = {"shard 1": 1, "shard 0 and the coordinator": 0}


def run(shard: int, lease_seconds: float, number: signal.Signals) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        config = RunConfig(
            run={
                "name": "takeover",
                "folder": str(folder),
                "learners": 2,
                "budget_steps": 100_000,
                "evaluator": False,
            },
            sync={"fragments": 8, "period": 8, "overlap": 2},
            syncer={"shards": 2, "port": 0, "standbys": 1, "lease_seconds": lease_seconds},
            workload={"name": "paced", "options": {"step_seconds": 0.1}},
        )
        local = LocalRun(config)
        struck: list[float] = []
        steps = script(local, folder, shard, number, struck)
        try:
            local.start()
            local.wait(lambda: next(steps))
        except Enough:
            pass
        finally:
            local.close()
        return measured(folder, shard, struck[0])


class Enough(Exception):
    """The standby has told of a version."""


def script(
    run: LocalRun, folder: Path, shard: int, number: signal.Signals, struck: list[float]
) -> Iterator[None]:
    while not run.used_budget():
        yield
    while len(told(folder / "tape" / f"shard-{shard}.jsonl")) < 8:
        yield
    process = run.supervisor.children[f"shard-{shard}"].process
    assert process is not None
    run.supervisor.children[f"shard-{shard}"].restarts = False
    process.send_signal(number)
    struck.append(time.time())
    while not told(folder / "tape" / f"shard-{shard}-standby.jsonl"):
        yield
    raise Enough


def told(path: Path) -> list[float]:
    """When merged versions were told of."""
    if not path.exists():
        return []
    merged = [r for r in TapeReader(path) if r.kind == "event" and r.type == "Merged"]
    return [record.wall for record in merged]


def measured(folder: Path, shard: int, struck: float) -> dict[str, float]:
    second = folder / "tape" / f"shard-{shard}-standby.jsonl"
    taken = next(r for r in TapeReader(second) if r.type == "TookOver")
    greeted = next(r.wall for r in TapeReader(second) if r.type == "Accept")
    return {
        "claim_seconds": taken.wall - struck,
        "first_learner_seconds": greeted - struck,
        "next_version_seconds": told(second)[0] - struck,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    raw: dict[str, list[dict[str, float]]] = {}
    for what, shard in SHARD_OF.items():
        for lease_seconds in (2.0, 5.0):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                if number == signal.SIGSTOP and (shard == 0 or lease_seconds == 2.0):
                    continue
                key = f"{what}, {number.name}, lease {lease_seconds:g} s"
                raw[key] = [run(shard, lease_seconds, number) for _ in range(arguments.runs)]
                print(key, raw[key], flush=True)
    result = {
        f"{key}: seconds until {name}": spread([row[field] for row in rows])
        for key, rows in raw.items()
        for name, field in (
            ("the claim", "claim_seconds"),
            ("the next version", "next_version_seconds"),
        )
    }
    keep(
        "takeover",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="shards on machines of their own with a network storage between them; models "
        "whose disk takes seconds to read",
    )


if __name__ == "__main__":
    main()
