"""Commands generated from option models: parsing, names and help."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from decoupled_diloco.cli.command_line import CommandOptions, command, named, option_of
from decoupled_diloco_plan.bandwidth import plan_options as bandwidth
from decoupled_diloco_plan.bandwidth.plan_options import PlanOptions
from decoupled_diloco_plan.goodput.cluster_settings import SYSTEMS
from decoupled_diloco_plan.goodput.goodput_options import GoodputOptions


class Small(CommandOptions):
    """A model with each kind of field."""

    name: Annotated[str | None, typer.Argument()] = None
    """The name."""

    size: Annotated[float, typer.Option("--big", parser=lambda text: 2 * float(text))] = 1.5
    """A number."""

    loud: Annotated[bool, typer.Option("--loud/--quiet")] = False
    """Volume."""

    hidden: int = 3


def parsed(*arguments: str) -> Small:
    """Return the options that a command receives for these arguments."""
    found: list[Small] = []

    @command(Small)
    def small(options: Small) -> None:
        """A command."""
        found.append(options)

    app = typer.Typer()
    app.command()(small)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_given_options_are_parsed_and_the_rest_are_defaults() -> None:
    assert parsed().given == {}
    assert parsed() == Small(name=None, size=1.5, loud=False, hidden=3)
    assert parsed("x", "--big", "4", "--loud").given == {"name": "x", "size": 8.0, "loud": True}
    assert parsed("--big", "1.5").given == {"size": 3.0}


def test_an_option_is_named_as_on_the_command_line() -> None:
    assert option_of(Small, "name") == "NAME"
    assert option_of(Small, "size") == "--big"
    assert option_of(Small, "loud") == "--loud"
    assert option_of(PlanOptions, "hub_link") == "--hub-link"
    assert list(named(Small)) == ["name", "size", "loud"]


@pytest.mark.parametrize("model", [PlanOptions, GoodputOptions])
def test_every_option_has_a_description(model: type[CommandOptions]) -> None:
    assert all(len(field.description or "") > 5 for field in named(model).values())


@pytest.mark.parametrize(
    ("model", "name", "known"),
    [
        (PlanOptions, "partition", bandwidth.PARTITIONS),
        (PlanOptions, "system", bandwidth.SYSTEMS),
        (PlanOptions, "method", bandwidth.METHODS),
        (PlanOptions, "table", bandwidth.SOURCES),
        (GoodputOptions, "system", tuple(SYSTEMS)),
    ],
)
def test_the_help_lists_all_valid_names(
    model: type[CommandOptions], name: str, known: tuple[str, ...]
) -> None:
    text = model.model_fields[name].description or ""
    assert all(each in text for each in known)


@pytest.mark.parametrize(
    "module", ["commands", "bandwidth.plan_options", "goodput.goodput_command"]
)
def test_the_commands_are_found_in_any_import_order(module: str) -> None:
    code = (
        f"import decoupled_diloco_plan.{module}; from decoupled_diloco.cli.main import app; "
        "print([c.callback.__module__ for c in app.registered_commands if c.name == 'plan'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['decoupled_diloco.cli.command_line']\n", done.stderr
