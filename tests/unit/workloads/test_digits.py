"""The perceptron on digits: each learner's own images, repeatable batches, and training."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import torch

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.workloads.digits import DigitsOptions, DigitsWorkload


def workload_of(**options: float) -> DigitsWorkload:
    return DigitsWorkload(DigitsOptions.model_validate(options))


def most_frequent(alpha: float) -> float:
    """Return the mean share of a learner's most frequent digit."""
    found = workload_of(alpha=alpha).images_of(200)
    shares = [Counter(labels.tolist()).most_common(1)[0][1] / len(labels) for _, labels in found]
    return sum(shares) / len(shares)


def test_alpha_determines_how_different_the_learners_are() -> None:
    assert most_frequent(0.3) > 0.45
    assert most_frequent(100.0) < 0.25


def test_a_learner_has_its_own_images_and_no_held_out_ones() -> None:
    workload = workload_of()
    held_out = {image.numpy().tobytes() for image in workload.digits.held_out[0]}
    for images, labels in workload.images_of(10):
        assert images.shape == (20, 8, 8)
        assert len(labels) == 20
        assert not held_out & {image.numpy().tobytes() for image in images}


def test_batches_continue_where_they_stopped() -> None:
    workload = workload_of(seed=3)
    whole = [labels for _, labels in islice(workload.batches(1, 4), 6)]
    rest = [labels for _, labels in islice(workload_of(seed=3).batches(1, 4, start=4), 2)]
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], rest, strict=True))
    assert {len(labels) for labels in whole} == {8}


def test_it_learns_its_own_images() -> None:
    workload = workload_of()
    model = workload.model()
    optimizer, first = workload.optimizer(model), workload.evaluate(model)
    losses = []
    for batch in islice(workload.batches(0, 2), 60):
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert workload.evaluate(workload.model()) == first, "a new model starts from the seed"


def test_a_batch_is_at_most_the_images_of_a_learner() -> None:
    with pytest.raises(ConfigError) as caught:
        load_workload("digits", {"batch_size": 21})
    assert "batch_size=21 exceeds images=20 of a learner: lower batch_size or raise images" in str(
        caught.value
    )
