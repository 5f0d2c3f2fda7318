"""`ddiloco chaos`: real processes with a scenario's faults, and the verdict on their tapes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.tape import TapeReader
from decoupled_diloco_lab.chaos import spaces
from process.process_runs import command, config_file, orphans, stopped_at_exit, until

ACCEPTED_MIN = 0.8
"""On a busy machine, processes take ten seconds to start. Training in that time is lost with a
learner that is then killed.
"""


def chaos(folder: Path, *arguments: str, seconds: float = 280.0) -> tuple[int, str]:
    given = (*arguments, "--set", f"run.folder={folder}")
    with stopped_at_exit(command("chaos", *given)) as process:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output


def verdict(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "chaos.json").read_text()))


def event(**keys: object) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(["\n[[events]]", *lines, ""])


def story(folder: Path, *events: str, head: str = "") -> tuple[str, str]:
    """Return the two arguments: a run and its scenario."""
    path = folder / "story.toml"
    path.write_text("".join([head, *events]))
    run = config_file(
        folder / "run",
        run={"learners": 3, "max_steps": 130},
        syncer={"shards": 2},
        sync={"apply": {"alignment": "carry", "missed": "rebase"}},
        workload={"step_seconds": 0.3},
    )
    return str(run), str(path)


def test_every_kind_of_process_is_killed_five_times(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    least = ("--accepted-min", str(ACCEPTED_MIN))
    code, output = chaos(folder, "chaos-short", *least, seconds=380.0)
    assert code == 0, output
    found = verdict(folder)
    assert found["kept"] is True
    assert "verdict: every promise was kept" in output
    kills = [r.data["processes"] for r in TapeReader(folder) if r.data.get("kind") == "kill"]
    struck = [name for names in kills for name in names]
    assert min(struck.count(name) for name in ("shard-0", "shard-1", "evaluator")) >= 5
    assert sum(name.startswith("learner-") for name in struck) == 5
    ended = [r.data["name"] for r in TapeReader(folder) if r.data.get("signal") == signal.SIGKILL]
    assert sorted(ended) == sorted(struck), "exactly the intended processes were killed"


def test_links_and_disks_fail_in_every_way(tmp_path: Path) -> None:
    events = [
        event(kind="delay", target="learner-0", delay_seconds=0.1, at_seconds=2, for_seconds=5),
        event(kind="loss", target="learner-1", share=0.05, at_seconds=2, for_seconds=5),
        event(kind="corrupt", target="learner-2", share=0.05, at_seconds=2, for_seconds=5),
        event(kind="break", target="learners", at_seconds=8),
        event(kind="cut", target="learner-0", direction="up", at_seconds=9, for_seconds=3),
        event(kind="cut", target="shard-1", at_seconds=13, for_seconds=2),
        event(kind="vanish", target="learner-1", at_seconds=14, for_seconds=2),
        event(kind="restart", target="learner-2", at_seconds=17),
        event(kind="restart", target="shard-1", at_seconds=19),
        event(kind="disk-lost", target="shard-1", at_seconds=24, for_seconds=1),
    ]
    if not spaces.unavailable("mount", "umount"):
        events.append(event(kind="disk-full", target="shard-0", at_seconds=20, for_seconds=4))
    run, path = story(tmp_path, *events)
    folder = tmp_path / "run"
    code, output = chaos(folder, run, path, "--accepted-min", "0.5", seconds=180.0)
    assert code == 0, output
    records = list(TapeReader(folder))
    told = {r.data["kind"] for r in records if r.type == "FaultInjected"}
    assert len(told) == len({e.split('"')[1] for e in events})
    failed = [(r.data["order"]["type"], r.data["reason"]) for r in records if r.type == "Failed"]
    spoilt = [r for r in records if r.type in ("BodyCorrupt", "Lost")]
    fetched_in_vain = any(order == "Fetch" for order, _ in failed)
    assert spoilt or fetched_in_vain, "something was corrupt, or cut off"
    if "disk-full" in told:
        full = [reason for order, reason in failed if order == "Merge" and "No space" in reason]
        assert full, "the kernel had no space"
        assert list((folder / "durable" / "shard-0").glob("*.safetensors")), (
            "the run is in the folder"
        )


@pytest.mark.skipif(
    bool(spaces.unavailable("ip", "tc")), reason=spaces.unavailable("ip", "tc") or "available"
)
def test_a_link_has_its_rate_and_can_be_throttled(tmp_path: Path) -> None:
    head = """
[[learners]]
count = 2
step_seconds = 0.3

[[learners]]
name = "far"
step_seconds = 0.3
link = "dsl"

[[links]]
name = "dsl"
latency_seconds = 0.02
up = "2Mbit/s"
down = "2Mbit/s"
"""
    throttle = event(kind="throttle", target="dsl", factor=50.0, at_seconds=5, for_seconds=12)
    run, path = story(tmp_path, throttle, head=head)
    folder = tmp_path / "run"
    least = ("--accepted-min", "0.5", "--participation-min", "0.8")
    shorter = ("--set", "run.max_steps=100", *least)
    code, output = chaos(folder, run, path, *shorter)
    assert code == 0, output
    records = list(TapeReader(folder))
    begin, end = (
        next(r.wall for r in records if r.type == kind) for kind in ("FaultInjected", "FaultEnded")
    )
    rounds = [r for r in records if r.type == "RoundFinished"]
    late = [
        max((p["delivered_seconds"] or 9.0) for p in r.data["participants"])
        for r in rounds
        if begin + 1 < r.wall < end and r.data["participants"]
    ]
    assert late
    assert max(late) > 0.3, "payloads were slow"
    evicted = [r for r in records if r.type == "Evict" and "lease" in r.data["reason"]]
    assert not evicted, "heartbeats pass"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Including a stopped process, which cannot notice that its parent has ended."""
    pause = event(kind="pause", target="learner-1", at_seconds=0.5)
    cut = event(kind="cut", target="learner-0", at_seconds=0.5)
    run, path = story(tmp_path, pause, cut)
    folder = tmp_path / "run"
    with stopped_at_exit(command("chaos", run, path, "--set", f"run.folder={folder}")) as process:
        tape = folder / "tape" / "launcher.jsonl"
        until(lambda: tape.exists() and '"pause"' in tape.read_text(), "the pause", 60.0)
        time.sleep(0.5)
        os.kill(process.pid, number)
        output, _ = process.communicate(timeout=240)
        assert process.returncode in (130, -signal.SIGKILL), output
    until(lambda: not orphans(folder), "every process has ended", 30.0)


@pytest.mark.smoke
def test_faults_that_real_processes_cannot_have_are_rejected_at_once(tmp_path: Path) -> None:
    jump = event(kind="clock-jump", target="shard-0", jump_seconds=30, at_seconds=5)
    folder = tmp_path / "run"
    code, output = chaos(folder, *story(tmp_path, jump))
    assert code == 2
    assert "clock that it reads cannot be set: use --virtual" in output
    assert not folder.exists()
    code, output = chaos(folder, *story(tmp_path, jump), "--virtual", "--protocol-only")
    assert "verdict: every promise was kept" in output
