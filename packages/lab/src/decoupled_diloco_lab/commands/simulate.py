"""`ddiloco simulate`: run a scenario in virtual time."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import (
    Sets,
    complete_recipe,
    exit_with,
    fail,
    find_recipe,
    find_shipped,
    make_console,
)
from decoupled_diloco.launch.termination import INTERRUPTED, handling
from decoupled_diloco_lab import SCENARIOS
from decoupled_diloco_lab.commands.scenarios import complete_scenario

if TYPE_CHECKING:
    import torch

    from decoupled_diloco.show.console import SteadyConsole
    from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
    from decoupled_diloco_lab.simulate.scenario import Happening, Scenario
    from decoupled_diloco_lab.simulate.script import Script

POLL_SECONDS = 0.2
LINE_SECONDS = 5.0


def _find_scenario(name: str) -> Path:
    return find_shipped(SCENARIOS, name)


class SimulateOptions(CommandOptions):
    """Options of `ddiloco simulate`."""

    scenario: Annotated[
        Path,
        typer.Argument(metavar="SCENARIO", parser=_find_scenario, autocompletion=complete_scenario),
    ]
    """TOML file of the scenario, or name of a shipped one (see ddiloco scenarios)."""

    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", parser=find_recipe, autocompletion=complete_recipe),
    ] = None
    """Simulate this run instead of the scenario's: TOML file, or name of a shipped recipe."""

    settings: Sets = None
    seed: Annotated[int | None, typer.Option(min=0)] = None
    """Seed of all random choices: weights, data, times, failures. Default: the scenario's."""

    protocol_only: Annotated[bool, typer.Option("--protocol-only")] = False
    """Simulate only the protocol, without tensors, for thousands of learners."""

    device: Annotated[str, typer.Option(metavar="DEVICE")] = "cpu"
    """Train all learners on this device: auto, gpu, cpu, cuda, cuda:1, xpu or mps. The same seed
    gives the same bits only on the CPU."""

    tape: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None
    """With --protocol-only: write the event tape to this folder. Default: write no tape."""


