"""The output of `--help`, and of a wrong command, name or option."""

from __future__ import annotations

from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from decoupled_diloco.cli.command_groups import DEBUG, INSPECT, OPERATE, PLAN, RUN
from decoupled_diloco.cli.main import app

USAGES = [
    "train [OPTIONS] [CONFIG]",
    "syncer [OPTIONS] [CONFIG]",
    "launch [OPTIONS] CONFIG",
    "relay [OPTIONS] CONFIG",
    "learner [OPTIONS] CONFIG",
    "evaluator [OPTIONS] CONFIG",
    "recipes [OPTIONS] [NAME]",
    "export [OPTIONS] [RUN]",
    "list [OPTIONS] [FOLDER]",
    "status [OPTIONS] [RUN]",
    "watch [OPTIONS] [RUN]",
    "logs [OPTIONS] [RUN] [PROCESS]",
    "report [OPTIONS] [RUN] [OTHER]",
    "explain [OPTIONS] round|learner|step WHICH [RUN]",
    "data [OPTIONS] [RUN]",
    "audit [OPTIONS] [RUN]",
    "track [OPTIONS] [RUN]",
    "metrics [OPTIONS] rules|dashboard|config [CONFIG|RUN]",
    "traces [OPTIONS] [RUN]",
    "stop [OPTIONS] [RUN]",
    "checkpoint [OPTIONS] [RUN]",
    "mirror [OPTIONS] [RUN]",
    "kill [OPTIONS] PROCESS [RUN]",
    "doctor [OPTIONS] [CONFIG]",
    "plan [OPTIONS] [CONFIG]",
    "goodput [OPTIONS]",
    "intervals [OPTIONS] [CONFIG|RUN]",
    "privacy [OPTIONS] CONFIG",
    "plugins [OPTIONS]",
    "events [OPTIONS] [RUN]",
    "replay [OPTIONS] [RUN]",
    "simulate [OPTIONS] SCENARIO",
    "scenarios [OPTIONS] [NAME]",
    "chaos [OPTIONS] [CONFIG] SCENARIO",
    "certs create-ca [OPTIONS] FOLDER",
    "certs add [OPTIONS] FOLDER NAME...",
    "certs renew [OPTIONS] FOLDER [NAME]...",
    "certs list [OPTIONS] FOLDER",
    "parties create-key [OPTIONS] NAME",
    "parties check [OPTIONS] FILE",
]
"""The usage of every command: CONFIG and RUN are positional everywhere."""


@pytest.mark.parametrize("usage", USAGES)
def test_the_usage_of_every_command(usage: str) -> None:
    command = usage.partition(" [OPTIONS]")[0].split()
    result = CliRunner().invoke(app, [*command, "--help"], prog_name="ddiloco")
    lines = [line.strip() for line in result.output.splitlines()]
    assert f"Usage: ddiloco {usage}" in lines


def test_every_command_has_a_usage_here_and_a_group() -> None:
    group: Any = typer.main.get_command(app)
    shown = {name: each for name, each in group.commands.items() if not each.hidden}
    written = [usage.split() for usage in USAGES]
    assert {words[0] for words in written} == shown.keys()
    for name in ("certs", "parties"):
        assert set(shown[name].commands) == {words[1] for words in written if words[0] == name}
    panels = [each.rich_help_panel for each in shown.values()]
    assert list(dict.fromkeys(panels)) == [RUN, INSPECT, OPERATE, PLAN, DEBUG]


