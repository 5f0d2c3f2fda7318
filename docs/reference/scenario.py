"""The page of all keys of a scenario, from the models that read them: run it to see the page.

python docs/reference/scenario.py
"""

from __future__ import annotations

from configuration import model_in, setting

from decoupled_diloco.simulate.scenario_file import RUN_TABLES, ScenarioFile

TABLES = ("learners", "links", "events", "random")

HEAD = """\
# Scenario

What `ddiloco simulate` and `ddiloco chaos` are given: which run, and what happens to it. Seconds
are virtual, or real ones since the first step. [Simulate a scenario](../how-to/simulate.md) and
[prove it under faults](../how-to/chaos.md) show how.
"""

RUN = """\
## The run's tables

In the place of `run = "…"` the scenario can hold the run itself: {tables}, as in the
[configuration](configuration.md).
"""


def page() -> str:
    """The page, in Markdown."""
    fields = ScenarioFile.model_fields
    single = [key for key in fields if key not in (*TABLES, *RUN_TABLES[1:])]
    parts = [HEAD, "## At the top { #top }\n"]
    parts += [setting("top", key, fields[key]) for key in single]
    for table in TABLES:
        field = fields[table]
        parts.append(f"## `[[{table}]]` {{ #{table} }}\n\n{field.description}\n")
        model = model_in(field.annotation)
        parts += [setting(table, key, each) for key, each in model.model_fields.items()]
    tables = ", ".join(f"`[{name}]`" for name in RUN_TABLES[:-1]) + " and `[[faults]]`"
    return "\n".join([*parts, RUN.format(tables=tables)])


if __name__ == "__main__":
    print(page())
