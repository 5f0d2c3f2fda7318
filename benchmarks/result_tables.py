"""Generate `benchmarks/README.md` from the folders in `benchmarks/results`.

python benchmarks/result_tables.py

Titles, columns and texts of most tables are in `benchmarks.toml`. A table that is not a list of
rows has a function here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from evidence import ABOUT, RESULTS

HEAD = """# Measurements

`python benchmarks/result_tables.py` generates this page from the folders in `results/`. Each folder
has the command, the configuration, the raw output and the result. The estimates were written before
measuring. The machine has 2 cores and was shared with other work. Ratios are therefore taken within
one run, and the spread is shown as minimum to maximum."""


class Template(Formatter):
    """Formatter for numbers: `{name}`, `{name:FORMAT}` or `{name:FACTOR|FORMAT|UNIT}`.

    A missing value is empty. A spread is its median with the extremes in parentheses, a mean has
    its interval, and several values are separated by slashes. `{name!n}` leaves out a zero.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return None, field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value or None if conversion == "n" else super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        *factor, spec = format_spec.split("|")
        spec, unit = (factor.pop(), spec) if len(factor) == 2 else (spec, "")
        if value is None:
            return ""
        if isinstance(value, Mapping) and "median" in value:
            low, high = (format(value[end], spec) for end in ("min", "max"))
            return f"{value['median']:{spec}} ({low} to {high})"
        if isinstance(value, Mapping) and "mean" in value:
            within = f" [{value['low']:+.2f}, {value['high']:+.2f}]" if "low" in value else ""
            return f"{value['mean']:+.2f} %{within}"
        if isinstance(value, Mapping | list):
            each = value.values() if isinstance(value, Mapping) else value
            return (" / " if spec else ", ").join(format(one, spec) for one in each)
        return format(float(factor[0]) * value if factor else value, spec) + unit


fill = Template().format


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def grid(columns: dict[str, str], rows: Any) -> str:
    """Return a table of rows, each a dict, by the templates of its columns.

    A column whose header begins with "?" is left out if it is empty. A row that is a text, the
    reason why it was not measured, fills the second column.
    """
    cases = rows if isinstance(rows, Mapping) else dict(enumerate(rows))
    lines = [
        [case, row] + [""] * (len(columns) - 2)
        if isinstance(row, str)
        else [fill(template, case=case, row=row, **row) for template in columns.values()]
        for case, row in cases.items()
    ]
    shown = [
        number
        for number, header in enumerate(columns)
        if not header.startswith("?") or any(line[number] for line in lines)
    ]
    names = [name.removeprefix("?") for name in columns]
    return table([names[n] for n in shown], [[line[n] for n in shown] for line in lines])


def listed(about: dict[str, Any], result: Any) -> str:
    """Return the table that `benchmarks.toml` describes."""
    about = ABOUT[about["like"]] | about if "like" in about else about
    rows = result[about["rows"]] if "rows" in about else result
    if "sort" in about:
        rows = dict(sorted(rows.items(), key=lambda each: each[1][about["sort"]]))
    columns = {fill(name, **about): template for name, template in about["columns"].items()}
    around = (fill(about.get(place, ""), result=result, **about) for place in ("before", "after"))
    before, after = around
    return "\n\n".join(filter(None, (before, grid(columns, rows), after)))


def grids(name: str, **shown: Any) -> str:
    """Return tables of a section, by the names of their columns in it; empty ones are left out."""
    return "\n\n".join(grid(ABOUT[name][which], rows) for which, rows in shown.items() if rows)


def pairs(result: Any) -> str:
    rows = []
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            rows.append([name, fill("{:.2f}", value)])
        elif isinstance(value, dict):
            rows += [[f"{name}: {key}", fill("{:.4f}", inner)] for key, inner in value.items()]
        else:
            rows.append([name, str(value)])
    return table(["", ""], rows)


def few(values: list[float], digits: int, unit: str) -> str:
    """Return the median of a few values, with minimum and maximum if there are several."""
    if not values:
        return ""
    shown = f"{statistics.median(values):,.{digits}f}"
    if len(values) > 1:
        shown += f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    return shown + unit


