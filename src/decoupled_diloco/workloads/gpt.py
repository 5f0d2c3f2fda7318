"""A small byte-level GPT on the source of Python's standard library: `name = "gpt"`.

Shapes: `B` sequences, `T` bytes of context, `W` width, `H` heads, `D` = W / H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.text import Corpus, batch_at, held_out_batches, load_corpus

VOCABULARY = 256
LR_FINAL = 0.1
EVALUATION_BATCH_SIZE = 16

TextBatch: TypeAlias = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [B, T] each."""


class GptOptions(Settings):
    """`[workload.options]` of the byte-level GPT: size, batch, inner optimizer, data."""

    table: ClassVar[str] = "[workload.options]"

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

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Inner optimizer: "adamw" (paper); "sgd", without momentum, for the data-parallel baseline."""

    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate, greater than 0. Tune it for each batch size and inner optimizer before
    comparing runs."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices towards 0, not of norms; 0 and up."""

    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Averaging factors of AdamW's two moments, 0 to less than 1. 0.95 as usual for language
    models: it forgets early gradients sooner than 0.999."""

    warmup_steps: int = Field(default=20, ge=0)
    """Global steps until the learning rate reaches its peak, 0 to less than total_steps. 20 are
    enough for AdamW's moments to mean something."""

    total_steps: int | None = Field(default=None, ge=1)
    """Global step at which the learning rate has fallen to a tenth, by a cosine. Filled in with
    the run's budget_steps; without one the rate stays at its peak."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights and of the order of the data. Filled in with the run's seed."""

    eval_batches: int = Field(default=8, ge=1)
    """Held-out batches of 16 sequences in one evaluation, at least 1. Raise it for a finer
    measurement."""

    corpus_bytes_max: int | None = Field(default=None, ge=1)
    """Limit of the training text, bytes. Default: all of it, about 12 MB."""

    def inapplicable(self) -> dict[str, str]:
        """`betas` are AdamW's."""
        return {"betas": "with optimizer='sgd'"} if self.optimizer == "sgd" else {}

    @model_validator(mode="after")
    def _check_shape(self) -> GptOptions:
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width={self.width} in {self.table} is not a multiple of 2 × heads="
                f"{2 * self.heads}: rotary positions need heads of even size; change width or heads"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas={list(self.betas)} in {self.table} are out of range: "
                "each must be at least 0 and less than 1"
            )
        explicit = "warmup_steps" in self.model_fields_set
        if explicit and self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} in {self.table} is not below "
                f"total_steps={self.total_steps}: lower warmup_steps or train longer"
            )
        return self


