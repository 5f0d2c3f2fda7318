"""A small vision transformer on scikit-learn's handwritten digits: `name = "vit"`.

The 1797 gray images of 8 × 8 pixels come with scikit-learn, so nothing is downloaded. Install the
extra "vision" in the clone: `pip install -e 'packages/lab[vision]'`. Budgets and
weights count one image as one token.

Shapes: `B` images, `T` patches of an image, `W` width.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.inner import BuiltIn, InnerOptions, check_heads, evaluating
from decoupled_diloco.workloads.text import pass_order, region
from decoupled_diloco.workloads.transformer import MLP, Block, initialize
from decoupled_diloco.workloads.workload import Picture

SIDE = 8
CLASSES = 10
INTENSITY_MAX = 16.0
HELD_OUT_SHARE = 0.2
PICTURES = 12

ImageBatch: TypeAlias = tuple[Tensor, Tensor]
"""Images, fp32 [B, 8, 8] from 0 to 1, and their digits, int64 [B]."""


class VitOptions(InnerOptions):
    """`[workload.options]` of "vit": model size, batch, augmentation, inner optimizer."""

    layers: int = Field(default=2, ge=1)
    """Transformer blocks, at least 1. The defaults result in 0.1 M parameters."""

    width: int = Field(default=64, ge=1)
    """Size of the residual stream, a multiple of heads."""

    heads: int = Field(default=4, ge=1)
    """Attention heads, at least 1."""

    patch_side: Literal[1, 2, 4] = 2
    """Side of a patch in pixels: 1, 2 or 4. A side of 2 results in 16 patches per image. Smaller
    patches cost more."""

    batch_size: int = Field(default=32, ge=1)
    """Images in one learner's batch, at least 1 and at most a learner's share of the 1438 training
    images."""

    shift_pixels_max: int = Field(default=0, ge=0, lt=SIDE)
    """Augmentation: training images are shifted by up to this number of pixels in each direction, 0
    (off) to 7. The digits nearly fill their images, and a run of a few hundred steps is too short
    to benefit. With 1, the accuracy after 360 steps of recipes/vision.toml is 90 % instead of
    96 %."""

    @model_validator(mode="after")
    def _check_shape(self) -> VitOptions:
        check_heads(self, self.width, self.heads, 1, "each head has its share of the width")
        return self


@dataclass(frozen=True)
class Digits:
    """The images in two disjoint sets, and the hex SHA-256 digest of all of them in order."""

    train: ImageBatch
    held_out: ImageBatch
    digest: str


class ImageWorkload(BuiltIn):
    """Base class of the workloads whose models classify the images of digits."""

    name: ClassVar[str]
    options: Any  # with `batch_size`

    @property
    def digits(self) -> Digits:
        """All images."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the mean cross-entropy of the digit in nats."""
        device = next(model.parameters()).device
        images, labels = batch
        return F.cross_entropy(model(images.to(device)).float(), labels.to(device))

    def tokens(self, batch: ImageBatch) -> int:
        """Return the number of images."""
        return len(batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and the accuracy (0 to 1) on all held-out images."""
        images, labels = self.digits.held_out
        with evaluating(model):
            logits = model(images.to(next(model.parameters()).device)).float().cpu()
        return {
            "loss": F.cross_entropy(logits, labels).item(),
            "accuracy": (logits.argmax(-1) == labels).float().mean().item(),
            "tokens": float(len(labels)),
        }

    def sample(self, model: nn.Module, prompt: str = "", length: int = 200) -> None:
        """Return ``None``: the model generates no text."""

    def pictures(self, model: nn.Module) -> list[Picture]:
        """Return held-out images with their digits and those that the model reads."""
        images, labels = (each[:PICTURES] for each in self.digits.held_out)
        with evaluating(model):
            found = model(images.to(next(model.parameters()).device)).argmax(-1).tolist()
        rows = zip(images, labels.tolist(), found, strict=True)
        return [Picture(f"written {label}, read {read}", image) for image, label, read in rows]

    def describe(self) -> dict[str, Any]:
        """Describe the model and the data for the tape."""
        return {
            "workload": self.name,
            "parameters": sum(parameter.numel() for parameter in self.model().parameters()),
            "tokens_per_step": self.options.batch_size,
            "corpus": "scikit-learn's handwritten digits, 8 × 8 pixels; a token is an image",
            "corpus_sha256": self.digits.digest,
            "train_images": len(self.digits.train[1]),
            "held_out_images": len(self.digits.held_out[1]),
            "options": self.options.model_dump(mode="json"),
        }


class VitWorkload(ImageWorkload):
    """The built-in workload "vit"; see `decoupled_diloco.workloads.Workload` for the methods.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    name = "vit"
    options: VitOptions

    def __init__(self, options: VitOptions) -> None:
        require_images(self.name)
        self.options = options

    @cached_property
    def digits(self) -> Digits:
        """The images, read at first use."""
        return load_digits(self.options.seed)

    def _build(self) -> Vit:
        return Vit(self.options)

    def _batch(self, part: int, parts: int, step: int) -> ImageBatch:
        return batch_at(self.digits.train, part, parts, step, self.options)

    def pass_batches(self) -> int:
        """Return the number of batches per epoch, in which every training image comes once."""
        return -(-len(self.digits.train[1]) // self.options.batch_size)

    def pass_batch(self, turn: int, index: int) -> ImageBatch:
        """Return one batch of an epoch, with shifted images. The last batch may be smaller."""
        options = self.options
        order = pass_order(len(self.digits.train[1]), options.seed, turn)
        chosen = torch.from_numpy(order[index * options.batch_size :][: options.batch_size])
        rng = np.random.default_rng([options.seed, turn, index, 1])
        return _moved(self.digits.train, chosen, rng, options.shift_pixels_max)


class Vit(nn.Module):
    """A vision transformer: patches, learned positions, non-causal blocks, mean, head."""

    def __init__(self, options: VitOptions) -> None:
        super().__init__()
        self.patch_side = options.patch_side
        patches = (SIDE // options.patch_side) ** 2
        self.patch = nn.Linear(options.patch_side**2, options.width, bias=False)
        self.positions = nn.Parameter(torch.empty(patches, options.width))
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads, MLP(options.width, 4 * options.width), causal=False)
            for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(options.width)
        self.head = nn.Linear(options.width, CLASSES, bias=False)
        initialize(self, options.layers)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float [B, 8, 8] from 0 to 1, to logits of the digit, float [B, 10]."""
        x = self.patch(patches_of(images, self.patch_side)) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def patches_of(images: Tensor, side: int) -> Tensor:
    """Cut images [B, 8, 8] into squares, row by row: [B, T, side²]."""
    count = SIDE // side
    squares = images.view(len(images), count, side, count, side).transpose(2, 3)
    return squares.reshape(len(images), count * count, side * side)


def require_images(workload: str) -> None:
    """Raise `ConfigError` if scikit-learn, which has the images, is not installed."""
    if find_spec("sklearn") is None:
        raise ConfigError(
            f"workload {workload!r} requires the images of scikit-learn, which is not installed: "
            "run pip install -e 'packages/lab[vision]' in the clone"
        )


def load_digits(seed: int) -> Digits:
    """Read the digits of scikit-learn. The seed decides their order and which fifth is held out."""
    from sklearn.datasets import load_digits as read

    images, labels = read(return_X_y=True)
    order = np.random.default_rng([seed, len(labels)]).permutation(len(labels))
    pixels = torch.from_numpy(images[order]).float().view(-1, SIDE, SIDE) / INTENSITY_MAX
    classes = torch.from_numpy(labels[order]).long()
    held_out = round(HELD_OUT_SHARE * len(labels))
    return Digits(
        train=(pixels[held_out:], classes[held_out:]),
        held_out=(pixels[:held_out], classes[:held_out]),
        digest=hashlib.sha256(pixels.numpy().tobytes() + classes.numpy().tobytes()).hexdigest(),
    )


def batch_at(
    train: ImageBatch, part: int, parts: int, step: int, options: VitOptions
) -> ImageBatch:
    """Return batch number `step` of a partition: distinct images of its share, each shifted.

    This is a pure function of its arguments, so training can continue at any step without saved
    state.

    Raises:
        ConfigError: The share is smaller than a batch.
    """
    mine = region(len(train[1]), part, parts)
    if len(mine) < options.batch_size:
        raise ConfigError(
            f"batch_size={options.batch_size} exceeds the {len(mine)} images of partition {part} "
            f"of {parts}: lower learners or batch_size"
        )
    rng = np.random.default_rng([options.seed, part, step])
    chosen = mine.start + torch.from_numpy(
        rng.choice(len(mine), size=options.batch_size, replace=False)
    )
    return _moved(train, chosen, rng, options.shift_pixels_max)


def _moved(train: ImageBatch, chosen: Tensor, rng: np.random.Generator, reach: int) -> ImageBatch:
    images, labels = train
    shifts = rng.integers(-reach, reach + 1, size=(len(chosen), 2))
    return shifted(images[chosen], torch.from_numpy(shifts)), labels[chosen]


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift each image [B, 8, 8] down and to the right, and fill with zeros.

    `shifts`: int64 [B, 2], down and right, in pixels from -7 to 7.
    """
    padded = F.pad(images, (SIDE, SIDE, SIDE, SIDE))
    places = torch.arange(SIDE, dtype=torch.int64, device=images.device)
    numbers = torch.arange(len(images), dtype=torch.int64, device=images.device)
    rows = places[None, :] + SIDE - shifts[:, :1]
    columns = places[None, :] + SIDE - shifts[:, 1:]
    return padded[numbers[:, None, None], rows[:, :, None], columns[:, None, :]]
