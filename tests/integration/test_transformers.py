"""The Hugging Face Trainer as a learner, with the real library on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.integrations.transformers import DiLoCoCallback, synchronize
from integration.lines import Lines, model_of, trainer_of
from integration.real_system import System


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    run = {"learners": 1, "max_steps": 24}
    system = System(tmp_path / "run", run=run, sync={"fragments": 3, "quorum": 1})
    system.start()
    yield system
    system.close()


@pytest.mark.parametrize("what", ["auto_find_batch_size", "interrupted"])
def test_training_can_start_again_in_the_same_process(
    system: System, tmp_path: Path, what: str
) -> None:
    """It starts again after an out-of-memory error that the Trainer handles, or after Ctrl-C."""
    model, calls = model_of(), 0

    def fail(module: Any, given: Any, named: Any) -> None:
        nonlocal calls
        calls += module.training
        if calls == 5:
            calls += 1
            raise RuntimeError("CUDA out of memory.") if again else KeyboardInterrupt

    again = what == "auto_find_batch_size"
    model.register_forward_pre_hook(fail, with_kwargs=True)
    trainer = trainer_of(tmp_path, model, auto_find_batch_size=again)
    callback = synchronize(trainer, system.addresses[0], name="a")
    if not again:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.incarnation == 2
    assert callback.learner.ended
    system.wait_finished()


def test_a_trainer_takes_part_until_the_budget_is_spent(system: System, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of())
    callback = synchronize(trainer, system.addresses, name="one")
    trainer.train()
    learner = callback.learner
    assert learner is not None
    assert learner.ended
    system.wait_finished()
    assert 24 <= learner.steps == trainer.state.global_step < 40
    assert callback.rounds >= 1
    logged = [each for each in trainer.state.log_history if "loss" in each]
    assert logged[-1]["step"] > 10
    # The model has the run's final weights.
    shard = system.shards[0]
    assert learner.versions == tuple(
        str(fragment.version) for fragment in shard.machine.state.fragments.values()
    )


def test_tokens_of_all_calls_of_a_step_are_counted_without_padding(
    system: System, tmp_path: Path
) -> None:
    data = Lines()
    trainer = trainer_of(tmp_path, model_of(), max_steps=8)
    callback = synchronize(trainer, system.addresses, name="one")
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.steps == 8
    assert callback.learner.tokens == sum(data.lengths), "an epoch has eight steps of eight samples"


def test_reports_have_the_runs_metrics(system: System, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, *arguments: Any, logs: dict[str, Any], **further: Any) -> None:
            seen.append(dict(logs))

    trainer = trainer_of(tmp_path, model_of(), max_steps=6)
    trainer.add_callback(Reporter)
    synchronize(trainer, system.addresses, name="one")
    trainer.train()
    assert {"loss", "diloco/run_step", "diloco/rounds", "diloco/discarded_tokens"} <= set(seen[1])
    assert seen[1]["diloco/run_step"] >= 1


def test_it_resumes_from_the_trainers_checkpoint_with_the_runs_weights(
    system: System, tmp_path: Path
) -> None:
    first = trainer_of(tmp_path, model_of(), max_steps=8, save_strategy="steps", save_steps=8)
    synchronize(first, system.addresses, name="one")
    first.train()
    second = trainer_of(tmp_path, model_of(seed=1), max_steps=16)
    callback = synchronize(second, system.addresses, name="one")
    second.train(resume_from_checkpoint=True)
    assert callback.learner is not None
    assert callback.learner.incarnation == 2
    assert callback.learner.steps == second.state.global_step == 16
    assert second.optimizer.state_dict()["state"][0]["step"] == 16, "its optimizer continued"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_with_peft_only_the_adapter_is_synchronized(system: System, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = model_of()
    before = {name: each.clone() for name, each in base.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(base, config)
    trainer = trainer_of(tmp_path, model)
    callback = synchronize(trainer, system.addresses, name="one")
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.ended
    synchronized = [
        spec.name for spec in callback.learner._party.membership.shared.tensors.store.layout.tensors
    ]
    assert synchronized == [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in synchronized)
    for name, each in model.get_base_model().state_dict().items():
        plain = name.replace("base_layer.", "")
        if "lora_" not in name:
            assert torch.equal(each, before[plain])


@pytest.mark.parametrize("name", ["checkpoint", "optimizer"])
@pytest.mark.parametrize("make", [DiLoCoCallback, synchronize])
def test_options_of_the_trainer_are_not_arguments(make: Any, name: str) -> None:
    assert name not in inspect.signature(make).parameters
    assert "timeouts" in inspect.signature(make).parameters


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_options_that_keep_the_weights_elsewhere_are_rejected(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of())
    setattr(trainer.args, name, "something")
    callback = DiLoCoCallback("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"{name}= in the TrainingArguments"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
