"""The page of all metrics, from the table by which they are told: run it to see the page.

python docs/reference/metrics_page.py
"""

from __future__ import annotations

from collections.abc import Iterable

from decoupled_diloco.monitor.metric_table import EVERY, LEARNER, PROCESS, SHARD, Measure

HEAD = """\
# Metrics

What Prometheus is told at `/metrics`: see [how to monitor a run](../how-to/monitoring.md). Counters
begin again with their process. `label` in the tables is what tells a metric's series apart.
"""


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD, "## Of every process\n", _table(EVERY)]
    parts += [f"\nBesides these, on Linux: {', '.join(f'`{name}`' for name in PROCESS)}.\n"]
    parts += ["## Of a shard\n", _table(SHARD[len(EVERY) :])]
    parts += ["\n## Of a learner\n", "With `metrics_address`, a learner tells these itself.\n"]
    return "\n".join([*parts, _table(LEARNER[len(EVERY) :]), ""])


def _table(measures: Iterable[Measure]) -> str:
    rows = ["| name | kind | label | meaning |", "|---|---|---|---|"]
    for each in measures:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(page())
