"""Loss over time on unequal links: fixed codecs and periods, and schedules that follow the links.

Scenarios of four learners. The links are scaled so that they load this model like one with 24 M
parameters.

1. Links of 100, 20, 5 and 5 Mbit/s.
2. 40 Mbit/s for all; one link falls to a tenth in the middle third.
3. The links of 1, and one learner that is four times slower.
4. 2 Mbit/s for all.
5. One uplink with a twelfth of the bandwidth that bf16 needs, and the same without it.

Virtual time, paired seeds; a step takes one second.

    python benchmarks/adapting.py --seeds 1 2 3

With `--real`, scenario 5 is measured once with real processes in two network namespaces. The steps
have a fixed length of one second. It needs root.

    python benchmarks/adapting.py --real --steps 300
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evidence import keep, options
from virtual import LEARNERS, RATES, SEQUENCES, SIZE, Row, Watch, compare, interval, mean_of

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.merge import layout_of
from decoupled_diloco.protocol.messages import Note, SendBody
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.training import virtual_run
from network.network_spaces import FAR, FAR_ADDRESS, NEAR, link

LADDER = ("bf16", "int8", "int4", "int2")
LIMITS = {"sync_every": [24, 192], "overlap_steps": [2, 8]}
PERIOD = 24
MBIT = 125_000.0
NOMINAL = 24e6
"""Parameters of the model to which the links' rates refer."""

NARROW = 12
"""In scenario 5, bf16 needs this many times the bandwidth of one uplink, at 16 Mbit/s per step."""

REAL = {"defaults": None, "bf16": "bf16"}
REAL_SIZE = {
    "layers": 4,
    "width": 256,
    "context": 16,
    "batch_size": 1,
    "corpus_bytes_max": 200_000,
}

LOOKS = 12
"""Number of evaluations of the global weights per run."""


@dataclass(frozen=True)
class Scenario:
    """Links in Mbit/s, seconds per step, and the factor on the last link in the middle third."""

    links: Sequence[float]
    speeds: Sequence[float] = (1.0,) * LEARNERS
    falls_to: float = 1.0
    fixed: Sequence[str] = LADDER

    def rates(self, look: int) -> list[float]:
        """Return the rates of all links before evaluation `look` (from 0), Mbit/s."""
        falls = LOOKS <= 3 * look < 2 * LOOKS
        return [*self.links[:-1], self.links[-1] * (self.falls_to if falls else 1.0)]


UNEQUAL = (100, 20, 5, 5)
SCENARIOS = {
    "100, 20, 5, 5 Mbit/s": Scenario(UNEQUAL),
    "40 Mbit/s, one falls to 4": Scenario((40, 40, 40, 40), falls_to=0.1),
    "100, 20, 5, 5 Mbit/s, a slow accelerator": Scenario(UNEQUAL, (4.0, 1.0, 1.0, 1.0)),
    "one uplink of a twelfth": Scenario(
        (1000, 1000, 1000, 16 / NARROW), fixed=("bf16", "topk ladder", "rebase")
    ),
    "1000 Mbit/s for all": Scenario((1000,) * LEARNERS, fixed=()),
    "2 Mbit/s for all": Scenario(
        (2, 2, 2, 2), fixed=("bf16", "int4", "int2", "int4 H=96", "int2 H=96", "int4 H=96 τ=4")
    ),
}
Setting = tuple[Scenario, str]
CELLS: dict[str, Setting] = {
    f"{name}: {codec}": (scenario, codec)
    for name, scenario in SCENARIOS.items()
    for codec in ("adaptive", *scenario.fixed)
}


class Seen(Watch):
    """Counts changes of codec, and records schedule revisions."""

    def __init__(self, fragments: int) -> None:
        super().__init__(fragments)
        self.changes = 0
        self.plans: list[str] = []

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        super().__call__(process, now, event, effects)
        notes = [each.text for each in effects if isinstance(each, Note)]
        self.changes += sum("now sends in" in text for text in notes)
        self.plans += [text for text in notes if text.startswith("revision ")]


def settings(codec: str, seed: int, steps: int) -> RunConfig:
    """Return a run with one codec, or with a ladder from which each learner gets one that fits."""
    codec, _, plan = codec.partition(" H=")
    period, _, overlap = plan.partition(" τ=")
    sync: dict[str, Any] = {"sync_every": int(period or PERIOD), "overlap_steps": int(overlap or 2)}
    uplink: str | list[str] = codec
    if codec in ("adaptive", "rebase", "topk ladder"):
        uplink, sync = list(LADDER), {"sync_every": PERIOD, "adapt": LIMITS}
    if codec == "rebase":
        sync["apply"] = {"missed": "rebase"}
    if codec == "topk ladder":
        uplink = [*LADDER, "topk"]
    inner = {"batch_size": SEQUENCES // LEARNERS, "learning_rate": RATES["adamw"]}
    return RunConfig(
        run={"learners": LEARNERS, "max_steps": steps + PERIOD, "seed": seed},
        sync={"fragments": PERIOD, "codec": {"uplink": uplink, "downlink": "int4"}, **sync},
        workload={"options": {**SIZE, **inner}},
    )


def measure(cell: Setting, seed: int, steps: int) -> Row:
    """Return the held-out loss of the global weights at `LOOKS` times, and counts from the tape."""
    scenario, codec = cell
    config = settings(codec, seed, steps)
    names, watch = config.learner_ids, Seen(config.sync.fragments)
    specs = [
        LearnerSpec(name, speed, latency=0.01, up_bytes_per_second=1e9, down_bytes_per_second=1e9)
        for name, speed in zip(names, scenario.speeds, strict=True)
    ]
    begun = time.monotonic()
    with virtual_run(config, specs, recorder=watch) as run:
        system = run.system
        system.run(stop=lambda: all(watch.tokens[name] for name in names))
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
        "participation_percent": {name: watch.participation_percent([name]) for name in names},
        "counted_percent": {name: 100 - watch.discarded_percent([name]) for name in names},
        "changes": watch.changes,
        "plans": watch.plans,
        "seconds": round(time.monotonic() - begun, 1),
    }


