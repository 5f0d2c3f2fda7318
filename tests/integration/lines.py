"""A small Hugging Face model, and lines for its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

CONTEXT = 12


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Lines of 5 to 12 tokens, padded."""

    def __init__(self, count: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = [5 + n % 8 for n in range(count)]
        self.tokens = torch.randint(1, 31, (count, CONTEXT), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(CONTEXT) < self.lengths[index]).long()
        tokens = self.tokens[index] * mask
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def trainer_of(folder: Path, model: Any, **arguments: Any) -> Any:
    options = {
        "max_steps": 10_000,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    training = transformers.TrainingArguments(folder / "trainer", **options)
    return transformers.Trainer(model, training, train_dataset=Lines())
