"""The Lightning Trainer as a learner, with the real library on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.integrations.lightning import DiLoCoCallback, tokens_of
from integration.lightning_loop import Module, loader, trainer_of
from integration.real_system import System

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters()),
            torch.optim.SGD(self.net[2].parameters()),
        ]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Slow(Module):
    """On a busy machine, too, it takes few steps until it hears that the budget is spent."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        time.sleep(0.02)
        return super().training_step(batch, index)


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    run = {"learners": 1, "max_steps": 24}
    system = System(tmp_path / "run", run=run, sync={"fragments": 2, "quorum": 1})
    system.start()
    yield system
    system.close()


def test_a_trainer_takes_part_until_the_budget_is_spent(system: System, tmp_path: Path) -> None:
    callback = DiLoCoCallback(system.addresses, name="one")
    trainer = trainer_of(tmp_path, callback)
    trainer.fit(Slow(), loader())
    learner = callback.learner
    assert learner is not None
    assert learner.ended
    system.wait_finished()
    assert 24 <= learner.steps == trainer.global_step < 60
    assert learner.tokens == 8 * learner.steps, "two batches of four per step"
    assert callback.rounds >= 1
    assert trainer.callback_metrics["diloco/rounds"] >= 1


def test_it_resumes_from_the_trainers_checkpoint(system: System, tmp_path: Path) -> None:
    kept = tmp_path / "kept.ckpt"
    first = trainer_of(tmp_path, DiLoCoCallback(system.addresses, name="one"), max_steps=8)
    modules = Module(), Module(seed=1)
    first.fit(modules[0], loader())
    first.save_checkpoint(kept)
    callback = DiLoCoCallback(system.addresses, name="one")
    second = trainer_of(tmp_path, callback, max_steps=16)
    second.fit(modules[1], loader(), ckpt_path=kept, weights_only=False)
    learner = callback.learner
    assert learner is not None
    assert (learner.incarnation, learner.steps) == (2, 16)
    assert learner.tokens == sum(module.rows for module in modules)
    assert second.optimizers[0].state_dict()["state"][0]["step"] == 16, "its optimizer continued"


def test_an_error_in_training_ends_the_learner(system: System, tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if self.trainer.global_step == 3:
                raise ZeroDivisionError
            return super().training_step(batch, index)

    callback = DiLoCoCallback(system.addresses, name="one")
    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, callback).fit(Failing(), loader())
    assert callback.learner is not None
    with pytest.raises(ConfigError, match="closed learner"):
        callback.learner.step(tokens=1)


def test_a_batch_with_steps_of_several_optimizers_is_one_step(
    system: System, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.ckpt"
    for ends, steps in ((16, 8), (24, 12)):
        callback = DiLoCoCallback(system.addresses, name="one")
        trainer = trainer_of(tmp_path, callback, accumulate_grad_batches=1, max_steps=ends)
        again = {"ckpt_path": kept, "weights_only": False} if kept.exists() else {}
        trainer.fit(Two(), loader(), **again)
        trainer.save_checkpoint(kept)
        assert callback.learner is not None
        assert callback.learner.steps == steps
        assert callback.learner.tokens == 4 * steps


def test_tokens_of_batches() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert int(tokens_of({"input_ids": torch.zeros(2, 3), "attention_mask": mask})) == 3
    assert tokens_of({"input_ids": torch.zeros(2, 3)}) == 6
    assert tokens_of([torch.zeros(5, 2), torch.zeros(5)]) == 5
    assert tokens_of(torch.zeros(7, 2)) == 7
