"""The code on the page about Hugging Face datasets trains on streamed local files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from docs.snippets import ROOT, blocks_of
from integration.real_system import System

datasets = pytest.importorskip("datasets")


class Tokenizer:
    """A character tokenizer."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [min(ord(each), 127) for each in text]}


def test_the_code_on_the_page_trains(make: Callable[..., System], tmp_path: Path) -> None:
    files = []
    for number in range(4):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text("\n".join(f"line {line} of file {number}" for line in range(60)))
    load = datasets.load_dataset

    def local(name: str, **options: Any) -> Any:
        assert options == {"split": "train", "streaming": True}
        return load("text", data_files=[*map(str, files)], **options)

    (block,) = [b for b in blocks_of(ROOT / "docs/how-to/hf-datasets.md") if b.language == "python"]
    system = make(run={"learners": 1, "max_steps": 24}, sync={"quorum": 1})
    system.start()
    imports = "from datasets import load_dataset\nfrom transformers import AutoTokenizer\n"
    assert imports in block.text
    text = block.text.replace(imports, "").replace("64, 1024, 8", "4, 16, 8")
    text = text.replace("http://syncer:7070", system.addresses[0])
    model = nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    given = {
        "model": model,
        "optimizer": optimizer,
        "auth_token": None,
        # Passed here, so that nothing accesses the hub.
        "load_dataset": local,
        "AutoTokenizer": SimpleNamespace(from_pretrained=lambda name: Tokenizer()),
    }
    exec(compile(text, block.where, "exec"), given)
    learner: Any = given["learner"]
    assert learner.ended
    assert learner.steps >= 24
    assert learner.tokens == learner.steps * 8 * 16, "counted from the model's inputs"
