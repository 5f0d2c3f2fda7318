"""Loss by settings of the method: H, τ, P, M, outer optimizers, other models, long runs.

Each group is a folder, and a table of all measurements so far. Runs are in virtual time at equal
tokens, each with a data-parallel or default counterpart on the same batches. Every run is one line
of a file, and recorded runs are not repeated.

    python benchmarks/settings_sweep.py rounds --seeds 1
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import published_methods
import torch
from evidence import keep, parser
from quality import STREAMING_OUTER, SYNCHRONOUS
from speeds import EQUAL, UNEQUAL
from virtual import RATES, SEQUENCES, SIZE, Cell, Row, gap_percent, interval, mean_of, measured

from decoupled_diloco.config.plugins import register_method
from decoupled_diloco_lab.study.statistics import tost


def _wire(up: str, down: str = "", period: int = 24) -> dict[str, Any]:
    return {"codec": {"uplink": up, "downlink": down or up}, "sync_every": period}


ALONE = {"lr": 1.0, "momentum": 0.0}
"""No outer optimizer: the merged contribution is applied as it is."""

CARRY = {"apply": {"alignment": "carry"}}


def _longer() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner in RATES:
        dp = f"{inner}: data-parallel"
        cell = Cell(dp, steps=1800, inner=inner)
        cells[dp] = replace(cell, against="", plain=True)
        wires = {
            "bf16": _wire("bf16"),
            "int4": _wire("int4"),
            "int2 up, int4 down": _wire("int2", "int4"),
            "int2": _wire("int2"),
            "int2, H = 48": _wire("int2", period=48),
            "top-k up, int4 down": _wire("topk", "int4"),
            "top-k": _wire("topk"),
            "int2, H = 144": _wire("int2", period=144),
        }
        for name, sync in wires.items():
            cells[f"{inner}: {name}"] = replace(cell, sync=sync)
        sparse = _wire("topk", "int4")
        sparse["codec"]["feedback_decay"] = 0.95
        name = f"{inner}: top-k up, int4 down, 1 / 0, β = 0.95"  # as SparseLoCo
        cells[name] = replace(cell, sync=sparse, outer=ALONE)
        cells[f"{inner}: mean"] = replace(cell, sync={"merge": {"rule": "mean"}})
        cells[f"{inner}: 1 / 0"] = replace(cell, outer=ALONE)
        cells[f"{inner}: mean, 1 / 0"] = replace(
            cell, sync={"merge": {"rule": "mean"}}, outer=ALONE
        )
        less = {"lr": 0.7, "momentum": 0.0}
        cells[f"{inner}: 0.7 / 0"] = replace(cell, outer=less)
        cells[f"{inner}: mean, 0.7 / 0"] = replace(
            cell, sync={"merge": {"rule": "mean"}}, outer=less
        )
        for name in ("int4", "int2", "int2, H = 48", "int2, H = 144"):
            cells[f"{inner}: mean, {name}"] = replace(
                cell, sync={**wires[name], "merge": {"rule": "mean"}}
            )
        rising = replace(cell, outer=less, until={"momentum": 0.9})
        cells[f"{inner}: momentum from 0 to 0.9"] = rising
        for factor in (0.7, 1.4):
            name = f"{inner}: {factor:g} times the inner rate"
            cells[name] = replace(cell, rate=factor * RATES[inner])
        for learners in (1, 8):
            dp = f"{inner}: M = {learners}, data-parallel"
            here = replace(cell, learners=learners, against=dp)
            cells[dp] = replace(here, against="", plain=True)
            cells[f"{inner}: M = {learners}"] = here
    return cells


def _learners() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner in RATES:
        for learners in (1, 2, 4, 8, 16):
            for batch, which in ((0, "32 in total"), (8, "8 each")):
                if batch * learners == SEQUENCES:
                    continue
                name = f"{inner}: M = {learners}, batch {which}"
                dp = f"{name}, data-parallel"
                steps = 600 * SEQUENCES // (learners * (batch or SEQUENCES // learners))
                cell = Cell(dp, learners=learners, batch=batch, steps=steps, inner=inner)
                cells[dp] = replace(cell, against="", plain=True)
                cells[name] = cell
                if inner == "muon" and not batch:
                    cells[f"{name}, mean"] = replace(cell, sync={"merge": {"rule": "mean"}})
    return cells


def _schedule() -> dict[str, Cell]:
    default = "H = 24, τ = 2, P = 24"
    cells = {default: Cell()}
    for period in (8, 48, 96, 200):
        cells[f"H = {period}"] = Cell(default, sync={"sync_every": period})
    often = {"sync_every": 8}
    cells["H = 8, carry"] = Cell(default, sync={**often, "apply": {"alignment": "carry"}})
    mean = {**often, "merge": {"rule": "mean"}}
    cells["H = 8, mean"] = Cell(default, sync=mean)
    mean["apply"] = {"alignment": "carry"}
    cells["H = 8, mean, carry, 1 / 0"] = Cell(default, sync=mean, outer=ALONE)
    for overlap in (2, 6, 12, 23):  # links take no time here, so merges that have arrived must wait
        late: dict[str, Any] = {"overlap_steps": overlap, "apply": {"when": "at_overlap"}}
        cells[f"applied {overlap} steps later"] = Cell(default, sync=late)
        carried = {**late, "apply": {**late["apply"], "alignment": "carry"}}
        cells[f"applied {overlap} steps later, carry"] = Cell(default, sync=carried)
    for fragments in (1, 4):
        cells[f"P = {fragments}"] = Cell(default, sync={"fragments": fragments})
    return cells


OUTERS = (
    *((0.7, 0.5), (0.4, 0.5), (1.0, 0.5)),
    *((1.0, 0.0), (0.7, 0.0)),
    *((0.5, 0.7), (0.15, 0.9), (0.4, 0.9), (0.7, 0.9)),
)
SCHEDULES = (("momentum", 0.0, 0.9), ("momentum", 0.9, 0.0), ("lr", 1.0, 0.4), ("lr", 0.4, 1.0))


def _rounds() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for steps, period in ((600, 24), (600, 8), (1800, 8)):
        rounds = f"{steps // period} rounds of H = {period}"
        default = f"{rounds}: 0.7 / 0.5"
        for lr, momentum in OUTERS:
            name = f"{rounds}: {lr:g} / {momentum:g}"
            outer, sync = {"lr": lr, "momentum": momentum}, {"sync_every": period}
            against = default if name != default else ""
            cells[name] = Cell(against, steps=steps, sync=sync, outer=outer)
        for of, start, end in SCHEDULES:
            settings = {"lr": 0.7, "momentum": 0.5, of: start}
            name = f"{rounds}: {of} from {start:g} to {end:g}"
            cells[name] = Cell(default, steps=steps, sync=sync, outer=settings, until={of: end})
    return cells


ALL_AT_ONCE: dict[str, Any] = {
    "fragments": 1,
    "overlap_steps": 0,
    "quorum": 2,
    "grace_margin": 0.0,
    "wait": "at_overlap",
    "merge": {"weighting": "uniform"},
}
"""As in torchft's DiLoCo: two learners wait for each other and average the whole model."""


