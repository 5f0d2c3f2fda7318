"""The byte-level GPT: its architecture, its training, and equality in all processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.gpt import GPT, GptOptions, GptWorkload

TINY: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch_size": 4,
    "eval_batches": 2,
    "corpus_bytes_max": 200_000,
}


@pytest.fixture(scope="module")
def workload() -> GptWorkload:
    return GptWorkload(GptOptions(**TINY))


def tiny(**options: Any) -> GptWorkload:
    return GptWorkload(GptOptions(**{**TINY, **options}))


def train(workload: GptWorkload, steps: int) -> list[float]:
    model = workload.model()
    optimizer = workload.optimizer(model)
    losses = []
    for batch in itertools.islice(workload.batches(0, 1), steps):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_default_model_has_853_120_parameters() -> None:
    # 4 blocks of 12 · 128², embedding and head of 256 · 128, 9 norms of 128.
    assert (
        GptWorkload(GptOptions()).parameters()
        == 4 * 12 * 128**2 + 2 * 256 * 128 + 9 * 128
        == 853_120
    )
    assert GptWorkload(GptOptions(tied=True)).parameters() == 853_120 - 256 * 128


def test_the_default_model_has_enough_tensors_for_24_fragments() -> None:
    matrices = [p for p in GPT(GptOptions()).parameters() if p.ndim == 2]
    assert len(matrices) >= 24


def test_a_tied_head_is_the_embedding() -> None:
    model = tiny(tied=True).model()
    assert isinstance(model, GPT)
    assert model.head.weight is model.embedding.weight


def test_the_seed_determines_the_weights_and_the_global_generator_is_unchanged() -> None:
    before = torch.random.get_rng_state()
    first, second = tiny().model().state_dict(), tiny().model().state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tiny(seed=1).model().state_dict()
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_buffers_are_not_part_of_the_weights(workload: GptWorkload) -> None:
    model = workload.model()
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


def test_the_loss_of_an_untrained_model_is_high(workload: GptWorkload) -> None:
    assert 5.0 < workload.evaluate(workload.model())["loss"] < 7.0


def test_a_byte_depends_only_on_earlier_bytes(workload: GptWorkload) -> None:
    model = workload.model()
    ids = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 20:] = 0
    with torch.no_grad():
        first, second = model(ids), model(changed)
    assert torch.allclose(first[0, :20], second[0, :20], atol=1e-5)
    assert not torch.allclose(first[0, 20:], second[0, 20:], atol=1e-5)


def test_a_byte_depends_on_the_positions_of_others(workload: GptWorkload) -> None:
    model = workload.model()
    with torch.no_grad():
        first = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
        second = model(torch.tensor([[2, 1, 3, 4]]))[0, -1]
    assert not torch.allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_loss_falls_in_20_steps(optimizer: str) -> None:
    rate = {"adamw": 5e-3, "sgd": 0.1}[optimizer]
    losses = train(tiny(optimizer=optimizer, learning_rate=rate), 20)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_training_is_bitwise_deterministic() -> None:
    assert train(tiny(), 3) == train(tiny(), 3)


def test_norms_have_no_weight_decay(workload: GptWorkload) -> None:
    groups = workload.optimizer(workload.model()).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert {p.ndim for p in groups[0]["params"]} == {2}
    assert {p.ndim for p in groups[1]["params"]} == {1}


def test_a_restarted_learner_continues_at_the_same_batch(workload: GptWorkload) -> None:
    whole = list(itertools.islice(workload.batches(1, 3), 8))
    resumed = list(itertools.islice(workload.batches(1, 3, start=5), 3))
    for (a, b), (c, d) in zip(whole[5:], resumed, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_targets_are_the_next_bytes(workload: GptWorkload) -> None:
    inputs, targets = next(workload.batches(0, 1))
    assert inputs.shape == targets.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert workload.tokens((inputs, targets)) == 128


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    workload = tiny(warmup_steps=10, total_steps=110)
    assert [workload.schedule(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert workload.schedule(60) == pytest.approx(0.55)
    assert workload.schedule(110) == workload.schedule(10**6) == pytest.approx(0.1)
    values = [workload.schedule(step) for step in range(10, 120)]
    assert values == sorted(values, reverse=True)


def test_without_total_steps_the_schedule_stays_at_its_peak() -> None:
    assert tiny(warmup_steps=0).schedule(0) == tiny().schedule(10**6) == 1.0


def test_a_run_may_be_shorter_than_the_default_warm_up() -> None:
    assert tiny(total_steps=5).schedule(4) == pytest.approx(0.25)


def test_evaluation_is_repeatable_and_changes_nothing(workload: GptWorkload) -> None:
    model = workload.model()
    for training in (True, False):
        model.train(training)
        first = workload.evaluate(model)
        assert first == workload.evaluate(model)
        assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_does_not_depend_on_seed_or_batch_size(workload: GptWorkload) -> None:
    model = workload.model()
    other = tiny(seed=9, batch_size=2)
    assert other.evaluate(model) == workload.evaluate(model)


def test_a_failed_evaluation_restores_training_mode(workload: GptWorkload) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, ids: Tensor) -> Tensor:
            raise RuntimeError("broken")

    model = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        workload.evaluate(model)
    assert model.training


def test_generated_text_has_the_requested_length(workload: GptWorkload) -> None:
    model = workload.model()
    assert isinstance(model, GPT)
    written = model.generate(b"def ", 40, generator=torch.Generator().manual_seed(1))
    assert len(written) == 40, "longer than the context"
    assert written == model.generate(b"def ", 40, generator=torch.Generator().manual_seed(1))
    assert written != model.generate(b"def ", 40, generator=torch.Generator().manual_seed(2))
    assert model.generate(b"", 3, temperature=0) == model.generate(b"", 3, temperature=0)
    assert model.generate(b"def ", 0) == b""


def test_temperature_0_generates_the_likeliest_byte(workload: GptWorkload) -> None:
    model = workload.model()
    assert isinstance(model, GPT)
    with torch.no_grad():
        likeliest = int(model(torch.tensor([list(b"def ")]))[0, -1].argmax())
    assert model.generate(b"def ", 1, temperature=0) == bytes([likeliest])


def test_a_sample_starts_with_its_prompt(workload: GptWorkload) -> None:
    model = workload.model()
    sample = workload.sample(model, "class ", 10)
    assert sample.startswith("class ")
    assert sample == workload.sample(model, "class ", 10)


def test_describe_is_plain_and_names_the_data(workload: GptWorkload) -> None:
    import json

    facts = json.loads(json.dumps(workload.describe()))
    assert facts["parameters"] == workload.parameters()
    assert facts["corpus_sha256"] == workload.corpus.digest
    assert facts["tokens_per_step"] == 128
    assert facts["train_bytes"] == 200_000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"width": 100, "heads": 4},
            "width=100 in [workload.options] is not a multiple of 2 × heads=8: rotary positions "
            "need heads of even size; change width or heads",
        ),
        (
            {"betas": [0.9, 1.0]},
            "betas=[0.9, 1.0] in [workload.options] is out of range: "
            "each number must be at least 0 and less than 1",
        ),
        (
            {"warmup_steps": 10, "total_steps": 10},
            "warmup_steps=10 in [workload.options] is not below total_steps=10: "
            "lower warmup_steps or train longer",
        ),
        (
            {"optimizer": "sgd", "betas": [0.9, 0.95]},
            "betas=(0.9, 0.95) in [workload.options] would be ignored with optimizer='sgd': "
            "take betas out",
        ),
        (
            {"batchsize": 1},
            "unknown key 'batchsize' in [workload.options]: did you mean 'batch_size'?",
        ),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        GptOptions(**options)
    assert str(error.value) == sentence
