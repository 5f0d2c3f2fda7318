"""Secure sums in real processes: learners, shards and relays that fail, and what is stored."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.tape.records import Record
from process.process_runs import (
    config_of,
    local_run,
    logs,
    output_of,
    records,
    send,
    wait,
    when,
)
from replay_check import assert_replays

PASSED_ON = {"SumClaim": "keys", "SumShares": "shares", "SumOpening": "shares", "SumStep": "text"}
"""The messages with keys and shares, and their fields with these."""

SECRET = re.compile(r"[A-Za-z0-9+]{40,}")
"""A text that may be a key or a share in base64, of at least 30 bytes. About half of them have no
"/", which a path has, too."""


def config(folder: Path, steps: int, learners: int = 3, **tables: Any) -> RunConfig:
    """Return a run with secure sums of at least two contributions."""
    tables["sync"] = {"quorum": 2, **tables.get("sync", {})}
    return config_of(
        folder,
        run={"max_steps": steps, "learners": learners},
        privacy={"secure_sums": True, "threshold": 2},
        **tables,
    )


def merged(folder: Path, shard: int = 0) -> list[Record]:
    """Return the merged rounds on a shard's tape."""
    if not (folder / "tape" / f"shard-{shard}.jsonl").exists():
        return []
    ended = [r for r in records(folder, f"shard-{shard}") if r.type == "RoundFinished"]
    return [r for r in ended if r.data["verdict"] == "merged"]


def merged_of(round: Record) -> set[str]:
    """Return the learners whose contributions a merged round has."""
    return {p["learner"] for p in round.data["participants"] if p["state"] == "folded"}


def all_took_part(folder: Path, learners: int, shards: int = 1) -> bool:
    rounds = [each for shard in range(shards) for each in merged(folder, shard)]
    names = {name for each in rounds for name in merged_of(each)}
    return names == {f"learner-{i}" for i in range(learners)}


def must_hold(folder: Path, run: LocalRun, shards: int = 1) -> None:
    """Check what holds for every run with secure sums."""
    assert_replays(folder)
    rounds = [each for shard in range(shards) for each in merged(folder, shard)]
    assert min(len(merged_of(each)) for each in rounds) >= 2
    must_keep_no_secret(folder)
    shown = output_of("status", str(folder))
    assert "finished" in shown
    number = rounds[len(rounds) // 2].data["round"]
    explained = " ".join(output_of("explain", "round", str(number), str(folder)).split())
    assert "learner-" in explained
    assert "Traceback" not in output_of("report", str(folder))
    assert (folder / "report.html").exists()


def must_keep_no_secret(folder: Path) -> None:
    """No file of the run has a key, a share or a mask of a sum."""
    found = 0
    for path in sorted((folder / "tape").glob("*.jsonl")):
        for record in records(folder, path.stem):
            message = record.data.get("message", {})
            field = PASSED_ON.get(message.get("type", ""))
            if field is not None:
                found += 1
                assert not message.get(field), f"{path}: {record}"
    assert found > 10, "the messages are on the tapes, without their texts"
    texts = [p for p in folder.rglob("*") if p.suffix in (".jsonl", ".log", ".json", ".journal")]
    for path in texts:
        for secret in SECRET.findall(path.read_text(errors="replace")):
            assert re.fullmatch(r"[0-9a-f]+", secret), f"{path}: {secret}"


@pytest.mark.smoke
def test_the_others_sums_go_on_without_a_killed_learner(tmp_path: Path) -> None:
    folder, away = tmp_path / "run", list[int]()

    def script() -> Iterator[None]:
        yield from when(lambda: all_took_part(folder, 3))
        send(run, "learner-2", signal.SIGKILL)
        away.append(len(merged(folder)))
        yield from when(lambda: len(merged(folder)) > away[0] + 4)
        away.append(len(merged(folder)))
        yield from when(lambda: any("learner-2" in merged_of(r) for r in merged(folder)[away[1] :]))

    with local_run(config(folder, 240)) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, logs(folder)
    assert len(away) == 2
    assert any("learner-2" in merged_of(each) for each in merged(folder)[away[1] :])
    must_hold(folder, run)


def test_sums_go_on_after_a_killed_shard_is_back(tmp_path: Path) -> None:
    """What it had received of a sum is lost, and the round opens again."""
    folder, before = tmp_path / "run", list[int]()

    def script() -> Iterator[None]:
        for _ in range(2):
            count = len(merged(folder))
            yield from when(lambda least=count + 4: len(merged(folder)) > least)
            before.append(len(merged(folder)))
            send(run, "shard-0", signal.SIGKILL)
        yield from when(lambda: len(merged(folder)) > before[-1] + 4)

    with local_run(config(folder, 200, syncer={"shards": 2})) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, logs(folder)
    assert len(before) == 2
    assert {each.data["version"]["term"] for each in merged(folder)} >= {1, 2, 3}
    assert all_took_part(folder, 3, shards=2)
    must_hold(folder, run, shards=2)


@pytest.mark.parametrize("lost", [False, True], ids=["steady", "relay-killed"])
def test_relays_add_up_masked_contributions(tmp_path: Path, lost: bool) -> None:
    folder = tmp_path / "run"
    sites = [{"name": "site-a", "learners": [0, 1]}, {"name": "site-b", "learners": [2, 3]}]
    slow = {"sync_every": 16, "overlap_steps": 8}

    def sums() -> list[Record]:
        begun = (folder / "tape" / "shard-0.jsonl").exists()
        return [r for r in records(folder, "shard-0") if r.type == "SumArrived"] if begun else []

    def script() -> Iterator[None]:
        yield from when(lambda: {r.data["relay"] for r in sums()} == {"site-a", "site-b"})
        if lost:
            count = len(merged(folder))
            send(run, "relay-site-a", signal.SIGKILL)
            yield from when(lambda: len(merged(folder)) > count + 4)

    with local_run(config(folder, 320, learners=4, sync=slow, sites=sites)) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, logs(folder)
    assert max(len(r.data["asks"]) for r in sums()) == 2
    assert all_took_part(folder, 4)
    must_hold(folder, run)


def test_a_learner_of_two_ranks_takes_part(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = {"ranks": [2, 1], "parallelism": ["ddp", "plain"], "sync_ranks": 1}
    with local_run(config(folder, 80, learners=2, learner=ranks, data={"elastic": False})) as run:
        run.start()
        outcome = wait(run)
    assert outcome.finished, logs(folder)
    assert all_took_part(folder, 2)
    must_hold(folder, run)
