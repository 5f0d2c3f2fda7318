"""Tables of the benchmarks that compare losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shapes import percent, table


def quality(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['inner_rate']:g}",
            f"{row['mean_loss']:.4f}",
            percent(row["gap_to_data_parallel_percent"]),
            percent(row["gap_of_decoupled_percent"]),
        ]
        for name, row in result.items()
    ]
    header = ["system", "inner rate", "loss", "against data-parallel", "decoupled against it"]
    return table(header, rows) + "\n\nMean of the paired seeds, with 95 % intervals (Student's t)."


def settings(against: str, what: str = "600 steps") -> Callable[[Any], str]:
    """The table of a group of `settings.py`, with the words for what its cells are against."""

    def form(result: Any) -> str:
        columns = ["times less traffic", "loss", "accuracy", against, "seeds"]
        rows = [
            [
                name,
                f"{row['less']:,.0f}",
                f"{row['loss']:.4f}",
                f"{100 * row['accuracy']:.1f} %" if "accuracy" in row else "",
                percent(row.get("gap_percent")),
                f"{row['seeds']}",
            ]
            for name, row in result.items()
        ]
        if not any("accuracy" in row for row in result.values()):
            columns.remove("accuracy")
            rows = [[*row[:3], *row[4:]] for row in rows]
        return (
            table(["", *columns], rows)
            + f"\n\nUnless said: four learners, a global batch of 32 sequences, {what}, "
            "P = H = 24, τ = 2, AdamW. Paired seeds, 95 % intervals (Student's t)."
        )

    return form


def traffic(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['less']:,.0f}",
            f"{row['loss']:.4f}",
            percent(row.get("gap_to_data-parallel_percent")),
            percent(row.get("gap_to_bf16_percent")),
        ]
        for name, row in sorted(result.items(), key=lambda each: each[1]["less"])
    ]
    header = ["system, inner rate, codecs", "times less traffic", "loss", "against data-parallel"]
    return (
        table([*header, "against bf16"], rows)
        + "\n\nTraffic against gradients in fp32, each step, up and down. A codec is for both ways "
        "unless another is named. H = 24 unless said. Paired seeds, 95 % intervals (Student's t)."
    )


def adapting(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['loss']:.4f}",
            percent(row["loss_over_adaptive_percent"]),
            percent(row["adaptive_sooner_percent"]),
            " / ".join(f"{share:.0f}" for share in row["participation_percent"].values()) + " %",
            ", ".join(map(str, row["changes"])),
        ]
        for name, row in result.items()
    ]
    header = ["links: codec", "loss", "over the ladder's", "the ladder has this loss sooner by"]
    return table([*header, "learners took part", "changes of codec"], rows)


def cut_off(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['loss']:.4f}",
            percent(row["over_never_percent"]),
            f"{row['highest_after']:.2f}" if row["highest_after"] else "",
        ]
        for name, row in result.items()
    ]
    header = ["one learner of two is away for", "loss", "against never", "highest loss after it"]
    return table(header, rows)


def late(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['mean_loss']:.4f} [{row['loss']['low']:.4f}, {row['loss']['high']:.4f}]",
            percent(row["gap_to_reference_percent"]),
            f"{row['bodies_of_the_last']:.0f}",
            f"{row['bodies_of_the_first']:.0f}",
        ]
        for name, row in result.items()
    ]
    header = [
        "an upload takes",
        "loss",
        "against nobody slow",
        "merged of a slow learner",
        "of a fast one",
    ]
    return "Four learners, P = H = 24, defaults, equal tokens, three paired seeds.\n\n" + table(
        header, rows
    )


def speeds(result: Any) -> str:
    def classes(values: dict[str, float]) -> str:
        shown = (values.get(name) for name in ("full", "half", "quarter"))
        return " / ".join(f"{value:.0f}" for value in shown if value is not None) + " %"

    rows = []
    for name, row in result.items():
        rows.append(
            [
                name,
                f"{row['mean_loss']:.4f} [{row['loss']['low']:.4f}, {row['loss']['high']:.4f}]",
                percent(row["gap_to_default_percent"]),
                f"{row['discarded_percent']:.1f} %",
                classes(row["discarded_percent_of"]),
                classes(row["participation_percent"]),
                f"{row['rounds']:.0f}",
            ]
        )
    header = [
        "missed, alignment, participants",
        "loss",
        "against the default",
        "tokens discarded",
        "of the fast / half / quarter",
        "took part",
        "rounds",
    ]
    return (
        table(header, rows)
        + "\n\nMean of the paired seeds, with 95 % intervals (Student's t). Steps of 4, 4, 2 and "
        "1 s for the first eight rows; all rows train the same number of tokens."
    )


def loss_under_faults(result: Any) -> str:
    gap, seconds = result["gap_percent"], result["virtual_seconds"]
    rows = [
        ["without faults", f"{result['without']:.4f}", f"{seconds['without']:.0f} s", "0"],
        [
            "with faults",
            f"{result['with']:.4f} ({percent(gap)})",
            f"{seconds['with']:.0f} s",
            ", ".join(map(str, result["faults"])),
        ],
    ]
    return table(["", "evaluation loss", "virtual time", "faults of each seed"], rows)
