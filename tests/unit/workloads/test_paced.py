"""The paced workload: a step has the configured length."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import paced
from decoupled_diloco.workloads.paced import PacedOptions, PacedWorkload


class Clock:
    """A clock that only `sleep` and `advance` move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    return clock


def build(**options: Any) -> PacedWorkload:
    return PacedWorkload(PacedOptions(**{"layers": 1, "corpus_bytes_max": 100_000, **options}))


def test_each_step_after_the_first_waits_for_its_time(clock: Clock) -> None:
    workload = build(step_seconds=0.5)
    model, batches = workload.model(), workload.batches(0, 1)
    for work in (0.1, 0.2, 0.7, 0.0):
        workload.loss(model, next(batches))
        clock.now += work
    workload.loss(model, next(batches))
    assert clock.slept == [0.4, 0.3, 0.0, 0.5]


def test_each_learner_can_have_its_own_step_length(clock: Clock) -> None:
    workload = build(step_seconds=[0.5, 2.0])
    model, batches = workload.model(), workload.batches(1, 2)
    workload.loss(model, next(batches))
    workload.loss(model, next(batches))
    assert clock.slept == [2.0]


def test_evaluation_does_not_wait(clock: Clock) -> None:
    workload = build(step_seconds=0.5, eval_batches=2)
    model = workload.model()
    workload.evaluate(model)
    workload.evaluate(model)
    assert clock.slept == []


def test_the_loss_equals_that_of_the_gpt(clock: Clock) -> None:
    from decoupled_diloco.workloads.gpt import GptOptions, GptWorkload

    workload = build()
    plain = GptWorkload(
        GptOptions(layers=1, width=64, context=64, batch_size=4, corpus_bytes_max=100_000)
    )
    model, batch = workload.model(), next(workload.batches(0, 1))
    assert workload.loss(model, batch).item() == plain.loss(model, batch).item()


def test_a_list_with_another_length_than_learners_is_rejected() -> None:
    with pytest.raises(ConfigError) as error:
        build(step_seconds=[0.5, 2.0]).batches(0, 3)
    assert str(error.value) == (
        "step_seconds has 2 numbers, but there are 3 learners: use one number for all, or one per "
        "learner"
    )


@pytest.mark.parametrize("seconds", [0, -1, [], [0.1, 0.0]])
def test_a_step_length_that_is_not_positive_is_rejected(seconds: object) -> None:
    with pytest.raises(ConfigError, match=r"step_seconds=.* use numbers greater than 0"):
        PacedOptions(step_seconds=seconds)


def test_a_step_length_of_the_wrong_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match="step_seconds='fast' in"):
        PacedOptions(step_seconds="fast")
