"""`ddiloco train` and `ddiloco syncer`: run it, show it, say what remains."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from decoupled_diloco.cli.telling import tell_beginning, tell_outcome, tell_page, what_remains
from decoupled_diloco.cli.timing import import_intervals
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import from_elsewhere
from decoupled_diloco.launch.local import LocalRun, RunOutcome
from decoupled_diloco.launch.termination import INTERRUPTED, handling, interrupt
from decoupled_diloco.observe.progress import ProgressDisplay
from decoupled_diloco.observe.terminal import SteadyConsole

if TYPE_CHECKING:
    from decoupled_diloco.chaos.real import RealRun


def train_locally(
    config: RunConfig, console: SteadyConsole, *, resume: bool = False, checkpoint: str = ""
) -> int:
    """Runs everything on this machine; returns the exit code."""
    if resume and not checkpoint and _tell_if_finished(config, console):
        return 0
    run = LocalRun(config, resume=resume, checkpoint=checkpoint)
    tell_beginning(config, run.path, run.folder.moved_to, console)
    outcome = carry_out(run, config, console, lambda: tell_page(run, console))
    tell_outcome(run.path, outcome.weights, console, run.model)
    if not outcome.finished:
        console.print(f"the run did not finish: {outcome.reason}", style="bold red")
        console.say(what_remains(run.path, config))
    return _code(outcome)


def carry_out(
    run: LocalRun | RealRun,
    config: RunConfig,
    console: SteadyConsole,
    begun: Callable[[], None] | None = None,
) -> RunOutcome:
    """Starts a run and shows how it is doing, to its end or to Ctrl-C; then no process is left.

    ``begun`` is called once the processes are started.
    """
    budget = (config.run.budget_steps, config.run.budget_tokens)
    try:
        with handling(interrupt, signal.SIGTERM):
            run.start()
            if begun is not None:
                begun()
            with ProgressDisplay(run.followed, *budget, console=console) as progress:
                outcome = run.wait(progress.poll)
                progress.poll()
                return outcome
    except KeyboardInterrupt:
        console.print("interrupted: ending all processes")
        return RunOutcome(False, "interrupted", None)
    finally:
        # A second Ctrl-C must not interrupt the clean-up that leaves no orphan.
        with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
            run.close()


def serve_locally(
    config: RunConfig,
    console: SteadyConsole,
    *,
    resume: bool = False,
    checkpoint: str = "",
    new: bool = False,
) -> int:
    """Runs all shards on this machine, for learners that are started elsewhere.

    A command that is repeated by mistake must not end their run: see ``may_replace`` of `LocalRun`.
    """
    if resume and not checkpoint and _tell_if_finished(config, console):
        return 0
    run = LocalRun(
        config,
        learners=False,
        resume=resume,
        checkpoint=checkpoint,
        may_replace=new,
        hides_token=True,
    )

    def begun() -> None:
        import_intervals()  # while the shards import the same
        run.wait_for_shards()
        run.invite()
        _tell_how_to_join(config, run, console)
        tell_page(run, console)
        tell_beginning(config, run.path, run.folder.moved_to, console, here=False)

    outcome = carry_out(run, config, console, begun)
    remains = outcome.weights or what_remains(run.path, config, "syncer")
    tell_outcome(run.path, outcome.weights, console, run.model)
    console.say(f"\n{outcome.reason}; {remains}")
    return _code(outcome)


def _code(outcome: RunOutcome) -> int:
    if outcome.finished:
        return 0
    return INTERRUPTED if outcome.reason == "interrupted" else 1


def _tell_if_finished(config: RunConfig, console: SteadyConsole) -> bool:
    """Whether a run that is to go on has nothing left to do."""
    from decoupled_diloco.launch.resume import standing_of  # torch takes seconds

    standing = standing_of(Path(config.run.folder), config)
    if standing.is_finished:
        console.say(
            f"finished already: {standing.weights}; to train longer, raise its budget with "
            "--set run.budget_steps=… or run.budget_tokens=…"
        )
    return standing.is_finished


def _tell_how_to_join(config: RunConfig, run: LocalRun, console: SteadyConsole) -> None:
    reached = [from_elsewhere(address) for address in run.addresses]
    more = "" if reached == list(run.addresses) else ", or any other address of this machine"
    each, own = config.syncer.principals_file is not None, config.syncer.token_file is not None
    secret = "FILE_WITH_ITS_OWN" if each else run.secret_file
    kept = each or own or run.folder.resumed
    new = "" if kept else "\n  (new in each run: learners of an earlier one need it again)"
    told, options = [f"secret: {run.secret_file}{new}"], f" --token-file {secret}"
    arguments = ", token=…"
    if run.secret_file is None:
        told, options, arguments = [], "", ""
    if config.tls.serves:
        options += " --authority AUTHORITY.pem"
        arguments += ", tls=dd.Tls(authority=…"
        if config.tls.client_authority is not None:
            told.append("each shows a certificate of its own: ddiloco certificates add")
            options += " --certificate ITS_OWN.pem --key ITS_OWN.key"
            arguments += ", certificate=…, key=…"
        arguments += ")"
    lines = [
        f"syncer of {config.run.name}: {', '.join(reached)}{more}",
        *told,
        "join with:",
        f'  dd.Learner(model, syncer="{reached[0]}"{arguments})',
        f"  ddiloco learner {run.path}/run.toml --index 0 --syncer {reached[0]}{options}\n",
    ]
    console.say("\n".join(lines))