def peers(result: Any) -> str:
    names, faults = ABOUT["peers"]["systems"], ABOUT["peers"]["faults"]

    def rows_of(kind: str, cells: Callable[[Any], list[str]]) -> list[list[str]]:
        return [
            [faults.get(kind, where), names[system], *cells(row)]
            for where, systems in result.get(kind, {}).items()
            for system, row in systems.items()
        ]

    def speed(row: Any) -> list[str]:
        percent = few(row["percent_of_none"], 1, " %")
        return [
            percent if row["rate"] else f"only {row['steps'][0]} of its steps",
            few(row["longest_gap_seconds"], 2, " s"),
            few([n / 1e3 for n in row["bytes_per_step"]], 1, " kB"),
            f"{row['finished']} of {row['runs']}",
        ]

    def reached(row: Any) -> str:
        known = [at for at in row.get("seconds_to_target", []) if at is not None]
        return few(known, 0, " s")

    def compared(row: Any) -> list[str]:
        sent = few([n / 1e3 for n in row["bytes_per_step"]], 1, " kB")
        shown = [sent, f"{row['loss']:.4f}", str(row["runs"])]
        if (gap := row.get("gap")) is None:
            return [*shown, "", ""]
        mean = "{mean:100|+.2f} % [{low:100|+.2f}, {high:100|+.2f}]"
        beyond = "lower" if gap["high"] < 0 else "higher" if gap["low"] > 0 else "not shown"
        return [*shown, fill(mean, **gap), "equivalent" if gap["equivalent"] else beyond]

    def slow(row: Any) -> list[str]:
        return [few(row["seconds_of_all_steps"], 0, " s"), f"{row['loss']:.2f}"]

    def fault(kind: str, row: Any) -> list[str]:
        alive = [gaps[:-1] if "worker" in faults[kind] else gaps for gaps in row["gaps"]]
        longest = [max(filter(None, gaps)) for gaps in alive if gaps[0] is not None]
        back = [back[-1] for back in row["back_seconds"] if back[-1] is not None]
        steps = [float(steps[0]) for steps in row["steps_in_minute"]]
        ended = f"{row['finished']} of {row['runs']}"
        shown = [few(longest, 1, " s"), few(back, 1, " s"), few(steps, 0, "")]
        return [*shown, reached(row), ended]

    header = ["model and link", "system", "steps/s, relative to no communication", "longest step"]
    parts = [table([*header, "sent per step and direction", "finished"], rows_of("speed", speed))]
    parts.append(fill(ABOUT["peers"]["paced"], result=result))
    header = ["model and link, four paced workers", "system", "steps/s, relative to none"]
    header += ["longest step", "sent per step and worker", "finished", "loss 2.3 after"]
    parts.append(table(header, rows_of("paced", lambda row: [*speed(row), reached(row)])))
    header = ["two workers, 600 steps", "system", "sent per step and direction", "loss", "seeds"]
    header += ["relative to the best peer, 90 % interval", "TOST, margin 0.5 %"]
    parts.append(table(header, rows_of("loss", compared)))
    header = ["one worker four times slower, equal tokens", "training time", "loss"]
    parts.append(table(header, [row[1:] for row in rows_of("slow", slow)]))
    header = ["fault", "system", "longest time without a step, workers that were not killed"]
    header += ["killed worker steps again after", "steps in the minute after the fault"]
    header += ["loss 2.0 after"]
    struck = [
        row
        for kind in result
        if kind in faults
        for row in rows_of(kind, lambda row, kind=kind: fault(kind, row))
    ]
    return "\n\n".join([*parts, table([*header, "finished"], struck)])


def ranks(result: Any) -> str:
    steps, moves = {}, {}
    for name, row in result.items():
        what, _, case = name.partition(", ")
        if what == "step":
            traffic = [each / 1e6 for each in row["bytes to and from the syncer by rank"]]
            steps[case] = {**row, "MB": traffic}
            continue
        for sync_ranks in ("one sync rank", "all sync ranks"):
            sent = row[f"MB sent and received by rank, {sync_ranks}"]
            both = {
                what: [row[f"{way}, {sync_ranks}, {what}"] for way in ("collect", "distribute")]
                for what in (
                    "relative to a gather",
                    "relative to a copy",
                    "without the exchange, relative to a copy",
                )
            }
            moved = " / ".join(f"{s:.0f}, {t:.0f}" for s, t in sent)
            ways = {way: row[f"{way}, {sync_ranks}, ms"] for way in ("collect", "distribute")}
            moves[f"{case}, {sync_ranks}"] = {**row, **both, **ways, "moved": moved}
    return grids("ranks", steps=steps, moves=moves)


