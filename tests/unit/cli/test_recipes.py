"""`ddiloco recipes` and `ddiloco scenarios` with a missing or unreadable file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import ConfigError


@pytest.mark.parametrize("kind", ["recipes", "scenarios"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nosuch.toml", "No such file or directory"),
        ("./x", "No such file or directory"),
        ("./folder", "Is a directory"),
        ("binary", "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_printed_is_reported(
    kind: str, name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(app, [kind, name])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        f"{name} cannot be printed: {why}: ddiloco {kind} lists the available names"
    )
