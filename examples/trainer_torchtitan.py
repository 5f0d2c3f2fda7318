r"""The torchtitan Trainer as a learner of a run: all ranks of a torchrun job are one learner.

    pip install -e '.[torchtitan]'        # in the clone
    ddiloco syncer homelab
    torchrun --nproc-per-node 8 examples/trainer_torchtitan.py --syncer http://127.0.0.1:7070 \
        --auth-token-file runs/homelab/token --name a --parallelism.tensor_parallel_degree 2

It trains torchtitan's Llama 3 debug model on the bytes of Python's standard library. Options that
are not its own are passed to torchtitan. With `--checkpoint.enable` it resumes when started again.
"""

import argparse
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models import llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import init_logger

from decoupled_diloco.integrations.torchtitan import DiLoCoTrainer

parser = argparse.ArgumentParser(description="Train a small byte model as one learner.")
parser.add_argument("--syncer", required=True, help="address of a shard, such as http://host:port")
parser.add_argument("--auth-token-file", type=Path, help="file with the run's secret")
parser.add_argument("--name", required=True, help="this learner's name, the same across restarts")


class Bytes(BaseDataLoader):
    """Random windows of a text's bytes, different on each data-parallel rank."""

    def __init__(
        self, dp_world_size: int, dp_rank: int, tokenizer: None, job_config: JobConfig
    ) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(file.read_bytes() for file in files))
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        self.size = job_config.training.local_batch_size
        self.window = torch.arange(job_config.training.seq_len + 1)
        seed = zlib.crc32(f"{job_config.job.description} {dp_rank}".encode())
        self.order = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield inputs and labels forever."""
        while True:
            latest = len(self.text) - len(self.window)
            starts = torch.randint(latest, (self.size, 1), generator=self.order)
            windows = self.text[starts + self.window].long()
            yield {"input": windows[:, :-1].clone()}, windows[:, 1:].clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the random order."""
        return {"order": self.order.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of `state_dict`."""
        self.order.set_state(state["order"])


def main() -> None:
    """Train until the run is over."""
    given, others = parser.parse_known_args()
    token = given.auth_token_file.read_text() if given.auth_token_file else None
    spec = replace(llama3.get_train_spec(), build_dataloader_fn=Bytes, build_tokenizer_fn=None)
    register_train_spec("llama3_of_bytes", spec)
    init_logger()
    config = ConfigManager().parse_args(["--model.name", "llama3_of_bytes", *others])
    config.job.description = given.name
    config.job.dump_folder = f"runs/torchtitan-{given.name}"
    trainer = DiLoCoTrainer(config, given.syncer, auth_token=token, name=given.name)
    try:
        trainer.train()
    finally:
        trainer.close()
    print(f"{given.name}: {trainer.learner.steps} steps; the model holds the run's final weights")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