def _merges() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for momentum in (0.5, 0.9):
        default = f"0.7 / {momentum:g}: mean, all at once"
        outer = {"lr": 0.7, "momentum": momentum}
        cell = Cell(default, learners=2, steps=240, outer=outer)
        mean = {"merge": {"rule": "mean"}}
        all_at_once = {**ALL_AT_ONCE, "merge": {**ALL_AT_ONCE["merge"], "rule": "mean"}}
        cells[default] = replace(cell, against="", sync=all_at_once)
        cells[f"0.7 / {momentum:g}: RDA, all at once"] = replace(cell, sync=ALL_AT_ONCE)
        cells[f"0.7 / {momentum:g}: mean, in 24 parts"] = replace(cell, sync=mean)
        cells[f"0.7 / {momentum:g}: RDA, in 24 parts"] = cell
    return cells


def _models() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    kinds = {
        "mixture of experts": Cell(workload="moe", options={"expert_hidden": 128}),
        "vision": Cell(workload="vit", steps=360, rate=4e-3, sync={"fragments": 12}),
    }
    for kind, cell in kinds.items():
        for learners in (4, 8):
            name = f"{kind}, M = {learners}"
            dp = f"{name}: data-parallel"
            here = replace(cell, against=dp, learners=learners)
            streaming = {**cell.sync, **SYNCHRONOUS, "quorum": learners}
            cells[dp] = replace(here, against="", plain=True)
            cells[f"{name}: decoupled"] = here
            cells[f"{name}: Streaming DiLoCo"] = replace(
                here, sync=streaming, outer=STREAMING_OUTER
            )
    return cells


