"""The part of `ddiloco replay` that computes a run's weights again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoupled_diloco.show.console import SteadyConsole

SHOWN_MAX = 3
"""The most notes and differences of a shard that are printed."""


def show_weights(run: Path, until: float | None, console: SteadyConsole) -> bool:
    """Compute the weights of a run again and print the result; return whether all bits agree."""
    from decoupled_diloco.show.console import plain_table
    from decoupled_diloco_lab.simulate.weights_replay import replay_weights

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
    return not any(each.differences or each.final == "others" for each in computed)
