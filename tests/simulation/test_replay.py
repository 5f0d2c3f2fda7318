"""`ddiloco replay`: a tape replays exactly, and a changed or truncated tape is detected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decoupled_diloco.tape.segments import lines_of, tapes_in


def ddiloco(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-m", "decoupled_diloco", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three virtual runs: two with the same seed, one with another."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 1), ("same", 1), ("other", 2)):
        arguments = ["simulate", "flaky-link", "--protocol-only", "--tape", name, "--seed", seed]
        done = ddiloco(*map(str, arguments), "--set", "run.max_steps=40", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def edited(source: Path, target: Path, edit: Callable[[list[str]], list[str]]) -> Path:
    """Copy a run and change the tape of its first learner."""
    (target / "tape").mkdir(parents=True)
    for path in tapes_in(source / "tape"):
        lines = [line.text.decode() for line in lines_of(path, [])]
        if path.name == "learner-0.jsonl":
            lines = edit(lines)
        (target / "tape" / path.name).write_text("".join(lines))
    return target


def test_every_process_of_a_run_replays_exactly(runs: Path) -> None:
    done = ddiloco("replay", "a", cwd=runs)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert {row[0] for row in rows} >= {"coordinator", "shard-0", "learner-0"}
    assert all(row[-2:] == ["the", "same"] for row in rows)
    events = {row[0]: int(row[2]) for row in rows}
    lines = lines_of(runs / "a" / "tape" / "shard-0.jsonl", [])
    assert events["shard-0"] == sum(b'"kind":"event"' in line.text for line in lines) > 100


@pytest.mark.long
def test_until_replays_only_the_beginning(runs: Path) -> None:
    def events(*options: str) -> int:
        done = ddiloco("replay", "a", *options, cwd=runs)
        assert done.returncode == 0
        return sum(int(line.split()[2]) for line in done.stdout.splitlines()[1:])

    assert 0 < events("--until-seconds", "10") < events("--until-seconds", "20") < events()


def test_an_order_that_the_machine_does_not_produce_is_shown(runs: Path, tmp_path: Path) -> None:
    def change(lines: list[str]) -> list[str]:
        index = next(i for i, line in enumerate(lines) if '"type":"Apply"' in line)
        record = json.loads(lines[index])
        record["data"]["discarded_tokens"] += 1
        lines[index] = json.dumps(record) + "\n"
        return lines

    folder = edited(runs / "a", tmp_path / "changed", change)
    done = ddiloco("replay", folder, cwd=runs)
    assert done.returncode == 1
    assert "1 differ" in done.stdout
    assert "on the tape: " in done.stdout
    assert '"discarded_tokens"' in done.stdout


@pytest.mark.parametrize("event", ['"Done"', '"Connected","data":{"peer":"shard-0"', '"Published"'])
def test_a_missing_event_is_reported_in_one_sentence(
    runs: Path, tmp_path: Path, event: str
) -> None:
    def remove(lines: list[str]) -> list[str]:
        index = next(i for i, line in enumerate(lines) if f'"type":{event}' in line)
        return lines[:index] + lines[index + 1 :]

    folder = edited(runs / "a", tmp_path / "hole", remove)
    done = ddiloco("replay", folder, cwd=runs)
    assert done.returncode in (1, 6), done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    assert "differ" in done.stdout or "the tape of learner-0 was changed" in done.stderr


def test_a_truncated_tape_replays_as_far_as_it_goes(runs: Path, tmp_path: Path) -> None:
    def truncate(lines: list[str]) -> list[str]:
        return [*lines[:200], lines[200][:30]]

    folder = edited(runs / "a", tmp_path / "truncated", truncate)
    done = ddiloco("replay", folder, cwd=runs)
    assert done.returncode == 0, done.stdout
    assert "line 201 is torn" in done.stdout


@pytest.mark.long
def test_runs_with_the_same_seed_are_equal_and_another_seed_differs(runs: Path) -> None:
    alike = ddiloco("replay", "a", "--diff", "same", cwd=runs)
    assert alike.returncode == 0, alike.stdout
    assert "same has the same records for every process" in alike.stdout
    parted = ddiloco("replay", "a", "--diff", "other", cwd=runs)
    assert parted.returncode == 1
    assert "learner-0 differs after " in parted.stdout
    first = parted.stdout.split("differs after")[1]
    here, there = first.split("  here:")[1].split("  there:")
    assert here.split() != there.split()[: len(here.split())], "the first difference is shown"


def test_a_missing_run_is_reported_in_one_sentence(runs: Path, tmp_path: Path) -> None:
    done = ddiloco("replay", tmp_path / "missing", cwd=runs)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
