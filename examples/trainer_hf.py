r"""The Hugging Face Trainer as a learner; the line with `synchronize` is the only addition.

    pip install -e '.[transformers]'     # in the clone
    ddiloco train examples/trainer_hf.toml

Or start a syncer, then the script in any number of terminals, each with a different name:

    ddiloco syncer homelab
    python examples/trainer_hf.py --syncer http://127.0.0.1:7070 \
        --auth-token-file runs/homelab/token --name a

It trains a tiny Llama on the bytes of Python's standard library. If you start it again under the
same name with `--resume`, it continues from the Trainer's last checkpoint, with the run's weights.
`torchrun --nproc_per_node 2 examples/trainer_hf.py …` starts a two-process learner.
"""

import argparse
import os
import sysconfig
import zlib
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from decoupled_diloco.integrations.transformers import synchronize

CONTEXT = 64

parser = argparse.ArgumentParser(description="Train a tiny Llama as one learner.")
parser.add_argument("--syncer", help="address of a shard, such as http://host:port")
parser.add_argument("--auth-token-file", type=Path, help="file with the run's secret")
parser.add_argument(
    "--name",
    default=os.environ.get("DDILOCO_NAME", "alone"),
    help="this learner's name, the same across restarts",
)
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text's bytes, in this learner's random order."""

    def __init__(self, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(file.read_bytes() for file in files))
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        order = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(text) - CONTEXT, (1_000_000,), generator=order)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self.starts[index])
        window = self.text[start : start + CONTEXT].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train until the run is over."""
    given = parser.parse_args()
    token = given.auth_token_file.read_text() if given.auth_token_file else None
    config = AutoConfig.from_pretrained(Path(__file__).parent / "tiny_llama")
    folder = Path(os.environ.get("DDILOCO_CHECKPOINT", "runs")) / f"trainer-{given.name}"
    arguments = TrainingArguments(
        str(folder),
        max_steps=1_000_000,  # the run's budget ends the training
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        logging_steps=10,
        save_steps=50,
        report_to=[],
    )
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(model, arguments, train_dataset=Windows(zlib.crc32(given.name.encode())))
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    callback = synchronize(trainer, given.syncer, auth_token=token, name=given.name)
    trainer.train(resume_from_checkpoint=last if given.resume else None)
    learner = callback.learner
    print(f"{given.name}: {learner.steps} steps; the model holds the run's final weights")


if __name__ == "__main__":
    main()
