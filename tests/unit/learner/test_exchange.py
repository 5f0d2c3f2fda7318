"""A learner's tensors execute the orders of its machine (rules 5 to 7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import MergeError
from decoupled_diloco.learner.exchange import LearnerTensors, verified
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.learner.payloads import BodyExchange
from decoupled_diloco.merge import (
    as_bytes,
    codec,
    digest,
    layout_of,
    make_outer,
    publish,
    values_digest,
)
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import Asking, Done, Failed, Fetch, Version
from decoupled_diloco.runtime import REAL

N = 12
ASK = Asking(1, 1)


def tensors_of(model: nn.Module) -> LearnerTensors:
    plan = MergePlan.make(
        layout_of(model),
        fragments=1,
        strategy="balanced",
        uplink="fp32",
        downlink="bf16",
        method="rda",
        weighting="tokens",
        outer=make_outer(),
    )
    return LearnerTensors(plan, ModuleStore(model), blend_alpha=0.25)


class Beside:
    """A background with these tensors and this client, which records the machine's events."""

    def __init__(self, tensors: LearnerTensors, client: object, events: list[object]) -> None:
        self.tensors, self.client, self.deliver = tensors, client, events.append
        self.changed = REAL.monitor()

    def address_of(self, shard: int) -> str:
        return ""

    def reaches(self, shard: int) -> bool:
        return True

    async def in_worker(self, task: Callable[[], Tensor]) -> Tensor:
        return task()


def exchange_of(tensors: LearnerTensors, client: object, events: list[object]) -> BodyExchange:
    return BodyExchange(cast("Any", Beside(tensors, client, events)))


@pytest.fixture
def tensors() -> LearnerTensors:
    learner = tensors_of(nn.Linear(4, 3, bias=False))
    learner.stage(0, torch.zeros(N))
    learner.apply(0, "overwrite")
    return learner


def theta(tensors: LearnerTensors) -> Tensor:
    return tensors.store.snapshot(tensors.plan.fragments[0]).values()


def train(tensors: LearnerTensors, by: float) -> None:
    fragment = tensors.plan.fragments[0]
    tensors.store.overwrite(fragment, theta(tensors) + by)


class Served:
    """A client that receives the same bytes from every path."""

    def __init__(self, body: Tensor) -> None:
        self.body = body

    async def get(self, path: str, buffer: memoryview, *, base: str) -> None:
        buffer[:] = as_bytes(self.body).numpy().data


@pytest.mark.parametrize("is_right", [True, False])
async def test_a_whole_copy_is_staged_only_if_its_digest_is_the_announced_one(
    tensors: LearnerTensors, is_right: bool
) -> None:
    """Nothing else could detect wrong bits in a whole copy."""
    values = torch.linspace(-1, 1, N)
    events: list[object] = []

    served = Served(values if is_right else values + 0.25)
    exchange = exchange_of(tensors, served, events)
    version = Version(1, 4)
    await exchange.fetch(
        Fetch(0, 0, version, "/w", True, values_digest(values), "the learner is behind")
    )
    assert [type(event) for event in events] == [Done if is_right else Failed]
    assert (tensors.staged[0] is not None) == is_right


@pytest.mark.parametrize("nbytes", [8, 25, 2**53])
async def test_a_difference_of_an_impossible_size_is_not_fetched(nbytes: int) -> None:
    """No memory is allocated for it; the learner fetches the whole copy instead."""
    events: list[object] = []
    tensors = tensors_of(nn.BatchNorm1d(2))  # a difference has 8 bytes, flags, and 16 bytes
    exchange = exchange_of(tensors, None, events)
    await exchange.fetch(
        Fetch(0, 0, Version(1, 4), "/d", False, "digest", "the difference follows", nbytes)
    )
    (event,) = events
    assert isinstance(event, Failed)
    assert f"difference_nbytes={nbytes}, but only 9 to 24 are possible" in event.reason


def test_without_training_a_contribution_is_exactly_zero(tensors: LearnerTensors) -> None:
    tensors.snapshot(0)
    body, _, _ = tensors.capture(0, ASK).encode(tensors.plan.uplink.name)
    assert not body.any()