def _variants() -> dict[str, Cell]:
    alone = {
        "participation": "async",
        "grace_margin": 0.0,
        "apply": {"missed": "rebase", "alignment": "carry"},
        "late": {"max_versions": 128},
    }
    delayed = {"optimizer": "delayed-nesterov", "options": {"every": 4}}
    turned = {"merge": {"rule": "published_methods:heloco"}}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "the default": ({}, {}),
        "delayed Nesterov, every = 4": ({}, delayed),
        "own rounds, Nesterov": (alone, {}),
        "own rounds, delayed Nesterov": (alone, delayed),
        "own rounds, Nesterov, a quarter of the rate": (alone, {"lr": 0.175}),
        "own rounds, no momentum, rate 1/4": (alone, {"lr": 0.25, "momentum": 0.0}),
        "mean": ({"merge": {"rule": "mean"}}, {}),
        "HeLoCo": (turned, {}),
        "own rounds, HeLoCo": ({**alone, **turned}, {}),
        "own rounds, HeLoCo, a quarter of the rate": ({**alone, **turned}, {"lr": 0.175}),
    }
    cells: dict[str, Cell] = {}
    for speed, speeds in {"1, 1, 2, 4": UNEQUAL, "equal": EQUAL}.items():
        default = f"{speed}: {next(iter(kinds))}"
        for kind, (sync, outer) in kinds.items():
            name = f"{speed}: {kind}"
            cell = Cell(steps=1536, batch=8, speeds=speeds, sync=sync, outer=outer)
            cells[name] = replace(cell, against=default if name != default else "")
    return cells


FREQUENT = {**_wire("int4", period=8), **CARRY}
"""As in the recipe `low-loss`."""

FIRST = ["exp_avg|momentum_buffer"]
"""First moments: a second one needs bf16."""

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "carry": {"sync": CARRY},
    "1 / 0": {"outer": ALONE},
    "carry, 1 / 0": {"sync": CARRY, "outer": ALONE},
    "H = 8, carry, 1 / 0": {"sync": {**CARRY, "sync_every": 8}, "outer": ALONE},
    "H = 8, carry, 1 / 0, int4": {"sync": FREQUENT, "outer": ALONE},
    "mean, H = 8, carry, 1 / 0, int4": {
        "sync": {**FREQUENT, "merge": {"rule": "mean"}},
        "outer": ALONE,
    },
    "int2, H = 36": {"sync": _wire("int2", period=36)},
    "int2, H = 36, carry": {"sync": {**_wire("int2", period=36), **CARRY}},
    "int2, H = 36, outer 0.9 / 0.5": {
        "sync": _wire("int2", period=36),
        "outer": {"lr": 0.9, "momentum": 0.5},
    },
    "rate 0.8, int2, H = 36": {"rate": 0.8, "sync": _wire("int2", period=36)},
    "int2, H = 24": {"sync": _wire("int2")},
    "one bit, H = 18": {"sync": _wire("published_methods:ScaledSign", period=18)},
    "one bit, H = 24": {"sync": _wire("published_methods:ScaledSign")},
    "one bit up, int2 down, H = 24": {"sync": _wire("published_methods:ScaledSign", "int2")},
    "int2, H = 48, and 24 in the last fifth": {
        "sync": {**_wire("int2", period=48), "schedule": "published_methods:half_at_the_end"}
    },
    "int2, H = 36, carry, 1 / 0": {
        "sync": {**_wire("int2", period=36), **CARRY},
        "outer": ALONE,
    },
    "weight decay / M": {"options": {"weight_decay": 0.025}},
    "rate 0.7, H = 8, carry, 1 / 0": {
        "rate": 0.7,
        "sync": {**CARRY, "sync_every": 8},
        "outer": ALONE,
    },
    "moments": {"sync": {"moments": {}}},
    "moments in fp32": {"sync": {"moments": {"codec": "fp32"}}},
    "moments, H = 8, carry, 1 / 0": {
        "sync": {**CARRY, "sync_every": 8, "moments": {}},
        "outer": ALONE,
    },
    "moments, H = 8, carry, 1 / 0, int4": {"sync": {**FREQUENT, "moments": {}}, "outer": ALONE},
    **{
        f"moments {how}, H = 8, carry, 1 / 0, int4": {
            "sync": {**FREQUENT, "moments": moments},
            "outer": ALONE,
        }
        for how, moments in {
            "every 2": {"every": 2},
            "every 4": {"every": 4},
            "in fp32": {"codec": "fp32"},
            "in int8": {"codec": "int8", "names": FIRST},
            "in int4": {"codec": "int4", "names": FIRST},
        }.items()
    },
}
"""Changes of a cell; `rate` is relative to the tuned inner rate."""