def sooner(row: Row, other: Row) -> float:
    """Return the percentage by which a run reaches the other's final loss sooner.

    It is negative for a slower run. Losses are interpolated linearly between evaluations. A run
    that does not reach the loss counts as reaching it at its last evaluation.
    """
    goal, losses = other["losses"][-1], row["losses"]
    look = next((n for n, loss in enumerate(losses) if loss <= goal), LOOKS)
    at = float(look + 1)
    if 0 < look < LOOKS:
        at -= (goal - losses[look]) / (losses[look - 1] - losses[look])
    return 100 * (1 - at / LOOKS)


def _steps(folder: Path, name: str) -> bool:
    """Return whether a learner of a run has stepped."""
    path = folder / "run" / "tape" / f"{name}.jsonl"
    return path.exists() and any(r.type == "StepFinished" for r in TapeReader(path))


def real(codec: str | None, steps: int) -> Row:
    """Run scenario 5 with real processes; `None`: with the default codecs.

    The first learner is behind the slow uplink. The syncer and the other learners are at the other
    end of the link. The first third of the run is not counted.
    """
    with TemporaryDirectory() as name, link(Path(name), mbit=None) as made:
        folder = Path(name)
        (folder / "token").write_text("a secret")
        config = RunConfig(
            run={"folder": folder / "run", "learners": LEARNERS, "max_steps": steps},
            sync={} if codec is None else {"codec": {"uplink": codec}},
            syncer={"host": FAR_ADDRESS, "port": 7070, "token_file": folder / "token"},
            workload={"name": "paced", "options": {"step_seconds": 1.0, **REAL_SIZE}},
        )
        path = folder / "run.toml"
        path.write_text(dump_config(config))
        numel = layout_of(load_workload("paced", config.workload_options()).model()).numel
        made.start(FAR, "syncer", str(path), "--shard", "0")
        for index in range(LEARNERS):
            made.start(FAR if index else NEAR, "learner", str(path), "--index", str(index))
        while not all(_steps(folder, name) for name in config.learner_ids):
            time.sleep(1.0)  # the initial weights may come from the first learner
        made.narrow(16e-6 * numel / config.sync.fragments / NARROW)
        while any(process.poll() is None for process in made.started):
            time.sleep(1.0)
        assert not any(process.returncode for process in made.started), made.logs()
        records = sorted(
            (
                (record.at, path.stem, record)
                for path in (folder / "run" / "tape").glob("*.jsonl")
                for record in TapeReader(path)
            ),
            key=lambda each: each[:2],
        )
    names = config.learner_ids
    ends = {
        each: [at for at, own, r in records if own == each and r.type == "StepFinished"]
        for each in names
    }
    begin, end = (
        max(each[len(each) // 3] for each in ends.values()),
        min(each[-1] for each in ends.values()),
    )
    watch, codecs = Watch(config.sync.fragments), Counter[str]()
    for at, own, record in records:
        if not begin <= at <= end or record.type not in (
            "StepFinished",
            "Apply",
            "RoundFinished",
            "SendBody",
        ):
            continue
        value = record.value()
        watch(own, at, value, (value,))
        if isinstance(value, SendBody) and own == names[0]:
            codecs[value.codec] += 1
    return {
        "counted_percent": {each: 100 - watch.discarded_percent([each]) for each in names},
        "participation_percent": {each: watch.participation_percent([each]) for each in names},
        "step_seconds": {
            each: statistics.median(b - a for a, b in pairwise(times) if begin <= a <= end)
            for each, times in ends.items()
        },
        "rounds": watch.rounds,
        "seconds": end - begin,
        "codecs": dict(codecs),
    }


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Summarize one codec in one scenario, compared with the adaptive ladder."""
    own, adaptive = rows[name], rows[f"{name.rpartition(': ')[0]}: adaptive"]
    pairs = list(zip(own, adaptive, strict=True))
    gaps = [100 * (one["losses"][-1] / other["losses"][-1] - 1) for one, other in pairs]
    return {
        "loss": sum(row["losses"][-1] for row in own) / len(own),
        "loss_over_adaptive_percent": interval(gaps),
        "adaptive_sooner_percent": interval([sooner(other, one) for one, other in pairs]),
        "participation_percent": mean_of(own, "participation_percent"),
        "counted_percent": mean_of(own, "counted_percent"),
        "changes": [row["changes"] for row in own],
        "plans": [row["plans"] for row in own],
    }


if __name__ == "__main__":
    if "--real" in sys.argv:
        arguments = options(real=False, steps=300)
        rows = {name: real(codec, arguments.steps) for name, codec in REAL.items()}
        about: dict[str, Any] = {"steps": arguments.steps, "narrow": NARROW, **REAL_SIZE}
        keep("adapting_real", config=about, raw=rows, result=rows)
        sys.exit()
    config: dict[str, Any] = {"sequences": SEQUENCES, "inner_rate": RATES["adamw"]}
    config |= {"period": PERIOD, "ladder": LADDER, "limits": LIMITS, "latency_seconds": 0.01}
    compare("adapting", CELLS, measure, summary, steps=400, config=config)
