"""What `--help` says of how a command is called."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("explain", "explain [OPTIONS] round|learner|step WHICH"),
        ("export", "export [OPTIONS] RUN"),
        ("recipes", "recipes [OPTIONS] [NAME]"),
        ("report", "report [OPTIONS] TAPE [OTHER]"),
        ("chaos", "chaos [OPTIONS] [RUN] SCENARIO"),
        ("status", "status [OPTIONS] [SOURCE]"),
    ],
)
def test_the_usage_is_written_as_one_types_it(command: str, usage: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], prog_name="ddiloco")
    lines = [line.strip() for line in result.output.splitlines()]
    assert f"Usage: ddiloco {usage}" in lines


@pytest.mark.parametrize("command", [[], ["train"], ["replay"]])
def test_the_help_is_there_for_who_asks_shortly_and_has_no_types_of_flags(
    command: list[str],
) -> None:
    short, long = (CliRunner().invoke(app, [*command, flag]) for flag in ("-h", "--help"))
    assert short.exit_code == 0, short.output
    assert short.output == long.output
    assert "bool" not in short.output.lower()


def test_a_chaos_of_more_than_a_run_and_a_scenario_is_refused() -> None:
    result = CliRunner().invoke(app, ["chaos", "a", "b", "c"])
    assert result.exit_code == 2
    assert "'a b c' is more than a run and a scenario" in result.output
