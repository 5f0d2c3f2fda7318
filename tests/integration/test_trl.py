"""TRL's SFTTrainer as a learner: a Hugging Face Trainer with its own data and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decoupled_diloco.integrations.transformers import synchronize
from integration.lines import CONTEXT, Lines, model_of
from integration.real_system import System

for library in ("accelerate", "datasets", "peft", "tokenizers", "trl"):
    pytest.importorskip(library)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

WORDS = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n for n in range(2, 31)}


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    run = {"learners": 1, "max_steps": 24}
    system = System(tmp_path / "run", run=run, sync={"fragments": 3, "quorum": 1})
    system.start()
    yield system
    system.close()


def trainer_of(
    folder: Path, model: Any, adapter: Any = None, max_steps: int = 10_000, packing: bool = False
) -> Any:
    """Return a trainer for texts of 4 to 11 words, each followed by the end token."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    lengths = enumerate(Lines().lengths)
    words = [[f"w{2 + (n + m) % 29}" for m in range(count - 1)] for n, count in lengths]
    arguments = SFTConfig(
        folder / "trainer",
        max_steps=max_steps,
        max_length=CONTEXT,
        packing=packing,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    return SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": [" ".join(each) for each in words]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
        peft_config=adapter,
    )


@pytest.mark.parametrize("packing", [False, True])
def test_its_tokens_equal_its_own_count(packing: bool, system: System, tmp_path: Path) -> None:
    """Texts are padded, or several are packed into one row without a mask."""
    trainer = trainer_of(tmp_path, model_of(), max_steps=5, packing=packing)
    callback = synchronize(trainer, system.addresses, name="one")
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.steps == trainer.state.global_step == 5
    logged = [each["num_tokens"] for each in trainer.state.log_history if "num_tokens" in each]
    assert callback.learner.tokens == logged[-1]
    assert len(logged) == 5


def test_the_runs_budget_ends_it(system: System, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model_of())
    callback = synchronize(trainer, system.addresses, name="one")
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.ended
    assert 24 <= callback.learner.steps == trainer.state.global_step < 40
    assert callback.rounds >= 3
    system.wait_finished()


def test_only_its_adapter_is_synchronized(system: System, tmp_path: Path) -> None:
    from peft import LoraConfig

    base = model_of()
    before = {name: each.clone() for name, each in base.state_dict().items()}
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = trainer_of(tmp_path, base, adapter)
    callback = synchronize(trainer, system.addresses, name="one")
    trainer.train()
    assert callback.learner is not None
    assert callback.learner.ended
    synchronized = [
        spec.name for spec in callback.learner._party.membership.shared.tensors.store.layout.tensors
    ]
    trained = [name for name, each in trainer.model.named_parameters() if each.requires_grad]
    assert synchronized == trained
    assert len(synchronized) == 8, "two matrices of two projections of two layers"
    assert all("lora_" in name for name in synchronized)
    after = trainer.model.get_base_model().state_dict()
    for name, each in before.items():
        again = after.get(name, after.get(name.replace("_proj.", "_proj.base_layer.")))
        assert again is not None
        assert torch.equal(again, each)