def test_the_help_has_groups_in_order() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    places = [output.index(f"─ {panel} ─") for panel in (RUN, INSPECT, OPERATE, PLAN, DEBUG)]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tape", "events"),
        ("ledger", "data"),
        ("timing", "intervals"),
        ("log", "track"),
        ("certificates", "certs"),
        ("certs new", "certs create-ca"),
    ],
)
@pytest.mark.parametrize("more", [[], ["runs/quickstart", "--json"], ["--help"]])
def test_an_old_command_name_is_rejected_with_the_new_one(
    old: str, new: str, more: list[str]
) -> None:
    result = CliRunner().invoke(app, [*old.split(), *more], prog_name="ddiloco")
    assert result.exit_code == 2
    assert result.stderr == f"error: `ddiloco {old}` is called `ddiloco {new}` now.\n"
    assert not result.stdout
    assert CliRunner().invoke(app, [*new.split(), "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("stauts", "status"), ("lgos", "logs"), ("tarin", "train"), ("certs creat-ca", "create-ca")],
)
def test_an_unknown_name_is_rejected_with_a_similar_one(wrong: str, meant: str) -> None:
    result = CliRunner().invoke(app, wrong.split())
    assert result.exit_code == 2
    assert f"Did you mean '{meant}'?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["explain", "round", "1", "--of", "runs/x"], "--of"),
        (["kill", "learner-0", "--json"], "--json"),
        (["logs", "--json"], "--json"),
        (["list", "--follow"], "--follow"),
        (["status", "--lines", "1"], "--lines"),
        (["simulate", "flaky-link", "--run", "diloco"], "--run"),
        (["certs", "list", "x", "--valid-days", "1"], "--valid-days"),
        (["status", "--cut", "last"], "--cut"),
        (["logs", "--token-file", "x"], "--token-file"),
        (["status", "--engine", "slurm"], "--engine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_of_another_command_is_rejected(arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"No such option: {option}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("train quickstart --cut last", "--cut is called --checkpoint now"),
        ("syncer quickstart --cut=3", "--cut is called --checkpoint now"),
        ("syncer quickstart --standbys 1", "--standbys is called --standby now"),
        ("syncer quickstart --token-file x", "--token-file is called --auth-token-file now"),
        ("status --token-file x", "--token-file is called --auth-token-file now"),
        ("doctor --authority x", "--authority is called --ca-cert now"),
        ("learner quickstart --certificate x", "--certificate is called --cert now"),
        ("traces --to http://127.0.0.1:1", "--to is called --collector now"),
        ("watch --every 1", "--every is called --interval-seconds now"),
        ("checkpoint --timeout 1", "--timeout is called --timeout-seconds now"),
        ("certs create-ca x --name y", "--name is called --host now"),
        (
            "launch quickstart --engine slurm",
            "--engine is the setting launch.backend now: set it in the TOML file, or with --set "
            "launch.backend=…",
        ),
    ],
)
def test_an_old_option_is_rejected_with_the_new_one(arguments: str, sentence: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {sentence}\n"


def test_each_option_has_one_meaning() -> None:
    """An option of several commands has one metavar, or is listed here with its reason."""
    group: Any = typer.main.get_command(app)
    commands = {**group.commands, **group.commands["certs"].commands}
    found: dict[str, dict[tuple[str | None, bool], list[str]]] = {}
    for command, each in commands.items():
        for option in each.params:
            if option.param_type_name == "option" and not option.hidden:
                kind = (option.metavar, option.is_flag)
                for name in option.opts:
                    found.setdefault(name, {}).setdefault(kind, []).append(command)
    several = {name: kinds for name, kinds in found.items() if len(kinds) > 1}
    assert several.keys() == {
        "--out",  # a folder or a file, as the command writes it
        *("--learners", "--chips"),  # one number, or several to compare
        "--step-seconds",  # a time, with its unit or in seconds
    }, several


@pytest.mark.parametrize("command", [[], ["train"], ["replay"]])
def test_short_help_works_and_flags_have_no_types(
    command: list[str],
) -> None:
    short, long = (CliRunner().invoke(app, [*command, flag]) for flag in ("-h", "--help"))
    assert short.exit_code == 0, short.output
    assert short.output == long.output
    assert "bool" not in short.output.lower()


def test_chaos_rejects_more_than_a_run_and_a_scenario() -> None:
    result = CliRunner().invoke(app, ["chaos", "a", "b", "c"])
    assert result.exit_code == 2
    assert "'a b c' is not [CONFIG] SCENARIO" in result.output
