"""Compare rounds that learners open with their own steps with a naive model of a shard.

Random schedules use scripted learners: slow learners, slow links, reports of several steps,
learners that leave, come back and drain, and payloads and merges that fail. The model is checked
after every event.

`python -m outside.test_own_rounds FIRST END` (in `tests`) tries more seeds and prints failing ones.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from decoupled_diloco.protocol import messages
from deliberate_breaks import Break
from outside.own_schedule import Schedule
from simulation.own_breaks import FORGOTTEN_TURNS

SEEDS = 80


def wrong(seed: int) -> str:
    try:
        Schedule(seed).run_to_the_end()
    except AssertionError as error:
        return str(error)[:500] or "the machine's own check"
    return ""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_schedules(seed: int) -> None:
    assert not (found := wrong(seed)), found


def test_the_schedules_merge_on_time_and_late_contributions() -> None:
    merges: Counter[str] = Counter()
    for seed in range(10):
        schedule = Schedule(seed)
        schedule.run_to_the_end()
        merges += schedule.model.merges
    assert merges["alone"] > 500
    assert merges["late"] > 100


def lost(kind: type) -> Callable[[list[Any]], list[Any]]:
    """Drop every fifth order or message of a kind."""
    seen = Counter[type]()

    def changed(effects: list[Any]) -> list[Any]:
        kept = []
        for effect in effects:
            if kind in (type(effect), type(getattr(effect, "message", None))):
                seen[kind] += 1
            if kind not in (type(effect), type(getattr(effect, "message", None))) or seen[kind] % 5:
                kept.append(effect)
        return kept

    return changed


@pytest.mark.parametrize("kind", [messages.Pull, messages.Fold, messages.Merge, messages.Outcome])
def test_the_model_notices_dropped_orders(kind: type) -> None:
    schedule = Schedule(3)
    schedule.changed = lost(kind)
    with pytest.raises(AssertionError):
        schedule.run_to_the_end()


@pytest.mark.parametrize("participants", ["reported", "all"])
def test_the_model_notices_rounds_that_a_clock_opens(participants: str) -> None:
    with pytest.raises(AssertionError, match=r"not its turn|without a contribution"):
        Schedule(3, participants=participants).run_to_the_end()


@pytest.mark.parametrize("each", FORGOTTEN_TURNS, ids=[each.mark for each in FORGOTTEN_TURNS])
def test_the_model_notices_a_forgotten_request(each: Break) -> None:
    with each.broken():
        assert any(map(wrong, range(SEEDS)))


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if found := wrong(number):
            print(f"seed {number}: {found}", flush=True)
