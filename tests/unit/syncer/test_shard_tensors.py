"""The tensors of a shard: verify, fold, merge, publish (rules 5, 6 and 8)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import MergeError, ProtocolError
from decoupled_diloco.merge import codec, digest, layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.syncer.shard_tensors import ShardTensors

N = 12


def plan(**settings: object) -> MergePlan:
    given = {
        "fragments": 1,
        "strategy": "balanced",
        "uplink": "fp32",
        "downlink": "fp32",
        "method": "rda",
        "weighting": "tokens",
        "outer": make_outer("sgd", 1.0, 0.0),
        **settings,
    }
    return MergePlan.make(layout_of(nn.Linear(4, 3, bias=False)), **given)  # type: ignore[arg-type]


def shard(**settings: object) -> ShardTensors:
    tensors = ShardTensors(plan(**settings), (0,))
    tensors.install(0, torch.zeros(N))
    return tensors


FIRST, SECOND = Asking(1, 1), Asking(1, 2)


def deliver(tensors: ShardTensors, ask: Asking, d: Tensor) -> None:
    body = tensors.plan.uplink.encode(d)
    tensors.verify(0, ask, body, digest(body))


def test_one_learner_and_an_outer_rate_of_one_is_the_identity() -> None:
    tensors = shard()
    d = torch.linspace(-1, 1, N)
    deliver(tensors, FIRST, d)
    tensors.fold(0, FIRST, 4, 400)
    published = tensors.merge(0)
    torch.testing.assert_close(published.whole, d)
    assert published.digest == digest(published.whole)


@pytest.mark.parametrize("epochs", [1, 5])
def test_fedavg_weights_a_device_by_its_number_of_images(epochs: int) -> None:
    """With E epochs over n_k images each, in equal batches, the merge is Σ n_k Δ_k / Σ n_k."""
    batch, images = 8, [8, 24, 160, 1000]
    tensors, changes = shard(method="mean"), torch.randn(len(images), N)
    for number, (count, change) in enumerate(zip(images, changes, strict=True)):
        ask = Asking(1, 1 + number)
        deliver(tensors, ask, change)
        tensors.fold(0, ask, epochs * count / batch, epochs * count)
    weights = torch.tensor(images, dtype=torch.float64)
    expected = (weights @ changes.double() / weights.sum()).float()
    torch.testing.assert_close(tensors.merge(0).whole, expected)


@pytest.mark.parametrize(("of", "step"), [("weight", 1.0), ("change", 0.5)])
def test_equally_late_changes_are_a_smaller_step_only_if_they_are_scaled(
    of: str, step: float
) -> None:
    """FedBuff: the step is (1/K) Σ s(τ) Δ. In a weighted mean, equal s(τ) cancel."""
    tensors, change, late = shard(method="mean"), torch.linspace(-1, 1, N), 0.5
    for ask in (FIRST, SECOND):
        deliver(tensors, ask, change)
        factors = {"scale": late} if of == "change" else {"discount": late}
        tensors.fold(0, ask, 4, 400, **factors)
    torch.testing.assert_close(tensors.merge(0).whole, step * change)


def received() -> tuple[ShardTensors, str]:
    """Return a shard of zeros that has received ones, and the digest of these."""
    tensors, ones = shard(), torch.ones(N)
    tensors.receive(0, ones, digest(ones))
    return tensors, digest(ones)


def test_a_copy_is_stored_until_it_is_installed() -> None:
    tensors, wanted = received()
    assert torch.equal(tensors.whole(0), torch.zeros(N)), "another attempt may be in progress"
    tensors.install_received(0, wanted)
    assert torch.equal(tensors.whole(0), torch.ones(N))
    assert torch.equal(tensors.fragments[0].master, torch.ones(N))


def test_an_unwanted_copy_changes_nothing() -> None:
    tensors, wanted = received()
    tensors.install_received(0, digest(torch.zeros(N)))
    assert torch.equal(tensors.whole(0), torch.zeros(N))
    tensors.install_received(0, wanted)
    assert torch.equal(tensors.whole(0), torch.zeros(N)), "it was discarded"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_invalid_copy_is_not_stored(bad: float) -> None:
    tensors, wanted = received()
    with pytest.raises(ProtocolError, match="digest="):
        tensors.receive(0, torch.full((N,), 2.0), wanted)
    values = torch.full((N,), bad)
    with pytest.raises(MergeError, match="not installed"):
        tensors.receive(0, values, digest(values))
    tensors.install_received(0, wanted)
    assert torch.equal(tensors.whole(0), torch.ones(N)), "the earlier copy is still stored"


def test_weights_are_quantity_times_quality() -> None:
    tensors = shard(method="mean")
    deliver(tensors, FIRST, torch.full((N,), 1.0))
    deliver(tensors, SECOND, torch.full((N,), 2.0))
    tensors.fold(0, FIRST, 2, 20)  # 20 · 10
    tensors.fold(0, SECOND, 1, 20)  # 20 · 20
    expected = (200 * 1.0 + 400 * 2.0) / 600
    torch.testing.assert_close(tensors.merge(0).whole, torch.full((N,), expected))


@pytest.mark.parametrize("method", ["mean", "rda"])
def test_the_factor_of_a_party_multiplies_the_weights_of_its_contributions(method: str) -> None:
    """Each party has its accumulator, because its factor is known only at the merge."""
    changes, asks = torch.randn(4, N), [Asking(1, number) for number in range(4)]
    tensors, plain = shard(method=method), shard(method=method)
    for number, party in enumerate("abba"):
        for each in (tensors, plain):
            deliver(each, asks[number], changes[number])
        tensors.fold(0, asks[number], 1, 10 + number, party=party)
        discount = {"a": 0.25, "b": 3.0}[party]
        plain.fold(0, asks[number], 1, 10 + number, discount=discount)
    limited = tensors.merge(0, (("a", 0.25), ("b", 3.0))).whole
    torch.testing.assert_close(limited, plain.merge(0).whole)
    deliver(tensors, FIRST, changes[0])
    tensors.fold(0, FIRST, 1, 1, party="b")
    torch.testing.assert_close(tensors.merge(0).whole - limited, changes[0])


def test_uniform_weighting_ignores_the_counters() -> None:
    tensors = shard(method="mean", weighting="uniform")
    deliver(tensors, FIRST, torch.full((N,), 1.0))
    deliver(tensors, SECOND, torch.full((N,), 2.0))
    tensors.fold(0, FIRST, 2, 20)
    tensors.fold(0, SECOND, 1, 20)
    torch.testing.assert_close(tensors.merge(0).whole, torch.full((N,), 1.5))


def test_the_rounding_error_of_bf16_is_published_the_next_time() -> None:
    tensors = shard(downlink="bf16")
    d = torch.full((N,), 1.0 + 2.0**-10)
    deliver(tensors, FIRST, d)
    tensors.fold(0, FIRST, 1, 1)
    first = tensors.merge(0)
    assert torch.equal(first.whole, torch.ones(N)), "bf16 has 8 bits"
    deliver(tensors, SECOND, torch.full((N,), 2.0**-10))
    tensors.fold(0, SECOND, 1, 1)
    assert torch.equal(tensors.merge(0).whole, torch.full((N,), 1.0 + 2.0**-9))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_contribution_that_is_not_finite_is_rejected(bad: float) -> None:
    tensors = shard()
    d = torch.zeros(N)
    d[5] = bad
    with pytest.raises(MergeError, match="not finite"):
        deliver(tensors, FIRST, d)


def test_a_wrong_digest_or_size_is_rejected() -> None:
    tensors = shard()
    body = codec("fp32").encode(torch.zeros(N))
    with pytest.raises(ProtocolError, match=r"digest=.*, but 00 was announced"):
        tensors.verify(0, FIRST, body, "00")
    with pytest.raises((ProtocolError, MergeError)):
        tensors.verify(0, FIRST, body[:-4], digest(body[:-4]))


def test_a_diverged_outer_step_leaves_the_fragment_as_it_was() -> None:
    tensors = shard(downlink="bf16", outer=make_outer("nesterov", 3e38, 0.5))
    deliver(tensors, FIRST, torch.full((N,), 1e30))
    tensors.fold(0, FIRST, 1, 1)
    with pytest.raises(MergeError, match="lower the outer lr"):
        tensors.merge(0)
    assert not tensors.whole(0).any()
    assert not tensors.fragments[0].master.any()
    assert not any(value.any() for value in tensors.fragments[0].outer.state_dict().values())


def test_folded_contributions_are_discarded_and_unfolded_ones_stay() -> None:
    """After a merge that the disk did not take, contributions that arrived meanwhile join the next
    one.
    """
    tensors = shard(method="mean")
    deliver(tensors, FIRST, torch.full((N,), 1.0))
    deliver(tensors, SECOND, torch.full((N,), 2.0))
    tensors.fold(0, FIRST, 1, 1)
    tensors.forget_folded(0)
    tensors.forget_folded(0)
    tensors.fold(0, SECOND, 1, 1)
    torch.testing.assert_close(tensors.merge(0).whole, torch.full((N,), 2.0))


def test_a_dropped_contribution_leaves_nothing() -> None:
    tensors = shard()
    deliver(tensors, FIRST, torch.ones(N))
    tensors.drop(0, FIRST)
    tensors.drop(0, FIRST)
    assert not tensors._arrived
    with pytest.raises(KeyError):
        tensors.fold(0, FIRST, 1, 1)


def test_two_contributions_of_one_learner_are_two() -> None:
    """A late one and the next one: each is folded with its own counters."""
    tensors = shard(method="mean")
    deliver(tensors, FIRST, torch.full((N,), 1.0))
    deliver(tensors, SECOND, torch.full((N,), 4.0))
    tensors.fold(0, SECOND, 2, 20)  # 20 · 10
    tensors.fold(0, FIRST, 1, 10)  # 10 · 10
    torch.testing.assert_close(tensors.merge(0).whole, torch.full((N,), 3.0))


def test_a_discount_counts_once_in_the_weight() -> None:
    tensors = shard(method="mean")
    deliver(tensors, FIRST, torch.full((N,), 1.0))
    deliver(tensors, SECOND, torch.full((N,), 4.0))
    tensors.fold(0, FIRST, 1, 10)
    tensors.fold(0, SECOND, 1, 10, discount=0.5)
    expected = (1.0 + 0.5 * 4.0) / 1.5
    torch.testing.assert_close(tensors.merge(0).whole, torch.full((N,), expected))


def test_a_published_copy_is_never_written_to_again() -> None:
    tensors = shard()
    before = tensors.whole(0)
    deliver(tensors, FIRST, torch.ones(N))
    tensors.fold(0, FIRST, 1, 1)
    tensors.merge(0)
    assert not before.any()


def test_initial_weights_that_are_not_finite_are_rejected() -> None:
    tensors = ShardTensors(plan(), (0,))
    with pytest.raises(MergeError, match="fragment 0 has NaN"):
        tensors.install(0, torch.full((N,), math.nan))


def test_a_whole_payload_is_copied_out_of_its_buffer() -> None:
    buffer = bytearray(codec("fp32").encode(torch.ones(N)).numpy().tobytes())
    values = values_of(memoryview(buffer), N)
    buffer[:] = bytes(len(buffer))
    assert torch.equal(values, torch.ones(N))
    with pytest.raises(ProtocolError, match="48 are needed"):
        values_of(memoryview(bytes(44)), N)


def test_nearly_parallel_contributions_to_one_merge_are_named() -> None:
    """Whether the earlier ones are folded already or not; the next merge starts empty."""
    rng, tensors, number = torch.Generator().manual_seed(1), shard(), iter(range(1, 99))

    def alike(learner: str, d: Tensor, *, folds: bool = True) -> tuple[str, ...]:
        ask = Asking(1, next(number))
        deliver(tensors, ask, d)
        found = tensors.alike(0, ask, learner)
        if folds:
            tensors.fold(0, ask, 4, 400)
        return found

    one, other, third = (torch.randn(N, generator=rng) for _ in range(3))
    assert [alike(name, one) for name in "abc"] == [(), (), ()], (
        "a first contribution is not compared"
    )
    tensors.merge(0)
    assert [alike("a", other), alike("b", third), alike("c", 2 * other)] == [(), (), ("a",)]
    assert alike("c", third, folds=False) == ("b",), "whether it is folded or not"
    assert alike("a", third) == ("b", "c")
    tensors.merge(0)
    assert alike("a", one) == (), "the earlier ones are merged"
    assert alike("d", one) == (), "its first contribution"
    assert alike("b", one) == ("a", "d")
    assert alike("b", 2 * one) == (), "its direction is the same in every round"
