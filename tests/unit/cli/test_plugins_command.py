"""`ddiloco plugins` lists what a run can name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
from typer.testing import CliRunner

from decoupled_diloco._version import __version__
from decoupled_diloco.cli.main import app
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.config.plugins import SHIPPED
from decoupled_diloco.merge import codec


def listed() -> list[list[str]]:
    result = CliRunner().invoke(app, ["plugins"])
    assert result.exit_code == 0, result.output
    return [line.split("\t") for line in result.output.splitlines()]


def test_each_listed_method_can_be_used() -> None:
    names: dict[str, list[str]] = {}
    for kind, name, version, module in listed():
        if module == "decoupled_diloco":
            assert version == __version__
            names.setdefault(kind, []).append(name)
    assert set(SHIPPED) - {"schedule"} | {"workload"} == names.keys()
    for rule in ("active", "all"):
        assert options_of(RunConfig(run={"max_steps": 1}, sync={"participation": rule})).rule  # type: ignore[arg-type]
    assert names["participation rule"] == ["active", "all", "async"]
    assert [codec(name).name for name in names["codec"][:2]] == ["fp32", "bf16"]
    for rule in names["merge rule"]:
        RunConfig(run={"max_steps": 1}, sync={"merge": {"rule": rule}})  # type: ignore[arg-type]
    for optimizer in set(names["outer optimizer"]) - {"delayed-nesterov"}:
        RunConfig(run={"max_steps": 1}, outer={"optimizer": optimizer})  # type: ignore[arg-type]


def test_methods_of_installed_packages_are_listed_without_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(group: str, **_: Any) -> list[EntryPoint]:
        return [EntryPoint("mine", "no_such_module:make", group)]

    monkeypatch.setattr("decoupled_diloco.cli.plugins_command.entry_points", found)
    own = [row for row in listed() if row[1] == "mine"]
    assert ["method", "mine", "", "no_such_module:make"] in own
    assert {row[0] for row in own} == {"method", "workload", "command", "module"}
