"""SIGKILL of each kind of process at 50 random moments of one run, then of everything; then resume.

Three paced learners (0.25 s a step), two shards, the first with the coordinator. Learners, shard 0
and shard 1 are killed at random moments, 50 each, whether they train, start or have just come back.
Then every process is killed at once, and the run is resumed to its end. From the tape: the verdict
of `ddiloco chaos`, replay and ledger of both parts together.

    python benchmarks/kills.py
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from evidence import keep, spread

from decoupled_diloco.chaos.real import RealRun, require_real
from decoupled_diloco.chaos.reference import fault_free_share
from decoupled_diloco.chaos.verdict import judge
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.observe.accounts import account_for
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.scenario import load_scenario

ESTIMATE = (
    "no rule of versions and merges is broken, every tape replays, no survivor loses a step, the "
    "resumed run ends with all fragments; accepted tokens far below 0.97, because a fault every "
    "two seconds leaves a shard hardly the time to start"
)
STEP_SECONDS = 0.25
GROUPS = ("learners", "shard-0", "shard-1")

RUN = """
until_seconds = {until}

[run]
learners = 3
budget_steps = {steps}
evaluator = false

[sync]
fragments = 2
period = 2
overlap = 1
alignment = "carry"
missed = "rebase"

[syncer]
shards = 2
port = 0

[workload]
name = "paced"

[workload.options]
step_seconds = {step_seconds}
layers = 1
width = 32
heads = 2
context = 16
batch_size = 2
corpus_bytes_max = 200_000
"""
EVENT = """
[[events]]
kind = "kill"
target = "{target}"
choose = "one"
at_seconds = {at}
for_seconds = {seconds}
"""


def story(kills: int, seconds: float, seed: int) -> str:
    """A scenario with so many kills of each group at random moments."""
    choices = Choices(f"{seed}/kills")
    events = [
        EVENT.format(
            target=group,
            at=round(choices.uniform(1.0, seconds), 3),
            seconds=round(choices.uniform(0.05, 1.0), 3),
        )
        for group in GROUPS
        for _ in range(kills)
    ]
    steps = round(seconds / STEP_SECONDS) + 120
    head = RUN.format(until=seconds + 3.0, steps=steps, step_seconds=STEP_SECONDS)
    return head + "".join(events)


def carry_out(path: Path, folder: Path) -> dict[str, Any]:
    """The kills, the end of everything, and the rest of the run."""
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
    resumed = LocalRun(scenario.config, resume=True)
    try:
        resumed.start()
        outcome = resumed.wait(lambda: None)
    finally:
        resumed.close()
    verdict = judge(
        folder,
        accepted_share=fault_free_share(scenario),
        finished=outcome.finished,
        reason=outcome.reason,
    )
    history = read_run(folder)
    tokens = account_for(history).tokens
    parts = ("merged", "in_flight", "missed", "given_up", "crashed", "left_behind", "unsent")
    ledger = {part: tokens.tokens(part) for part in parts}
    away = {
        group: [o.seconds for o in history.outages if o.who.startswith(group.rstrip("s"))]
        for group in GROUPS
    }
    return {
        "checks": [dataclasses.asdict(check) for check in verdict.checks],
        "numbers": verdict.numbers,
        "faults": verdict.faults,
        "ledger": {"trained": tokens.tokens("trained"), **ledger},
        "away_seconds": {group: [s for s in each if s is not None] for group, each in away.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "kills.toml"
        path.write_text(story(arguments.kills, arguments.seconds, arguments.seed))
        raw = carry_out(path, Path(name) / "run")
    ledger = raw["ledger"]
    parts = sum(value for part, value in ledger.items() if part != "trained")
    result = {
        **{check["name"]: f"{check['measured']}" for check in raw["checks"]},
        "promises kept": "; ".join(c["name"] for c in raw["checks"] if c["kept"]),
        "ledger: parts over trained": parts / ledger["trained"],
        "accepted over trained": ledger["merged"] / ledger["trained"],
        "seconds away": {g: spread(s) for g, s in raw["away_seconds"].items() if s},
    }
    keep(
        "kills",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="kills of hosts (power), whose kernels tell nobody; other machines",
    )


if __name__ == "__main__":
    main()
