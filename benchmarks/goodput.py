"""Goodput of clusters with 150 thousand to 2.4 million chips: simulated and published.

    make goodput        # python benchmarks/goodput.py

It writes the rows, a plot and a run's timeline to `benchmarks/results/goodput`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import Any

from evidence import HERE, keep, options

from decoupled_diloco_plan.goodput.calibrate import CHIPS
from decoupled_diloco_plan.goodput.cluster_settings import (
    BLOCK_CHIPS,
    PREEMPTED_A_DAY,
    SYSTEMS,
    YEAR_SECONDS,
    Cluster,
    Constants,
    stay_of,
)
from decoupled_diloco_plan.goodput.pace import pace_of
from decoupled_diloco_plan.goodput.picture import plot_goodput, plot_timeline
from decoupled_diloco_plan.goodput.study import Effort, cells, study

sys.path.insert(0, str(HERE.parent / "tests"))
from simulation.scavenging import SCAVENGED, relative_time

SCAVENGING = (150_000, 1_200_000, 2_400_000)
"""Cluster sizes for scavenging; the published number of chips is unknown."""

SLOWDOWNS = (1.0,) * 4 + (1.18,) * 4
UNEQUAL = Cluster(
    "decoupled", 10_000, 8, mtbi_seconds=1e6 * YEAR_SECONDS, slowdowns=SLOWDOWNS, jitter=0.1
)


def unequal() -> dict[str, Any]:
    """Return goodput and participation of four fast and four slow learners."""
    found = {}
    for name, quorum, slack, grace, published in (
        ("K=8", 8, 0, False, 84),
        ("K=8, two steps of slack", 8, 2, False, None),
        ("K=1, no grace", 1, 2, False, 100),
        ("K=1, grace window", 1, 2, True, 100),
    ):
        pace = pace_of(replace(UNEQUAL, quorum=quorum, slack_steps=slack, grace=grace), 0)
        found[name] = {
            "goodput": 100 * sum(pace.useful) / len(pace.useful),
            "pace": 100 * pace.against_fastest,
            "slow_in_rounds": 100 * sum(pace.took_part[4:]) / 4,
            "published": published,
        }
    return found


def scavenged() -> list[dict[str, Any]]:
    """Return the training time with more chips for half of it, for few to many preemptions."""
    stays = [stay_of(BLOCK_CHIPS, share) for share in PREEMPTED_A_DAY]
    return [
        {
            "share": share,
            "published": {"decoupled, M=8": decoupled, "elastic": elastic},
            "chips": {
                str(chips): {
                    name: [relative_time(cluster, share, stay_seconds=stay) for stay in stays]
                    for name, cluster in (
                        ("decoupled, M=8", Cluster("decoupled", chips, 8)),
                        ("elastic", Cluster("elastic", chips)),
                    )
                }
                for chips in SCAVENGING
            },
        }
        for share, (decoupled, elastic) in SCAVENGED.items()
    ]


def main() -> None:
    arguments = options(learners="2,4,8,16", seeds=6)
    began = time.process_time()
    learners = [int(each) for each in arguments.learners.split(",")]
    effort = Effort(seeds=arguments.seeds)
    rows = [study(cluster, effort) for cluster in cells(SYSTEMS, CHIPS, learners)]
    documents = [row.as_json(1000.0) for row in rows]
    table: dict[str, dict[str, Any]] = {}
    for row, document in zip(rows, documents, strict=True):
        own = row.cluster
        name = own.system + ("" if own.alone else f", M={own.learners}")
        columns = ("goodput", "goodput_interval", "uptime", "published")
        table.setdefault(name, {})[str(own.chips)] = {each: document[each] for each in columns}
    result = {"goodput": table, "unequal": unequal(), "scavenged": scavenged()}
    seconds = time.process_time() - began
    folder = keep(
        "goodput",
        config={**vars(arguments), "constants": asdict(Constants())},
        raw={"rows": documents, "processor_seconds": seconds},
        result=result,
    )
    shown = [row for row in rows if row.cluster.system != "barrier" or row.cluster.learners == 8]
    shown = [row for row in shown if row.cluster.learners != 4]
    plot_goodput(shown, folder / "goodput.png")
    plot_timeline(Cluster("decoupled", 1_200_000, 8), 1.0, 0, folder / "timeline.png")
    print(f"{len(rows)} cells in {seconds:.0f} s of one core: {folder}")


if __name__ == "__main__":
    main()