def _gap() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner, learners, steps in product(RATES, (1, 4, 8, 16), (600, 1800, 3600)):
        start = f"{inner}, M = {learners}, {steps} steps: "
        dp = f"{start}data-parallel"
        cell = Cell(dp, learners=learners, steps=steps, inner=inner)
        cells[dp] = replace(cell, against="", plain=True)
        for name, more in VARIANTS.items():
            more = dict(more)
            rate = more.pop("rate", 1.0) * RATES[inner]
            sync = {**more.pop("sync", {})}
            if inner == "muon":
                sync["merge"] = {"rule": "mean"}
            cells[start + name] = replace(cell, rate=rate, sync=sync, **more)
    return cells


CHAOS = 26.0, 25.0
"""Seconds between failures of 1.2 million chips that each fail once a year, and until a learner is
back (Decoupled DiLoCo, arXiv 2604.21428)."""


def _paper() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    frequent = {**FREQUENT, "merge": {"rule": "mean"}}
    text = Cell(inner="muon", sync=frequent, outer=ALONE)
    kinds = {
        "text, dense": text,
        "text, mixture of experts": replace(text, workload="moe", options={"expert_hidden": 128}),
        "vision": Cell(
            workload="vit",
            inner="muon",
            steps=360,
            rate=4e-3,
            sync={**frequent, "fragments": 8},
            outer=ALONE,
        ),
        "speech": Cell(
            workload="speech",
            inner="muon",
            steps=480,
            rate=8e-3,
            sync={**frequent, "fragments": 8},
            outer=ALONE,
            options={"eval_utterances": 1000},
        ),
    }
    between, repair = CHAOS
    for kind, cell in kinds.items():
        dp = f"{kind}: data-parallel"
        cell = replace(cell, against=dp, learners=8)
        cells[dp] = replace(cell, against="", plain=True)
        streaming = {"fragments": cell.sync.get("fragments", 24), **SYNCHRONOUS, "quorum": 8}
        cells[f"{kind}: Streaming DiLoCo, M = 8"] = replace(
            cell, sync=streaming, outer=STREAMING_OUTER
        )
        for learners in (2, 4, 8, 16):
            own = replace(cell, learners=learners)
            cells[f"{kind}: decoupled, M = {learners}"] = own
            cells[f"{kind}: decoupled, M = {learners}, failures"] = replace(
                own, chaos=(learners * between, repair)
            )
    return cells


def _int4() -> dict[str, Cell]:
    cell = Cell(against="bf16")
    return {"bf16": replace(cell, against=""), "int4": replace(cell, sync=_wire("int4"))}


MARGIN = 0.005
"""Largest relative difference of losses that counts as equivalent: fixed before the runs."""


def _own(name: str, lr: float, **options: float) -> dict[str, Any]:
    return {"optimizer": f"published_methods:{name}", "lr": lr, "options": options}


OWN = {
    "isotropic": "merge rule",
    "heloco": "merge rule",
    "GPA": "outer optimizer",
    "ConstantLength": "outer optimizer",
    "short_at_the_end": "schedule",
    "half_at_the_end": "schedule",
    "long_at_the_end": "schedule",
    "Statistical2Bit": "codec",
    "ScaledSign": "codec",
}
"""The methods of `published_methods`, and their kinds."""


