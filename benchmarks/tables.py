"""Makes `benchmarks/README.md` from the folders below `benchmarks/results`.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loss_tables import (
    adapting,
    cut_off,
    late,
    loss_under_faults,
    quality,
    settings,
    speeds,
    traffic,
)
from peers_table import peers
from shapes import spread, table

HERE = Path(__file__).parent
RESULTS = HERE / "results"

HEAD = """# Measurements

Made by `python benchmarks/tables.py` from the folders below `results/`; each holds the command, the
configuration, the raw output and the result. The estimates were written before measuring. The
machine has 2 cores and was shared with other work: ratios are taken within one run, and the spread
is shown as smallest to largest.
"""

TITLES = {
    "step_overhead": "What a learner costs its training loop",
    "step_overhead_int4": "The same, with four bits both ways",
    "step_overhead_short": "The same, for short steps",
    "step_overhead_tensors": "The same, for models of thousands of small tensors",
    "peers": "Beside what people use instead",
    "background": "What the background takes from the thread that trains",
    "ranks": "A learner of several ranks",
    "mixed": "A run of mixed parallelism, and plain learners",
    "gpu": "On a GPU",
    "quality": "Loss at equal tokens",
    "traffic": "Loss against traffic",
    "longer": "Loss against traffic, three times as long",
    "schedule": "Period, overlap and fragments",
    "learners": "How many learners",
    "rounds": "Which outer optimizer, for how many rounds",
    "merges": "Why an outer optimizer does better elsewhere",
    "variants": "Rounds that a learner opens, and delayed momentum",
    "models": "A mixture of experts, and images",
    "adapting": "A codec for each link",
    "speeds": "Learners of unequal speed",
    "late": "Contributions that come late",
    "cut_off": "A learner that is cut off, and comes back",
    "kill": "One of four learners is killed",
    "fork_server": "Starts and restarts, with and without a fork server",
    "joining": "A learner joins",
    "loss_under_faults": "Loss under faults",
    "chaos": "Half an hour of failures of every kind",
    "kills": "Each kind of process is killed fifty times, then everything",
    "takeover": "A shard's standby takes over",
    "recovery": "A learner comes back",
    "durability": "What journal, checkpoints and cuts cost a run",
    "durability_worker": "What a durable commit costs the shard's merge worker",
    "data_plane_wan": "Bodies over a long link",
    "data_plane_loopback": "Bodies on loopback",
    "tls": "What TLS costs bodies",
    "strangers": "Thousands of strangers at a shard",
    "strangers_before": "The same before they were bounded",
    "fuzz": "A million hostile inputs",
    "shard_memory": "What memory a shard needs",
    "merging": "Merging",
    "codec_speed": "Codecs on one core",
    "large": "A shard with thousands of learners",
    "tape": "The tapes of a long run",
    "events": "Random worlds, every event checked",
    "worlds": "A long run of random worlds",
    "goodput": "Goodput of a million chips, simulated",
    "goodput_real": "The goodput simulator against real runs",
    "plan": "The planner against the published tables",
    "plan_real": "The planner against real runs",
}


def step_overhead(result: Any) -> str:
    rows = []
    for case, row in result.items():
        if isinstance(row, str):
            rows.append([case, row, "", "", ""])
            continue
        inside = row["inside_step_percent"]
        rows.append(
            [
                case,
                f"{1e3 * row['step_seconds']:.0f} ms",
                f"{inside['median']:.2f} %, p99 {inside['p99']:.2f} %",
                spread(row["throughput_percent_of_detached"], 1) + " %",
                f"{row['bytes_per_merge_over_theory_percent']:+.2f} %",
            ]
        )
    return table(
        [
            "case",
            "inner step",
            "time inside `step()`, of the inner step",
            "tokens/s, of the same loop without it",
            "bytes a merge, over theory",
        ],
        rows,
    )


def mixed(result: Any) -> str:
    rows = [[mode, *(spread(each, 4) for each in row.values())] for mode, row in result.items()]
    return table(["rounds", "loss of plain learners, nats", "mixed less plain, nats"], rows)


def ranks(result: Any) -> str:
    steps, moves, ways = [], [], ("collect", "distribute")
    for case, row in result.items():
        what, _, case = case.partition(", ")
        if what == "step":
            inside = " / ".join(f"{each:.1f}" for each in row["inside step(), ms, median by rank"])
            talked = row["bytes to and from the syncer by rank"]
            steps.append(
                [
                    case,
                    f"{row['step, ms']:.0f} ms",
                    inside,
                    f"{row['inside step(), % of a step, rank 0']:.2f} %",
                    spread(row["throughput, % of that without the run"], 1) + " %",
                    " / ".join(f"{each / 1e6:.1f}" for each in talked),
                    f"{row['start to first step, s']:.1f} s",
                ]
            )
            continue
        for carriers in ("one carrier", "all carry"):
            sent = row[f"MB sent and taken by rank, {carriers}"]
            moves.append(
                [
                    f"{case}, {carriers}",
                    spread(row[f"collect, {carriers}, ms"], 0),
                    spread(row[f"distribute, {carriers}, ms"], 0),
                    f"{row['a gather on rank 0, ms']:.0f}",
                    f"{row['a plain copy, ms']:.0f}",
                    *(
                        " / ".join(f"{row[f'{way}, {carriers}{what}']:.1f}" for way in ways)
                        for what in (
                            ", times a gather",
                            ", times a copy",
                            ", without the exchange, times a copy",
                        )
                    ),
                    " / ".join(f"{s:.0f}, {t:.0f}" for s, t in sent),
                ]
            )
    step_header = ["learner", "inner step", "ms inside `step()`, by rank", "of the step, rank 0"]
    step_header += ["tokens/s, of the same loop without it", "MB to and from the syncer, by rank"]
    step_header += ["start to first step"]
    header = ["all fragments, once", "collected, ms", "distributed, ms", "a gather, ms"]
    header += ["a plain copy, ms", "both, times a gather", "both, times a copy"]
    header += ["outside the exchange, times a copy", "MB sent, taken by rank"]
    return "\n\n".join(table(*each) for each in ((step_header, steps), (header, moves)) if each[1])


def gpu(result: Any) -> str:
    told, learners, losses = [], [], []
    for case, row in result.items():
        if case == "claims that do not hold":
            told += [f"*Does not hold:* {each}." for each in row]
        elif case == "comparison" and not isinstance(row, str):
            reference = row["data-parallel"]["loss"]
            losses += [
                [name, f"{each['loss']:.4f}", f"{100 * (each['loss'] / reference - 1):+.2f} %"]
                for name, each in row.items()
            ]
        elif isinstance(row, str):
            told.append(f"{case}: {row}.")
        else:
            learners.append([case, *_learner_on_gpu(row)])
    header = ["learner", "inner step", "ms inside `step()`", "ms, while the device sleeps"]
    header += ["of the step", "tokens/s, of the same loop without it", "GPU, GB", "pinned, GB"]
    header += ["copies that pass beside kernels"]
    shown = [table(header, learners)] if learners else []
    if losses:
        shown.append(table(["eight learners", "loss", "against data-parallel"], losses))
    return "\n\n".join([*shown, *told])


def _learner_on_gpu(row: Any) -> list[str]:
    beside = row["copies beside kernels, %"]
    memory = [row["device memory, GB"], row["host memory, GB"]["pinned"]]
    return [
        f"{row['step, ms']:.0f} ms",
        spread(row["inside step(), ms"]),
        spread(row["inside step() beside a sleeping kernel, ms"]),
        f"{row['inside step(), % of a step']:.2f} %",
        spread(row["tokens/s, % of the same loop without it"], 1) + " %",
        *(f"{before:.1f}, with it {after:.1f}" for before, after in memory),
        beside if isinstance(beside, str) else f"{beside:.0f} %",
    ]


def background(result: Any) -> str:
    def middles(row: Any, *keys: str) -> str:
        return " + ".join(f"{row[f'inside_{key}_ms']['median']:.2f}" for key in keys)

    rows = [
        [
            case,
            f"{row['step_ms']:.0f} ms",
            spread(row["inside_ms"]),
            middles(row, "ran", "queued", "still"),
            spread(row["inside_if_preempting_ms"]),
            spread(row["work_more_still_ms"]),
            spread(row["others_ran_ms"], 1),
            spread(row["lost_ms"]),
        ]
        for case, row in result.items()
    ]
    header = ["learners, operations", "step", "ms inside `step()`", "ran, queued, stood still"]
    header += ["if threads that wake up take the core", "the rest of the step stood still more, ms"]
    header += ["other threads ran, ms", "lost: ran inside, stood still anywhere, ms"]
    return table(header, rows)


def data_plane(result: Any) -> str:
    rows = []
    for kind in ("put", "get"):
        row = result[kind]
        share = result.get(f"{kind}_share_of_link")
        rows.append(
            [
                kind.upper(),
                f"{row['median_bytes_per_second'] * 8 / 1e6:.0f} Mbit/s "
                f"({row['least'] * 8 / 1e6:.0f} to {row['most'] * 8 / 1e6:.0f})",
                "" if share is None else f"{100 * share:.0f} %",
                f"{result[f'{kind}_share_of_raw']:.2f}",
            ]
        )
    text = table(["", "median", "of the link", "times one raw TCP connection"], rows)
    return (
        text + f"\n\nLargest round trip of a control ping while bodies fill the link: "
        f"{1e3 * result['ping_seconds_largest']:.0f} ms "
        f"(idle {1e3 * result['idle_rtt_seconds']:.1f} ms)."
    )


def pairs(result: Any) -> str:
    rows = []
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            rows.append([name, spread(value)])
        elif isinstance(value, dict):
            rows += [[f"{name}: {key}", spread(inner, 4)] for key, inner in value.items()]
        else:
            rows.append([name, str(value)])
    return table(["", ""], rows)


def goodput(result: Any) -> str:
    chips = list(next(iter(result["goodput"].values())))
    rows = []
    for name, cells in result["goodput"].items():
        shown = []
        for cell in cells.values():
            text = f"{cell['goodput']:.1f} ±{cell['goodput_interval']:.1f}"
            published = cell["published"]
            shown.append(text if published is None else f"{text} ({published:g})")
        rows.append([name, *shown])
    header = ["goodput, %", *(f"{int(each) / 1e3:g} k chips" for each in chips)]
    parts = [
        table(header, rows),
        "In brackets what was published; the first two rows are fitted, all else is predicted. "
        "± is the 95 % interval over seeds.",
        "![Goodput over chips](results/goodput/goodput.png)",
        _unequal(result["unequal"]),
        "Four fast and four slow learners, 18 % apart, 10 % jitter, no failures.",
        _scavenged(result["scavenged"]),
        "Time of training, as a share of that without: more chips are there for half of the work. "
        "Borrowed machines are preempted as often as 10 % a day (in brackets 5 % and 15 %). How "
        "large the cluster was, was not published.",
    ]
    return "\n\n".join(parts)


def _unequal(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['goodput']:.1f} %" + (f" ({row['published']})" if row["published"] else ""),
            f"{row['pace']:.0f} %",
            f"{row['slow_in_rounds']:.0f} %",
        ]
        for name, row in result.items()
    ]
    header = ["", "goodput (published)", "ticks per step of the fastest", "slow ones in rounds"]
    return table(header, rows)


def _scavenged(result: Any) -> str:
    rows = []
    for row in result:
        for system, published in row["published"].items():
            cells = [cell[system] for cell in row["chips"].values()]
            shown = [f"{middle:.2f} ({least:.2f}–{most:.2f})" for least, middle, most in cells]
            rows.append([f"{system}, +{100 * row['share']:.0f} %", f"{published:.2f}", *shown])
    rows.sort(key=lambda row: row[0].partition(",")[0])
    chips = [f"of {int(each) / 1e6:g} M chips" for each in result[0]["chips"]]
    return table(["scavenged chips", "published", *chips], rows)


def goodput_real(result: Any) -> str:
    rows = [
        [
            name,
            f"{row['predicted']:.1f} %",
            spread(row["measured"], 1) + " %",
            f"{row['predicted'] - row['measured']['median']:+.1f}",
            f"{row['by_the_rules_off']:+.1f}",
            f"{row['join_seconds']:.1f} s" if row["join_seconds"] else "",
        ]
        for name, row in result["schedules"].items()
    ]
    told = ", ".join(f"{name} {value:.2f} s" for name, value in result["lengths"].items())
    header = [
        "schedule",
        "predicted from other runs",
        "measured",
        "off, points",
        "by the rules from each run's own lengths (no foresight): most off",
        "its joins took",
    ]
    return table(header, rows) + f"\n\nLengths of the other runs: {told}."


def recovery(result: Any) -> str:
    ways = ("own checkpoint", "donor, direct", "donor, relay", "published copies")
    costs = ("checkpoint: copy to fresh memory", "checkpoint: copy", "checkpoint: write")
    rows = [
        [f"{row['million_parameters']} M", *(f"{row[name]:.3f} s" for name in (*ways, *costs))]
        for row in result["rows"]
    ]
    return table(["fp32 parameters", *ways, *costs], rows)


def plan(result: Any) -> str:
    rows: dict[tuple[str, str, int], list[str]] = {}
    targets = list(dict.fromkeys(cell["utilization"] for cell in result["rows"]))
    for cell in result["rows"]:
        key = cell["model"], cell["system"], cell["period"]
        mark = "" if cell["grid_steps_off"] == 0 else f" ({cell['published']:g})"
        rows.setdefault(key, []).append(f"{cell['predicted']:.3g}{mark}")
    header = ["model", "system", "H", *(f"{100 * target:g} %" for target in targets)]
    cells = table(header, [[model, system, str(h), *r] for (model, system, h), r in rows.items()])
    regions = [
        [
            f"{row['step_seconds']:g} s",
            f"{row['gbit']:g}",
            *(f"{100 * row[name]:.1f} %" for name in ("data_parallel", "diloco", "streaming")),
            f"{100 * row['decoupled']:.1f} %",
            f"{row['period']}, {row['overlap']}",
            f"{100 * row['discarded']:.0f} %",
            f"{row['times_faster']:.0f}",
        ]
        for row in result["headline"]
    ]
    head = ["step", "Gbit/s", "data-parallel", "DiLoCo", "Streaming", "decoupled", "H, τ"]
    head += ["discarded", "times faster than data-parallel"]
    count, exact, near = result["cells"], result["exact"], result["within a grid step"]
    return "\n\n".join(
        [
            "Gbit/s that reach a compute utilisation, and in brackets the published cell where it "
            f"differs: {exact} of {count} are equal, {near} within one step of the grid (a fifth).",
            cells,
            "12B over four regions, the utilisation of each system and the ratio of wall-clock:",
            table(head, regions),
            f"*Assumed:* {result['assumed']}.",
            "![utilisation over bandwidth](results/plan/headline.png)",
        ]
    )


def plan_real(result: Any) -> str:
    rows = []
    for case in result["cases"]:
        pairs_of = [
            f"{100 * case['predicted'][name]:.1f} / {100 * case['measured'][name]:.1f} %"
            for name in ("compute", "kept", "utilization")
        ]
        traffic = [
            f"{case['predicted'][way]:.2f} / {case['measured'][way]:.2f}"
            for way in ("up_mbit", "down_mbit")
        ]
        step = f"{case['step_seconds']:g} s"
        rows.append([case["system"], step, f"{case['mbit']:g}", *pairs_of, *traffic])
    header = ["predicted / measured", "step", "Mbit/s", "steps", "rounds kept", "utilisation"]
    header += ["up Mbit/s", "down Mbit/s"]
    error = result["largest error"]
    return (
        table(header, rows)
        + "\n\nLargest differences: "
        + "; ".join(
            f"learners that {name} {100 * error[wait]['utilization']:.1f} points of utilisation, "
            f"{100 * error[wait]['traffic']:.0f} % of traffic"
            for name, wait in (("never wait", "never"), ("wait", "at_overlap"))
        )
        + ". Processes took "
        f"{1e3 * result['handling seconds of a body']:.0f} ms for a body besides moving it."
    )


def large(result: Any) -> str:
    rows = []
    for case, found in result.items():
        for name, row in found.items():
            part, _, kind = name.partition(": ")
            if part == "handlers" and row["worst"]["median"] < 1.0:
                continue
            if part in ("handlers", "turns"):
                what = f"{kind}, {'the machine alone' if part == 'handlers' else 'longest turn'}"
                times = [spread(row[key]) for key in ("median", "worst", "worst_wall")]
                rows.append([case, what, *times])
            elif name.startswith("bytes"):
                kib = {key: value / 1024 for key, value in row.items()}
                rows.append([case, name.replace("_", " ").replace("bytes", "KiB"), spread(kib)])
            else:
                rows.append([case, name, spread(row)])
    header = ["case", "what", "ms, median", "ms, worst", "ms, worst by the clock on the wall"]
    rows = [[*row, "", ""][:5] for row in rows]
    note = "Machine handlers that never take a millisecond are left out."
    return table(header, rows) + f"\n\n{note}"


def tape(result: Any) -> str:
    rows = [
        [name, spread(value) if isinstance(value, dict) else f"{value:.0f}"]
        for name, value in result.items()
        if name != "codecs"
    ]
    codecs = [
        [name, f"{row['ratio']:.1f}", f"{row['megabytes_a_second']:.0f}"]
        for name, row in result["codecs"].items()
    ]
    compared = table(["the same text", "times smaller", "MB/s of one thread"], codecs)
    return f"{table(['', ''], rows)}\n\n{compared}"


def codec_speed(result: Any) -> str:
    rows = [
        [name, f"{row['bits']:g}", spread(row["encode"], 1), spread(row["decode"], 1)]
        for name, row in result.items()
    ]
    return table(["codec", "bits an element", "encode, GB/s of fp32", "decode, GB/s of fp32"], rows)


FORMS: dict[str, Callable[[Any], str]] = {
    "step_overhead": step_overhead,
    "step_overhead_int4": step_overhead,
    "step_overhead_short": step_overhead,
    "step_overhead_tensors": step_overhead,
    "peers": peers,
    "background": background,
    "ranks": ranks,
    "mixed": mixed,
    "gpu": gpu,
    "quality": quality,
    "longer": settings("against its own data-parallel", "1,800 steps"),
    "schedule": settings("against the default"),
    "learners": settings("against data-parallel", "600 steps (8 of each: as many tokens)"),
    "rounds": settings("against 0.7 / 0.5"),
    "merges": settings("against a mean of all at once", "240 steps of two learners"),
    "variants": settings("against the default", "1,536 steps of all together"),
    "models": settings("against data-parallel", "600 steps (images: 360)"),
    "speeds": speeds,
    "traffic": traffic,
    "adapting": adapting,
    "late": late,
    "cut_off": cut_off,
    "codec_speed": codec_speed,
    "large": large,
    "tape": tape,
    "loss_under_faults": loss_under_faults,
    "recovery": recovery,
    "data_plane_wan": data_plane,
    "data_plane_loopback": data_plane,
    "goodput": goodput,
    "goodput_real": goodput_real,
    "plan": plan,
    "plan_real": plan_real,
}


def section(folder: Path) -> str:
    document = json.loads((folder / "result.json").read_text())
    command = (folder / "command").read_text().strip()
    form = FORMS.get(folder.name, pairs)
    return "\n\n".join(
        [
            f"## {TITLES.get(folder.name, folder.name)}",
            f"`{command}` ([{folder.name}](results/{folder.name}))",
            form(document["result"]),
            f"*Estimate before:* {document['estimate']}.",
            f"*Not measured:* {document['not_measured']}.",
        ]
    )


def page() -> str:
    known = list(TITLES)
    folders = [path.parent for path in RESULTS.glob("*/result.json")]
    folders.sort(key=lambda f: (known.index(f.name) if f.name in known else 99, f.name))
    return "\n\n".join([HEAD.rstrip(), *(section(folder) for folder in folders)]) + "\n"


if __name__ == "__main__":
    (HERE / "README.md").write_text(page())
