"""Every command and snippet of the documentation, of the README and of CONTRIBUTING.md works."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

import decoupled_diloco as dd
from decoupled_diloco.cli.main import app
from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from docs.snippets import PAGES, ROOT, Block, blocks_of, check_output, check_toml, reader
from docs.zygote import Zygote
from process.process_runs import fork_server

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if "not run" not in block.directives]
LONG = {
    *("docs/planning.md", "docs/concepts/failures.md"),
    *(
        f"docs/how-to/{name}.md"
        for name in (
            *("accelerate", "chaos", "experiment-logs", "hugging-face", "watch", "lightning"),
            *("many-gpus", "own-script", "simulate"),
        )
    ),
}
"""Slow pages, whose commands other tests of `make test` run in another way."""

PROSE = {page: re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in PAGES}


def named(blocks: list[Block]) -> list[Any]:
    return [pytest.param(block, id=block.where) for block in blocks]


def pages_with_commands() -> list[Any]:
    pages = dict.fromkeys(block.page for block in RUN if block.language == "sh")
    ids = [str(page.relative_to(ROOT)) for page in pages]
    return [
        pytest.param(
            page,
            id=each,
            marks=[pytest.mark.xdist_group(each), *([pytest.mark.long] if each in LONG else [])],
        )
        for page, each in zip(pages, ids, strict=True)
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the results of runs that several pages share."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a `ddiloco` command that does not spend time on imports."""
    with contextlib.closing(Zygote(tmp_path_factory.mktemp("zygote"))) as zygote:
        yield zygote.command


@pytest.mark.parametrize("page", pages_with_commands())
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path, kept: Path, command: Path) -> None:
    with reader(tmp_path, kept, command) as somebody:
        for block in blocks_of(page):
            if "not run" in block.directives:
                continue
            if "file" in block.directives:
                (tmp_path / block.directives["file"]).write_text(block.text)
            elif block.language == "sh":
                somebody.run(block)
            elif "output" in block.directives:
                check_output(block, somebody.last_output)


def test_few_blocks_are_not_run_and_each_has_a_reason() -> None:
    reasons = {b.where: b.directives["not run"] for b in BLOCKS if "not run" in b.directives}
    assert all(len(reason) > 10 for reason in reasons.values())
    assert len(set(reasons.values())) <= 16, reasons


def test_only_known_languages_are_shown() -> None:
    known = {"sh", "python", "toml", "text"}
    assert {block.language for block in BLOCKS} <= known


WRITTEN = {"file", "not a run"}
TOML = [b for b in RUN if b.language == "toml" and not WRITTEN & b.directives.keys()]


@pytest.mark.parametrize("block", named(TOML))
def test_settings_are_accepted(block: Block) -> None:
    check_toml(block.text)


PYTHON = [b for b in RUN if b.language == "python" and "file" not in b.directives]


class Model(nn.Module):
    """The model of the snippets; it returns the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss


class Loader(list[torch.Tensor]):
    """Batches that support a loop which resumes at a position."""

    began_at = -1

    def __getitem__(self, which: Any) -> Any:
        self.began_at = which.start
        return super().__getitem__(which)


def names(run: LocalRun) -> dict[str, Any]:
    """Return the names that a snippet may use."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": [torch.randn(2, 8) for _ in range(10_000)],
        "auth_token": run.secret_file.read_text().strip(),
        "torch": torch,
    }


@pytest.mark.parametrize("block", named(PYTHON))
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "with syncer" not in block.directives:
        exec(compile(block.text, block.where, "exec"), {})
        return
    config = RunConfig(
        run={"folder": tmp_path / "run", "learners": 1, "max_steps": 16, "evaluator": False},
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1},
        syncer={"port": 0},
    )
    with contextlib.closing(LocalRun(config, learners=False, server=fork_server())) as run:
        run.start()
        given = names(run)
        text = block.text.replace("http://syncer:7070", run.addresses[0])
        text = text.replace("runs/homelab/token", str(run.secret_file))
        code = compile(text, block.where, "exec")
        if "interrupted after" in block.directives:
            after = int(block.directives["interrupted after"].split()[0])
            given["loader"], loader = Loader(given["loader"][:after]), given["loader"]
            exec(code, given)
            assert given["going_on"], "the run continues without it"
            given |= {**names(run), "loader": Loader(loader)}
        exec(code, given)
        if isinstance(given["loader"], Loader):
            assert given["loader"].began_at > 0
            assert given["learner"].steps == given["position"].batches
        if "learner" in given:
            given["learner"].close()


COMMAND = re.compile(r"(?:`|^|\| )ddiloco ([a-z]+)((?: [^`\n]*)?)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    not_run = [b.text for b in blocks_of(page) if "not run" in b.directives]
    for name, rest in COMMAND.findall("\n".join([PROSE[page], *not_run])):
        assert name in group.commands, f"{page}: ddiloco {name}"
        command = group.commands[name]
        if rest.strip() and hasattr(command, "commands"):
            subcommand = rest.split()[0]
            assert subcommand in command.commands, f"{page}: ddiloco {name}{rest}"
            command = command.commands[subcommand]
        known = {option for each in command.params for option in each.opts}
        options = set(re.findall(r"--[a-z-]+", rest))
        assert options <= known | {"--help"}, f"{page}: ddiloco {name}{rest}"


SETTING = re.compile(
    r"`(run|sync|outer|syncer|learner|data|launch|workload)\.(?!toml`)([a-z_.]+)[`= ]"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_in_the_text_exist(page: Path) -> None:
    for table, keys in SETTING.findall(PROSE[page]):
        if table == "learner" and hasattr(dd.Learner, keys):
            continue
        model: Any = RunConfig
        for key in [table, *keys.split(".")]:
            fields = getattr(model, "model_fields", {})
            assert key in fields, f"{page}: {table}.{keys}"
            kinds = [fields[key].annotation, *getattr(fields[key].annotation, "__args__", ())]
            model = next((each for each in kinds if hasattr(each, "model_fields")), None)
