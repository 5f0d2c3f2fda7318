"""A small byte-level GPT on the source of Python's standard library: `name = "gpt"`.

Shapes: `B` sequences, `T` bytes of context.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from decoupled_diloco.workloads.inner import BuiltIn, InnerOptions, check_heads, evaluating
from decoupled_diloco.workloads.text import (
    Corpus,
    batch_at,
    held_out_batches,
    load_corpus,
    pass_batch_at,
    windows_of,
)
from decoupled_diloco.workloads.transformer import MLP, Block, initialize, rotary

VOCABULARY = 256
EVALUATION_BATCH_SIZE = 16

TextBatch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [B, T] each."""


class GptOptions(InnerOptions):
    """`[workload.options]` of the byte-level GPT: size, batch, inner optimizer, data."""

    layers: int = Field(default=4, ge=1)
    """Transformer blocks, at least 1. The defaults make 0.85 M parameters: one core trains them
    at some 14,000 tokens a second."""

    width: int = Field(default=128, ge=2)
    """Size of the residual stream, a multiple of 2 × heads."""

    heads: int = Field(default=4, ge=1)
    """Attention heads, at least 1."""

    context: int = Field(default=128, ge=1)
    """Bytes that the model sees at once, at least 1."""

    tied: bool = False
    """Use the embedding as output head too. Saves 256 × width parameters."""

    batch_size: int = Field(default=16, ge=1)
    """Sequences in one learner's batch, at least 1. A step trains batch_size × context tokens."""

    eval_batches: int = Field(default=8, ge=1)
    """Held-out batches of 16 sequences in one evaluation, at least 1. Raise it for a finer
    measurement."""

    corpus_bytes_max: int | None = Field(default=None, ge=1)
    """Limit of the training text, bytes. Default: all of it, about 12 MB."""

    @model_validator(mode="after")
    def _check_shape(self) -> GptOptions:
        check_heads(self, self.width, self.heads, 2, "rotary positions need heads of even size")
        return self


class GptWorkload(BuiltIn):
    """The built-in workload "gpt"; see `decoupled_diloco.workloads.Workload` for the methods."""

    name: ClassVar[str] = "gpt"

    options: GptOptions

    def __init__(self, options: GptOptions) -> None:
        self.options = options

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read when it is first needed."""
        return load_corpus(self.options.corpus_bytes_max)

    def parameters(self) -> int:
        """Trainable numbers of the model, tied ones counted once."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self._build().parameters())

    def _build(self) -> GPT:
        return GPT(self.options)

    def _batch(self, part: int, parts: int, step: int) -> TextBatch:
        options = self.options
        return _split(
            batch_at(
                self.corpus.train,
                part=part,
                parts=parts,
                step=step,
                batch_size=options.batch_size,
                context=options.context,
                seed=options.seed,
            )
        )

    def pass_batches(self) -> int:
        """Batches of a pass in which every window of the text comes once."""
        return -(-windows_of(self.corpus.train, self.options.context) // self.options.batch_size)

    def pass_batch(self, turn: int, index: int) -> TextBatch:
        """One batch of a pass; windows from anywhere in the text."""
        options = self.options
        return _split(
            pass_batch_at(
                self.corpus.train,
                turn=turn,
                index=index,
                batch_size=options.batch_size,
                context=options.context,
                seed=options.seed,
            )
        )

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Mean cross-entropy of the next byte, nats."""
        return cross_entropy(model, batch)

    def tokens(self, batch: TextBatch) -> int:
        """Bytes predicted."""
        return batch[1].numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean loss on the held-out files: always the same windows."""
        with evaluating(model):
            found = [self._metrics(model, _split(ids)) for ids in self._held_out]
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}

    def sample(self, model: nn.Module, prompt: str = "def ", length: int = 200) -> str:
        """The prompt and what the model writes after it, by a fixed seed."""
        assert isinstance(model, GPT)
        generator = torch.Generator("cpu").manual_seed(self.options.seed)
        written = model.generate(prompt.encode(), length, temperature=0.8, generator=generator)
        return prompt + written.decode(errors="replace")

    def describe(self) -> dict[str, Any]:
        """What the tape should know about model and data."""
        return {
            "workload": self.name,
            "parameters": self.parameters(),
            "tokens_per_step": self.options.batch_size * self.options.context,
            "corpus": "source of Python's standard library, without tests",
            "corpus_sha256": self.corpus.digest,
            "train_bytes": len(self.corpus.train),
            "train_files": len(self.corpus.train_files),
            "held_out_bytes": len(self.corpus.held_out),
            "held_out_files": len(self.corpus.held_out_files),
            "options": self.options.model_dump(mode="json"),
        }

    def _metrics(self, model: nn.Module, batch: TextBatch) -> dict[str, float]:
        return {"loss": cross_entropy(model, batch).item()}

    @cached_property
    def _held_out(self) -> list[Tensor]:
        return held_out_batches(
            self.corpus.held_out,
            count=self.options.eval_batches,
            batch_size=EVALUATION_BATCH_SIZE,
            context=self.options.context,
        )


class GPT(nn.Module):
    """A decoder-only transformer over bytes: pre-norm, rotary positions, ReLU² MLP, no biases.

    ``make_mlp`` makes what follows the attention in each block; default: an MLP of 4 × width.
    """

    def __init__(
        self, options: GptOptions, make_mlp: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.context = options.context
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        make_mlp = make_mlp or (lambda: MLP(options.width, 4 * options.width))
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads, make_mlp()) for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        cos, sin = rotary(options.context, options.width // options.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialize(self, options.layers)
        if options.tied:
            self.embedding.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte: int64 [B, T], T at most the context, to float [B, T, 256]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(
        self,
        prompt: bytes,
        count: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> bytes:
        """Continue a prompt by `count` bytes; an empty one is the start of a file.

        `temperature` 0: always the likeliest byte; 1: as the model says; more: wilder.
        """
        device = self.embedding.weight.device
        ids = torch.tensor([list(prompt or b"\0")], dtype=torch.int64, device=device)
        for _ in range(count):
            logits = self(ids[:, -self.context :])[:, -1].float().cpu()
            if temperature > 0:
                choice = torch.multinomial(
                    (logits / temperature).softmax(-1), 1, generator=generator
                )
            else:
                choice = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, choice.to(device)], dim=1)
        return bytes(ids[0, -count:].tolist()) if count else b""


def cross_entropy(model: nn.Module, batch: TextBatch) -> Tensor:
    """Mean cross-entropy of the next byte, nats; on the model's device."""
    device = next(model.parameters()).device
    inputs, targets = batch
    logits = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())


def _split(ids: Tensor) -> TextBatch:
    return ids[:, :-1], ids[:, 1:]
