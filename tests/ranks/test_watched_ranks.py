"""Only rank 0 of a multi-rank learner exposes metrics and logs, although all ranks configure it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from free_ports import free_ports
from integration.real_system import System, scraped
from process.process_runs import scalars, until
from ranks.rank_learners import ranks
from ranks.rank_program import BATCH, Job


@pytest.fixture
def system(tmp_path: Path):
    system = System(tmp_path / "run", run={"learners": 1, "max_steps": 10_000})
    system.start()
    yield system
    system.close()


def test_rank_0_reports_for_all_ranks(system: System, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    job = Job(
        *("fsdp", system.addresses[0], "one", tmp_path),
        steps=60,
        pause=0.05,
        metrics_address=f"127.0.0.1:{port}",
        tracker=f"tensorboard:{tmp_path / 'board'}",
    )
    with ranks(job, 2) as learner:
        until(lambda: "step 10\n" in learner.log(1), "it trains", 60)
        found = scraped(f"http://127.0.0.1:{port}/metrics")
        learner.require_success()
    steps = found["ddiloco_learner_steps_total"]
    assert 8 <= steps <= 60
    # The tokens of both ranks' halves; those of the last two steps may be an estimate.
    a_step = found["ddiloco_learner_tokens_total"] / steps
    assert a_step == pytest.approx(BATCH * 4, rel=0.01)
    assert found["ddiloco_learner_loss"] > 0
    assert found["ddiloco_learner_step_overhead_seconds_count"] > 0
    assert f"one: metrics at http://127.0.0.1:{port}/metrics" in learner.log(0)
    assert "metrics at" not in learner.log(1)
    assert len(list((tmp_path / "board").glob("events*"))) == 1, "one rank logs"
    logged = scalars(tmp_path / "board")
    assert {"loss", "diloco/tokens", "diloco/run_step"} <= logged.keys()


def test_an_occupied_port_ends_all_ranks(system: System, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = Job("ddp", system.addresses[0], "one", tmp_path, metrics_address=f"127.0.0.1:{port}")
        with ranks(job, 2) as learner:
            assert set(learner.wait(60)) == {1}
            assert f"cannot listen on 127.0.0.1:{port}" in learner.log(0)