@command(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Run a scenario in virtual time; the same seed gives the same bits."""
    from decoupled_diloco_lab.simulate.scenario import load_scenario

    tape, overrides = options.tape, options.settings or ()
    if tape is not None and not options.protocol_only:
        fail("--tape requires --protocol-only: with tensors the tape is in the run folder")
    if options.protocol_only and options.device != "cpu":
        fail(
            f"--device {options.device} cannot be combined with --protocol-only: it has no tensors"
        )
    _require_scenario(options.scenario)
    if options.device != "cpu":
        overrides = [*overrides, f"learner.device={options.device}"]
    scenario = load_scenario(
        options.scenario, run=options.config, overrides=overrides, seed=options.seed
    )
    if options.protocol_only:
        spare_a_real_run(tape, "--tape ")
        exit_with(simulate_protocol(scenario, tape, make_console()))
    spare_a_real_run(Path(scenario.config.run.folder), "--set run.folder=")
    from decoupled_diloco.launch.devices import device_of_process

    # A missing device is an error before there is a folder.
    device = None if options.device == "cpu" else device_of_process(scenario.config)
    exit_with(simulate_training(scenario, make_console(), device))


def _require_scenario(path: Path) -> None:
    """Refuse the TOML file of a run, which would be simulated for a long time by mistake."""
    from decoupled_diloco.config.toml_tables import read_tables
    from decoupled_diloco_lab.simulate.scenario_file import RUN_TABLES

    tables = read_tables(path) if path.exists() else {}
    if isinstance(tables.get("run"), dict) and tables.keys() <= set(RUN_TABLES):
        fail(
            f"{path} is a run, not a scenario: start it with ddiloco train {path}, or simulate it "
            f"with ddiloco simulate SCENARIO --config {path} (see ddiloco scenarios)"
        )


def spare_a_real_run(folder: Path | None, option: str) -> None:
    """Refuse to rename the folder of a real run for a simulation with the same name."""
    if folder is None or (folder / "scenario.toml").exists():
        return
    if (folder / "tape").is_dir() or (folder / "tape.jsonl").exists():
        fail(
            f"{folder} holds a run with real processes, which a simulation must not replace: "
            f"choose another folder with {option}{folder}-simulated"
        )


def simulate_training(
    scenario: Scenario, console: SteadyConsole, device: torch.device | None = None
) -> int:
    """Simulate with tensors, on the CPU or a device; return the exit code."""
    from decoupled_diloco.cli.run_messages import print_outcome
    from decoupled_diloco.launch.run_folder import RunFolder
    from decoupled_diloco.show.terminal import ProgressDisplay
    from decoupled_diloco_lab.simulate.simulation import Simulation, trained_in

    config = scenario.config
    started = time.monotonic()
    workload = trained_in(scenario)  # raises before the folder is created
    with RunFolder(Path(config.run.folder)) as folder, _noticing_interrupts() as interrupted:
        _keep_settings(scenario, folder.path)
        simulation = Simulation(scenario, folder.path, workload, device or "cpu")
        _print_start("", scenario, console)
        budget = (config.run.max_steps, config.run.max_tokens)
        weights: Path | None = None
        try:
            with ProgressDisplay(folder.path, *budget, console=console, virtual=True) as progress:
                poll = _now_and_then(progress.poll)
                while not interrupted() and simulation.advance():
                    poll()
                if simulation.finished and not interrupted():
                    weights = simulation.finish()
        finally:
            simulation.close()
        seconds = time.monotonic() - started
        print_outcome(folder.path, weights, console)
        _print_end(simulation.system.now, seconds, simulation.script, console)
        if weights is None:
            _print_unfinished(simulation.reason, console)
    return 0 if weights is not None else _code(simulation.reason)


def simulate_protocol(scenario: Scenario, tape: Path | None, console: SteadyConsole) -> int:
    """Simulate without tensors; return the exit code."""
    from decoupled_diloco.launch.run_folder import RunFolder
    from decoupled_diloco.show.console import named_values
    from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun

    # With thousands of learners, looking for cycles as often as usual costs a quarter of the time.
    gc.set_threshold(200_000, 50, 1000)

    with contextlib.ExitStack() as stack:
        interrupted = stack.enter_context(_noticing_interrupts())
        if tape is not None:
            folder = stack.enter_context(RunFolder(tape))
            _keep_settings(scenario, folder.path)
        run = ProtocolRun(scenario, tape)
        _print_start("the protocol of ", scenario, console)
        try:
            _follow(run, interrupted, console)
        finally:
            run.close()
    console.print()
    console.print(named_values(_rows(run)))
    _print_end(run.system.now, run.real_seconds, run.script, console)
    if not run.finished:
        _print_unfinished(run.reason, console)
    return 0 if run.finished else _code(run.reason)


def _keep_settings(scenario: Scenario, folder: Path) -> None:
    """Write the resolved run and the resolved scenario; both can be run again."""
    from decoupled_diloco.config import dump_config
    from decoupled_diloco_lab.simulate.scenario import dump_scenario

    (folder / "run.toml").write_text(dump_config(scenario.config), encoding="utf-8")
    (folder / "scenario.toml").write_text(dump_scenario(scenario), encoding="utf-8")


def _print_start(what: str, scenario: Scenario, console: SteadyConsole) -> None:
    from decoupled_diloco.run_model.phrases import many

    config = scenario.config
    learners = many(config.run.learners, "learner")
    shards = many(config.syncer.shards, "syncer shard")
    console.print_text(f"simulating {what}{config.run.name} in virtual time: {learners}, {shards}")


def _print_unfinished(reason: str, console: SteadyConsole) -> None:
    text = f"the run did not finish: {reason or 'interrupted'}"
    console.print(text, style="bold red")


def _code(reason: str) -> int:
    """Return why it has not finished as an exit code; reaching until_seconds is not a failure."""
    if not reason:
        return INTERRUPTED
    return 0 if reason.startswith("until_seconds") else 1


def _now_and_then(poll_once: Callable[[], object]) -> Callable[[], None]:
    """Poll at most every ``POLL_SECONDS`` of real time, without an effect on the simulation."""
    last = time.monotonic()

    def poll() -> None:
        nonlocal last
        if time.monotonic() - last >= POLL_SECONDS:
            poll_once()
            last = time.monotonic()

    return poll


def _follow(run: ProtocolRun, interrupted: Callable[[], bool], console: SteadyConsole) -> None:
    """Advance the simulation, and print its progress every few seconds."""
    from decoupled_diloco.run_model.phrases import clock_face

    budget = run.scenario.config.run.max_steps
    line_at = time.monotonic() + LINE_SECONDS
    while not interrupted() and run.advance():
        if time.monotonic() >= line_at:
            line_at = time.monotonic() + LINE_SECONDS
            step = f"step {run.script.clock}" + (f"/{budget}" if budget else "")
            rate = run.system.events / run.real_seconds
            console.print(
                f"{clock_face(run.system.now)}  {step}, {run.tally.merged} rounds, "
                f"{run.system.events} events, {rate:.0f}/s"
            )


@contextlib.contextmanager
def _noticing_interrupts() -> Iterator[Callable[[], bool]]:
    """End a simulation between two events on Ctrl-C or SIGTERM; a second Ctrl-C ends it at once."""
    noticed: list[int] = []

    def notice(number: int, frame: object) -> None:
        if noticed and number == signal.SIGINT:
            raise KeyboardInterrupt
        noticed.append(number)

    with handling(notice, signal.SIGINT, signal.SIGTERM):
        yield lambda: bool(noticed)


def _print_end(virtual: float, real: float, script: Script, console: SteadyConsole) -> None:
    from decoupled_diloco.units import format_duration

    print_missed(script.missed, console)
    console.print(f"\n{format_duration(virtual)} of virtual time in {format_duration(real)}")


def print_missed(missed: Iterable[Happening], console: SteadyConsole) -> None:
    """Print which events of a scenario did not happen because the run had ended before."""
    for each in missed:
        step = f"step {each.at_step}" if each.at_share is None else f"{each.at_share:.0%}"
        what = f"{each.kind} {each.target.name}"
        console.print_text(
            f"did not happen: {what} at {step}, which the run did not reach", "yellow"
        )


def _rows(run: ProtocolRun) -> list[tuple[str, str]]:
    from decoupled_diloco.run_model.phrases import percent
    from decoupled_diloco.units import format_bytes, format_count, format_duration

    tally, system, config = run.tally, run.system, run.scenario.config

    def spread(values: list[float]) -> str:
        if not values:
            return "–"
        ordered = sorted(values)
        median, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95))
        return f"{format_duration(median)} median, 95 % within {format_duration(high)}"

    asked = percent(tally.folded / tally.asked) if tally.asked else "–"
    all_learners = tally.merged * config.run.learners
    present = percent(tally.folded / all_learners) if all_learners else "–"
    waited = f"{len(tally.quorum_seconds)} rounds"
    if tally.quorum_seconds:
        waited += f", {spread(tally.quorum_seconds)}"
    abandoned = [f"{count} {why}" for why, count in tally.reasons.most_common(3) if count]
    return [
        ("global step", str(run.script.clock)),
        ("tokens", format_count(run.tokens)),
        ("rounds merged", str(tally.merged)),
        ("rounds abandoned", "; ".join([str(tally.abandoned), *abandoned])),
        ("took part", f"{present} of all learners per round, {asked} of the requested ones"),
        ("waited for quorum", waited),
        ("window closed", spread(tally.closed_seconds)),
        ("round merged", spread(tally.finished_seconds)),
        ("learners sent", format_bytes(run.data_sent)),
        ("events", f"{format_count(system.events)}, {system.events / run.real_seconds:.0f}/s"),
        *([("written", str(run.folder))] if run.folder is not None else []),
    ]
