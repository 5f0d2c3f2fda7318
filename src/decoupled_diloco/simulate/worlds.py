"""Random worlds of real processes: settings, learners, links, and what befalls them.

python -m decoupled_diloco.simulate.worlds --runs 100
python -m decoupled_diloco.simulate.worlds --seed 7          # one of them, with its events
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.effects import Merge, Persist
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.checkers import Checker
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.disk import Loss
from decoupled_diloco.simulate.drawn import (
    random_learners,
    random_options,
    random_sizes,
    with_slow_links,
)
from decoupled_diloco.simulate.faults import Fault, random_faults, random_hardships, strike
from decoupled_diloco.simulate.hosts import Host
from decoupled_diloco.simulate.lineage import Lineage
from decoupled_diloco.simulate.system import System
from decoupled_diloco.transport.base import Limits

COMMAND = "python -m decoupled_diloco.simulate.worlds --seed {seed}"

FLOAT_BYTES = 4

FAULTY_STEPS = 25.0
"""For how many steps of the fastest learner faults befall a world, at the most."""

SETTLE_SECONDS = 120.0
"""Leases, lost connections and backoff, once faults have ceased."""

RAM = "/dev/shm"
"""Where a world's files are, if this machine has it: nothing of them need last."""


@dataclass(frozen=True, slots=True)
class Report:
    """What has become of a world."""

    seed: int | str
    events: int
    seconds: float
    processor_seconds: float


@dataclass
class Scene:
    """A world before it runs."""

    system: System
    checker: Checker
    lineage: Lineage
    faults: list[Fault]
    calm_at: float


def config_of(
    options: Options, folder: Path, *, learners: int, budget: int, file: Any = None
) -> RunConfig:
    """A run's settings; those that would be ignored are left out."""
    waits = options.wait != "never"
    gate = {} if waits else {"norm_gate": options.norm_gate}
    if options.norm_gate and not waits:
        gate["oversized"] = options.oversized  # type: ignore[assignment]
    tables: dict[str, Any] = {
        "run": {
            "name": "world",
            "learners": learners,
            "budget_steps": budget,
            "evaluator": False,
            "folder": folder,
            "checkpoint_every_seconds": options.checkpoint_every_seconds,
        },
        "sync": {
            "fragments": options.fragments,
            "period": options.period,
            "overlap": min(options.overlap, options.period - 1),
            "quorum": options.quorum,
            "grace_margin": options.grace_margin,
            "participants": options.participants,
            "alignment": options.alignment,
            "missed": options.missed,
            "apply": options.apply,
            "wait": options.wait,
            "counter_cap_periods": options.counter_cap_periods,
            "late": options.late,
            "partition": "tensor",
            **gate,
        },
        "syncer": {"shards": options.shards},
        "workload": {},
    }
    return RunConfig(**tables)