class GptWorkload:
    """The built-in workload "gpt"; see `decoupled_diloco.workloads.Workload` for the methods."""

    def __init__(self, options: GptOptions) -> None:
        self.options = options

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read when it is first needed."""
        return load_corpus(self.options.corpus_bytes_max)

    def model(self) -> GPT:
        """A new model, its weights drawn from the seed; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return GPT(self.options)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW or plain SGD; weight decay on matrices only."""
        options = self.options
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        if options.optimizer == "sgd":
            return torch.optim.SGD(
                groups, lr=options.learning_rate, weight_decay=options.weight_decay
            )
        return torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay
        )

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[TextBatch]:
        """The endless batches of one learner, from its own region of the text."""
        step = start
        while True:
            yield _split(
                batch_at(
                    self.corpus.train,
                    part=part,
                    parts=parts,
                    step=step,
                    batch_size=self.options.batch_size,
                    context=self.options.context,
                    seed=self.options.seed,
                )
            )
            step += 1

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Mean cross-entropy of the next byte, nats."""
        return _cross_entropy(model, batch)

    def tokens(self, batch: TextBatch) -> int:
        """Bytes predicted."""
        return batch[1].numel()

    def schedule(self, step: int) -> float:
        """Linear warm-up to 1, then a cosine to 0.1 at `total_steps`, then constant."""
        warmup, total = self.options.warmup_steps, self.options.total_steps
        if step < warmup:
            return (step + 1) / warmup
        if total is None:
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return LR_FINAL + (1 - LR_FINAL) * 0.5 * (1 + math.cos(math.pi * progress))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean loss on the held-out files: always the same windows."""
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                losses = [_cross_entropy(model, _split(ids)).item() for ids in self._held_out]
        finally:
            model.train(was_training)
        return {"loss": sum(losses) / len(losses)}

    def sample(self, model: nn.Module, prompt: str = "def ", length: int = 200) -> str:
        """The prompt and what the model writes after it, by a fixed seed."""
        assert isinstance(model, GPT)
        generator = torch.Generator().manual_seed(self.options.seed)
        written = model.generate(prompt.encode(), length, temperature=0.8, generator=generator)
        return prompt + written.decode(errors="replace")

    def describe(self) -> dict[str, Any]:
        """What the tape should know about model and data."""
        return {
            "workload": "gpt",
            "parameters": count_parameters(self.options),
            "tokens_per_step": self.options.batch_size * self.options.context,
            "corpus": "source of Python's standard library, without tests",
            "corpus_sha256": self.corpus.digest,
            "train_bytes": len(self.corpus.train),
            "train_files": len(self.corpus.train_files),
            "held_out_bytes": len(self.corpus.held_out),
            "held_out_files": len(self.corpus.held_out_files),
            "options": self.options.applicable(),
        }

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

    Query, key and value have matrices of their own, so that no tensor stands out in size and the
    balanced partition has enough of them for 24 fragments.
    """

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.context = options.context
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(_Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        cos, sin = _rotary(options.context, options.width // options.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize(options.layers)
        if options.tied:
            self.embedding.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            ids: int64 [B, T], T at most the context.

        Returns:
            float [B, T, 256].
        """
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
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
        """Continue a prompt byte by byte.

        Args:
            prompt: What to continue; empty: the start of a file.
            count: Bytes to write.
            temperature: 0: always the likeliest byte; 1: as the model says; more: wilder.
            generator: Source of randomness, on the CPU.

        Returns:
            The `count` new bytes, without the prompt.
        """
        device = self.embedding.weight.device
        ids = torch.tensor([list(prompt or b"\0")], device=device)
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

    def _initialize(self, layers: int) -> None:
        """Embedding: normal with σ = 1; matrices: 1/√fan-in; into the residual stream: less.

        With σ = 1 the residual stream starts at the size that the norms bring it to, so that the
        blocks add to it in small steps; it learns clearly faster than from 1/√width.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 1.0 if name == "embedding.weight" else parameter.shape[1] ** -0.5
            if name.endswith("project.weight"):
                std /= math.sqrt(2 * layers)
            nn.init.normal_(parameter, std=std)


def count_parameters(options: GptOptions) -> int:
    """Trainable numbers of the model that these options make, tied ones counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(options).parameters())


class _Block(nn.Module):
    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width)
        self.attention = _Attention(options.width, options.heads)
        self.mlp_norm = nn.RMSNorm(options.width)
        self.mlp = _MLP(options.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.mlp(self.mlp_norm(x))
        return x  # noqa: RET504 (the two residual lines belong together)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotate(self._split(self.query(x)), cos, sin)
        k = _rotate(self._split(self.key(x)), cos, sin)
        v = self._split(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.project(y.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, W] to [B, H, T, D]."""
        sequences, steps, width = x.shape
        return x.view(sequences, steps, self.heads, width // self.heads).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.project(F.relu(self.expand(x)).square())
        return projected


def _rotary(context: int, size: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position angles, [T, D / 2] each."""
    frequencies = base ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head, [B, H, T, D], by the angle of the position."""
    cos, sin = cos[: x.shape[2]], sin[: x.shape[2]]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _split(ids: Tensor) -> TextBatch:
    return ids[:, :-1], ids[:, 1:]


def _cross_entropy(model: nn.Module, batch: TextBatch) -> Tensor:
    device = next(model.parameters()).device
    inputs, targets = batch
    logits = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten())
