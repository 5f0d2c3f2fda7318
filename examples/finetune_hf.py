r"""Custom workload: a causal language model from Hugging Face transformers.

    pip install -e '.[transformers]'     # in the clone
    cd examples
    ddiloco train finetune_hf.toml                      # trains tiny_llama/config.json from scratch
    ddiloco export runs/finetune_hf --format huggingface --out my_llama
    ddiloco train finetune_hf.toml --set workload.options.config= \
        --set workload.options.model=my_llama \
        --set workload.options.learning_rate=2e-4       # continues from the exported model

The file selects it with `name = "finetune_hf:workload"`. That function receives the options of the
file, and returns an object with the methods of `decoupled_diloco.workloads.Workload`. Nothing is
downloaded unless `download = true`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.huggingface import byte_tokenizer
from decoupled_diloco.workloads import Workload
from decoupled_diloco.workloads.text import batch_at, held_out_batches, load_corpus

disable_progress_bar()  # Progress bars would fill a learner's log.

HELD_OUT_SHARE = 0.05


class Options(Settings):
    """`[workload.options]` of this workload; the run sets `seed` and `total_steps`."""

    table: ClassVar[str] = "[workload.options]"

    model: str = ""
    """Model to fine-tune: a folder with config.json and weights, or a name on the hub."""

    config: str = ""
    """Model to train from scratch: a folder with config.json; the seed determines its weights.
    Exactly one of model and config is required."""

    tokenizer: str = ""
    """A folder, a name on the hub, or "bytes". Default: the model's tokenizer; "bytes" with config.
    """

    download: bool = False
    """Allow downloads from the hub. Otherwise its models must be in the local cache."""

    text: tuple[str, ...] = Field(default=(), strict=False)
    """Files to train on, as patterns: ["notes/*.txt"]. Default: the source of Python's standard
    library. The last 5 % of the text is held out."""

    text_bytes_max: int = Field(default=2_000_000, ge=1)
    """Maximum size of the text, bytes. Every learner tokenizes it at its start."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters. "bfloat16" halves the memory, but rounds small updates to zero, so
    use a higher learning rate with it."""

    context: int = Field(default=128, ge=1)
    """Sequence length in tokens, at most the model's number of positions."""

    batch_size: int = Field(default=8, ge=1)
    """Sequences per batch of one learner, at least 1."""

    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate of AdamW. To fine-tune a real model, use about 2e-5."""

    warmup_steps: int = Field(default=20, ge=0)
    """Global steps until the learning rate reaches its peak."""

    eval_batches: int = Field(default=8, ge=1)
    """Held-out batches per evaluation."""

    seed: int = 0
    """Seed of the initial weights and of the data order."""

    total_steps: int | None = None
    """Global step at which the learning rate has fallen to a tenth."""

    @model_validator(mode="after")
    def _check_model(self) -> Options:
        if bool(self.model) == bool(self.config):
            raise ConfigError(
                f"model={self.model!r} and config={self.config!r} in {self.table}: give exactly "
                "one, a model to fine-tune or a config to train from scratch"
            )
        return self


class FineTuning(Workload):
    """Model, data, optimizer and schedule. `schedule` and `describe` are optional."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.source = options.model or options.config
        self.config = self._read(AutoConfig, self.source)
        self._check()

    def _read(self, kind: Any, name: str, **arguments: Any) -> Any:
        """Call `kind.from_pretrained` with a folder or hub name; report errors in one sentence."""
        try:
            return kind.from_pretrained(
                name, local_files_only=not self.options.download, **arguments
            )
        except (OSError, ValueError) as error:
            if not self.options.download and not Path(name).exists():
                raise ConfigError(
                    f"{name!r} is neither a folder nor in the local cache of the hub: correct the "
                    "path, or set download=true for a name on the hub"
                ) from None
            raise ConfigError(f"{name!r} cannot be loaded: {error}") from None

    def _check(self) -> None:
        options, config = self.options, self.config
        positions = getattr(config, "max_position_embeddings", options.context)
        if options.context > positions:
            raise ConfigError(
                f"context={options.context} exceeds the {positions} positions of {self.source!r}: "
                "lower context"
            )
        if len(self.tokenizer) > config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens, more than vocab_size="
                f"{config.vocab_size} of {self.source!r}: use the model's tokenizer"
            )

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or one for bytes; `ddiloco export` saves it."""
        name = self.options.tokenizer or self.options.model or "bytes"
        if name != "bytes":
            return self._read(AutoTokenizer, name)
        bytes_tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer()))
        return PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer)

    @cached_property
    def tokens_of_text(self) -> tuple[Tensor, Tensor]:
        """Training and held-out tokens, int32."""
        count = self.options.text_bytes_max
        if not self.options.text:
            corpus = load_corpus(count)
            return self._tokenize(bytes(corpus.train.numpy())), self._tokenize(
                bytes(corpus.held_out.numpy())
            )
        text = b"\0".join(path.read_bytes() for path in _files(self.options.text))[:count]
        tokens = self._tokenize(text)
        held_out = int(HELD_OUT_SHARE * len(tokens))
        return tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]

    def _tokenize(self, text: bytes) -> Tensor:
        # Tokenize all text at once, because many tokenizers put a space before each input.
        # verbose=False avoids a warning that the text exceeds the model's context, which is
        # intended here.
        whole = text.decode(errors="replace")
        ids = self.tokenizer(whole, add_special_tokens=False, verbose=False).input_ids
        return torch.tensor(ids, dtype=torch.int32)

    def model(self) -> nn.Module:
        """Return a new model with pretrained weights, or with random weights from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            if self.options.model:
                model = self._read(AutoModelForCausalLM, self.options.model)
            else:
                model = AutoModelForCausalLM.from_config(self.config)
        # from_pretrained returns a model in evaluation mode.
        trained: nn.Module = model.to(getattr(torch, self.options.dtype)).train()
        return trained

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW; any torch optimizer works."""
        return torch.optim.AdamW(model.parameters(), lr=self.options.learning_rate)

    def schedule(self, step: int) -> float:
        """Return the rate's factor at a global step: warm-up, then a cosine to a tenth."""
        warmup, total = self.options.warmup_steps, self.options.total_steps
        if step < warmup:
            return (step + 1) / warmup
        done = 0.0 if total is None else min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Tensor]:
        """Yield tokens, int64 [B, T + 1], from this learner's own region of the text."""
        options, step = self.options, start
        while True:
            yield batch_at(
                self.tokens_of_text[0],
                part=part,
                parts=parts,
                step=step,
                batch_size=options.batch_size,
                context=options.context,
                seed=options.seed,
            )
            step += 1

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next token, nats."""
        batch = batch.to(next(model.parameters()).device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def tokens(self, batch: Tensor) -> int:
        """Return the number of predicted tokens."""
        return batch[:, 1:].numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and perplexity on the held-out text."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            losses = [self.loss(model, batch).item() for batch in self._held_out]
        model.train(was_training)
        loss = sum(losses) / len(losses)
        # exp(x) overflows above x = 709.
        return {"loss": loss, "perplexity": math.inf if loss > 709 else math.exp(loss)}

    @cached_property
    def _held_out(self) -> list[Tensor]:
        options = self.options
        return held_out_batches(
            self.tokens_of_text[1],
            count=options.eval_batches,
            batch_size=options.batch_size,
            context=options.context,
        )

    def sample(self, model: nn.Module, prompt: str = "def ", length: int = 60) -> str:
        """Continue a prompt by greedy decoding."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for _ in range(length):
                logits = model(input_ids=ids[:, -self.options.context :], use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        model.train(was_training)
        return str(self.tokenizer.decode(ids[0]))

    def describe(self) -> dict[str, Any]:
        """Return facts for the report."""
        config: PretrainedConfig = self.config
        return {
            "model": self.source,
            "architecture": config.model_type,
            "text": list(self.options.text) or "the source of Python's standard library",
            "train_tokens": len(self.tokens_of_text[0]),
        }


def workload(options: dict[str, Any]) -> FineTuning:
    """Create the workload for `name = "finetune_hf:workload"`."""
    return FineTuning(Options(**options))


def _files(patterns: tuple[str, ...]) -> list[Path]:
    found = [Path(name) for pattern in patterns for name in sorted(glob(pattern, recursive=True))]  # noqa: PTH207 (absolute ones, too)
    files = [path for path in found if path.is_file()]
    if not files:
        raise ConfigError(
            f"text={list(patterns)} matches no file in {Path.cwd()}: patterns are relative to "
            "the current folder"
        )
    return files
