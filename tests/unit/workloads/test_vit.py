"""The vision transformer on digits: disjoint partitions, pure batches, and training."""

from __future__ import annotations

import importlib.util
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.workloads import vit
from decoupled_diloco_lab.workloads.vit import VitOptions, VitWorkload, patches_of, shifted

TINY: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "batch_size": 16}


@pytest.fixture(scope="module")
def workload() -> VitWorkload:
    return VitWorkload(VitOptions(**TINY))


def names_of(images: Tensor) -> list[bytes]:
    return [np.asarray(image).tobytes() for image in images]


def test_a_fifth_is_held_out_and_shares_no_image_with_training(workload: VitWorkload) -> None:
    train, held_out = workload.digits.train, workload.digits.held_out
    assert (len(train[1]), len(held_out[1])) == (1438, 359)
    assert train[0].shape == (1438, 8, 8)
    assert 0 <= train[0].min() < train[0].max() <= 1
    assert set(train[1].tolist()) == set(held_out[1].tolist()) == set(range(10))
    assert not set(names_of(train[0])) & set(names_of(held_out[0]))


def test_the_seed_determines_the_held_out_images(workload: VitWorkload) -> None:
    assert vit.load_digits(0).digest == workload.digits.digest
    assert vit.load_digits(1).digest != workload.digits.digest


def test_partitions_are_disjoint_and_used_completely(workload: VitWorkload) -> None:
    seen = []
    for part in range(3):
        batches = itertools.islice(workload.batches(part, 3), 300)
        seen.append({name for images, _ in batches for name in names_of(images)})
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
    assert set.union(*seen) == set(names_of(workload.digits.train[0]))


def test_a_batch_has_different_images_with_their_digits(workload: VitWorkload) -> None:
    images, labels = next(workload.batches(1, 4))
    assert (images.shape, labels.shape) == ((16, 8, 8), (16,))
    assert workload.tokens((images, labels)) == 16
    known = dict(zip(names_of(workload.digits.train[0]), workload.digits.train[1], strict=True))
    assert [int(known[name]) for name in names_of(images)] == labels.tolist()
    assert len(set(names_of(images))) == 16


@pytest.mark.parametrize("shift", [0, 2])
def test_a_restarted_learner_continues_at_the_same_batch(shift: int) -> None:
    workload = VitWorkload(VitOptions(**TINY, shift_pixels_max=shift))
    whole = list(itertools.islice(workload.batches(1, 3), 6))
    resumed = itertools.islice(workload.batches(1, 3, start=4), 2)
    for (a, b), (c, d) in zip(whole[4:], resumed, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    assert not torch.equal(whole[0][0], whole[1][0])


def test_a_shifted_image_is_moved_and_filled_with_zeros() -> None:
    image = torch.arange(1.0, 65.0).view(1, 8, 8)
    assert torch.equal(shifted(image, torch.tensor([[0, 0]])), image)
    down, right = shifted(image.repeat(2, 1, 1), torch.tensor([[2, 0], [0, -1]]))
    assert torch.equal(down[2:], image[0, :6])
    assert down[:2].count_nonzero() == 0
    assert torch.equal(right[:, :7], image[0, :, 1:])
    assert right[:, 7].count_nonzero() == 0


def test_augmented_images_are_shifted_training_images() -> None:
    plain, moved = (VitWorkload(VitOptions(**TINY, shift_pixels_max=n)) for n in (0, 1))
    (a, first), (b, second) = next(plain.batches(0, 2)), next(moved.batches(0, 2))
    assert torch.equal(first, second)
    every = [torch.tensor([[down, right]]) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    for image, other in zip(a, b, strict=True):
        assert any(torch.equal(shifted(image[None], shift)[0], other) for shift in every)


@pytest.mark.parametrize("side", [1, 2, 4])
def test_patches_are_squares_in_reading_order(side: int) -> None:
    image = torch.arange(64.0).view(1, 8, 8)
    patches = patches_of(image, side)
    count = 8 // side
    assert patches.shape == (1, count * count, side * side)
    for index in range(count * count):
        row, column = divmod(index, count)
        square = image[0, row * side : (row + 1) * side, column * side : (column + 1) * side]
        assert patches[0, index].tolist() == square.flatten().tolist()


def test_every_patch_depends_on_all_others(workload: VitWorkload) -> None:
    model, image = workload.model(), workload.digits.train[0][:1]
    changed = image.clone()
    changed[0, 7, 7] = 1 - changed[0, 7, 7]
    norm = model.norm.register_forward_hook(lambda _m, _i, out: found.append(out.detach()))
    found: list[Tensor] = []
    with torch.no_grad():
        model(image), model(changed)
    norm.remove()
    assert ((found[0] - found[1]).abs().amax(-1) > 0).all()


def test_the_loss_falls_and_the_accuracy_rises() -> None:
    workload = VitWorkload(VitOptions(**TINY, learning_rate=5e-3))
    model = workload.model()
    optimizer = workload.optimizer(model)
    before = workload.evaluate(model)
    for batch in itertools.islice(workload.batches(0, 1), 60):
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = workload.evaluate(model)
    assert before["accuracy"] < 0.3
    assert after["accuracy"] > 0.5
    assert after["loss"] < before["loss"]
    assert model.training
    assert after["tokens"] == 359


def test_describe_is_plain_and_counts_images(workload: VitWorkload) -> None:
    facts = json.loads(json.dumps(workload.describe()))
    assert facts["tokens_per_step"] == 16
    assert (facts["train_images"], facts["held_out_images"]) == (1438, 359)
    assert workload.sample(workload.model()) is None


def test_pictures_are_held_out_images_with_both_digits(workload: VitWorkload) -> None:
    model = workload.model()
    pictures = workload.pictures(model)
    images, labels = workload.digits.held_out
    with torch.no_grad():
        found = model(images[:12]).argmax(-1)
    assert model.training
    assert [each.caption for each in pictures] == [
        f"written {label}, read {read}" for label, read in zip(labels[:12], found, strict=True)
    ]
    assert torch.equal(torch.stack([each.pixels for each in pictures]), images[:12])


def test_the_error_without_scikit_learn_has_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(vit, "find_spec", lambda n: None if n == "sklearn" else found(n))
    with pytest.raises(ConfigError) as error:
        load_workload("vit", {})
    assert str(error.value) == (
        "workload 'vit' requires the images of scikit-learn, which is not installed: "
        "run pip install -e 'packages/lab[vision]' in the clone"
    )


def test_a_partition_smaller_than_a_batch_is_rejected() -> None:
    workload = VitWorkload(VitOptions(**{**TINY, "batch_size": 500}))
    with pytest.raises(ConfigError) as error:
        next(workload.batches(0, 4))
    assert str(error.value) == (
        "batch_size=500 exceeds the 359 images of partition 0 of 4: lower learners or batch_size"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"width": 30},
            "width=30 in [workload.options] is not a multiple of heads=4: "
            "each head has its share of the width; change width or heads",
        ),
        ({"patch_side": 3}, "patch_side=3 in [workload.options] is not known: "),
        ({"depth": 3}, "unknown key 'depth' in [workload.options]: "),
        ({"shift_pixels_max": 8}, "shift_pixels_max=8 in [workload.options] is out of range: "),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        VitOptions(**options)
    assert str(error.value).startswith(sentence)
