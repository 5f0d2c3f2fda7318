"""A small perceptron on handwritten digits, each learner with its own classes: `name = "digits"`.

Each learner has a few images. It draws its own mixture of the ten digits from a Dirichlet
distribution, so that learners have different data (non-IID). The images are those of `vit`.
Budgets and weights count one image as one token.

Shapes: `B` images.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache, cached_property
from itertools import islice

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.inner import InnerOptions
from decoupled_diloco_lab.workloads.vit import (
    CLASSES,
    SIDE,
    Digits,
    ImageBatch,
    ImageWorkload,
    load_digits,
    require_images,
)


class DigitsOptions(InnerOptions):
    """`[workload.options]` of "digits": model size, images of a learner, batch, inner optimizer."""

    hidden: int = Field(default=64, ge=1)
    """Width of the hidden layer, at least 1. The default results in 4,810 parameters."""

    images: int = Field(default=20, ge=1)
    """Images of one learner, at least 1. Learners may have the same image."""

    alpha: float = Field(default=0.3, gt=0)
    """Concentration of the Dirichlet distribution from which a learner draws its mixture of the ten
    digits, greater than 0. A smaller one makes the learners' data more different. With 0.3, most
    images of a learner are of two or three digits."""

    batch_size: int = Field(default=8, ge=1)
    """Images in one batch, at least 1 and at most `images`."""

    learning_rate: float = Field(default=0.1, gt=0)
    """Peak learning rate, greater than 0."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices, at least 0."""

    warmup_steps: int = Field(default=0, ge=0)
    """Global steps until the learning rate reaches its peak, at least 0 and less than
    total_steps."""

    @model_validator(mode="after")
    def _check_batch(self) -> DigitsOptions:
        if self.batch_size > self.images:
            raise ConfigError(
                f"batch_size={self.batch_size} exceeds images={self.images} of a learner: lower "
                "batch_size or raise images"
            )
        return self


class DigitsWorkload(ImageWorkload):
    """The built-in workload "digits"; see `decoupled_diloco.workloads.Workload` for the methods.

    Raises:
        ConfigError: scikit-learn is not installed.
    """

    name = "digits"
    options: DigitsOptions

    def __init__(self, options: DigitsOptions) -> None:
        require_images(self.name)
        self.options = options
        self.images_of = cache(self._images_of)
        """Return the images of each of this many learners."""

    @cached_property
    def digits(self) -> Digits:
        """All images, read at first use. Every seed holds out the same ones."""
        return load_digits(0)

    def _images_of(self, learners: int) -> list[ImageBatch]:
        options = self.options
        images, labels = self.digits.train
        rng = np.random.default_rng([options.seed, learners])
        by_class = [np.flatnonzero(labels.numpy() == each) for each in range(CLASSES)]
        found = []
        for _ in range(learners):
            mixture = rng.dirichlet([options.alpha] * CLASSES)
            classes = rng.choice(CLASSES, options.images, p=mixture)
            chosen = torch.tensor([rng.choice(by_class[each]) for each in classes])
            found.append((images[chosen], labels[chosen]))
        return found

    def order(self, part: int) -> Iterator[Tensor]:
        """Yield the indices of each batch among a learner's images, int64 [B], without end."""
        rng = np.random.default_rng([self.options.seed, part, 1])
        while True:
            yield torch.from_numpy(rng.permutation(self.options.images)[: self.options.batch_size])

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[ImageBatch]:
        """Return the endless batches of one learner."""
        images, labels = self.images_of(parts)[part]
        return ((images[each], labels[each]) for each in islice(self.order(part), start, None))

    def model(self) -> nn.Module:
        """Return a new model with weights from the seed; the global generator does not change."""
        return deepcopy(self._first)

    @cached_property
    def _first(self) -> nn.Module:
        return super().model()  # a thousand devices would spend their time on seeding generators

    def _build(self) -> nn.Module:
        hidden = self.options.hidden
        return nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE**2, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
        )
