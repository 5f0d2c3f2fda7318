"""The goodput simulator compared with real runs: four learners, killed by six schedules.

Real processes run: `ddiloco train` with the paced workload, SIGKILL, restarts by the launcher. The
simulator receives the times of a step, a restart and a join, and predicts the share of the
learners' time in steps. It predicts once from separate runs with one kill. It predicts a second
time from the means of the same run, because the time of a join depends on the machine's load.

    python benchmarks/goodput_real.py
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bench_runs import carry_out, paced
from evidence import keep, options, spread

from decoupled_diloco.run_model import read_run
from decoupled_diloco.run_model.accounts import account_for
from decoupled_diloco_plan.goodput.chip_learner import NEVER, Habits, Life, Slices
from decoupled_diloco_plan.goodput.chip_time import Account, Feed, enter
from decoupled_diloco_plan.goodput.cluster_settings import microseconds

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
"""Kills of each schedule: share of the budget, learner."""


def run(kills: tuple[tuple[float, int], ...], steps: int, step_seconds: float) -> dict[str, Any]:
    with paced(
        step_seconds=step_seconds,
        run={"name": "goodput", "learners": LEARNERS, "max_steps": steps},
        sync={"fragments": 4, "sync_every": 12, "overlap_steps": 2},
        syncer={"shards": 1},
        faults=[{"at": at, "kill": f"learner-{learner}"} for at, learner in kills],
    ) as config:
        carry_out(config)
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
                "process": each.process,
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


def scripted(kills: list[int], down: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield the kills of one learner as failures of its only chip."""
    if kills:
        yield kills, [0] * len(kills), [down] * len(kills)
    while True:
        yield [NEVER], [0], [1]


def predicted(kills: tuple[tuple[float, int], ...], times: dict[str, float]) -> float:
    """Return the goodput of a schedule, percent, from measured times."""
    step, end = microseconds(times["step"]), microseconds(times["span"])
    habits = Habits(
        step=step, downscale=0, upscale=microseconds(times["join"]), window=0, sudden=True
    )
    account = Account()
    for index in range(LEARNERS):
        at = [round(share * end) for share, victim in kills if victim == index]
        life = Life(Slices(1, 1), habits, scripted(at, microseconds(times["down"])))
        enter(account, Feed(life).take(end))
    account.check()
    others = LEARNERS * microseconds(times["other"])
    return 100 * max(0, account.useful - others) / account.allocated


def lengths(measured: dict[str, Any], otherwise: dict[str, float]) -> dict[str, float]:
    """Return the times of step, restart, join, other pauses and the whole run: means in seconds.

    A learner that was not back at the end of the run counts with the time until then. A run without
    kills takes restart and join from ``otherwise``.
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
    """Return kills that caused an outage; without one, the learner had not joined yet."""
    left = Counter(each["process"] for each in measured["outages"])
    found = []
    for share, learner in reversed(kills):
        if left[f"learner-{learner}"]:
            left[f"learner-{learner}"] -= 1
            found.append((share, learner))
    return tuple(reversed(found))


def mean(values: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of several runs' times, by name."""
    return {name: statistics.fmean(each[name] for each in values) for name in values[0]}


def compared(raw: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return predicted and measured goodput of the schedules that have run."""
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
                "measured": spread(measured),
                "by_the_rules_off": max(
                    (rules - real for rules, real in zip(by_rules, measured, strict=True)), key=abs
                ),
                "join_seconds": mean(own)["join"] if kills else None,
            }
    return {"lengths": times, "schedules": schedules}


def main() -> None:
    arguments = options(steps=160, step_seconds=0.3, repeats=3)
    config = {**vars(arguments), "learners": LEARNERS}
    raw: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(arguments.repeats):
        for name, kills in {"for measuring": MEASURED, **SCHEDULES}.items():
            found = run(kills, arguments.steps, arguments.step_seconds)
            raw.setdefault(name, []).append(found)
            print(repeat, name, f"{found['goodput']:.1f} %", found["outages"], flush=True)
            keep("goodput_real", config=config, raw=raw, result=compared(raw))


if __name__ == "__main__":
    main()
