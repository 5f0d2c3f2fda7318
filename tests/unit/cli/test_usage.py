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
    ],
)
def test_the_usage_is_written_as_one_types_it(command: str, usage: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], prog_name="ddiloco")
    lines = [line.strip() for line in result.output.splitlines()]
    assert f"Usage: ddiloco {usage}" in lines
