"""Runs in virtual time, one for each cell of a table and each seed: what is counted and kept."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.protocol.effects import Apply, RoundFinished
from decoupled_diloco.protocol.events import StepFinished

Row = dict[str, Any]


class Watch:
    """Counts what the tape says: discarded tokens, rounds, who is in them, how late."""

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.rounds = 0
        self.discarded: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.folded: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Looks at one event."""
        if isinstance(event, StepFinished):
            self.tokens[who] += event.tokens
        for effect in effects:
            if isinstance(effect, Apply):
                self.discarded[who] += effect.discarded_tokens
            elif isinstance(effect, RoundFinished) and effect.verdict == "merged":
                self.rounds += 1
                folded = [p for p in effect.participants if p.state == "folded"]
                self.folded.update(p.learner for p in folded)
                self.ages.update(p.age for p in folded)

    def discarded_percent(self, names: Sequence[str]) -> float:
        """An overwritten fragment is one of P parts, so its tokens count 1/P."""
        discarded = sum(self.discarded[name] for name in names) / self.fragments
        return 100 * discarded / sum(self.tokens[name] for name in names)

    def participation_percent(self, names: Sequence[str]) -> float:
        """Mean share of all merged rounds that the contributions of these learners are in."""
        return 100 * sum(self.folded[name] for name in names) / (self.rounds * len(names))


def parser(steps: int, of: str, name: str) -> ArgumentParser:
    """The options of a benchmark whose runs are all of one length."""
    found = kept_parser(name)
    found.add_argument("--steps", type=int, default=steps, help=of)
    found.add_argument("--name", default=name)
    return found


def kept_parser(name: str) -> ArgumentParser:
    """The options that all of them have."""
    found = ArgumentParser()
    found.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    found.add_argument(
        "--kept",
        type=Path,
        default=Path(f"{name}.jsonl"),
        help="runs that are done: the command can be repeated after it was stopped",
    )
    return found


def measured(
    kept: Path, cells: Iterable[str], seeds: Sequence[int], measure: Callable[[str, int], Row]
) -> dict[str, list[Row]]:
    """The rows of each cell, one for each seed; those that the file has are not run again."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    done = {(row["cell"], row["seed"]): row for row in map(json.loads, lines)}
    names = list(cells)
    for seed in seeds:
        for cell in names:
            if (cell, seed) not in done:
                done[cell, seed] = row = {"cell": cell, "seed": seed, **measure(cell, seed)}
                with kept.open("a") as file:
                    print(json.dumps(row), file=file)
                print(row, flush=True)
    return {cell: [done[cell, seed] for seed in seeds] for cell in names}
