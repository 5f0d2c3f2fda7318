"""The page of all keys of a scenario, from the models that read them: run it to see the page.

python docs/reference/scenario_page.py
"""

from __future__ import annotations

from configuration_page import model_in, setting

from decoupled_diloco_lab.simulate.scenario_file import RUN_TABLES, ScenarioFile

TABLES = ("learners", "links", "devices", "events", "random")

HEAD = """\
# Scenario

A scenario is a TOML file that names a run, its learners, their links and the faults that happen.
`ddiloco simulate` and `ddiloco chaos` read scenarios. Times are virtual seconds, or on real
processes seconds since the first step. See
[simulate a scenario](../how-to/simulate.md) and [chaos](../how-to/chaos.md).
"""

RUN = """\
## The run's tables

Instead of `run = "…"`, the scenario can contain the settings of the run: {tables}, as in the
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
        heading = "[devices]" if table == "devices" else f"[[{table}]]"
        parts.append(f"## `{heading}` {{ #{table} }}\n\n{field.description}\n")
        model = model_in(field.annotation)
        parts += [setting(table, key, each) for key, each in model.model_fields.items()]
    tables = ", ".join(f"`[{name}]`" for name in RUN_TABLES[:-1]) + " and `[[faults]]`"
    return "\n".join([*parts, RUN.format(tables=tables)])


if __name__ == "__main__":
    print(page())
