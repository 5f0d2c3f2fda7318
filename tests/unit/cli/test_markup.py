"""Names from users and texts of other programs are printed unchanged: brackets are not markup."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from decoupled_diloco.cli import local_training
from decoupled_diloco.cli.shared_options import make_console
from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import RunOutcome
from decoupled_diloco.run_model import FollowedRun
from decoupled_diloco.show.console import SteadyConsole

ROOT = Path(__file__).parents[3]


class Served:
    """A run that ends at once and starts no processes."""

    def __init__(
        self, config: RunConfig, *, checkpoint: str, resume: bool, **options: object
    ) -> None:
        self.path = config.run.folder
        self.went_back = checkpoint
        self.folder = SimpleNamespace(moved_to=Path("runs/a[b].1"), resumed=resume)
        self.addresses = ("http://127.0.0.1:7070",)
        self.secret_file = Path(config.run.folder) / "token"
        self.followed, self.model = FollowedRun(config.run.folder), None

    def start(self) -> None: ...
    def wait_for_shards(self) -> None: ...
    def invite(self) -> None: ...
    def close(self) -> None: ...
    def wait(self, on_poll: object) -> RunOutcome:
        return RunOutcome(False, "shard-0 does not run: no [/data] here", None)


def test_brackets_of_folders_and_reasons_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "LocalRun", Served)
    monkeypatch.setattr(local_training, "print_outcome", lambda *arguments: None)
    config = RunConfig(run={"folder": "runs/a[b]", "name": "small", "max_steps": 8})
    console = SteadyConsole(file=io.StringIO(), width=80)
    assert local_training.serve_locally(config, console) == 1
    text = console.file.getvalue()
    assert "syncer of small: http" in text
    assert "auth token: runs/a[b]/token" in text
    assert "the earlier run is now in runs/a[b].1" in text
    assert "new in each run" in text
    assert "ddiloco intervals runs/a[b]\n" in text
    assert "ddiloco learner runs/a[b]/run.toml" in text
    assert "no [/data] here; no weights" in text


def test_no_console_of_the_packages_interprets_markup() -> None:
    console = make_console()
    with console.capture() as capture:
        console.print("[bold]a[/bold] [/b]")
    assert "[bold]a[/bold] [/b]" in capture.get()
    calls = [
        path.name
        for source in (ROOT / "src", ROOT / "packages")
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Console"
    ]
    assert not calls, "use a SteadyConsole, which prints text unchanged"