def gpu(result: Any) -> str:
    notes, learners, losses = [], {}, {}
    for case, row in result.items():
        if case == "claims that do not hold":
            notes += [f"*Does not hold:* {each}." for each in row]
        elif isinstance(row, str):
            notes.append(f"{case}: {row}.")
        elif case == "comparison":
            reference = row["data-parallel"]["loss"]
            losses = {
                name: {**each, "gap": 100 * (each["loss"] / reference - 1)}
                for name, each in row.items()
            }
        else:
            overlapped = row["copies that overlap kernels, %"]
            aside = overlapped if isinstance(overlapped, str) else f"{overlapped:.0f} %"
            learners[case] = {**row, "pinned": row["host memory, GB"]["pinned"], "aside": aside}
    shown = grids("gpu", learners=learners, losses=losses)
    return "\n\n".join(filter(None, [shown, *notes]))


def data_plane(result: Any) -> str:
    rows = {
        kind.upper(): result[kind]
        | {share: result.get(f"{kind}_share_of_{share}") for share in ("link", "raw")}
        for kind in ("put", "get")
    }
    ping, idle = (1e3 * result[name] for name in ("ping_seconds_largest", "idle_rtt_seconds"))
    return (
        grids("data_plane_wan", columns=rows)
        + "\n\nLargest round trip of a control ping while payloads fill the link: "
        f"{ping:.0f} ms (idle {idle:.1f} ms)."
    )


def goodput(result: Any) -> str:
    chips = list(next(iter(result["goodput"].values())))
    rows = [
        [
            name,
            *(
                fill("{goodput:.1f} ±{goodput_interval:.1f}", **cell)
                + fill(" ({:g})" if cell["published"] is not None else "", cell["published"])
                for cell in cells.values()
            ),
        ]
        for name, cells in result["goodput"].items()
    ]
    for row in result["unequal"].values():
        row["shown"] = f" ({row['published']})" if row["published"] else ""
    parts = [
        table(["goodput, %", *(f"{int(each) / 1e3:g} k chips" for each in chips)], rows),
        "Published values are in parentheses. The first two rows are fitted, all others are "
        "predicted. ± is the 95 % interval over seeds.",
        "![Goodput over chips](results/goodput/goodput.png)",
        grids("goodput", unequal=result["unequal"]),
        "Four fast and four slow learners, 18 % apart, with 10 % jitter and without failures.",
        _scavenged(result["scavenged"]),
        "Training time relative to that without scavenged chips, which are present for half of the "
        "work. They are preempted at 10 % of the machines per day (in parentheses 5 % and 15 %). "
        "The published size of the cluster is unknown.",
    ]
    return "\n\n".join(parts)


def _scavenged(result: Any) -> str:
    rows = []
    for row in result:
        for system, published in row["published"].items():
            cells = [cell[system] for cell in row["chips"].values()]
            shown = [f"{middle:.2f} ({least:.2f}–{most:.2f})" for least, middle, most in cells]
            rows.append([f"{system}, +{100 * row['share']:.0f} %", f"{published:.2f}", *shown])
    rows.sort(key=lambda row: row[0].partition(",")[0])
    chips = [f"{int(each) / 1e6:g} M chips" for each in result[0]["chips"]]
    return table(["scavenged chips", "published", *chips], rows)


def goodput_real(result: Any) -> str:
    for row in result["schedules"].values():
        row["off"] = row["predicted"] - row["measured"]["median"]
    times = ", ".join(f"{name} {value:.2f} s" for name, value in result["lengths"].items())
    return f"{listed(ABOUT['goodput_real'], result)}\n\nTimes from the other runs: {times}."


