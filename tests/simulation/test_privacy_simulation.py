"""Differential privacy in runs of the real processes, in virtual time (rule 25)."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decoupled_diloco.config import RunConfig, method
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.page.document import state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.privacy_accounts import most_spent, privacy_of
from decoupled_diloco.show.report import render_report
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.terminal import render_status
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualRuntime
from replay_check import assert_replays
from worlds import worlds
from worlds.shrink import Changes

DP = {"clip": 0.5, "noise_multiplier": 2.0, "epsilon_max": 12.0, "delta": 1e-3}


def private(folder: Path, **dp: float) -> RunConfig:
    merge = {"rule": "mean", "weighting": "uniform", "norm_gate": 0, "buffers": "local"}
    return RunConfig(
        run={"name": "r", "folder": folder, "learners": 3, "max_steps": 60, "evaluator": False},
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1, "merge": merge},
        syncer={"shards": 2},
        data={"elastic": False},
        privacy={"dp": DP | dp},
        workload={},
    )


def system_of(config: RunConfig, folder: Path, seed: int = 1) -> System:
    folder.mkdir(exist_ok=True)
    learners = [LearnerSpec(f"learner-{n}", step_seconds=1.0) for n in range(3)]
    return System(config, learners, folder, seed=seed, tapes=folder)


def merges_on(folder: Path) -> Counter[tuple[str, int]]:
    """The merged contributions of each learner and fragment."""
    found = Counter[tuple[str, int]]()
    for shard in read_run(folder).shards.values():
        for round in shard.rounds:
            assert round.result is not None
            if round.result.verdict == "merged":
                folded = {p.learner for p in round.result.participants if p.state == "folded"}
                found.update((learner, round.result.fragment) for learner in folded)
    return found


def test_a_killed_shard_continues_the_account_and_repeats_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []
    random_bytes = VirtualRuntime.random_bytes

    def recorded(self: VirtualRuntime, count: int) -> bytes:
        drawn.append(random_bytes(self, count)[:64])
        return random_bytes(self, count)

    monkeypatch.setattr(VirtualRuntime, "random_bytes", recorded)
    folder = tmp_path / "r"
    system = system_of(private(folder), folder)
    system.run(until=30.0)
    host = system.acting(0)
    before = {p: dict(f.merges) for p, f in host.machine.state.fragments.items()}
    system.crash(host)
    system.restart(host)
    system.run(until=45.0)
    after = {p: dict(f.merges) for p, f in host.machine.state.fragments.items()}
    system.run(until=500.0, stop=lambda: system.finished)
    assert system.finished
    system.close()
    assert all(count > 0 for counts in before.values() for count in counts.values())
    for fragment, counts in before.items():
        assert all(after[fragment][name] >= count for name, count in counts.items())
    assert len(set(drawn)) == len(drawn) > 20
    run, merged = read_run(folder), merges_on(folder)
    for learner in run.learners.values():
        for fragment, count in learner.merges.items():
            # A merge that the crash interrupted is accounted for, too.
            assert merged[learner.name, fragment] <= count <= merged[learner.name, fragment] + 1
    assert_replays(folder)


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_random_worlds_keep_their_promises_with_accounts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late contributions wait for their own merges, and all training still reaches a version."""

    def accounted(**fields: Any) -> Options:
        return Options(**fields | {"merges_max": 10**6 if fields["wait"] == "never" else None})

    monkeypatch.setattr(method, "Options", accounted)
    assert worlds.failure(seed, Changes()) is None


def test_the_limit_ends_the_part_of_learners_and_not_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    config = private(folder, periods=4)
    system = system_of(config, folder)
    system.run(until=500.0, stop=lambda: system.finished)
    assert system.finished
    system.close()
    merged = merges_on(folder)
    assert set(merged.values()) == {4}, "each learner took part in four merges of each fragment"
    assert len(merged) == 6
    run = read_run(folder)
    account = most_spent(run)
    assert account is not None
    assert (account.periods, account.periods_max) == (4, 4)
    assert account.epsilon is not None
    assert 0 < account.epsilon <= account.epsilon_max
    status = status_of(run, run.latest)
    assert all(
        learner.privacy == privacy_of(run, run.learners[learner.name])
        for learner in status.learners
    )
    assert any("spent its privacy budget" in text for _, text in status.remarks)
    page = state_of_page(run, status, PageHistory())
    spent = f"ε {account.epsilon:.3g} of 12"
    detail = f"{account.learner}, after 4 of 4 periods, with δ = 0.001"
    assert ["privacy spent, at most", spent, detail] in page["cards"]
    assert spent in render_report(run)
    console = Console(width=120, file=StringIO(), record=True)
    console.print(render_status(status, width=120))
    assert console.export_text().count(spent) == 4, "of the run, and of each learner"
