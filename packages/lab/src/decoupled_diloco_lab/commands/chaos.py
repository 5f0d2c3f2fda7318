"""`ddiloco chaos`: run a scenario's faults on real processes, and verify the run's promises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import (
    Sets,
    complete_recipe,
    exit_with,
    fail,
    make_console,
)
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco_lab import SCENARIOS
from decoupled_diloco_lab.commands.scenarios import complete_scenario

if TYPE_CHECKING:
    from decoupled_diloco.show.console import SteadyConsole
    from decoupled_diloco_lab.chaos.verdict import Verdict
    from decoupled_diloco_lab.simulate.scenario import Scenario

DETAILS_MAX = 8
"""The most lines per broken promise that are printed; chaos.json has all."""


def _complete(incomplete: str) -> list[tuple[str, str]]:
    return [*complete_recipe(incomplete), *complete_scenario(incomplete)]


class ChaosOptions(CommandOptions):
    """Options of `ddiloco chaos`."""

    names: Annotated[
        list[str], typer.Argument(metavar="[CONFIG] SCENARIO", autocompletion=_complete)
    ]
    """SCENARIO: TOML file of the scenario, or name of a shipped one (see ddiloco scenarios).
    CONFIG: run to use instead of the scenario's, a TOML file or the name of a shipped recipe."""

    settings: Sets = None
    seed: Annotated[int | None, typer.Option(min=0)] = None
    """Seed of the run and of all random faults. Default: the scenario's."""

    virtual: Annotated[bool, typer.Option("--virtual")] = False
    """Simulate the run in virtual time instead of starting real processes."""

    protocol_only: Annotated[bool, typer.Option("--protocol-only")] = False
    """With --virtual: simulate only the protocol, without tensors."""

    reference: Annotated[Path | None, typer.Option(metavar="RUN")] = None
    """Run folder of a fault-free run of the same recipe, to compare accepted tokens with. Default:
    simulate one."""

    accepted_min: Annotated[float | None, typer.Option(min=0.0, max=1.0, metavar="SHARE")] = None
    """Minimum of accepted tokens, as a share of those of a fault-free run. Default: 0.97."""

    participation_min: Annotated[float | None, typer.Option(min=0.0, max=1.0, metavar="SHARE")] = (
        None
    )
    """Minimum share of eligible rounds in which each learner takes part. Default: 0.95, less for a
    short run."""

    def scenario(self) -> Scenario:
        from decoupled_diloco_lab.simulate.scenario import load_scenario

        if len(self.names) > 2:
            given = " ".join(self.names)
            fail(f"{given!r} is not [CONFIG] SCENARIO: give one of each at most")
        *config, scenario = self.names
        return load_scenario(
            SCENARIOS.find(scenario),
            run=RECIPES.find(config[0]) if config else None,
            overrides=self.settings or (),
            seed=self.seed,
        )

    def limits(self) -> dict[str, float]:
        """Return the limits of the promises that were given."""
        names = ("accepted_min", "participation_min")
        return {name: value for name, value in self.given.items() if name in names}


@command(ChaosOptions)
def chaos(options: ChaosOptions) -> None:
    """Train under a scenario's faults, then verify from the tapes that the run kept its promises.

    The command kills, pauses, slows down and restarts real processes on this machine, fills and
    empties their disks, and cuts and corrupts their links. The verdict is printed, and written to
    RUN/chaos.json. Exit code 1: a promise was broken.
    """
    if options.protocol_only and not options.virtual:
        fail("--protocol-only requires --virtual: real processes train")
    scenario, reference = options.scenario(), options.reference
    console = make_console()
    share = None if reference is None else _share(scenario, reference)
    code, finished, reason = _carry_out(scenario, console, options.virtual, options.protocol_only)
    if code == INTERRUPTED:
        console.print("no verdict: interrupted")
        exit_with(code)
    from decoupled_diloco_lab.chaos.verdict import judge, save_verdict

    folder = Path(scenario.config.run.folder)
    share = _share(scenario, None) if share is None else share
    verdict = judge(
        folder, accepted_share=share, finished=finished, reason=reason, **options.limits()
    )
    save_verdict(folder, verdict)
    _show(folder, verdict, console)
    exit_with(0 if verdict.kept else 1)


def _carry_out(
    scenario: Scenario, console: SteadyConsole, virtual: bool, protocol_only: bool
) -> tuple[int, bool, str]:
    """Run the scenario; return the exit code, whether the run finished, and why it ended."""
    if not virtual:
        return _run_processes(scenario, console)
    from decoupled_diloco_lab.chaos.reference import with_variance
    from decoupled_diloco_lab.commands.simulate import (
        simulate_protocol,
        simulate_training,
        spare_a_real_run,
    )

    scenario = with_variance(scenario)
    folder = Path(scenario.config.run.folder)
    spare_a_real_run(folder, "--set run.folder=")
    code = (
        simulate_protocol(scenario, folder, console)
        if protocol_only
        else simulate_training(scenario, console)
    )
    return code, code == 0, "the simulation has ended" if code == 0 else "it did not finish"


def _run_processes(scenario: Scenario, console: SteadyConsole) -> tuple[int, bool, str]:
    from decoupled_diloco.cli.local_training import carry_out
    from decoupled_diloco.cli.run_messages import print_outcome, print_start
    from decoupled_diloco_lab.chaos.real import RealRun, require_real
    from decoupled_diloco_lab.commands.simulate import print_missed
    from decoupled_diloco_lab.simulate.scenario import dump_scenario

    require_real(scenario)
    run = RealRun(scenario)
    config = scenario.config
    (run.path / "scenario.toml").write_text(dump_scenario(scenario), encoding="utf-8")
    print_start(config, run.path, run.local.folder.moved_to, console)
    outcome = carry_out(run, config, console)
    print_outcome(run.path, outcome.weights, console, run.local.model)
    print_missed(run.engine.missed, console)
    code = INTERRUPTED if outcome.reason == "interrupted" else 0
    return code, outcome.finished, outcome.reason


def _share(scenario: Scenario, reference: Path | None) -> float:
    """Return the share of the trained tokens that a fault-free run accepts."""
    from decoupled_diloco_lab.chaos.reference import accepted_share_of, fault_free_share

    return fault_free_share(scenario) if reference is None else accepted_share_of(reference)


def _show(folder: Path, verdict: Verdict, console: SteadyConsole) -> None:
    from rich.text import Text

    from decoupled_diloco.show.console import plain_table
    from decoupled_diloco_lab.chaos.verdict import FILE_NAME

    table = plain_table("promise", "measured", "limit", "")
    for check in verdict.checks:
        result = Text("kept", style="green") if check.kept else Text("BROKEN", style="bold red")
        table.add_row(check.name, check.measured, check.limit, result)
    struck = ", ".join(f"{count} × {kind}" for kind, count in verdict.faults.items())
    console.print(f"\nfaults: {struck or 'none'}\n")
    console.print(table)
    for check in verdict.checks:
        if not check.kept:
            for line in check.details[:DETAILS_MAX]:
                console.print(f"  {check.name}: {line}")
    words = "every promise was kept" if verdict.kept else "a promise was broken"
    console.print_text(
        f"\nverdict: {words}; {folder / FILE_NAME}",
        style="bold green" if verdict.kept else "bold red",
    )
