"""Kill each kind of process 50 times at random in one run, then kill everything, then resume.

Three paced learners (0.25 s per step), two shards, the first with the coordinator. Learners, shard
0 and shard 1 receive SIGKILL at random times, 50 each, whether they train, start or have just come
back. Then every process is killed at once, and the run is resumed to its end. From the tape: the
verdict of `ddiloco chaos`, replay, and the ledger of both parts together.

    python benchmarks/kills.py
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
from bench_runs import carry_out
from evidence import keep, options, spread

from decoupled_diloco.run_model import read_run
from decoupled_diloco.run_model.accounts import account_for
from decoupled_diloco_lab.chaos.real import RealRun, require_real
from decoupled_diloco_lab.chaos.reference import fault_free_share
from decoupled_diloco_lab.chaos.verdict import judge
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.scenario import load_scenario

STEP_SECONDS = 0.25
GROUPS = ("learners", "shard-0", "shard-1")
SMALL = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch_size": 2}
RUN = {
    "run": {"learners": 3, "evaluator": False},
    "sync": {
        "fragments": 2,
        "sync_every": 2,
        "overlap_steps": 1,
        "apply": {"alignment": "carry", "missed": "rebase"},
    },
    "syncer": {"shards": 2, "port": 0},
    "workload": {
        "name": "paced",
        "options": {"step_seconds": STEP_SECONDS, "corpus_bytes_max": 200_000, **SMALL},
    },
}


def story(kills: int, seconds: float, seed: int) -> str:
    """Return a scenario with this number of kills of each group at random times."""
    choices = Choices(f"{seed}/kills")
    events = [
        {
            "kind": "kill",
            "target": group,
            "choose": "one",
            "at_seconds": round(choices.uniform(1.0, seconds), 3),
            "for_seconds": round(choices.uniform(0.05, 1.0), 3),
        }
        for group in GROUPS
        for _ in range(kills)
    ]
    run = RUN["run"] | {"max_steps": round(seconds / STEP_SECONDS) + 120}
    return tomli_w.dumps({"until_seconds": seconds + 3.0, **RUN, "run": run, "events": events})


def measure(path: Path, folder: Path) -> dict[str, Any]:
    """Run the kills, the end of all processes, and the rest of the run."""
    scenario = require_real(load_scenario(path, overrides=[f"run.folder={folder}"]))
    run = RealRun(scenario)
    try:
        run.start()
        run.wait(lambda: None)
        for child in run.local.supervisor.children.values():
            if child.process is not None:
                child.process.kill()
    finally:
        run.close()
    carry_out(scenario.config, resume=True)
    share = fault_free_share(scenario)
    verdict = judge(folder, accepted_share=share, finished=True, reason="")
    history = read_run(folder)
    tokens = account_for(history).tokens
    parts = ("merged", "in_flight", "missed", "given_up", "crashed", "left_behind", "unsent")
    away = {
        group: [
            o.seconds
            for o in history.outages
            if o.process.startswith(group.rstrip("s")) and o.seconds is not None
        ]
        for group in GROUPS
    }
    return {
        "checks": [dataclasses.asdict(check) for check in verdict.checks],
        "numbers": verdict.numbers,
        "faults": verdict.faults,
        "ledger": {part: tokens.tokens(part) for part in ("trained", *parts)},
        "away_seconds": away,
    }


def main() -> None:
    arguments = options(kills=50, seconds=300.0, seed=0)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "kills.toml"
        path.write_text(story(**vars(arguments)))
        raw = measure(path, Path(name) / "run")
    ledger, trained = raw["ledger"], raw["ledger"]["trained"]
    result = {
        **{check["name"]: f"{check['measured']}" for check in raw["checks"]},
        "checks passed": "; ".join(c["name"] for c in raw["checks"] if c["kept"]),
        "ledger: sum of parts relative to trained tokens": (sum(ledger.values()) - trained)
        / trained,
        "accepted tokens relative to trained tokens": ledger["merged"] / trained,
        "downtime, seconds": {g: spread(s) for g, s in raw["away_seconds"].items() if s},
    }
    keep("kills", config=vars(arguments), raw=raw, result=result)


if __name__ == "__main__":
    main()
