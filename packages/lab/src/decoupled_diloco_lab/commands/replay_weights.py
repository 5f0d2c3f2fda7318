"""The part of `ddiloco replay` that computes a run's weights again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decoupled_diloco_lab.simulate.weights_replay import Without, replay_weights, weights_without

if TYPE_CHECKING:
    from decoupled_diloco.show.console import SteadyConsole

SHOWN_MAX = 3
"""The most notes and differences of a shard that are printed."""


def show_weights(
    run: Path,
    until: float | None,
    console: SteadyConsole,
    without: str = "",
    from_step: int = 0,
    file: Path | None = None,
) -> bool:
    """Compute the weights of a run again and print the result; return whether all bits agree.

    Args:
        run: The run folder.
        until: Stop this many seconds after the run's first record; ``None``: at its end.
        console: Prints the result.
        without: If all bits agree, also write the weights without this learner's contributions.
        from_step: The first global step whose contributions are left out.
        file: The file to write. Default: in the run folder.
    """
    from decoupled_diloco.show.console import plain_table

    computed = replay_weights(run, until)
    left = ("shard", "weights", "at the end")
    header = ("shard", "merges", "versions", "unknown", "weights", "at the end")
    table = plain_table(*header, left=left)
    for each in computed:
        count = len(each.differences)
        result = "the same bits" if not count else f"{count} differ"
        numbers = (str(each.merges), str(each.versions), str(each.unknown))
        table.add_row(each.process, *numbers, result, each.final)
    console.print()
    console.print(table)
    for each in computed:
        for note in each.notes[:SHOWN_MAX]:
            console.print(f"note: {each.process}: {note}")
        for difference in each.differences[:SHOWN_MAX]:
            console.print(f"{each.process}: other bits: {difference}")
    agree = not any(each.differences or each.final == "others" for each in computed)
    if without and not agree:
        console.print(f"the weights without {without} are not computed, because bits differ")
    elif without:
        _write_without(run, until, console, Without(without, from_step), file)
    return agree


def _write_without(
    run: Path, until: float | None, console: SteadyConsole, without: Without, file: Path | None
) -> None:
    file = file or run / f"weights-without-{without.learner}.safetensors"
    found = weights_without(run, without, file, until)
    since = f" from step {without.from_step} on" if without.from_step else ""
    console.print()
    console.print(
        f"without {without.learner}{since}: {found.left_out} contributions are left out, "
        f"{found.remaining} remain"
    )
    if found.unchanged:
        console.print(f"{found.unchanged} merges had no other contribution: they change nothing")
    for note in found.notes[:SHOWN_MAX]:
        console.print(f"note: {note}")
    console.print("a new run starts from these weights:")
    console.print(f"  ddiloco train CONFIG --set sync.initial_weights={file}")
