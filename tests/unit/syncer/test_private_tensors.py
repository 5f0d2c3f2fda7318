"""A shard clips contributions and adds noise to merges (rule 25)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.merge import body_digest, receive
from decoupled_diloco.privacy.dp import Mechanism
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.syncer.durable import ShardDisk
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from unit.plans import plan_of

N = 4000
CLIP, Z, RATE = 2.0, 0.5, 0.8


class Silent(Runtime):
    """Draws no noise: the smallest of all Box-Muller radii is 1.5e-8."""

    def random_bytes(self, count: int) -> bytes:
        """See `Runtime`."""
        return b"\xff" * count


@contextmanager
def no_noise() -> Iterator[None]:
    with within(Silent()):
        yield


def shard(z: float = Z, quantile: float | None = None) -> ShardTensors:
    plan = plan_of(nn.Linear(N, 1, bias=False), "fp32", "mean")
    mechanism = Mechanism(CLIP, z, N)
    if quantile is not None:
        mechanism = Mechanism.with_quantile(CLIP, z, N, quantile, rate=RATE)
    tensors = ShardTensors(plan, (0,), mechanism=mechanism)
    tensors.install(0, torch.zeros(N))
    return tensors


def contribute(tensors: ShardTensors, number: int, values: Tensor, discount: float = 1.0) -> None:
    ask = Asking(1, number)
    body = tensors.plan.uplink_of(0).encode(values)
    tensors.verify(0, ask, body, body_digest(body, tensors.plan.uplink_of(0)))
    # As with weighting="uniform", which gives each contribution the weight 1.
    tensors.fold(0, ask, 1.0, 1.0, discount=discount)


def direction(number: int) -> Tensor:
    values = torch.randn(N, generator=torch.Generator().manual_seed(number))
    return values / values.norm()


@pytest.mark.parametrize("size", [0.5, 2.0, 2000.0])
def test_a_dishonest_learner_moves_the_sum_by_at_most_the_clip(size: float) -> None:
    with no_noise():
        tensors = shard()
        for number in range(4):
            contribute(tensors, number, torch.zeros(N))
        contribute(tensors, 5, size * direction(0))
        tensors.merge(0)
    moved = 5 * tensors.fragments[0].master.norm()
    assert moved == pytest.approx(min(size, CLIP), rel=1e-5)


def test_each_merge_has_noise_of_its_own_with_the_claimed_deviation() -> None:
    tensors = shard()
    drawn = []
    for merge in range(3):
        before = tensors.fragments[0].master.clone()
        for number in range(4):
            contribute(tensors, 10 * merge + number, torch.zeros(N))
        tensors.merge(0)
        drawn.append(tensors.fragments[0].master - before)
    for noise in drawn:
        assert noise.std() == pytest.approx(Z * CLIP / 4, rel=0.06)
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 0.08


def test_the_noise_is_that_of_the_sum_whatever_the_weights() -> None:
    """Two contributions of weight 1/2 have the denominator 1."""
    tensors = shard()
    contribute(tensors, 1, torch.zeros(N), discount=0.5)
    contribute(tensors, 2, torch.zeros(N), discount=0.5)
    tensors.merge(0)
    assert tensors.fragments[0].master.std() == pytest.approx(Z * CLIP, rel=0.06)


def test_what_is_published_has_the_noise() -> None:
    tensors = shard()
    contribute(tensors, 1, torch.zeros(N))
    copy = tensors.merge(0)
    learner = torch.zeros(N)
    receive(learner, copy.difference, tensors.plan.downlink_of(0))
    assert learner.std() == pytest.approx(Z * CLIP, rel=0.06)
    assert torch.equal(learner, copy.whole)


def disk_of(folder: Path, quantile: float | None = None) -> ShardDisk:
    return ShardDisk(folder, "run", shard(quantile=quantile))


def test_a_restart_recovers_the_noise_of_the_past_and_draws_new_noise(tmp_path: Path) -> None:
    first = disk_of(tmp_path)
    first.installed({0: Version(1, 0)})
    contribute(first.tensors, 1, torch.zeros(N))
    first.merge(0, Version(1, 1))
    merged = first.tensors.fragments[0].master.clone()
    first.close()
    after = []
    for _ in range(2):  # a resume from the same files, twice
        again = disk_of(tmp_path)
        again.recover()
        assert torch.equal(again.tensors.fragments[0].master, merged), "the journal has the noise"
        contribute(again.tensors, 1, torch.zeros(N))
        again.tensors.merge(0)
        after.append(again.tensors.fragments[0].master - merged)
        again.close()
    assert abs(torch.corrcoef(torch.stack(after))[0, 1]) < 0.08


@pytest.mark.parametrize(("long", "share"), [(0, 1.0), (1, 0.75), (4, 0.0)])
def test_the_next_clip_follows_from_the_share_within_the_present_one(
    long: int, share: float
) -> None:
    with no_noise():
        tensors = shard(quantile=0.5)
        for number in range(4):
            contribute(tensors, number, (3.0 if number < long else 1.0) * direction(number))
        tensors.merge(0)
    assert tensors.fragments[0].clip == pytest.approx(math.exp(-RATE * (share - 0.5)))


def test_clips_counts_and_noise_use_the_clip_in_force() -> None:
    tensors = shard(quantile=0.5)
    tensors.fragments[0].clip = 10.0
    tensors.mechanism = replace(tensors.mechanism, noise_multiplier=Z)
    contribute(tensors, 1, torch.zeros(N))
    contribute(tensors, 2, torch.zeros(N))
    tensors.merge(0)
    assert tensors.fragments[0].master.std() == pytest.approx(10 * Z * CLIP / 2, rel=0.06)
    with no_noise():
        tensors = shard(quantile=0.5)
        tensors.fragments[0].clip = 10.0
        contribute(tensors, 1, 100 * CLIP * direction(1))
        tensors.merge(0)
    assert tensors.fragments[0].master.norm() == pytest.approx(10 * CLIP, rel=1e-5)
    assert tensors.fragments[0].clip == pytest.approx(10 * math.exp(RATE * 0.5))


def test_a_failed_merge_leaves_the_clip_and_its_count_behind() -> None:
    with no_noise():
        tensors = shard(quantile=0.5)
        contribute(tensors, 1, 3.0 * direction(1))
        tensors.forget_folded(0)  # the round is abandoned
        contribute(tensors, 2, direction(1))
        tensors.merge(0)
    assert tensors.fragments[0].clip == pytest.approx(math.exp(-RATE * 0.5))


@pytest.mark.parametrize("whole", [False, True])
def test_a_restart_continues_with_the_clip_in_force(whole: bool, tmp_path: Path) -> None:
    first = disk_of(tmp_path, quantile=0.5)
    first.installed({0: Version(1, 0)})
    for merge in range(1, 4):
        contribute(first.tensors, merge, direction(merge))
        first.merge(0, Version(1, merge))
    if whole:
        first.checkpoint()
    clip = first.tensors.fragments[0].clip
    assert clip != 1.0
    first.close()
    again = disk_of(tmp_path, quantile=0.5)
    again.recover()
    assert again.tensors.fragments[0].clip == clip
    again.close()


@pytest.mark.parametrize("size", [0.5, 2000.0])
def test_a_learner_clips_what_it_sends(size: float) -> None:
    model = nn.Linear(N, 1, bias=False)
    plan = plan_of(model, "fp32", "mean")
    tensors = LearnerTensors(plan, ModuleStore(model), mechanism=Mechanism(CLIP, Z, N))
    tensors.stage(0, torch.zeros(N))
    tensors.apply(0, "overwrite")
    tensors.store.overwrite(plan.fragments[0], size * direction(1))
    tensors.snapshot(0)
    body, _, _ = tensors.capture(0, Asking(1, 1)).encode("")
    assert plan.uplink_of(0).decode(body, N).norm() == pytest.approx(min(size, CLIP), rel=1e-5)
