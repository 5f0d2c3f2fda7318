"""Arguments that `ddiloco simulate` rejects before it writes anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app

RUN = "[run]\nmax_steps = 100\n"


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_a_run_is_not_a_scenario(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(RUN)
    text = refusal(str(file))
    assert f"{file} is a run, not a scenario: start it with ddiloco train {file}" in text
    assert f"ddiloco simulate SCENARIO --config {file}" in text


@pytest.mark.parametrize("how", [(), ("--protocol-only", "--tape")])
def test_the_folder_of_a_real_run_is_not_changed(
    how: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    real = Path("runs/mine")
    (real / "tape").mkdir(parents=True)
    Path("story.toml").write_text('name = "mine"\n' + RUN)
    text = refusal("story.toml", *how, *([str(real)] if how else []))
    assert "runs/mine holds a run with real processes, which a simulation must not replace" in text
    option = "--tape runs/mine-simulated" if how else "--set run.folder=runs/mine-simulated"
    assert option in text
    assert [entry.name for entry in Path("runs").iterdir()] == ["mine"]
