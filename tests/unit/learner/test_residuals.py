"""The residual of a codec is added to the next contribution, once (rule 19)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.learner.learner_checkpoint import HeldFragment, LearnerCheckpoint
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.merge import codec, layout_of, make_outer
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.protocol.messages import Asking, ForgetResidual, Version

N = 12
INT2 = codec("int2")


def learner(feedback: float | None = 1.0, uplink: str = "int2") -> LearnerTensors:
    model = nn.Linear(4, 3, bias=False)
    plan = MergePlan.make(
        layout_of(model),
        fragments=1,
        strategy="balanced",
        uplink=uplink,
        downlink="bf16",
        method="rda",
        weighting="tokens",
        outer=make_outer(),
        feedback=feedback,
    )
    tensors = LearnerTensors(plan, ModuleStore(model))
    tensors.stage(0, torch.zeros(N))
    tensors.apply(0, "overwrite")
    return tensors


def changes(number: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(number))


class Sender:
    """Trains, and sends contributions with the codec int2."""

    def __init__(self, tensors: LearnerTensors) -> None:
        self.tensors = tensors
        self.number = 0

    def send(self, name: str = "int2") -> tuple[Asking, Tensor, Tensor]:
        """Encode a new contribution; return its name, its training, and its decoded payload."""
        self.number += 1
        ask, trained, tensors = Asking(1, self.number), changes(self.number), self.tensors
        tensors.store.overwrite(tensors.plan.fragments[0], trained)  # the published copy is 0
        tensors.snapshot(0)
        body, _, residual = tensors.capture(0, ask).encode(name)
        tensors.encoded(0, ask, residual)
        return ask, trained, codec(name).decode(body, N)

    def settle(self, ask: Asking, *, gone: bool) -> None:
        self.tensors.settle(0, ask, gone=gone)

    @property
    def left(self) -> Tensor:
        return sum(self.tensors.residuals[0], torch.zeros(N))


def test_merged_contributions_and_residual_add_up_to_the_training() -> None:
    sender, trained, merged = Sender(learner()), torch.zeros(N), torch.zeros(N)
    for _ in range(20):
        ask, more, body = sender.send()
        sender.settle(ask, gone=True)
        trained, merged = trained + more, merged + body
        torch.testing.assert_close(merged + sender.left, trained, rtol=1e-5, atol=1e-5)
    assert sender.left.norm() < 0.5 * trained.norm()


def test_an_exact_codec_costs_no_memory_for_residuals() -> None:
    sender = Sender(learner(uplink="bf16"))
    ask, trained, body = sender.send("bf16")
    assert torch.equal(body, trained.bfloat16().float()), "as without error feedback"
    sender.settle(ask, gone=True)
    assert sender.tensors.residuals == [()]


@pytest.mark.parametrize("gone", [True, False])
def test_an_exact_codec_sends_the_residual_of_a_coarser_one_once(gone: bool) -> None:
    sender = Sender(learner(feedback=0.5))
    ask, _, _ = sender.send("int2")
    sender.settle(ask, gone=True)
    left = sender.left
    ask, trained, body = sender.send("bf16")
    torch.testing.assert_close(body, trained + 0.5 * left, rtol=1e-2, atol=1e-2)
    sender.settle(ask, gone=gone)
    assert len(sender.tensors.residuals[0]) == (0 if gone else 1)
    torch.testing.assert_close(sender.left, torch.zeros(N) if gone else left)


def test_a_rejected_contribution_restores_the_residual_before_it() -> None:
    sender = Sender(learner())
    sender.settle(sender.send()[0], gone=True)
    before = sender.left
    ask, trained, body = sender.send()
    assert torch.equal(body, INT2.decode(INT2.encode(trained + before), N))
    sender.settle(ask, gone=False)
    assert torch.equal(sender.left, before)


def test_a_residual_is_never_in_two_payloads_in_flight() -> None:
    sender = Sender(learner())
    sender.settle(sender.send()[0], gone=True)
    before = sender.left
    first, one, late = sender.send()
    second, two, body = sender.send()
    assert torch.equal(body, INT2.decode(INT2.encode(two), N))
    sender.settle(second, gone=True)
    sender.settle(first, gone=False)
    torch.testing.assert_close(sender.left, before + two - body)
    assert not torch.equal(late, INT2.decode(INT2.encode(one), N))


def test_a_contribution_that_was_never_encoded_restores_its_residual() -> None:
    sender = Sender(learner())
    sender.settle(sender.send()[0], gone=True)
    before = sender.left
    sender.tensors.snapshot(0)
    sender.tensors.capture(0, Asking(1, 99))
    assert not sender.tensors.residuals[0]
    sender.settle(Asking(1, 99), gone=True)
    assert torch.equal(sender.left, before)


def test_a_residual_fades_by_its_decay() -> None:
    sender = Sender(learner(0.5))
    sender.settle(sender.send()[0], gone=True)
    before = sender.left
    _, trained, body = sender.send()
    assert torch.equal(body, INT2.decode(INT2.encode(trained + 0.5 * before), N))


def test_a_residual_that_an_earlier_incarnation_may_have_sent_is_dropped() -> None:
    sender = Sender(learner())
    sender.settle(sender.send()[0], gone=True)
    sender.tensors._forget(ForgetResidual(0, ""))
    assert not sender.tensors.residuals[0]


def test_without_feedback_no_residual_is_stored() -> None:
    tensors = learner(None)
    tensors.snapshot(0)
    assert tensors.capture(0, Asking(1, 1)).encode("int2")[2] is None
    assert not tensors.under_way
    assert not tensors.residuals[0]


def test_changes_that_are_not_finite_leave_no_residual() -> None:
    sender = Sender(learner())
    sender.settle(sender.send()[0], gone=True)
    before, tensors = sender.left, sender.tensors
    tensors.store.overwrite(tensors.plan.fragments[0], torch.full((N,), float("nan")))
    tensors.snapshot(0)
    body, _, residual = tensors.capture(0, Asking(1, 50)).encode("int2")
    tensors.encoded(0, Asking(1, 50), residual)
    assert not INT2.decode(body, N).isfinite().any()
    sender.settle(Asking(1, 50), gone=False)  # as a shard answers it
    assert torch.equal(sender.left, before)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_checkpoint_has_the_residual_before_a_contribution_made_again(is_held: bool) -> None:
    sender = Sender(learner())
    sender.settle(sender.send()[0], gone=True)
    before = sender.left
    ask, _, _ = sender.send()
    kept = sender.tensors.kept_residual(0, ask if is_held else None)
    assert torch.equal(sum(kept, torch.zeros(N)), before if is_held else torch.zeros(N))


def test_a_checkpoint_restores_residuals(tmp_path: Path) -> None:
    version = Version(1, 1)
    held = [
        HeldFragment(version, "d", "s", 1, 1, torch.zeros(N), (changes(1), changes(2))),
        HeldFragment(version, "d", "s", 1, 1, torch.zeros(N)),
        HeldFragment(version, "d", "s", 1, 1, torch.zeros(N), (changes(3),)),
    ]
    LearnerCheckpoint("a", "r", 1, 1, 1, 0, 1, tuple(held), {}).write(tmp_path / "kept")
    found = LearnerCheckpoint.read(tmp_path / "kept").fragments
    assert [len(each.residual) for each in found] == [1, 0, 1]
    assert torch.equal(found[0].residual[0], changes(1) + changes(2))
    assert torch.equal(found[2].residual[0], changes(3))
