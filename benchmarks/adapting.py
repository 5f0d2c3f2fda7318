"""Loss over time where links differ: fixed codecs and periods, and those that follow the links.

Four learners of equal speed whose links carry, for the size of the model, what 100, 20, 5 and 5
Mbit/s are for one of 24 million parameters; then 40 Mbit/s for all, one of which falls to a tenth
in the middle third; then the first links, and one learner four times slower; then 2 Mbit/s for all.
Virtual time, paired seeds; a step is a second.

    python benchmarks/adapting.py --seeds 1 2 3
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cells import Row, Watch, measured, parser
from evidence import keep
from quality import LEARNERS, SEQUENCES, SIZE, interval

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.effects import Note
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.training import virtual_run

ESTIMATE = (
    "a body of bf16 takes 0.16, 0.8 and 3.2 of the second that it has: the two slow learners are "
    "heard a third as often with bf16, two thirds with int8, always with int4 and int2. At equal "
    "time int4 is best or equal, bf16 2 to 4 % worse, int8 1 %; the ladder within 0.5 % of int4. "
    "At 2 Mbit/s a copy of int4 takes two steps of the one that it has: H = 24 ends 5 % or more "
    "above H = 96, and what follows the links within 3 % of that"
)
LADDER = ("bf16", "int8", "int4", "int2")
LIMITS = {"period": [24, 192], "overlap": [2, 8]}
RATE = 8e-3
PERIOD = 24
NOMINAL = 24e6
"""Parameters of the model whose links these are."""

MBIT = 125_000.0
LOOKS = 12
"""So many times in a run the global weights are evaluated."""


@dataclass(frozen=True)
class Scenario:
    """Links in Mbit/s, seconds a step, and to what share the last link falls in the middle."""

    links: Sequence[float]
    speeds: Sequence[float] = (1.0,) * LEARNERS
    falls_to: float = 1.0
    fixed: Sequence[str] = LADDER

    def rates(self, look: int) -> list[float]:
        """Of all links before a look, from 0, in Mbit/s."""
        falls = LOOKS <= 3 * look < 2 * LOOKS
        return [*self.links[:-1], self.links[-1] * (self.falls_to if falls else 1.0)]


SCENARIOS = {
    "100, 20, 5, 5 Mbit/s": Scenario((100, 20, 5, 5)),
    "40 Mbit/s, one falls to 4": Scenario((40, 40, 40, 40), falls_to=0.1),
    "100, 20, 5, 5 Mbit/s, a slow accelerator": Scenario((100, 20, 5, 5), (4.0, 1.0, 1.0, 1.0)),
    "2 Mbit/s for all": Scenario(
        (2, 2, 2, 2), fixed=("bf16", "int4", "int2", "int4 H=96", "int2 H=96", "int4 H=96 τ=4")
    ),
}


class Seen(Watch):
    """And how often a learner was told to send in another codec, and the run of another plan."""

    def __init__(self, fragments: int) -> None:
        super().__init__(fragments)
        self.changes = 0
        self.plans: list[str] = []

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        super().__call__(who, now, event, effects)
        notes = [each.text for each in effects if isinstance(each, Note)]
        self.changes += sum("from now on" in text for text in notes)
        self.plans += [text for text in notes if text.startswith("revision ")]


def settings(codec: str, seed: int, steps: int) -> RunConfig:
    """A run in which all send in one codec, or each in the first of the ladder that fits."""
    codec, _, plan = codec.partition(" H=")
    period, _, overlap = plan.partition(" τ=")
    uplink: dict[str, Any] = {"uplink_codec": codec, "period": int(period or PERIOD)}
    uplink["overlap"] = int(overlap or 2)
    if codec == "adaptive":
        uplink = {"uplink_codecs": list(LADDER), "period": PERIOD, "adapt": LIMITS}
    options = {**SIZE, "batch_size": SEQUENCES // LEARNERS, "learning_rate": RATE}
    return RunConfig(
        run={"learners": LEARNERS, "budget_steps": steps + PERIOD, "seed": seed},
        sync={"fragments": PERIOD, "downlink_codec": "int4", **uplink},
        workload={"options": options},
    )


def measure(scenario: Scenario, codec: str, seed: int, steps: int) -> Row:
    """The held-out loss of the global weights at `LOOKS` moments, and what the tape says."""
    config = settings(codec, seed, steps)
    watch = Seen(config.sync.fragments)
    specs = [
        LearnerSpec(name, speed, latency=0.01, up_bytes_per_second=1e9, down_bytes_per_second=1e9)
        for name, speed in zip(config.learner_ids, scenario.speeds, strict=True)
    ]
    begun = time.monotonic()
    with virtual_run(config, specs, recorder=watch) as run:
        system = run.system
        system.run(stop=lambda: all(watch.tokens[name] for name in config.learner_ids))
        unit = run.plan.layout.numel / NOMINAL * MBIT
        losses = []
        for look in range(LOOKS):
            for host, rate in zip(system.learners.values(), scenario.rates(look), strict=True):
                for way in ("up", "down"):
                    host.link.stretch(way, rate * unit, system.clockwork)
            until = system.now + steps / LOOKS
            system.run(stop=lambda: system.finished, until=until)
            losses.append(run.evaluate()["loss"])
    return {
        "losses": losses,
        "participation_percent": {
            name: watch.participation_percent([name]) for name in config.learner_ids
        },
        "changes": watch.changes,
        "plans": watch.plans,
        "seconds": round(time.monotonic() - begun, 1),
    }


def sooner(rows: list[Row], others: list[Row]) -> list[float]:
    """In how many per cent less time the loss is reached that the others end with; below 0: more.

    Linear between two looks; who does not reach it is counted to reach it with its last look.
    """
    gains = []
    for row, other in zip(rows, others, strict=True):
        goal, losses = other["losses"][-1], row["losses"]
        look = next((n for n, loss in enumerate(losses) if loss <= goal), LOOKS)
        at = float(look + 1)
        if 0 < look < LOOKS:
            at -= (goal - losses[look]) / (losses[look - 1] - losses[look])
        gains.append(100 * (1 - at / LOOKS))
    return gains


def summary(rows: list[Row], adaptive: list[Row]) -> dict[str, Any]:
    """Of one codec in one scenario."""
    gaps = [
        100 * (x["losses"][-1] / y["losses"][-1] - 1) for x, y in zip(rows, adaptive, strict=True)
    ]
    names = rows[0]["participation_percent"]
    return {
        "loss": statistics.mean(row["losses"][-1] for row in rows),
        "loss_over_adaptive_percent": interval(gaps),
        "adaptive_sooner_percent": interval(sooner(adaptive, rows)),
        "participation_percent": {
            name: statistics.mean(row["participation_percent"][name] for row in rows)
            for name in names
        },
        "changes": [row["changes"] for row in rows],
        "plans": [row["plans"] for row in rows],
    }


def main() -> None:
    options = parser(400, "seconds of each run, virtual", "adapting")
    options.add_argument(
        "--cells", default=".", help="a regular expression; with the adaptive one of a scenario"
    )
    arguments = options.parse_args()
    torch.set_num_threads(1)
    cells = {
        f"{name}: {codec}": (scenario, codec)
        for name, scenario in SCENARIOS.items()
        for codec in ("adaptive", *scenario.fixed)
        if re.search(arguments.cells, f"{name}: {codec}")
    }
    rows = measured(
        arguments.kept,
        cells,
        arguments.seeds,
        lambda cell, seed: measure(*cells[cell], seed, arguments.steps),
    )
    folder = keep(
        arguments.name,
        estimate=ESTIMATE,
        config={
            "seconds": arguments.steps,
            "seeds": arguments.seeds,
            **SIZE,
            "sequences": SEQUENCES,
            "inner_rate": RATE,
            "period": PERIOD,
            "ladder": LADDER,
            "limits": LIMITS,
            "latency_seconds": 0.01,
        },
        raw=[row for each in rows.values() for row in each],
        result={
            name: summary(each, rows[f"{name.rpartition(': ')[0]}: adaptive"])
            for name, each in rows.items()
        },
        not_measured="larger models, other periods, links shared by several learners",
    )
    print(folder)


if __name__ == "__main__":
    main()