def draw(seed: int | str, folder: Path) -> Scene:
    """The world of a seed."""
    choices = Choices(seed)
    count = choices.integer(1, 4)
    options = random_options(choices.fork("options"), count)
    step = choices.log_uniform(0.05, 2.0)
    learners = [
        spec
        for spec in random_learners(choices.fork("learners"), count, step)
        if spec.role == "learner"
    ]
    sizes = random_sizes(choices.fork("sizes"), options.fragments)
    learners = with_slow_links(choices.fork("links"), learners, options, sizes)
    folder.mkdir(parents=True)
    budget = choices.integer(8, 30)
    power = choices.fork("power")
    system = System(
        config_of(options, folder, learners=count, budget=budget),
        learners,
        folder,
        seed=seed,
        sizes=[max(2, size // FLOAT_BYTES) for size in sizes],
        checkpoint_seconds=choices.fork("checkpoints").pick([0.0, 2.0, 10.0]) * step,
        power=_loss(power) if power.chance(0.4) else None,
    )
    bodies = choices.fork("bodies")
    system.streets.loss = bodies.pick([0.0, 0.0, 0.1, 0.5])
    system.limits = Limits(retries=bodies.pick([1, Limits.retries]))
    system.streets.corruption = bodies.pick([0.0, 0.0, 0.01])
    until = FAULTY_STEPS * step
    system.clockwork.at(until, system.streets.be_sound)
    faults = _faults(choices, system, until)
    strike(system, faults)
    _strike_at_writes(system, choices.fork("writes"), until)
    lineage = Lineage(system)
    system.on_checkpoint = lineage.checkpoint
    return Scene(system, Checker(system), lineage, faults, until)  # type: ignore[arg-type]


def _loss(choices: Choices) -> Loss:
    return Loss(
        choices,
        names=choices.pick([0.0, 0.5, 1.0]),
        writes=choices.pick([0.0, 0.5, 1.0]),
        torn=choices.pick([0.0, 0.5]),
        zeros=choices.pick([0.0, 0.5]),
    )


def _faults(choices: Choices, system: System, until: float) -> list[Fault]:
    names, shards = list(system.learners), len(system.shards)
    often = choices.fork("often").pick([4.0, 10.0, 30.0]) * until / 60
    faults = random_faults(choices.fork("faults"), names, shards, until=until, mean_seconds=often)
    if choices.fork("hard").chance(0.5):
        faults += random_hardships(
            choices.fork("hardships"),
            list(system.learners.values()),  # type: ignore[arg-type]
            shards,
            body_bytes=FLOAT_BYTES * sum(system.sizes) / len(system.sizes) / 2,
            until=until,
            mean_seconds=often,
        )
    return [replace(f, process=_host_of(f.process), peer=_host_of(f.peer)) for f in faults]


def _strike_at_writes(system: System, choices: Choices, until: float) -> None:
    """Now and then a machine loses its power while something is on its way to its disk."""
    shares = {Persist: choices.pick([0.0, 0.0, 0.1]), Merge: choices.pick([0.0, 0.0, 0.02])}

    def look(who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        for effect in effects:
            if system.now < until and choices.chance(shares.get(type(effect), 0.0)):
                host = system.coordinator if who == "coordinator" else system.shards[int(who[6:])]
                system.clockwork.after(choices.uniform(0.0, 0.01), lose_power, host)

    def lose_power(host: Host) -> None:
        system.crash(host, silent=True)
        system.clockwork.after(choices.log_uniform(0.05, 10.0), system.restart, host)

    system.recorders.append(look)


def _host_of(process: str) -> str:
    """Shard 0's process hosts the coordinator."""
    return "shard-0" if process == "coordinator" else process


def patience(scene: Scene) -> float:
    """How long a world may take, from its last fault on, until the run is over."""
    config, learners = scene.system.config, scene.system.learners.values()
    slowest = max(host.spec.step_seconds * (1 + 7 * host.spec.variance) for host in learners)
    nbytes = FLOAT_BYTES * sum(scene.system.sizes)
    rates = [min(h.spec.up_bytes_per_second, h.spec.down_bytes_per_second) for h in learners]
    way = max(host.spec.latency + host.spec.jitter for host in learners)
    steps = (config.run.budget_steps or 0) + 6 * config.sync.period
    if config.sync.wait != "never":  # each step waits for the rounds of what is due then
        slowest += 10 * config.sync.fragments * way + 2 * nbytes / min(rates)
    return SETTLE_SECONDS + 2 * steps * slowest + 12 * nbytes / min(rates) + 60 * way


def must_end(scene: Scene) -> None:
    """Lets the run come to its end, in time, with nothing missing.

    Raises:
        AssertionError: It does not.
    """
    system = scene.system
    limit = scene.calm_at + patience(scene)
    system.run(until=limit, stop=lambda: system.finished)
    assert system.finished, f"the run is not over after {limit:.0f} s: {_state(system)}"
    system.run(until=system.now + 60.0)
    problems = [text for host in system.hosts for loop in host.graves for text in loop.problems]
    assert not problems, problems[0]
    scene.lineage.check_end()


def _state(system: System) -> str:
    parts = []
    for host in system.hosts:
        phase = getattr(getattr(getattr(host, "machine", None), "state", None), "phase", "")
        parts.append(f"{host.name} {'alive' if host.alive else 'dead'} {phase}".strip())
    return ", ".join(parts)


@contextmanager
def a_folder() -> Iterator[Path]:
    """An empty folder for a world, and nothing of it afterwards."""
    with tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None) as folder:
        yield Path(folder) / "run"


def run(seed: int | str, tape: Any = None) -> Report:
    """Runs the world of a seed.

    Raises:
        AssertionError: Something does not hold.
    """
    started = time.process_time()
    torch.set_num_threads(1)
    with a_folder() as folder:
        scene = draw(seed, folder)
        system = scene.system
        if tape is not None:
            system.recorders.insert(0, tape)
        try:
            must_end(scene)
        finally:
            system.close()
    return Report(seed, system.events, system.now, time.process_time() - started)


def failure(seed: int | str) -> Exception | None:
    """What does not hold in the world of a seed, or fails in it; ``None``: nothing."""
    try:
        run(seed)
    except Exception as error:
        return error
    return None


def tape(who: str, now: float, event: Any, effects: Any) -> None:
    """Prints an event and its effects."""
    print(f"{now:10.4f} {who:12} {event}")
    for effect in effects:
        print(f"{'':25} {effect}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat one world and print its events")
    parser.add_argument("--quiet", action="store_true", help="with --seed: no events")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.seed is not None:
        print(run(arguments.seed, None if arguments.quiet else tape))
        return 0
    failed, events, started = 0, 0, time.process_time()
    for seed in range(arguments.first, arguments.first + arguments.runs):
        try:
            events += run(seed).events
        except Exception as error:  # whatever it is, the seed repeats it
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"{COMMAND.format(seed=seed)}\n    {where.name}:{where.lineno}: {error!r}"[:700])
        if seed % 20 == 0:
            gc.collect()
    seconds = time.process_time() - started
    print(f"{arguments.runs} worlds, {events} events, {failed} failed, {seconds:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
