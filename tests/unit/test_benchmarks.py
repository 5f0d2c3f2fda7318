"""Tables are what the folders say, and every number has its folder."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco import lab
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.gpt import GptWorkload, TextBatch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = (BENCHMARKS / "README.md").read_text()
    assert page == load("result_tables").page(), "run: python benchmarks/result_tables.py"


def test_every_folder_holds_its_evidence() -> None:
    folders = [path for path in (BENCHMARKS / "results").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        for name in ("command", "config.json", "raw.json", "result.json"):
            assert (folder / name).stat().st_size > 2, f"{folder.name}/{name}"


def test_the_published_methods_have_the_properties_of_their_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    methods = load("published_methods")
    for name in load("settings_sweep").OWN:
        if name != "isotropic":
            lab.check(getattr(methods, name))
    with pytest.raises(ConfigError, match="- equal contributions give that"):
        lab.check(methods.isotropic)  # it changes any matrix whose singular values differ


def test_runs_with_failures_have_the_tokens_of_those_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Utterances differ in length: a budget of the first batch was 42 % too high with 16."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    virtual = load("virtual")
    speech = load_workload("speech", {"batch_size": 4})
    batches = speech.batches(0, 1)
    taken = 2 * sum(speech.tokens(next(batches)) for _ in range(48)) / 48
    assert virtual.tokens_per_step(speech, 2) == pytest.approx(taken, rel=0.1)
    first = virtual.Cell(learners=2, workload="speech", chaos=(50.0, 25.0)).config(1)
    second = virtual.Cell(learners=16, workload="speech", chaos=(50.0, 25.0)).config(1)
    assert first.run.max_tokens == pytest.approx(second.run.max_tokens, rel=0.05)


def test_an_isotropic_merge_has_equal_singular_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    vectors = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.5, 0.25, 0.25])
    merged = load("published_methods").isotropic(vectors, weights, (4, 3)).view(4, 3)
    expected = torch.linalg.svdvals((weights @ vectors).view(4, 3)).mean()
    assert torch.allclose(torch.linalg.svdvals(merged), expected.expand(3), rtol=1e-4)


def test_heloco_turns_contributions_towards_the_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    methods = load("published_methods")
    momentum = torch.tensor([2.0, 0.0])
    weights = torch.ones(1)

    def turned(*values: float) -> list[float]:
        merged: Tensor = methods.heloco(torch.tensor([values]), weights, momentum)
        return merged.tolist()

    assert turned(3.0, 4.0) == [3.0, 4.0]  # cosine 0.6
    # Cosine 0, norm 2: half of the direction is the momentum's, and the norm stays 2.
    assert turned(0.0, 2.0) == pytest.approx([2**0.5, 2**0.5])
    # Cosine -1, norm 2: half of what opposes the momentum is left.
    assert turned(-2.0, 0.0) == pytest.approx([-1.0, 0.0])


TINY = {
    "layers": 4,
    "width": 8,
    "heads": 1,
    "context": 16,
    "eval_batches": 1,
    "corpus_bytes_max": 100_000,
}


def test_learners_train_the_batches_of_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    virtual = load("virtual")
    monkeypatch.setattr(virtual, "SIZE", TINY)
    trained: list[tuple[int, ...]] = []
    loss = GptWorkload.loss

    def watched(workload: GptWorkload, model: nn.Module, batch: TextBatch) -> Tensor:
        trained.append(tuple(batch[0].flatten().tolist()))
        return loss(workload, model, batch)

    monkeypatch.setattr(GptWorkload, "loss", watched)
    virtual.Cell(plain=True, steps=3).measure(1)
    of_data_parallel = set(trained)
    trained.clear()
    virtual.Cell(steps=3).measure(1)
    assert of_data_parallel == set(trained[: len(of_data_parallel)])
    assert len(of_data_parallel) == 3 * virtual.LEARNERS


class Answers(nn.Module):
    """Predicts the next byte of a text that it knows, or always the same byte."""

    def __init__(self, text: bytes, always: bytes = b"") -> None:
        super().__init__()
        self.text, self.always = text, always

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(*ids.shape, 256)
        for row, known in enumerate(map(bytes, ids.tolist())):
            start = self.text.index(known)
            right = self.always * len(known) or self.text[start + 1 : start + 1 + len(known)]
            logits[row, range(len(known)), list(right)] = 1.0
        return logits


def test_abilities_are_those_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    downstream = load("downstream")
    assert not doctest.testmod(downstream).failed
    workload = load_workload("gpt", {**TINY, "context": 64, "eval_batches": 8})
    assert isinstance(workload, GptWorkload)
    text = bytes(workload.corpus.held_out.tolist())
    knows = downstream.abilities(workload, Answers(text))
    assert knows == {"brackets": 1.0, "copying": 1.0}
    guesses = downstream.abilities(workload, Answers(text, b")"))
    assert 0 < guesses["brackets"] < 1
    assert guesses["copying"] == 0


def test_failures_cost_time_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    virtual = load("virtual")
    monkeypatch.setattr(virtual, "SIZE", TINY)
    row = virtual.Cell(steps=24, chaos=(30.0, 10.0), sync={"sync_every": 12}).measure(1)
    assert 30 < row["goodput"] < 95
    assert row["loss"] > 0