def plan(result: Any) -> str:
    rows: dict[tuple[str, str, int], list[str]] = {}
    targets = list(dict.fromkeys(cell["utilization"] for cell in result["rows"]))
    for cell in result["rows"]:
        key = cell["model"], cell["system"], cell["period"]
        mark = "" if cell["grid_steps_off"] == 0 else f" ({cell['published']:g})"
        rows.setdefault(key, []).append(f"{cell['predicted']:.3g}{mark}")
    header = ["model", "system", "H", *(f"{100 * target:g} %" for target in targets)]
    count, exact, near = result["cells"], result["exact"], result["within a grid step"]
    return "\n\n".join(
        [
            "Gbit/s that reach a compute utilization; the published cell is in parentheses if it "
            f"differs. {exact} of {count} are equal, {near} are within one step of the grid (a "
            "fifth).",
            table(header, [[model, system, str(h), *r] for (model, system, h), r in rows.items()]),
            "12B over four regions: the utilization of each system, and the ratio of wall-clock "
            "times:",
            grids("plan", headline=result["headline"]),
            f"*Assumed:* {result['assumed']}.",
            "![utilization over bandwidth](results/plan/headline.png)",
        ]
    )


def large(result: Any) -> str:
    rows = []
    for case, found in result.items():
        for name, row in found.items():
            part, _, kind = name.partition(": ")
            if part == "handlers" and row["worst"]["median"] < 1.0:
                continue
            if part in ("handlers", "turns"):
                what = f"{kind}, {'state machine only' if part == 'handlers' else 'longest turn'}"
                rows.append(
                    [
                        case,
                        what,
                        *fill("{median:.2f}|{worst:.2f}|{worst_wall:.2f}", **row).split("|"),
                    ]
                )
            elif name.startswith("bytes"):
                kib = {key: value / 1024 for key, value in row.items()}
                words = name.replace("_", " ").replace("bytes", "KiB")
                rows.append([case, words, fill("{:.2f}", kib), "", ""])
            else:
                rows.append([case, name, fill("{:.2f}", row), "", ""])
    header = ["case", "event", "ms, median", "ms, worst", "ms, worst (wall clock)"]
    note = "Handlers that never take a millisecond are left out."
    return f"{table(header, rows)}\n\n{note}"


def tape(result: Any) -> str:
    rows = [
        [name, fill("{:.2f}" if isinstance(value, dict) else "{:.0f}", value)]
        for name, value in result.items()
        if name != "codecs"
    ]
    return f"{table(['', ''], rows)}\n\n{grids('tape', codecs=result['codecs'])}"


def loss_under_faults(result: Any) -> str:
    seconds, faults = result["virtual_seconds"], ", ".join(map(str, result["faults"]))
    rows = [
        ["without faults", f"{result['without']:.4f}", f"{seconds['without']:.0f} s", "0"],
        [
            "with faults",
            fill("{with:.4f} ({gap_percent})", **result),
            f"{seconds['with']:.0f} s",
            faults,
        ],
    ]
    return table(["", "evaluation loss", "virtual time", "faults per seed"], rows)


FORMS: dict[str, Callable[[Any], str]] = {
    form.__name__: form
    for form in (peers, ranks, gpu, goodput, goodput_real, plan, large, tape, loss_under_faults)
} | {"data_plane_wan": data_plane, "data_plane_loopback": data_plane}


def section(name: str, folder: Path) -> str:
    document, about = json.loads((folder / "result.json").read_text()), ABOUT.get(name, {})
    if name in FORMS:
        shown = FORMS[name](document["result"])
    elif "like" in about or "columns" in about:
        shown = listed(about, document["result"])
    else:
        shown = pairs(document["result"])
    return "\n\n".join(
        [
            f"## {about.get('title', name)}",
            f"`{(folder / 'command').read_text().strip()}` ([{name}](results/{name}))",
            shown,
            *([f"*Conclusion:* {about['conclusion']}."] if "conclusion" in about else []),
            f"*Estimate before measuring:* {document['estimate']}.",
            f"*Not measured:* {document['not_measured']}.",
        ]
    )


def page() -> str:
    known = list(ABOUT)
    folders = [path.parent for path in RESULTS.glob("*/result.json")]
    folders.sort(key=lambda f: (known.index(f.name) if f.name in known else 99, f.name))
    return "\n\n".join([HEAD.rstrip(), *(section(each.name, each) for each in folders)]) + "\n"


if __name__ == "__main__":
    (RESULTS.parent / "README.md").write_text(page())
