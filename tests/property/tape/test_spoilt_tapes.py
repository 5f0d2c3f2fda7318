"""For any corrupted tape, the rest is reported, or one sentence explains why not.

A report is read after a failure, which may have affected the tape, too.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.console import SteadyConsole
from decoupled_diloco.show.report import render_report
from decoupled_diloco.show.terminal import print_summary
from worlds.scene import draw

SEED = 5
"""Seed of a world with crashes."""

VALUES = (
    *(None, True, "", "x", "<script>", [], {}, [[[]]], {"type": "Version"}),
    *(-1, 0, 10**30, -0.5, 1e308, -1e308, float("nan"), float("inf")),
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A few hundred lines of the tape of a virtual run with crashes."""
    folder = tmp_path_factory.mktemp("whole")
    scene = draw(SEED, folder / "run", tapes=folder)
    scene.system.run(until=scene.calm_at, stop=lambda: scene.system.finished)
    scene.system.close()
    every = [line for f in sorted(folder.rglob("*.jsonl")) for line in f.read_text().splitlines()]
    assert len(every) > 500
    return every[:700]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value, as a container and a key."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def corrupted(line: str, rng: random.Random) -> bytes:
    """Return a line with changed bytes, a changed value, or a missing field."""
    if rng.random() < 0.3:
        raw = bytearray(line.encode())
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    record = json.loads(line)
    container, key = rng.choice(list(places(record)))
    if isinstance(container, dict) and rng.random() < 0.15:
        del container[key]
    else:
        container[key] = rng.choice(VALUES)
    return json.dumps(record).encode()


@pytest.mark.parametrize("seed", range(30))
def test_a_corrupted_tape_is_reported_without_a_crash(
    lines: list[str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    raw = [
        corrupted(line, rng) if rng.random() < rng.choice([0.0, 0.02, 0.2]) else line.encode()
        for line in lines
    ]
    path = tmp_path / "tape.jsonl"
    path.write_bytes(b"\n".join(raw)[: rng.choice([None, -7])])
    try:
        history = read_run(path)
    except StorageError as error:
        if "event tape with schema" not in str(error):  # a spoilt version is a version
            raise
        return
    print_summary(history, (), SteadyConsole(file=io.StringIO(), width=80))
    page = render_report(history)
    assert page.rstrip().endswith("</html>")
    assert "<script" not in page
