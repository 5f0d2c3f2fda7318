"""What `ddiloco plan` says of a link with a set rate, against a real run over it."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.plan.inputs import read_run
from decoupled_diloco.plan.network import HUB, Link, Network, Site
from decoupled_diloco.plan.rounds import simulate
from decoupled_diloco.plan.setting import Model, Setting
from decoupled_diloco.protocol.options import Options
from network.spaces import FAR, FAR_ADDRESS, NEAR, link, unavailable

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are here"),
]

STEP_SECONDS, STEPS, WARM, MBIT = 0.5, 56, 16, 0.6


def test_the_rounds_that_a_slow_link_bears(tmp_path: Path) -> None:
    """Half of what is due; a busy machine answers late, hence the wide margins."""
    (tmp_path / "token").write_text("a secret")
    config = RunConfig(
        run={
            "folder": tmp_path / "run",
            "learners": 2,
            "budget_steps": STEPS,
            "evaluator": False,
        },
        sync={"fragments": 8, "period": 8, "overlap": 2},
        syncer={"host": FAR_ADDRESS, "port": 7070, "token_file": tmp_path / "token"},
        workload={
            "name": "paced",
            "options": {
                "step_seconds": STEP_SECONDS,
                "corpus_bytes_max": 200_000,
                "warmup_steps": 0,
                "batch_size": 1,
            },
        },
    )
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config))
    with link(tmp_path, mbit=MBIT) as made:
        made.start(FAR, "syncer", str(path), "--shard", "0")
        for index in range(2):
            made.start(NEAR, "learner", str(path), "--index", str(index))
        deadline = time.monotonic() + 200
        while any(process.poll() is None for process in made.started):
            assert time.monotonic() < deadline, made.logs()
            time.sleep(0.2)
        assert all(process.returncode == 0 for process in made.started), made.logs()
    tape = tmp_path / "run" / "tape"
    steps = [r.at for r in TapeReader(tape / "learner-0.jsonl") if r.type == "StepFinished"]
    typical = sorted(b - a for a, b in pairwise(steps))[len(steps) // 2]
    if typical > 1.25 * STEP_SECONDS:
        pytest.skip(
            f"the machine is too busy for the pace: a step of {STEP_SECONDS} s took "
            f"{typical:.2f} s, so the link is not what a round waits for"
        )
    begin, end = steps[WARM], steps[-8]
    merged = [
        r
        for r in TapeReader(tape / "shard-0.jsonl")
        if r.type == "RoundFinished" and r.data["verdict"] == "merged" and begin < r.at <= end
    ]
    kept = len(merged) / (len(steps) - 8 - WARM)

    found, rate = read_run(config), MBIT * 1e6 / 8
    # tbf holds back up to 0.2 s.
    network = Network((Site("near", 2, Link(rate, rate, 0.2)),), HUB, Link(math.inf, math.inf))
    model = Model(found.params, found.layers or 1, STEP_SECONDS)
    plan = simulate(model, Setting(Options(fragments=8, period=8, overlap=2)), network)
    assert 0.4 < plan.kept < 0.6, "the link bears about half of it"
    assert kept == pytest.approx(plan.kept, abs=0.2)
