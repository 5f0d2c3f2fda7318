"""Hundreds of unauthenticated connections to a shard: learners neither wait nor fail to join.

No log fills up.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from decoupled_diloco.launch.local import LocalRun
from process import stranger_clients
from process.process_runs import (
    STEP_SECONDS_MAX,
    config_of,
    health,
    local_run,
    longest_step,
    until,
)

COUNT = 400
SECONDS = 14.0
"""Longer than an unauthenticated connection may stay."""


def epoch(run: LocalRun, name: str) -> int:
    """Return a learner's incarnation according to its tape; a dead learner is restarted."""
    run.supervisor.poll()
    run.followed.poll()
    learner = run.followed.run.learners.get(name)
    return 0 if learner is None else learner.epoch


def test_four_hundred_unauthenticated_connections_delay_no_learner(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", run={"max_steps": 100_000, "learners": 3})
    with local_run(config) as run:
        run.start()
        until(lambda: len(run.supervisor.children) >= 4, "all processes")
        until(lambda: epoch(run, "learner-2") and run.followed.run.global_step > 5, "a few steps")
        address = run.addresses[0]
        host, _, port = address.rpartition("://")[2].rpartition(":")
        crowd = stranger_clients.start(address, COUNT, SECONDS)
        with socket.create_connection((host, int(port)), timeout=SECONDS + 10) as silent:
            time.sleep(3)
            before = epoch(run, "learner-2")
            run.supervisor.kill(
                "learner-2", restart=True
            )  # it returns while the other connections are open
            until(lambda: epoch(run, "learner-2") > before, "a learner that joins beside strangers")
            waits = []
            while crowd.poll() is None:
                began = time.monotonic()
                assert health(address)
                waits.append(time.monotonic() - began)
                time.sleep(0.2)
            assert silent.recv(100) == b"", "silent connections are closed"
        told = json.loads(crowd.communicate()[0])
        assert told["dialled"] >= COUNT
        assert told["closed"] > COUNT / 2, told
        assert max(waits) < 1.0, sorted(waits)[-3:]
        for name in ("learner-0", "learner-1"):
            assert run.supervisor.children[name].process.poll() is None
        log = (run.path / "logs" / "shard-0.log").read_text()
        assert "Traceback" not in log
        assert len(log) < 100_000
    for name in ("learner-0", "learner-1"):
        assert longest_step(run.path, name) < STEP_SECONDS_MAX
