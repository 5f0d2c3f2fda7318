"""Differential privacy in runs of the real processes, in virtual time (rule 25)."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from scipy import stats
from torch import Tensor

from decoupled_diloco.config import RunConfig, method
from decoupled_diloco.merge.accumulate import Accumulator
from decoupled_diloco.privacy.accountant import epsilon_spent
from decoupled_diloco.privacy.secure_sum import Opening
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import Made
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.page.document import state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.privacy_accounts import most_spent, privacy_of
from decoupled_diloco.show.report import render_report
from decoupled_diloco.show.status import status_of
from decoupled_diloco.show.terminal import render_status
from decoupled_diloco.syncer.contributions import Contributions
from decoupled_diloco.syncer.shard_tensors import OuterStep, ShardTensors
from decoupled_diloco.tape import TapeReader
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualRuntime
from replay_check import assert_replays
from worlds import worlds
from worlds.shrink import Changes

DP = {"clip": 0.5, "noise_multiplier": 2.0, "epsilon_max": 12.0, "delta": 1e-3}


def private(folder: Path, *, secure: bool = False, **dp: float) -> RunConfig:
    merge = {"rule": "mean", "weighting": "uniform", "buffers": "local"}
    if not secure:
        merge["norm_gate"] = 0
    return RunConfig(
        run={"name": "r", "folder": folder, "learners": 3, "max_steps": 60, "evaluator": False},
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1, "merge": merge},
        syncer={"shards": 2},
        data={"elastic": False},
        privacy={"dp": DP | dp, "secure_sums": secure},
        workload={},
    )


def system_of(config: RunConfig, folder: Path, seed: int = 1, ranks: int = 1) -> System:
    folder.mkdir(exist_ok=True)
    learners = [LearnerSpec(f"learner-{n}", step_seconds=1.0, ranks=ranks) for n in range(3)]
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


def clips_on(folder: Path) -> list[float]:
    """The clips after all merges in ascending order, as the tapes have them."""
    made = [each.value().result for each in TapeReader(folder) if each.type == "Done"]
    return sorted(each.clip for each in made if isinstance(each, Made) and each.clip is not None)


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_learner_clips_its_contributions_itself(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the shard, which clips them again, never sees more either."""
    verify, norms = Contributions.verify, list[float]()

    def seen(self: Contributions, fragment: int, *args: Any, **named: Any) -> float:
        norm = verify(self, fragment, *args, **named)
        assert self.mechanism is not None
        norms.append(norm / self.mechanism.clip_of(self.plan.fragments[fragment].numel))
        return norm

    monkeypatch.setattr(Contributions, "verify", seen)
    folder = tmp_path / "r"
    system = system_of(private(folder, clip=1e-3), folder, ranks=ranks)
    system.run(until=500.0, stop=lambda: system.finished)
    assert system.finished
    system.close()
    long = [norm for norm in norms if norm > 0.99]
    assert len(long) > 30
    assert max(long) < 1.01, "the codec rounds"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_opened_sum_has_the_noise_of_its_learners(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is 20 times as long as what the learners have trained, in each element."""
    open_sum, noise, needed = ShardTensors.open_sum, list[Tensor](), set[int]()

    def seen(self: ShardTensors, fragment: int, opening: Opening) -> None:
        open_sum(self, fragment, opening)
        (sums,) = self._accumulators[fragment].values()
        assert isinstance(sums, Accumulator)
        assert self.mechanism is not None
        needed.add(opening.cohort.needed)
        shares = len(opening.survivors) / opening.cohort.needed
        claimed = self.mechanism.noise_multiplier * self.mechanism.clip * sqrt(shares)
        noise.append(sums.state_dict()["sums"] / claimed)

    monkeypatch.setattr(ShardTensors, "open_sum", seen)
    folder = tmp_path / "r"
    limits = {"clip": 0.1, "noise_multiplier": 20.0}
    system = system_of(private(folder, secure=True, **limits), folder, ranks=ranks)
    system.run(until=500.0, stop=lambda: system.finished)
    assert system.finished
    system.close()
    assert needed == {2}
    assert len(noise) > 20
    assert stats.kstest(torch.cat(noise).numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("secure", [False, True])
def test_an_adaptive_clip_finds_the_norms_from_both_sides(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, ends, clips = ShardTensors.commit, list[float](), list[float]()

    def seen(self: ShardTensors, fragment: int, step: OuterStep) -> None:
        clips.append(step.after.clip)
        commit(self, fragment, step)

    monkeypatch.setattr(ShardTensors, "commit", seen)
    limits = {"noise_multiplier": 0.1, "epsilon_max": 3e4, "clip_quantile": 0.5, "clip_rate": 1.0}
    for first in (100.0, 1e-4):
        clips.clear()
        folder = tmp_path / f"{first}"
        system = system_of(private(folder, secure=secure, clip=first, **limits), folder)
        system.run(until=100.0)
        assert system.finished
        system.close()
        ends.append(first * exp(sum(map(log, clips[-6:])) / 6))
        assert clips_on(folder) == pytest.approx(sorted(first * clip for clip in clips), rel=1e-6)
    assert 0.01 < min(ends) < max(ends) < 3 * min(ends) < 3, "the firsts are six orders apart"


def test_a_learner_takes_part_in_no_sum_with_another_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is in units of the bound, so it would be another one."""
    monkeypatch.setattr(ShardTensors, "bounds", lambda self, fragment: (1e6,))
    folder = tmp_path / "r"
    system = system_of(private(folder, secure=True), folder)
    system.run(until=40.0)
    system.close()
    assert not merges_on(folder)


@pytest.mark.parametrize("secure", [False, True])
def test_the_limit_ends_the_part_of_learners_and_not_the_run(secure: bool, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    config = private(folder, secure=secure, periods=4)
    system = system_of(config, folder)
    system.run(until=500.0, stop=lambda: system.finished)
    assert system.finished
    system.close()
    merged = merges_on(folder)
    if secure:  # two learners are needed for a sum, so the third one stays below its limit
        assert max(merged.values()) == 4
    else:
        assert set(merged.values()) == {4}, "each learner took part in 4 merges of each fragment"
    assert len(merged) == 6
    run = read_run(folder)
    account = most_spent(run)
    assert account is not None
    assert (account.periods, account.periods_max) == (4, 4)
    assert account.epsilon is not None
    assert 0 < account.epsilon <= account.epsilon_max
    spent = epsilon_spent(DP["noise_multiplier"], 4, DP["delta"], discrete=secure)
    assert account.epsilon == spent, "a bound for discrete noise, exact for continuous noise"
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
    shown = 1 + sum(each.merges[0] == 4 for each in run.learners.values())
    assert console.export_text().count(spent) == shown >= 3, "of the run, and of each learner"
