"""A small Lightning module, and rows for its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from decoupled_diloco.integrations.lightning import DiLoCoCallback


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        self.rows = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        self.rows += len(x)
        return nn.functional.mse_loss(self.net(x), x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader() -> Any:
    rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), batch_size=4)


def trainer_of(folder: Path, callback: DiLoCoCallback, **arguments: Any) -> Any:
    options = {
        "accelerator": "cpu",
        "max_epochs": 1000,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "default_root_dir": folder,
        **arguments,
    }
    return lightning.Trainer(callbacks=[callback], **options)
