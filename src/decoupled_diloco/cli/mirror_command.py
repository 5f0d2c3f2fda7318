"""`ddiloco mirror`: copy a run to its object store while it runs."""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Event

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import RunFolder, Sets, StopWithParent, fail, prepare
from decoupled_diloco.config import load_config


class MirrorOptions(CommandOptions):
    """Options of `ddiloco mirror`."""

    run: RunFolder = ""
    settings: Sets = None
    stop_with_parent: StopWithParent = False


@command(MirrorOptions)
def mirror(options: MirrorOptions) -> None:
    """Copy a run to its object store until its processes have ended.

    `ddiloco train` and `ddiloco syncer` start this for a run with a store. With `ddiloco syncer
    --shard`, the first shard in each run folder does. Run it by hand after a run if the store was
    unreachable at its end. If shards have separate folders, run it for all of them at once.
    """
    from decoupled_diloco.launch.processes import MIRROR, open_tape
    from decoupled_diloco.launch.run_folder import is_in_use, is_run_folder
    from decoupled_diloco.launch.run_mirror import mirror_folder
    from decoupled_diloco.units import format_bytes

    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    prepare(options.stop_with_parent)
    run = Path(chosen_run(options.run, "ddiloco mirror runs/quickstart", here=True))
    if not is_run_folder(run):
        fail(f"{run} is not a run folder: name the folder of a run, such as runs/quickstart")
    config = load_config(run / "run.toml", options.settings or (), plugins=False)
    if not config.run.store:
        fail(f"{run} has no store: add --set run.store=s3://BUCKET/PREFIX")
    # A launcher asks this process to stop; the lock of its folder would show the launcher itself.
    by_hand = not options.stop_with_parent
    with open_tape(run, MIRROR, {"machine": MIRROR}) as tape:
        done = mirror_folder(run, config, tape, stop, lambda: by_hand and not is_in_use(run))
    typer.echo(
        f"state {done.number} of {config.run.name} is in {config.run.store} "
        f"({format_bytes(done.sent_bytes)} uploaded)"
    )