def _methods() -> dict[str, Cell]:
    isotropic = {"merge": {"rule": "published_methods:isotropic"}}
    schedule = "published_methods:{}_at_the_end"
    two_bits = {"uplink": "published_methods:Statistical2Bit"}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
        "1 / 0": ({}, ALONE, 1.0),
        "Iso-C, 1 / 0": (isotropic, ALONE, 1.0),
        "Iso-C, 2.1 / 0": (isotropic, {"lr": 2.1, "momentum": 0.0}, 1.0),
        "Iso-C, 1.8 / 0.8": (isotropic, {"lr": 1.8, "momentum": 0.8}, 1.0),
        "Iso-C, 2.1 / 0, twice the inner rate": (
            isotropic,
            {"lr": 2.1, "momentum": 0.0},
            2.0,
        ),
        "GPA": ({}, _own("GPA", 1.0), 1.0),
        "GPA, μx = 0.5": ({}, _own("GPA", 1.0, mu_x=0.5), 1.0),
        "constant length 1, momentum 0.5": ({}, _own("ConstantLength", 1.0), 1.0),
        "constant length 0.7, momentum 0.5": ({}, _own("ConstantLength", 0.7), 1.0),
        "H = 8 in the last fifth, 1 / 0": ({"schedule": schedule.format("short")}, ALONE, 1.0),
        "H = 8, 24, 48, 1 / 0": ({"schedule": schedule.format("long")}, ALONE, 1.0),
        "int2 up": ({"codec": {"uplink": "int2"}}, {}, 1.0),
        "statistical 2 bits up": ({"codec": two_bits}, {}, 1.0),
        "statistical 2 bits up, β = 0.9": (
            {"codec": {**two_bits, "feedback_decay": 0.9}},
            {},
            1.0,
        ),
    }
    cells: dict[str, Cell] = {}
    for inner in RATES:
        default = f"{inner}: default"
        cell = Cell(
            default, inner=inner, sync={"merge": {"rule": "mean"}} if inner == "muon" else {}
        )
        cells[default] = replace(cell, against="")
        for name, (sync, outer, rate) in kinds.items():
            cells[f"{inner}: {name}"] = replace(
                cell, sync={**cell.sync, **sync}, outer=outer, rate=rate * RATES[inner]
            )
    return cells


MEASURES = {"average_loss", "accuracy", "brackets", "copying", "character_error_rate", "goodput"}
"""What a table shows in addition to the loss, where a workload or a run has it."""

GROUPS = {
    "gap": _gap,
    "int4": _int4,
    "methods": _methods,
    "paper": _paper,
    "variants": _variants,
    "longer": _longer,
    "learners": _learners,
    "schedule": _schedule,
    "rounds": _rounds,
    "merges": _merges,
    "models": _models,
}
"""Cells of each results folder."""


def main() -> None:
    options = parser(seeds=[1, 2, 3], kept=Path("settings.jsonl"), cells=".")
    options.add_argument("group", choices=GROUPS)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    for name, kind in OWN.items():
        register_method(kind, f"published_methods:{name}", getattr(published_methods, name))
    cells = GROUPS[arguments.group]()
    names = [name for name in cells if re.search(arguments.cells, name)]
    measured(arguments.kept, names, arguments.seeds, lambda name, seed: cells[name].measure(seed))
    # Summarize all runs of each cell; important cells have more seeds than others.
    lines = map(json.loads, arguments.kept.read_text().splitlines())
    rows: dict[str, list[Row]] = {name: [] for name in cells}
    for row in sorted(lines, key=lambda row: row["seed"]):
        if row["cell"] in rows:
            rows[row["cell"]].append(row)
    rows = {name: each for name, each in rows.items() if each}
    keep(
        arguments.group,
        config={"sequences": SEQUENCES, **SIZE},
        raw=[row for each in rows.values() for row in each],
        result={name: summary(cells[name], name, rows) for name in rows},
    )


def summary(cell: Cell, name: str, rows: dict[str, list[Row]]) -> Row:
    """Return the mean loss, and the gap to the cell in `against`, paired by seeds.

    The gap is that of the loss in percent, or of an accuracy or error rate in percentage points.
    """
    own = rows[name]
    found: Row = {"less": cell.less, "loss": mean_of(own, "loss"), "seeds": len(own)}
    for measure in sorted(MEASURES.intersection(*own)):
        found[measure] = mean_of(own, measure)
    others = {row["seed"]: row for row in rows.get(cell.against, [])}
    pairs = [(row, others[row["seed"]]) for row in own if row["seed"] in others]
    if pairs and cell.against != name:
        shares = {"accuracy", "character_error_rate"}.intersection(*own)
        for share in shares:
            differences = [100 * (row[share] - other[share]) for row, other in pairs]
            found["points"] = interval(differences)
        if not shares:
            found["gap_percent"] = gap_percent(*map(list, zip(*pairs, strict=True)))
        if name == "int4":
            one, other = ([row["loss"] for row in each] for each in zip(*pairs, strict=True))
            found["equivalence"] = str(tost((name, one), (cell.against, other), MARGIN))
    return found


if __name__ == "__main__":
    main()
