r"""The Lightning Trainer as a learner of a run; the callback is the only addition.

    pip install -e '.[lightning]'        # in the clone
    ddiloco syncer homelab
    python examples/trainer_lightning.py --syncer http://127.0.0.1:7070 \
        --auth-token-file runs/homelab/token --name a

It trains a small byte model on Python's standard library. If you start it again under the same name
with `--resume`, it continues from the Trainer's last checkpoint, with the run's weights.
"""

import argparse
import sysconfig
import zlib
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from decoupled_diloco.integrations.lightning import DiLoCoCallback

CONTEXT, BATCH = 64, 64

parser = argparse.ArgumentParser(description="Train a small byte model as one learner.")
parser.add_argument("--syncer", required=True, help="address of a shard, such as http://host:port")
parser.add_argument("--auth-token-file", type=Path, help="file with the run's secret")
parser.add_argument("--name", required=True, help="this learner's name, the same across restarts")
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")


class NextByte(L.LightningModule):
    """Predicts the byte after a window."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 512), nn.GELU()),
            nn.Linear(512, 256),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        (window,) = batch
        loss = nn.functional.cross_entropy(self.net(window[:, :-1]), window[:, -1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the inner optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def windows(seed: int) -> TensorDataset:
    """Return windows of a text's bytes, in this learner's random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    order = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT, (100_000,), generator=order)
    return TensorDataset(text[starts[:, None] + torch.arange(CONTEXT + 1)].long())


def main() -> None:
    """Train until the run is over."""
    given = parser.parse_args()
    token = given.auth_token_file.read_text() if given.auth_token_file else None
    folder = Path(f"runs/lightning-{given.name}")
    diloco = DiLoCoCallback(given.syncer, auth_token=token, name=given.name)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=50, save_last=True)
    trainer = L.Trainer(
        max_epochs=-1,  # the run's budget ends the training
        callbacks=[diloco, checkpoint],
        accelerator="auto",
        logger=False,
    )
    loader = DataLoader(windows(zlib.crc32(given.name.encode())), batch_size=BATCH)
    trainer.fit(NextByte(), loader, ckpt_path=folder / "last.ckpt" if given.resume else None)
    print(f"{given.name}: {diloco.learner.steps} steps; the model holds the run's final weights")


if __name__ == "__main__":
    main()
