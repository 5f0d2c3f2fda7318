"""Loops that do not call `step`: `Learner.wrap`, `Learner.attach`, and counted tokens."""

from __future__ import annotations

import copy
import io
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from decoupled_diloco import Learner, Timeouts
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.tape import TapeReader
from free_ports import free_ports
from integration.real_system import PATIENCE_SECONDS, Model, System, parameters

Make = Callable[..., System]


class Reader(nn.Module):
    """A model that is called with tokens [B, T] and an optional mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.inner.hidden(self.inner.embedding(input_ids))
        return self.inner.head(hidden).logsumexp(-1).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def reported(system: System, name: str = "learner-0") -> list[int]:
    """Return the tokens of the steps that a learner reported."""
    records = TapeReader(system.folder / "tape" / f"{name}.jsonl")
    return [record.data["tokens"] for record in records if record.type == "StepFinished"]


def tokens(rows: int = 2, long: int = 5) -> torch.Tensor:
    return torch.randint(0, 11, (rows, long))


@pytest.fixture
def system(make: Make) -> System:
    system = make(run={"learners": 1, "max_steps": 12})
    system.start()
    return system


def joined(system: System, model: nn.Module, **options: object) -> Learner:
    return system.learner(model, "learner-0", **options)


def test_wrap_and_an_optimizer_are_enough(system: System) -> None:
    model = Reader()
    optimizer = sgd(model)
    seen = 0
    with joined(system, model, optimizer=optimizer) as learner:
        until = time.monotonic() + PATIENCE_SECONDS
        while not learner.ended and time.monotonic() < until:
            for batch in learner.wrap([tokens() for _ in range(4)]):
                seen += 1
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert learner.ended
        assert seen == learner.steps
    system.wait_finished()
    assert set(reported(system)) == {10}, "every batch has 2 x 5 tokens"


def test_accumulation_and_padding_are_counted(system: System) -> None:
    """Steps are those of the optimizer, and masked tokens are not counted."""
    model = Reader()
    optimizer = sgd(model)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    with joined(system, model, optimizer=optimizer) as learner:
        batches = learner.wrap(tokens() for _ in range(100_000))
        for number, batch in enumerate(batches, start=1):
            model(batch, attention_mask=mask).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                model(batch)
                model.train()
        assert learner.ended
        assert learner.steps == number // 3
    assert set(reported(system)) == {3 * 4}


def test_the_tokens_of_a_batch_may_be_passed(system: System) -> None:
    model = Reader()
    with joined(system, model) as learner:
        for batch in learner.wrap([tokens(), tokens(3)], tokens=len):
            model(batch)
        assert (learner.steps, learner.tokens) == (2, 5), (
            "without an optimizer each batch is a step"
        )


def test_steps_of_another_optimizer_are_reported_as_missed(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    model = Reader()
    with joined(system, model, optimizer=sgd(model)) as learner:
        with caplog.at_level(logging.WARNING):
            for batch in learner.wrap([tokens()] * 3):
                model(batch).backward()
                sgd(model).step()
        assert learner.steps == 0
    assert "not called in 3 batches" in caplog.text


def test_a_closed_learner_has_no_batches(system: System) -> None:
    learner = joined(system, Reader())
    learner.close()
    assert list(learner.wrap([1, 2])) == []


def test_hooks_are_removed_after_the_loop(system: System) -> None:
    model = Reader()
    optimizer = sgd(model)
    with joined(system, model, optimizer=optimizer) as learner:
        own = dict(optimizer._optimizer_step_post_hooks)
        assert len(model._forward_pre_hooks) == 1, "it counts tokens"
        for batch in learner.wrap([tokens()] * 3):
            assert optimizer._optimizer_step_post_hooks != own
            model(batch).backward()
            optimizer.step()
            break
        optimizer.step()
        assert learner.steps == 0
        assert optimizer._optimizer_step_post_hooks == own
    assert not model._forward_pre_hooks


def test_attach_follows_an_unchanged_loop(system: System) -> None:
    """The loop ends with the run, after its `finally`, and the model has the global weights."""
    model = Reader()
    optimizer = sgd(model)
    after = [False]

    def foreign() -> None:
        try:
            while True:
                model(tokens()).backward()
                try:
                    optimizer.step()
                except Exception:  # a loop may catch every exception
                    pytest.fail("the end of a run is not an error")
                optimizer.zero_grad()
        finally:
            after[0] = True

    learner = joined(system, model, optimizer=optimizer)
    with learner.attach():
        foreign()
    assert after[0]
    assert learner.ended
    system.wait_finished()
    assert set(reported(system)) == {10}
    before = parameters(model)
    model(tokens()).backward()
    optimizer.step()
    assert any(not torch.equal(before[n], p) for n, p in parameters(model).items())


def test_a_loop_that_ends_leaves_the_learner_in_the_run(system: System) -> None:
    model = Reader()
    optimizer = sgd(model)
    counts: Iterator[int] = iter((3, 4))
    with joined(system, model, optimizer=optimizer) as learner:
        with learner.attach(tokens=lambda: next(counts)):
            for _ in range(2):
                model(tokens()).backward()
                optimizer.step()
        assert (learner.steps, learner.tokens) == (2, 7)
        with pytest.raises(ZeroDivisionError), learner.attach():
            raise ZeroDivisionError
        assert learner.step(tokens=1)


def test_attach_needs_an_optimizer(system: System) -> None:
    with (
        joined(system, Reader()) as learner,
        pytest.raises(ConfigError, match="needs the optimizer: create the Learner with optimizer="),
        learner.attach(),
    ):
        pass


@pytest.mark.parametrize("given", [None, torch.numel])
def test_a_step_across_two_epochs_has_the_tokens_of_both(
    given: Callable[[torch.Tensor], int] | None, system: System
) -> None:
    model = Reader()
    optimizer = sgd(model)
    number = 0
    with joined(system, model, optimizer=optimizer) as learner:
        for _ in range(2):
            for batch in learner.wrap([tokens(), tokens(), tokens()], given):
                model(batch).backward()
                number += 1
                if number % 2 == 0:
                    optimizer.step()
        assert (learner.steps, learner.tokens) == (3, 60)


def test_step_counts_the_tokens_of_its_batches(system: System) -> None:
    """This includes accumulated batches. Padding and calls in evaluation mode are not counted."""
    model = Reader()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    with joined(system, model) as learner:
        model(tokens())
        assert learner.step()
        model(tokens())
        model(tokens(3), attention_mask=None)
        model.eval()
        model(tokens(100))
        model.train()
        assert learner.step(1.0)
        model(tokens(), attention_mask=mask)
        assert learner.step(torch.tensor(1.0))
    assert reported(system) == [10, 25, 4]


def test_tokens_must_be_passed_in_every_step_or_in_none(system: System) -> None:
    model = Reader()
    with joined(system, model) as learner:
        model(tokens())
        assert learner.step()
        assert learner.step(tokens=7)
        with pytest.raises(ConfigError, match="pass tokens= in every step, or in none"):
            learner.step()
        assert not model._forward_pre_hooks, "counting has ended"
        assert learner.step(tokens=0)
    assert reported(system) == [10, 7, 0]


def test_the_stages_of_a_pipeline_are_not_counted(system: System) -> None:
    stages = [nn.Linear(2, 3), nn.Sequential(nn.Identity(), nn.Linear(3, 4))]
    with joined(system, stages) as learner:  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"the tokens of pipeline stages .*: pass tokens="):
            learner.step()
        assert learner.steps == 0
        assert learner.step(tokens=5)


def test_a_compiled_model_is_counted_without_compiling_again(system: System) -> None:
    torch._dynamo.reset()
    model = Reader()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="aot_eager")
    with (
        joined(system, compiled, optimizer=optimizer) as learner,
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        for _ in range(4):
            compiled(tokens()).backward()
            optimizer.step()
            assert learner.step()
    assert reported(system) == [10] * 4


@pytest.mark.parametrize("how", ["in place", "beside"])
def test_a_model_compiled_after_the_join_is_not_counted(
    system: System, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """In a graph the counter would be a constant, and each step would compile again."""
    torch._dynamo.reset()
    model = Reader()
    called = model
    with joined(system, model) as learner:
        if how == "in place":
            model.compile(backend="aot_eager")
        else:
            called = torch.compile(model, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(4):
                called(tokens()).backward()
                assert learner.step()
    assert reported(system) == [1] * 4
    (warning,) = [each for each in caplog.messages if "cannot be counted" in each]
    assert "Pass tokens= to learner.step" in warning


def test_calls_of_a_copied_model_are_not_counted(system: System) -> None:
    """This includes a model that was pickled and loaded, for an average or an evaluation."""
    model = Reader()
    with joined(system, model) as learner:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for each in copies:
            each(tokens(100))
        model(tokens())
        assert learner.step()
    assert reported(system) == [10]
    assert all(torch.isfinite(each(tokens())) for each in copies)


def test_a_join_that_fails_leaves_no_hook() -> None:
    model = Reader()
    [port] = free_ports(1)
    with pytest.raises(TransportError):
        Learner(model, f"http://127.0.0.1:{port}", timeouts=Timeouts(join=0.2))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("wrapper", ["compile", "fabric"])
def test_a_wrapped_model_joins_learners_of_the_plain_one(
    wrapper: str, system: System, tmp_path: Path
) -> None:
    """Its parameters have the plain model's names, also in its checkpoints."""
    options = {"checkpoint": tmp_path / "kept"}
    with joined(system, Reader()):
        pass
    for steps in (2, 4):
        model: nn.Module = Reader()
        optimizer = sgd(model)
        if wrapper == "compile":
            model = torch.compile(model, backend="aot_eager")
        else:
            fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
            model, optimizer = fabric.setup(model, optimizer)
        with system.learner(model, "learner-1", optimizer=optimizer, **options) as learner:
            for batch in learner.wrap([tokens(), tokens()]):
                model(batch).backward()
                optimizer.step()
            assert (learner.steps, learner.tokens) == (steps, 10 * steps)
