"""Extract the commands and snippets of the pages, and run them like a reader.

A page's blocks run in order in a separate folder. It contains what a clone of the repository has in
addition to the package: recipes, scenarios, examples. Hidden comments before a block describe how a
test differs from a reader:

| comment | meaning |
|---|---|
| `test: set KEY=VALUE …` | `ddiloco` commands of the block use these settings |
| `test: small` | the same with a model whose steps take milliseconds |
| `test: background until TEXT` | the next blocks run when it has printed the text |
| `test: wait for FILE … WORD` | the block starts when the files contain the word |
| `test: end of the background` | the block starts when all background commands have succeeded |
| `test: first COMMAND` | this command runs before the block |
| `test: fails CODE` | the block ends with this exit code |
| `test: output` | the output of the previous block; `…` matches anything |
| `test: file NAME` | the block is a file that the reader writes |
| `test: with syncer` | `http://syncer:7070` and the loop's names (model, loader, …) exist |
| `test: on another loopback address` | SYNCER is an address of this machine |
| `test: once for all pages` | the same block runs once, and its `runs` are copied for other pages |
| `test: interrupted after N batches` | the loop ends early, and the block runs a second time |
| `test: not a run` | TOML that is not a run's file |
| `test: not run: REASON` | the block is not run |
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from decoupled_diloco.config import RunConfig
from free_ports import free_ports

ROOT = Path(__file__).parents[2]
GENERATED = {
    path.with_name(path.name.replace("_page.py", ".md"))
    for path in (ROOT / "docs/reference").glob("*_page.py")
}
PAGES = sorted(
    {*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - GENERATED
)
SECONDS_MAX = 240.0
SMALL = tuple(
    f"workload.options.{option}"
    for option in ("layers=1", "width=32", "heads=2", "context=16", "corpus_bytes_max=200000")
)

_BLOCK = re.compile(
    r"(?P<comments>(?:^ *<!-- test: .*? -->\n)*)^(?P<indent> *)```(?P<language>\w+)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
WORDS = (
    "background until",
    "end of the background",
    "fails",
    "file",
    "first",
    "interrupted after",
    "not a run",
    "not run",
    "on another loopback address",
    "once for all pages",
    "output",
    "set",
    "small",
    "wait for",
    "with syncer",
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    directives: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return all fenced blocks of a page, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in _BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + match["comments"].count("\n") + 1
        directives = dict(_directive(comment) for comment in match["comments"].splitlines())
        inner = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        found.append(Block(page, line, match["language"], inner, directives))
    assert text.count("```") == 2 * len(found), f"{page}: a block without a language"
    return found


def _directive(comment: str) -> tuple[str, str]:
    text = comment.strip().removeprefix("<!-- test: ").removesuffix(" -->")
    for word in WORDS:
        if text.startswith(word):
            return word, text.removeprefix(word).lstrip(": ")
    raise AssertionError(f"not known: {comment}")


@dataclass
class Background:
    """A command that continues while other blocks run."""

    process: subprocess.Popen[bytes]
    output: Path

    def until(self, text: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while text not in self.output.read_text(errors="replace"):
            printed = f"{text!r} was not printed: {self.output.read_text(errors='replace')}"
            assert self.process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.1)

    def ended(self) -> None:
        code = self.process.wait(SECONDS_MAX)
        assert code == 0, self.output.read_text(errors="replace")


@dataclass
class Reader:
    """Executes the blocks of a page in a separate folder, like a reader."""

    folder: Path
    kept: Path
    command: Path
    background: list[Background] = field(default_factory=list)
    last_output: str = ""

    def __post_init__(self) -> None:
        for name in ("recipes", "examples"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.folder / name)
        (self.folder / "tests").symlink_to(ROOT / "tests")  # `worlds`
        self._port = _two_free_ports()
        tools = self.folder / ".tools"
        tools.mkdir()
        (tools / "ddiloco").write_text(
            "#!/bin/sh\n"
            'more=""\n'
            'case "$1" in\n'
            f'  syncer) more="--set syncer.port={self._port} $SETS";;\n'
            '  train|learner|evaluator|simulate|chaos) more="$SETS";;\n'
            "esac\n"
            f'exec {self.command} "$@" $more\n'
        )
        (tools / "ddiloco").chmod(0o755)
        self._path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(self, block: Block) -> None:
        """Run a shell block."""
        directives = block.directives
        if "end of the background" in directives:
            while self.background:
                self.background.pop(0).ended()
        if "wait for" in directives:
            *names, text = directives["wait for"].split()
            for name in names:
                self._wait_for(name, text)
        if "background until" in directives:
            self.background.append(self._start(block))
            self.background[-1].until(directives["background until"])
        elif "once for all pages" in directives:
            self._run_once(block)
        else:
            self._run(block)

    def _run_once(self, block: Block) -> None:
        """Run a block for the first page that has it; other pages receive a copy of its results."""
        what = f"{block.text}{block.directives}".encode()
        kept = self.kept / hashlib.sha256(what).hexdigest()
        if not kept.exists():
            self._run(block)
            shutil.copytree(self.folder / "runs", kept)
        else:
            shutil.copytree(kept, self.folder / "runs", dirs_exist_ok=True)

    def _run(self, block: Block) -> None:
        done = subprocess.run(
            self._command(block),
            cwd=self.folder,
            env=self._environment(block),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
        )
        self.last_output = done.stdout
        assert done.returncode == int(block.directives.get("fails", 0)), (
            f"{block.where}:\n{done.stdout}"
        )

    def _command(self, block: Block) -> list[str]:
        ports = {"7070": str(self._port), "7071": str(self._port + 1)}
        text = re.sub("707[01]", lambda found: ports[found[0]], block.text)
        if "on another loopback address" in block.directives:
            text = text.replace("SYNCER", "127.0.0.2")
        text = f"{block.directives.get('first', '')}\n{text}"
        return ["bash", "-euo", "pipefail", "-c", text]

    def _environment(self, block: Block) -> dict[str, str]:
        chosen = block.directives.get("set", "").split()
        chosen += SMALL if "small" in block.directives else ()
        sets = " ".join(f"--set {each}" for each in chosen)
        own = {"PATH": self._path, "SETS": sets, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        return {**os.environ, **own}

    def _start(self, block: Block) -> Background:
        output = self.folder / f".output-{block.line}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._command(block),
                cwd=self.folder,
                env=self._environment(block),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Background(process, output)

    def _wait_for(self, name: str, text: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        path = self.folder / name
        while not (path.exists() and text in path.read_text(errors="replace")):
            assert time.monotonic() < deadline, f"{name} never had {text!r}"
            time.sleep(0.1)

    def close(self) -> None:
        """End background commands, like Ctrl-C in their terminal."""
        for each in self.background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGINT)
        for each in self.background:
            try:
                each.process.wait(240)
            except subprocess.TimeoutExpired:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()


@contextlib.contextmanager
def reader(folder: Path, kept: Path, command: Path) -> Iterator[Reader]:
    """Yield a reader, and end its background commands; keep the results that several pages need."""
    somebody = Reader(folder, kept, command)
    try:
        yield somebody
    finally:
        somebody.close()


def _two_free_ports() -> int:
    """Return a free port whose successor is free too."""
    while True:
        port = free_ports(1)[0]
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def check_output(block: Block, printed: str) -> None:
    """Compare an output block line by line, in order; ``…`` matches anything.

    The last of several decimals may differ, because processors round sums differently.
    """
    rest = printed
    for line in filter(None, map(str.strip, block.text.splitlines())):
        pattern = ".*".join(re.escape(part.strip()) for part in line.split("…"))
        pattern = re.sub(r"(\\\.\d+)\d(?!\d)", r"\1\\d", pattern)
        match = re.search(pattern.replace(r"\ ", r"\s+"), rest)
        assert match, f"{block.where}: {line!r} was not printed in:\n{printed}"
        rest = rest[match.end() :]


def check_toml(text: str) -> None:
    """Check a run's file, or some of its tables.

    Raises:
        ConfigError: a setting that does not exist or does not fit.
    """
    tables = tomllib.loads(text)
    run = tables.setdefault("run", {})
    if not {"max_steps", "max_tokens"} & run.keys():
        run["max_steps"] = 1
    RunConfig(**tables)
