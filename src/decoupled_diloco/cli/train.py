"""`ddiloco train` and `ddiloco syncer`: run it, show it, say what remains."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from rich.console import Console

from decoupled_diloco.cli.beginning import tell_beginning
from decoupled_diloco.cli.options import INTERRUPTED
from decoupled_diloco.cli.outcome import reader_may_be_gone, tell_outcome, what_remains
from decoupled_diloco.cli.timing import import_intervals
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import from_elsewhere
from decoupled_diloco.launch.local import LocalRun, RunOutcome
from decoupled_diloco.observe.following import FollowedRun
from decoupled_diloco.observe.progress import ProgressDisplay


def train_locally(
    config: RunConfig, console: Console, *, resume: bool = False, cut: str = ""
) -> int:
    """Runs everything on this machine; returns the exit code."""
    if resume and not cut and _tell_if_finished(config, console):
        return 0
    run = LocalRun(config, resume=resume, cut=cut)
    with reader_may_be_gone():
        tell_beginning(config, run.path, run.folder.moved_to, console)
    outcome = carry_out(run, config, console)
    with reader_may_be_gone():
        tell_outcome(run.path, outcome.weights, console, run.model)
        if not outcome.finished:
            console.print(f"the run did not finish: {outcome.reason}", style="bold red")
            console.print(what_remains(run.path, config), soft_wrap=True)
    if outcome.finished:
        return 0
    return INTERRUPTED if outcome.reason == "interrupted" else 1


class Run(Protocol):
    """A run on this machine: of `LocalRun`, or of one that meets with faults."""

    @property
    def path(self) -> Path:
        """Its folder."""
        ...

    @property
    def followed(self) -> FollowedRun:
        """What its tape tells while it goes on."""
        ...

    def start(self) -> None:
        """Starts all processes."""
        ...

    def wait(self, on_poll: Callable[[], None]) -> RunOutcome:
        """Returns when it is over."""
        ...

    def close(self) -> None:
        """Ends what still runs."""
        ...


def carry_out(run: Run, config: RunConfig, console: Console) -> RunOutcome:
    """Starts a run and shows how it is doing, to its end or to Ctrl-C; then no process is left."""
    budget = (config.run.budget_steps, config.run.budget_tokens)
    try:
        with (
            termination_as_interrupt(),
            ProgressDisplay(run.followed, *budget, console=console) as progress,
        ):
            run.start()
            outcome = run.wait(progress.poll)
            progress.poll()
            return outcome
    except KeyboardInterrupt:
        console.print("interrupted: ending all processes")
        return RunOutcome(False, "interrupted", None)
    finally:
        with undisturbed():
            run.close()


def serve_locally(
    config: RunConfig, console: Console, *, resume: bool = False, cut: str = "", new: bool = False
) -> int:
    """Runs all shards on this machine, for learners that are started elsewhere.

    Their run is not to be ended by a command that was only typed again: see ``anew`` of `LocalRun`.
    """
    if resume and not cut and _tell_if_finished(config, console):
        return 0
    run = LocalRun(config, learners=False, resume=resume, cut=cut, anew=new)
    budget = (config.run.budget_steps, config.run.budget_tokens)
    try:
        with termination_as_interrupt():
            run.start()
            import_intervals()  # while the shards import the same
            run.wait_for_shards()
            with reader_may_be_gone():
                _tell_how_to_join(config, run, console)
                tell_beginning(config, run.path, run.folder.moved_to, console, here=False)
            with ProgressDisplay(run.followed, *budget, console=console) as progress:
                outcome = run.wait(progress.poll)
                progress.poll()
    except KeyboardInterrupt:
        outcome = RunOutcome(False, "interrupted", None)
    finally:
        with undisturbed():
            run.close()
    remains = outcome.weights or what_remains(run.path, config, "syncer")
    with reader_may_be_gone():
        tell_outcome(run.path, outcome.weights, console, run.model)
        console.print(f"\n{outcome.reason}; {remains}", soft_wrap=True)
    if outcome.finished:
        return 0
    return INTERRUPTED if outcome.reason == "interrupted" else 1


def _tell_if_finished(config: RunConfig, console: Console) -> bool:
    """Whether a run that is to go on has nothing left to do."""
    from decoupled_diloco.launch.resume import standing_of  # torch takes seconds

    standing = standing_of(Path(config.run.folder), config)
    if standing.is_finished:
        console.print(
            f"finished already: {standing.weights}; to train longer, raise its budget with "
            "--set run.budget_steps=… or run.budget_tokens=…",
            soft_wrap=True,
            highlight=False,
        )
    return standing.is_finished


def _tell_how_to_join(config: RunConfig, run: LocalRun, console: Console) -> None:
    reached = [from_elsewhere(address) for address in run.addresses]
    more = "" if reached == list(run.addresses) else ", or any other address of this machine"
    each, own = config.syncer.principals_file is not None, config.syncer.token_file is not None
    secret = "FILE_WITH_ITS_OWN" if each else run.secret_file
    kept = each or own or run.folder.resumed
    new = "" if kept else "\n  (new in each run: learners of an earlier one need it again)"
    console.print(
        f"syncer of {config.run.name}: {', '.join(reached)}{more}\n"
        f"secret: {run.secret_file}{new}\n"
        "join with:\n"
        f'  dd.Learner(model, syncer="{reached[0]}", token=…)\n'
        f"  ddiloco learner {run.path}/run.toml --index 0 "
        f"--syncer {reached[0]} --token-file {secret}\n",
        soft_wrap=True,
    )


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not interrupt the clean-up that leaves no orphan."""
    before = [(n, signal.signal(n, signal.SIG_IGN)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