def test_a_contribution_is_the_snapshot_minus_the_published_copy(tensors: LearnerTensors) -> None:
    train(tensors, 0.5)
    tensors.snapshot(0)
    capture = tensors.capture(0, ASK)
    train(tensors, 0.25)  # after the snapshot, so not part of it
    body, text, _ = capture.encode(capture.plan.uplink.name)
    assert torch.equal(codec("fp32").decode(body, N), torch.full((N,), 0.5))
    assert text == digest(body)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("overwrite", 2.0),  # Θ̂
        ("carry", 2.25),  # Θ̂ + (θ − snapshot)
        ("rebase", 2.75),  # Θ̂ + (θ − Θ̂ before)
        ("blend", 0.25 * 0.75 + 0.75 * 2.0),  # αθ + (1 − α)Θ̂
    ],
)
def test_rule_7_each_apply_mode(tensors: LearnerTensors, mode: str, expected: float) -> None:
    train(tensors, 0.5)
    tensors.snapshot(0)
    tensors.capture(0, ASK)
    train(tensors, 0.25)
    tensors.stage(0, torch.full((N,), 2.0))
    tensors.apply(0, mode)  # type: ignore[arg-type]
    assert torch.equal(theta(tensors), torch.full((N,), expected))
    assert torch.equal(tensors.published[0], torch.full((N,), 2.0))
    assert tensors.staged[0] is None


# With parameters of lower precision, the rounding of a published copy is not training.

HALF = (torch.bfloat16, torch.float16)


def versions(dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return published copies near 1, with elements that the dtype cannot represent."""
    ulp = torch.finfo(dtype).eps
    parts = torch.linspace(0, 3, N) / 7
    return [1 + ulp * (parts.roll(number) + 1 / (7 + number)) for number in range(count)]


@pytest.mark.parametrize("dtype", HALF)
def test_rebase_does_not_keep_rounding_errors(dtype: torch.dtype) -> None:
    """Without training, d = θ − cast(Θ̂, dtype of θ) is exactly 0 after any number of rebases."""
    tensors = tensors_of(nn.Linear(4, 3, bias=False).to(dtype))
    for number, published in enumerate(versions(dtype, 10)):
        tensors.stage(0, published)
        tensors.apply(0, "rebase" if number else "overwrite")
        assert torch.equal(theta(tensors), published.to(dtype).float())
        tensors.snapshot(0)
        body, _, _ = tensors.capture(0, ASK).encode(tensors.plan.uplink.name)
        assert not body.any(), "the contribution has more than the training"


@pytest.mark.parametrize("dtype", HALF)
def test_rebase_keeps_exactly_the_training(dtype: torch.dtype) -> None:
    tensors = tensors_of(nn.Linear(4, 3, bias=False).to(dtype))
    before, after = versions(dtype, 2)
    tensors.stage(0, before)
    tensors.apply(0, "overwrite")
    trained = 8 * torch.finfo(dtype).eps
    train(tensors, trained)
    tensors.stage(0, after)
    tensors.apply(0, "rebase")
    assert torch.equal(theta(tensors), (after + trained).to(dtype).float())


def test_a_capture_keeps_its_base_when_a_newer_copy_is_applied(tensors: LearnerTensors) -> None:
    train(tensors, 1.0)
    tensors.snapshot(0)
    capture = tensors.capture(0, ASK)
    tensors.stage(0, torch.full((N,), 9.0))
    tensors.apply(0, "overwrite")
    body, _, _ = capture.encode(capture.plan.uplink.name)
    assert torch.equal(codec("fp32").decode(body, N), torch.ones(N))


def test_added_differences_give_the_same_bits_as_at_the_shard(tensors: LearnerTensors) -> None:
    published = torch.zeros(N)
    for number in range(1, 4):
        master = torch.linspace(0, number, N) / 3
        published = published.clone()
        body = publish(master, published, codec("bf16"))
        tensors.stage(0, tensors.next_values(0, body, digest(published)))
        if number != 2:  # two differences may be staged before a boundary
            tensors.apply(0, "overwrite")
    assert torch.equal(theta(tensors), published)


def test_a_wrong_digest_changes_nothing(tensors: LearnerTensors) -> None:
    body = codec("bf16").encode(torch.ones(N))
    with pytest.raises(MergeError, match=r"fragment 0 has digest .* announced deadbeef"):
        tensors.next_values(0, body, "deadbeef")
    assert tensors.staged[0] is None
    assert not theta(tensors).any()


def test_whole_values_are_verified_too() -> None:
    values = torch.ones(3)
    assert verified(values, 0, digest(values)) is values
    with pytest.raises(MergeError):
        verified(values, 0, digest(torch.zeros(3)))


def test_a_whole_copy_is_the_published_copy_or_the_parameters(tensors: LearnerTensors) -> None:
    train(tensors, 0.5)
    assert not tensors.whole(0, published=True).values().any()
    own = tensors.whole(0, published=False).values()
    assert torch.equal(own, torch.full((N,), 0.5))
