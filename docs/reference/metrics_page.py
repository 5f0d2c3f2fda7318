"""The page of all metrics, made from the table of metrics: run it to see the page.

python docs/reference/metrics_page.py
"""

from __future__ import annotations

from collections.abc import Iterable

from decoupled_diloco.monitor.metric_table import EVERY, LEARNER, PROCESS, SHARD, Measure

HEAD = """\
# Metrics

Prometheus reads these metrics at `/metrics`: see [how to monitor a run](../how-to/monitoring.md). A
counter starts at 0 again when its process restarts, unless its meaning mentions earlier
incarnations. Each value of a `label` is a separate series of the metric.
"""


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD, "## Every process\n", _table(EVERY)]
    parts += [f"\nOn Linux, also: {', '.join(f'`{name}`' for name in PROCESS)}.\n"]
    parts += ["## Shards\n", _table(SHARD[len(EVERY) :])]
    parts += ["\n## Learners\n", "A learner serves these itself if `metrics_address` is set.\n"]
    return "\n".join([*parts, _table(LEARNER[len(EVERY) :]), ""])


def _table(measures: Iterable[Measure]) -> str:
    rows = ["| name | kind | label | meaning |", "|---|---|---|---|"]
    for each in measures:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(page())
