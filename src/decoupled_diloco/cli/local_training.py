"""Run `ddiloco train` and `ddiloco syncer`: start the processes, show progress and the result."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from decoupled_diloco.cli.intervals import import_intervals
from decoupled_diloco.cli.run_messages import (
    describe_remains,
    print_outcome,
    print_page_address,
    print_start,
)
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import from_elsewhere
from decoupled_diloco.launch.local import LocalRun, RunOutcome
from decoupled_diloco.launch.termination import INTERRUPTED, handling, interrupt
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.terminal import ProgressDisplay

if TYPE_CHECKING:
    from decoupled_diloco.run_model import FollowedRun


class StartedRun(Protocol):
    """A run with processes on this machine, which `carry_out` starts and follows."""

    @property
    def followed(self) -> FollowedRun: ...

    def start(self) -> None: ...

    def wait(self, on_poll: Callable[[], None]) -> RunOutcome: ...

    def close(self) -> None: ...


def train_locally(
    config: RunConfig, console: SteadyConsole, *, resume: bool = False, checkpoint: str = ""
) -> int:
    """Run all processes on this machine; return the exit code."""
    if resume and not checkpoint and _print_if_finished(config, console):
        return 0
    run = LocalRun(config, resume=resume, checkpoint=checkpoint)
    print_start(config, run.path, run.folder.moved_to, console)
    outcome = carry_out(run, config, console, lambda: print_page_address(run, console))
    print_outcome(run.path, outcome.weights, console, run.model)
    if not outcome.finished:
        console.print(f"the run did not finish: {outcome.reason}", style="bold red")
        console.print_text(describe_remains(run.path, config))
    return _code(outcome)


def carry_out(
    run: StartedRun,
    config: RunConfig,
    console: SteadyConsole,
    begun: Callable[[], None] | None = None,
) -> RunOutcome:
    """Start a run and show its progress until it ends or Ctrl-C; then end all processes.

    ``begun`` is called once the processes have started.
    """
    budget = (config.run.max_steps, config.run.max_tokens)
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
        console.print("interrupted: stopping all processes")
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
    """Run all shards on this machine, for learners that start elsewhere.

    A command that is repeated by mistake does not end their run: see ``may_replace`` of `LocalRun`.
    """
    if resume and not checkpoint and _print_if_finished(config, console):
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
        _print_how_to_join(config, run, console)
        print_page_address(run, console)
        print_start(config, run.path, run.folder.moved_to, console, here=False)

    outcome = carry_out(run, config, console, begun)
    remains = outcome.weights or describe_remains(run.path, config, "syncer")
    print_outcome(run.path, outcome.weights, console, run.model)
    console.print_text(f"\n{outcome.reason}; {remains}")
    return _code(outcome)


def _code(outcome: RunOutcome) -> int:
    if outcome.finished:
        return 0
    return INTERRUPTED if outcome.reason == "interrupted" else 1


def _print_if_finished(config: RunConfig, console: SteadyConsole) -> bool:
    """Whether a run to resume has already finished; print that it has."""
    from decoupled_diloco.launch.resume_run import standing_of  # torch takes seconds

    standing = standing_of(Path(config.run.folder), config)
    if standing.is_finished:
        console.print_text(
            f"already finished: {standing.weights}; to train longer, raise the budget with "
            "--set run.max_steps=… or run.max_tokens=…"
        )
    return standing.is_finished


def _print_how_to_join(config: RunConfig, run: LocalRun, console: SteadyConsole) -> None:
    reached = [from_elsewhere(address) for address in run.addresses]
    more = "" if reached == list(run.addresses) else ", or any other address of this machine"
    each, own = config.syncer.principals_file is not None, config.syncer.token_file is not None
    file = "ITS_OWN_FILE" if each else run.secret_file
    kept = each or own or run.folder.resumed
    new = "" if kept else "\n  (new in each run: copy it to the learners again)"
    notes, options = [f"auth token: {run.secret_file}{new}"], f" --auth-token-file {file}"
    arguments = ", auth_token=…"
    if run.secret_file is None:
        notes, options, arguments = [], "", ""
    if config.tls.serves:
        options += " --ca-cert AUTHORITY.pem"
        arguments += ", tls=dd.TLSConfig(ca_cert=…"
        if config.tls.client_ca_cert is not None:
            notes.append("each learner presents its own certificate: ddiloco certs add")
            options += " --cert ITS_OWN.pem --key ITS_OWN.key"
            arguments += ", cert=…, key=…"
        arguments += ")"
    lines = [
        f"syncer of {config.run.name}: {', '.join(reached)}{more}",
        *notes,
        "join with:",
        f'  dd.Learner(model, syncer="{reached[0]}"{arguments})',
        f"  ddiloco learner {run.path}/run.toml --index 0 --syncer {reached[0]}{options}\n",
    ]
    console.print_text("\n".join(lines))
