"""Real processes that record payloads: these reproduce the run's weights, bit for bit."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.config.method import plan_of
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.merge.plan import values_of
from decoupled_diloco.syncer.payload_archive import PAYLOADS, read_body, read_layout
from decoupled_diloco.syncer.result import values_in
from decoupled_diloco_lab.simulate.weights_replay import replay_weights
from process.process_runs import (
    config_of,
    health,
    local_run,
    output_of,
    records,
    send,
    wait,
    when,
)
from replay_check import assert_replays


def running(run: LocalRun, name: str) -> bool:
    """Whether a shard is running."""
    return health(run.addresses[int(name[-1])]).get("phase") == "running"


@pytest.mark.parametrize("disk", ["kept", "lost", "none"])
def test_weights_are_reproduced_after_any_fault_of_the_shards(tmp_path: Path, disk: str) -> None:
    """Both shards are killed: with their disks, with lost disks, and with none."""
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"learners": 2, "max_steps": 400},
        syncer={"shards": 2, "record_payloads": True, "persist": disk != "none"},
        sync={"quorum": 2},
    )

    def script() -> Iterator[None]:
        for name, share in (("shard-1", 0.05), ("shard-0", 0.1)):
            yield from when(lambda share=share: run.used_budget() > share)
            child = run.supervisor.children[name]
            send(run, name, signal.SIGKILL)
            yield from when(lambda child=child: not child.running)
            if disk == "lost":
                shutil.rmtree(folder / "durable" / name)
            yield from when(lambda name=name: running(run, name))

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script())
    assert outcome.finished, outcome.reason
    for result in replay_weights(folder):
        assert sum(r.kind == "start" for r in records(folder, result.process)) == 2
        assert not result.differences
        assert result.unknown == 0, result.notes
        assert result.final == "the same"
        assert result.versions > 20
    assert_replays(folder)


def payloads_of(folder: Path, **sync: object) -> Path:
    """Train a short run that records its payloads; return its folder."""
    settings = {"shards": 2, "record_payloads": True}
    config = config_of(folder, run={"max_steps": 24}, syncer=settings, sync=sync)
    with local_run(config) as run:
        run.start()
        outcome = wait(run)
    assert outcome.finished, outcome.reason
    return folder


@pytest.mark.smoke
def test_a_new_run_continues_from_weights_without_a_learner(tmp_path: Path) -> None:
    first = payloads_of(tmp_path / "first")
    text = output_of("replay", str(first), "--without", "learner-1", "--from", "8")
    assert "contributions are left out" in text
    file = first / "weights-without-learner-1.safetensors"
    second = payloads_of(tmp_path / "second", initial_weights=file)
    plan = plan_of(read_layout(second / PAYLOADS / "shard-0"), config_of(second))
    for fragment, values in values_in(file, plan, range(4)).items():
        body = read_body(second / PAYLOADS / f"shard-{fragment % 2}", f"file/{fragment}")
        assert body is not None
        assert values_of(body, len(values)).equal(values)
