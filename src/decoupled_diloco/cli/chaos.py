"""`ddiloco chaos`: a run under the faults of a scenario, and whether it kept its promises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.options import (
    Sets,
    complete_recipe,
    complete_scenario,
    exit_with,
    fail,
    make_console,
)
from decoupled_diloco.config.files import find_shipped
from decoupled_diloco.launch.termination import INTERRUPTED

if TYPE_CHECKING:
    from decoupled_diloco.chaos.verdict import Verdict
    from decoupled_diloco.observe.terminal import SteadyConsole
    from decoupled_diloco.simulate.scenario import Scenario

DETAILS_MAX = 8
"""Lines of what broke a promise that are shown; chaos.json has all."""


def _complete(incomplete: str) -> list[tuple[str, str]]:
    return [*complete_recipe(incomplete), *complete_scenario(incomplete)]


class ChaosOptions(CommandOptions):
    """Options of `ddiloco chaos`."""

    told: Annotated[list[str], typer.Argument(metavar="[RUN] SCENARIO", autocompletion=_complete)]
    """The scenario's TOML file, or the name of a shipped one; before it, another run than its own:
    a TOML file, or a shipped recipe's name."""

    settings: Sets = None
    seed: Annotated[int | None, typer.Option(min=0)] = None
    """Seed of the run, and of all that strikes at random."""

    virtual: Annotated[bool, typer.Option("--virtual")] = False
    """Run in virtual time instead of with real processes."""

    protocol_only: Annotated[bool, typer.Option("--protocol-only")] = False
    """With --virtual: simulate the protocol without tensors."""

    reference: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None
    """A fault-free run of the same recipe to compare accepted tokens with. Default: it is
    simulated."""

    accepted_min: Annotated[float | None, typer.Option(min=0.0, max=1.0, metavar="SHARE")] = None
    """Least accepted tokens over those of a fault-free run. Default: 0.97."""

    participation_min: Annotated[float | None, typer.Option(min=0.0, max=1.0, metavar="SHARE")] = (
        None
    )
    """Least share of its eligible rounds that any learner takes part in. Default: 0.95; a short run
    has few."""

    def scenario(self) -> Scenario:
        from decoupled_diloco.simulate.scenario import load_scenario

        if len(self.told) > 2:
            told = " ".join(self.told)
            fail(f"{told!r} is more than a run and a scenario: give one of each at most")
        *given, story = self.told
        return load_scenario(
            find_shipped("scenarios", story),
            run=find_shipped("recipes", given[0]) if given else None,
            overrides=self.settings or (),
            seed=self.seed,
        )

    def limits(self) -> dict[str, float]:
        """The promises' limits, as far as they are given."""
        names = ("accepted_min", "participation_min")
        return {name: value for name, value in self.given.items() if name in names}


@command(ChaosOptions)
def chaos(options: ChaosOptions) -> None:
    """Trains under a scenario's faults, checks the tapes, and says whether all promises were kept.

    Kills, stops, slows down and starts again real processes of this machine, fills and empties
    their disks, cuts and spoils their links. The verdict is printed and in RUN/chaos.json. Exit
    code 1: a promise was broken.
    """
    if options.protocol_only and not options.virtual:
        fail("--protocol-only is for --virtual: real processes train")
    scenario, reference = options.scenario(), options.reference
    console = make_console()
    share = None if reference is None else _share(scenario, reference)
    code, finished, reason = _carry_out(scenario, console, options.virtual, options.protocol_only)
    if code == INTERRUPTED:
        console.print("no verdict: interrupted")
        exit_with(code)
    from decoupled_diloco.chaos.verdict import judge, save_verdict

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
    """Exit code, whether it finished, and why it ended."""
    if not virtual:
        return _really(scenario, console)
    from decoupled_diloco.chaos.reference import with_variance
    from decoupled_diloco.cli.simulate import simulate_protocol, simulate_training, spare_a_real_run

    scenario = with_variance(scenario)
    folder = Path(scenario.config.run.folder)
    spare_a_real_run(folder, "--set run.folder=")
    code = (
        simulate_protocol(scenario, folder, console)
        if protocol_only
        else simulate_training(scenario, console)
    )
    return code, code == 0, "the simulation is over" if code == 0 else "it did not finish"


def _really(scenario: Scenario, console: SteadyConsole) -> tuple[int, bool, str]:
    from decoupled_diloco.chaos.real import RealRun, require_real
    from decoupled_diloco.cli.telling import tell_beginning, tell_missed, tell_outcome
    from decoupled_diloco.cli.train import carry_out
    from decoupled_diloco.simulate.scenario import dump_scenario

    require_real(scenario)
    run = RealRun(scenario)
    config = scenario.config
    (run.path / "scenario.toml").write_text(dump_scenario(scenario), encoding="utf-8")
    tell_beginning(config, run.path, run.local.folder.moved_to, console)
    outcome = carry_out(run, config, console)
    tell_outcome(run.path, outcome.weights, console, run.local.model)
    tell_missed(run.engine.missed, console)
    code = INTERRUPTED if outcome.reason == "interrupted" else 0
    return code, outcome.finished, outcome.reason


def _share(scenario: Scenario, reference: Path | None) -> float:
    """The share of the trained tokens that a fault-free run accepts."""
    from decoupled_diloco.chaos.reference import accepted_share_of, fault_free_share

    return fault_free_share(scenario) if reference is None else accepted_share_of(reference)


def _show(folder: Path, verdict: Verdict, console: SteadyConsole) -> None:
    from rich.text import Text

    from decoupled_diloco.chaos.verdict import FILE_NAME
    from decoupled_diloco.observe.terminal import plain_table

    table = plain_table("promise", "measured", "limit", "")
    for check in verdict.checks:
        told = Text("kept", style="green") if check.kept else Text("BROKEN", style="bold red")
        table.add_row(check.name, check.measured, check.limit, told)
    struck = ", ".join(f"{count} × {kind}" for kind, count in verdict.faults.items())
    console.print(f"\nfaults: {struck or 'none'}\n")
    console.print(table)
    for check in verdict.checks:
        if not check.kept:
            for line in check.details[:DETAILS_MAX]:
                console.print(f"  {check.name}: {line}")
    words = "every promise was kept" if verdict.kept else "a promise was broken"
    console.say(
        f"\nverdict: {words}; {folder / FILE_NAME}",
        style="bold green" if verdict.kept else "bold red",
    )
