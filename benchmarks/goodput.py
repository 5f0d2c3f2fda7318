"""Goodput of clusters of 150 thousand to 2.4 million chips: simulated, beside what was published.

    make goodput        # python benchmarks/goodput.py

Writes the rows, a plot and a run's timeline to `benchmarks/results/goodput`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evidence import RESULTS, keep

from decoupled_diloco_plan.goodput.calibrate import CHIPS
from decoupled_diloco_plan.goodput.pace import pace_of
from decoupled_diloco_plan.goodput.picture import plot_goodput, plot_timeline
from decoupled_diloco_plan.goodput.settings import (
    BLOCK_CHIPS,
    PREEMPTED_A_DAY,
    SYSTEMS,
    YEAR_SECONDS,
    Cluster,
    Constants,
    stay_of,
)
from decoupled_diloco_plan.goodput.study import Effort, Row, cells, study

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simulation.scavenging import SCAVENGED, relative_time

ESTIMATE = (
    "two systems of one learner are fitted, within 3 points; decoupled, which is predicted, is "
    "within 1.5 points of elastic training on chips / M; a barrier loses 5 to 15 points to waiting"
)
SCAVENGING = (150_000, 1_200_000, 2_400_000)
"""Chips of the cluster that borrows more: how many they were was not published."""

UNEQUAL = Cluster(
    "decoupled",
    10_000,
    8,
    mtbi_seconds=1e6 * YEAR_SECONDS,
    slowdowns=(1.0,) * 4 + (1.18,) * 4,
    jitter=0.1,
)


def cell(row: Row) -> dict[str, Any]:
    document = row.as_json(1000.0)
    return {key: document[key] for key in ("goodput", "goodput_interval", "uptime", "published")}


def unequal() -> dict[str, Any]:
    """Four fast and four slow learners: goodput, and who takes part."""
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
    """Time of training with more chips for half of it, for the least to the most preemptions."""
    stays = [stay_of(BLOCK_CHIPS, share) for share in PREEMPTED_A_DAY]
    rows = []
    for share, (decoupled, elastic) in SCAVENGED.items():
        row: dict[str, Any] = {
            "share": share,
            "published": {"decoupled, M=8": decoupled, "elastic": elastic},
            "chips": {},
        }
        for chips in SCAVENGING:
            systems = (Cluster("decoupled", chips, 8), Cluster("elastic", chips))
            row["chips"][str(chips)] = {
                name: [relative_time(cluster, share, stay_seconds=stay) for stay in stays]
                for name, cluster in zip(row["published"], systems, strict=True)
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", default="2,4,8,16")
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    began = time.process_time()
    learners = [int(each) for each in arguments.learners.split(",")]
    effort = Effort(seeds=arguments.seeds)
    rows = [study(cluster, effort) for cluster in cells(SYSTEMS, CHIPS, learners)]
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row.cluster.system
        name += "" if row.cluster.alone else f", M={row.cluster.learners}"
        table.setdefault(name, {})[str(row.cluster.chips)] = cell(row)
    result = {"goodput": table, "unequal": unequal(), "scavenged": scavenged()}
    seconds = time.process_time() - began
    folder = keep(
        "goodput",
        estimate=ESTIMATE,
        config={**vars(arguments), "constants": asdict(Constants())},
        raw={"rows": [row.as_json(1000.0) for row in rows], "processor_seconds": seconds},
        result=result,
        not_measured="any real cluster of such a size: the constants come from published goodput",
    )
    shown = [row for row in rows if row.cluster.system != "barrier" or row.cluster.learners == 8]
    shown = [row for row in shown if row.cluster.learners != 4]
    plot_goodput(shown, folder / "goodput.png")
    plot_timeline(Cluster("decoupled", 1_200_000, 8), 1.0, 0, folder / "timeline.png")
    print(f"{len(rows)} cells in {seconds:.0f} s of one core: {Path(RESULTS) / 'goodput'}")


if __name__ == "__main__":
    main()
