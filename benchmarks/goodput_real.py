"""The goodput simulator against real runs: four learners, killed after six schedules.

Real processes (`ddiloco train` of the paced workload, SIGKILL, restarts by the launcher). The
simulator is told the lengths of a step, of a restart and of a join, and says what share of the
learners' time each schedule leaves in steps: once with the lengths of runs of their own with one
kill, once with the means of the very run that it predicts, because a join takes as long as the
machine is busy.

    python benchmarks/goodput_real.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evidence import keep, run_to_its_end

from decoupled_diloco.config import RunConfig
from decoupled_diloco.observe.accounts import account_for
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco_plan.goodput.accounts import Account, Feed, enter
from decoupled_diloco_plan.goodput.life import NEVER, Habits, Life, Slices
from decoupled_diloco_plan.goodput.settings import microseconds

ESTIMATE = (
    "within 2 points of goodput for one kill at a time; up to 5 too high where several learners "
    "start at once, because they share two cores while they import torch"
)
LEARNERS = 4
MEASURED = ((0.3, 1),)
SCHEDULES: dict[str, tuple[tuple[float, int], ...]] = {
    "no kill": (),
    "one kill": ((0.4, 0),),
    "two learners, one after the other": ((0.1, 1), (0.5, 2)),
    "the same learner twice": ((0.1, 3), (0.6, 3)),
    "two learners at once": ((0.2, 0), (0.2, 1)),
    "four kills": ((0.1, 0), (0.2, 1), (0.3, 2), (0.4, 3)),
}
"""For each schedule the kills: share of the budget, learner."""


def run(kills: tuple[tuple[float, int], ...], steps: int, step_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        config = RunConfig(
            run={
                "name": "goodput",
                "folder": str(Path(name) / "run"),
                "learners": LEARNERS,
                "budget_steps": steps,
                "evaluator": False,
            },
            sync={"fragments": 4, "period": 12, "overlap": 2},
            syncer={"shards": 1, "port": 0},
            workload={"name": "paced", "options": {"step_seconds": step_seconds}},
            faults=[{"at": at, "kill": f"learner-{who}"} for at, who in kills],
        )
        run_to_its_end(config)
        history = read_run(config.run.folder)
        account = account_for(history)
    assert account.span is not None
    end = account.span[1]
    return {
        "kills": kills,
        "goodput": 100 * (account.time.stepping or 0.0),
        "span_seconds": account.time.seconds("allocated") / LEARNERS,
        "step_seconds": statistics.median(
            learner.step_seconds_median or step_seconds for learner in history.learners.values()
        ),
        "outages": [
            {
                "who": each.who,
                "back": each.back_at is not None,
                "down_seconds": (each.restarted_at or end) - each.down_at,
                "away_seconds": (each.back_at or end) - each.down_at,
            }
            for each in history.outages
        ],
        "time": {
            part: account.time.seconds(part)
            for part in ("useful", "discarded", "waiting", "down", "joining", "other")
        },
    }


def told(kills: list[int], down: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """The kills of one learner as failures of its only chip."""
    if kills:
        yield kills, [0] * len(kills), [down] * len(kills)
    while True:
        yield [NEVER], [0], [1]


def predicted(kills: tuple[tuple[float, int], ...], times: dict[str, float]) -> float:
    """Goodput of a schedule, percent, from the measured lengths of time."""
    step, end = microseconds(times["step"]), microseconds(times["span"])
    habits = Habits(
        step=step, downscale=0, upscale=microseconds(times["join"]), window=0, sudden=True
    )
    account = Account()
    for who in range(LEARNERS):
        at = [round(share * end) for share, victim in kills if victim == who]
        life = Life(Slices(1, 1), habits, told(at, microseconds(times["down"])))
        enter(account, Feed(life).take(end))
    account.check()
    others = LEARNERS * microseconds(times["other"])
    return 100 * max(0, account.useful - others) / account.allocated


def lengths(measured: dict[str, Any], otherwise: dict[str, float]) -> dict[str, float]:
    """Step, restart, join, what a learner stands else, and the whole, seconds: means of a run.

    A learner that was not back when the run ended counts with the time until then. What a run
    without a kill cannot tell is taken from ``otherwise``.
    """
    outages, parts = measured["outages"], measured["time"]
    found = {**otherwise, "step": measured["step_seconds"]}
    if outages:
        down = statistics.fmean(each["down_seconds"] for each in outages)
        away = statistics.fmean(each["away_seconds"] for each in outages)
        found |= {"down": down, "join": away - down}
    rejoining = sum(each["away_seconds"] - each["down_seconds"] for each in outages)
    stood = parts["waiting"] + parts["other"] + max(0.0, parts["joining"] - rejoining)
    return {**found, "other": stood / LEARNERS, "span": measured["span_seconds"]}


def taken(
    kills: tuple[tuple[float, int], ...], measured: dict[str, Any]
) -> tuple[tuple[float, int], ...]:
    """The kills that took a learner out: one that had not joined yet only joins later."""
    left = Counter(each["who"] for each in measured["outages"])
    found = []
    for share, who in reversed(kills):
        if left[f"learner-{who}"]:
            left[f"learner-{who}"] -= 1
            found.append((share, who))
    return tuple(reversed(found))


def mean(values: list[dict[str, float]]) -> dict[str, float]:
    """Of several runs' lengths, each name by itself."""
    return {name: statistics.fmean(each[name] for each in values) for name in values[0]}


def compared(raw: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What was predicted and what was measured, of the schedules that have run."""
    times, schedules = mean([lengths(each, {}) for each in raw["for measuring"]]), {}
    for name, kills in SCHEDULES.items():
        if runs := raw.get(name):
            own = [lengths(each, times) for each in runs]
            measured = [each["goodput"] for each in runs]
            by_rules = [
                predicted(taken(kills, each), mine) for each, mine in zip(runs, own, strict=True)
            ]
            schedules[name] = {
                "predicted": predicted(kills, {**times, "span": mean(own)["span"]}),
                "measured": {
                    "median": statistics.median(measured),
                    "min": min(measured),
                    "max": max(measured),
                },
                "by_the_rules_off": max(
                    (rules - real for rules, real in zip(by_rules, measured, strict=True)), key=abs
                ),
                "join_seconds": mean(own)["join"] if kills else None,
            }
    return {"lengths": times, "schedules": schedules}


def save(raw: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    result = compared(raw)
    keep(
        "goodput_real",
        estimate=ESTIMATE,
        config={**vars(arguments), "learners": LEARNERS},
        raw=raw,
        result=result,
        not_measured="learners on machines of their own, where a restart costs the others "
        "nothing. The column of the rules uses what each run itself had (its joins, and what its "
        "learners stood), so it checks the rules and not foresight",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--step-seconds", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    raw: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(arguments.repeats):
        for name, kills in {"for measuring": MEASURED, **SCHEDULES}.items():
            found = run(kills, arguments.steps, arguments.step_seconds)
            raw.setdefault(name, []).append(found)
            print(repeat, name, f"{found['goodput']:.1f} %", found["outages"], flush=True)
            save(raw, arguments)


if __name__ == "__main__":
    main()
