"""Commands of other distributions: each works, or prints how to install it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli import extra_commands
from decoupled_diloco.cli.command_groups import Commands
from decoupled_diloco.cli.main import app


def commands(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Return an app with `plan` and another command, with these entry points installed."""
    points = {name: EntryPoint(name, where, extra_commands.GROUP) for name, where in found.items()}

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        assert group == extra_commands.GROUP
        return [points[name]] if name in points else []

    monkeypatch.setattr(extra_commands, "entry_points", entry_points)
    made = Commands()
    made.command("other")(lambda: None)
    extra_commands.add_command(made, "plan", "plan")
    return made


def run(made: Commands, *arguments: str) -> Any:
    return CliRunner().invoke(made, ["plan", *arguments])


@pytest.mark.parametrize("arguments", [(), ("--params", "12e9"), ("quickstart",), ("--help",)])
def test_a_missing_distribution_prints_how_to_install_it(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = commands({}, monkeypatch)
    result = run(made, *arguments)
    assert result.exit_code == 2
    assert (
        "ddiloco plan is not installed: run pip install -e packages/plan in the clone"
        in result.stderr
    )
    assert (
        "run ddiloco plan to see how to install it" in CliRunner().invoke(made, ["--help"]).output
    )


@pytest.mark.parametrize("where", ["decoupled_diloco_gone:plan", "decoupled_diloco.units:plan"])
def test_a_command_that_cannot_be_loaded_prints_why_and_others_work(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = commands({"plan": where}, monkeypatch)
    assert "ddiloco plan cannot be loaded (" in run(made, "--params", "1e9").stderr
    assert CliRunner().invoke(made, ["other"]).exit_code == 0


def test_an_installed_command_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = commands({"plan": "decoupled_diloco.cli.recipes:recipes"}, monkeypatch)
    result = run(made)
    assert result.exit_code == 0
    assert "quickstart" in result.stdout


@pytest.mark.parametrize("name", ["plan", "goodput"])
def test_this_environment_has_both(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert "--json" in shown.output
