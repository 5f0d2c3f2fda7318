"""Studies of small models: real learners, merges and files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import decoupled_diloco as dd
from decoupled_diloco.config.plugins import plugin_versions
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.protocol.machine_options import Candidate, RoundView
from decoupled_diloco.protocol.messages import RoundFinished, RoundOpened
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.study import LearnerSpec, Study, lab_study
from decoupled_diloco_lab.study.functions import StudyWorkload

TRUTH = torch.linspace(-1, 1, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(learner: int, learners: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * seed + learner)
    while True:
        inputs = torch.randn(4, 8, generator=generator)
        yield inputs, inputs @ TRUTH


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs)[:, 0], targets)


def evaluation() -> list[Any]:
    return [next(batches(99, 100, 7)) for _ in range(2)]


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean(contributions: Tensor, weights: Tensor) -> Tensor:
    return weights @ contributions


def made(**changes: Any) -> Study:
    given = {
        "model": model,
        "batches": batches,
        "loss": loss,
        "evaluation": evaluation,
        "inner": inner,
        "learners": 2,
        "steps": 12,
        "seeds": 2,
        "device": "cpu",
    }
    return Study(**{**given, **changes})


SYNC = {"sync.fragments": 2, "sync.sync_every": 4, "sync.overlap_steps": 1}


def test_a_study_compares_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = made(folder=tmp_path)
    study.run("data-parallel")
    study.run("decoupled", settings=SYNC)
    losses = study.run("mine", merge=mean, outer=torch.optim.AdamW, settings=SYNC)
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    study.table()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["method", "loss"]
    assert [row.split()[0] for row in rows] == ["data-parallel", "decoupled", "mine", "2"]
    assert rows[0].split()[2] == "reference"
    assert rows[2].split()[1] == f"{sum(losses) / 2:.4f}"
    study.plot(tmp_path / "loss.svg")
    picture = ElementTree.parse(tmp_path / "loss.svg").getroot()
    assert picture.attrib["aria-label"].count("mine") == 1
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(row["name"], row["seed"]) for row in lines] == [
        (name, seed) for name in ("data-parallel", "decoupled", "mine") for seed in (0, 1)
    ]
    assert {row["tokens"] for row in lines[:2]} == {2 * 12 * 4}
    for row in lines[2:]:  # a learner may take one more step until the end of the run arrives
        assert 2 * 12 * 4 <= row["tokens"] <= 2 * 13 * 4
    assert lines[0]["bytes_per_step"] == 8 * 161
    assert 0 < lines[2]["bytes_per_step"] < 8 * 161


def test_a_function_and_the_shipped_rule_agree() -> None:
    study = made(seeds=1)
    shipped = study.run("shipped", merge="mean", settings=SYNC)
    assert study.run("own", merge=mean, settings=SYNC) == pytest.approx(shipped, rel=1e-5)


def test_all_learners_start_from_the_same_weights_and_repeat() -> None:
    first, second = made(), made()
    assert first.run("decoupled") == second.run("decoupled")
    assert first.losses("decoupled")[0] != first.losses("decoupled")[1]


def test_data_parallel_is_training_with_the_global_batch() -> None:
    study = made(seeds=[3])
    found = study.run("data-parallel")
    torch.manual_seed(3)
    own = model()
    optimizer = inner(own)
    streams = [batches(learner, 2, 3) for learner in range(2)]
    for _ in range(12):
        parts = [next(stream) for stream in streams]
        loss(own, tuple(map(torch.cat, zip(*parts, strict=True)))).backward()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = torch.stack([loss(own, batch) for batch in evaluation()]).mean()
    assert found == pytest.approx([float(expected)], rel=1e-5)


def test_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(folder=tmp_path)
    found = first.run("decoupled")
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"name": "decoup')  # the process was killed here
    trained: list[int] = []
    build = StudyWorkload.model

    def counted(workload: StudyWorkload) -> nn.Module:
        trained.append(workload._seed)
        return build(workload)

    monkeypatch.setattr(StudyWorkload, "model", counted)
    again = made(folder=tmp_path)
    assert again.run("decoupled") == found
    assert not trained
    longer = made(folder=tmp_path, seeds=3)
    assert longer.run("decoupled")[:2] == found
    assert set(trained) == {2}
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 3


def clipping(limit: float) -> Callable[[Tensor, Tensor], Tensor]:
    def clipped(contributions: Tensor, weights: Tensor) -> Tensor:
        return weights @ contributions.clamp(-limit, limit)

    return clipped


def test_a_changed_method_does_not_reuse_runs(tmp_path: Path) -> None:
    made(folder=tmp_path, seeds=1).run("mine", merge=clipping(1.0))
    same = made(folder=tmp_path, seeds=1)
    assert same.run("mine", merge=clipping(1.0))
    with pytest.raises(ConfigError, match=r"name='mine' was run with another source: sync.merge"):
        same.run("mine", merge=clipping(2.0))
    with pytest.raises(ConfigError, match="steps is 13 here and 12 there"):
        made(folder=tmp_path, seeds=1, steps=13).run("mine", merge=clipping(1.0))
    with pytest.raises(ConfigError, match=r"inner is .* here and .* there"):
        made(folder=tmp_path, seeds=1, inner=lambda model: inner(model)).run(
            "mine", merge=clipping(1.0)
        )


def test_the_tape_would_name_the_functions_and_their_source() -> None:
    made(seeds=1, steps=2).run("mine", merge=clipping(3.0))
    assert any(
        version.startswith("sha256:")
        for name, version in plugin_versions().items()
        if name == clipping.__module__
    )


def test_the_margin_of_a_test_is_fixed_at_its_first_call(tmp_path: Path) -> None:
    study = made(folder=tmp_path)
    study.run("decoupled")
    study.run("mean", merge="mean")
    found = study.equivalent("mean", "decoupled", margin=0.5, sd=0.05)
    assert (found.seeds, found.sd) == (2, 0.05)
    assert study.equivalent("mean", "decoupled", margin=0.5).mean == found.mean
    with pytest.raises(ConfigError, match=r"margin is 0.9 here and 0.5 there"):
        study.equivalent("mean", "decoupled", margin=0.9)
    more = made(folder=tmp_path, seeds=3)
    more.run("decoupled")
    more.run("mean", merge="mean")
    with pytest.raises(ConfigError, match=r"seeds is \[0, 1, 2\] here and \[0, 1\] there"):
        more.equivalent("mean", "decoupled", margin=0.5)


def test_faults_and_speeds_of_learners(tmp_path: Path) -> None:
    crashed: list[str] = []

    def crash(system: System) -> None:
        host = system.learners["learner-1"]
        system.clockwork.at(5.5, lambda: (system.crash(host), crashed.append(host.name)))

    specs = [
        LearnerSpec("learner-0", step_seconds=1.0, latency=0.05),
        LearnerSpec("learner-1", step_seconds=2.0),
    ]
    study = made(learners=specs, seeds=1)
    assert study.run("decoupled", faults=crash)
    assert crashed == ["learner-1"]


def test_a_study_does_not_disturb_the_program() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(5)
    made(seeds=1, steps=2).run("decoupled")
    first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), first)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def fewer_steps_later(step: int, steps: int | None) -> int:
    assert steps == 40
    return 8 if step < 20 else 2


def watched(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> list[Any]:
    """Return a list that receives the orders of this kind in later studies."""
    found: list[Any] = []
    run = lab_study.virtual_run

    def recorded(*args: Any, **given: Any) -> Any:
        made = run(*args, **given)
        made.system.recorders.append(
            lambda process, now, event, effects: found.extend(
                each for each in effects if isinstance(each, kind)
            )
        )
        return made

    monkeypatch.setattr(lab_study, "virtual_run", recorded)
    return found


def test_a_schedule_changes_how_often_fragments_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = watched(monkeypatch, RoundOpened)
    settings = {"sync.fragments": 2, "sync.overlap_steps": 1}
    made(steps=40, seeds=1).run("mine", schedule=fewer_steps_later, settings=settings)
    ticks = [round.tick for round in rounds if round.tick < 40]
    assert ticks == [4, 8, 12, 16, *range(20, 40)]


def test_a_participation_rule_chooses_who_contributes(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turn(learner: Candidate, round: RoundView) -> bool:
        return learner.name == f"learner-{round.tick // 2 % 2}"

    rounds = watched(monkeypatch, RoundFinished)
    made(steps=40, seeds=1).run("mine", participation=in_turn, settings=SYNC)
    took_part = {
        round.tick: {each.learner for each in round.participants if each.state == "folded"}
        for round in rounds
        if round.tick < 40
    }
    assert took_part == {tick: {f"learner-{tick // 2 % 2}"} for tick in range(2, 40, 2)}


def test_the_shipped_participation_rules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    study = made(seeds=1, learners=[LearnerSpec("learner-0"), LearnerSpec("learner-1", 3.0)])
    assert study.run("all", participation="all") != study.run("active", participation="active")


def test_the_method_of_a_recipe_runs_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = watched(monkeypatch, RoundFinished)
    study = made(steps=40, seeds=1)
    study.run("diloco", sync_every=10)
    merged = [round for round in rounds if round.tick < 40]
    assert [round.tick for round in merged] == [10, 20, 30]
    assert all(len(round.participants) == 2 for round in merged), "it waits for all learners"
    study.run("streaming-diloco", settings={"sync.fragments": 2})
    (row,) = [row for (name, _), row in study._rows.items() if name == "diloco"]
    assert row["source"]["outer"] == {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    assert row["source"]["sync"]["merge"] == {"rule": "mean", "weighting": "uniform"}


def nan_later(contributions: Tensor, weights: Tensor) -> Tensor:
    merged = weights @ contributions
    return merged * math.nan if len(contributions) == 2 else merged


def nan_from_the_start(contributions: Tensor, weights: Tensor) -> Tensor:
    return math.nan * contributions[0]


def raises_later(contributions: Tensor, weights: Tensor) -> Tensor:
    if len(contributions) == 2:
        raise ValueError("two are company")
    return weights @ contributions


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (nan_later, r"a merge of 'mine' with seed=0 failed: .*:nan_later_\w+' returned a value"),
        (raises_later, r"a merge of 'mine' .*:raises_later_\w+' raises ValueError\('two are comp"),
        (nan_from_the_start, r"fails for 1 contributions of 1 elements: .* is not finite"),
        (lambda c, w: w @ c[:, :0], r"fails for 1 contributions of 1 elements: .* shape \[0\]"),
    ],
)
def test_a_rule_that_fails_ends_the_study(rule: Any, message: str) -> None:
    with pytest.raises(DilocoError, match=message):
        made().run("mine", merge=rule)


def wrong_later(step: int, steps: int | None) -> Any:
    return 4 if step < 14 else 4.5


def wrong_in_the_end(learner: Candidate, round: RoundView) -> Any:
    return None if round.tick > 6 and len(round.learners) == 2 else True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": wrong_later}, r"schedule=.*wrong_later.* returned 4.5 for step=14, steps=14"),
        ({"schedule": lambda step, steps: 1 / step}, "schedule raises ZeroDivisionError"),
        ({"schedule": lambda step, steps: 1}, "overlap_steps=1 in .* is not below sync_every=1"),
        ({"participation": lambda learner: True}, "takes 1 positional argument but 2 were given"),
        ({"participation": lambda learner, round: 1}, "returned an int for learner-0: return True"),
        ({"participation": wrong_in_the_end}, r"'mine' with seed=0 failed: .* returned a NoneType"),
        ({"participation": "al"}, "participation='al' in .* is not known: did you mean 'all'"),
    ],
)
def test_a_schedule_or_a_participation_rule_that_fails_ends_the_study(
    given: dict[str, Any], message: str
) -> None:
    settings = {"sync.fragments": 2, "sync.overlap_steps": 1}
    with pytest.raises(DilocoError, match=message):
        made(steps=14, seeds=1).run("mine", settings=settings, **given)


def test_a_schedule_that_fails_after_the_tried_steps_ends_the_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoupled_diloco.config.run.SCHEDULE_STEPS_TRIED", 5)
    study = made(learners=[LearnerSpec("learner-0"), LearnerSpec("learner-1")], seeds=1, steps=20)
    with pytest.raises(DilocoError, match="failed: schedule returned 0 for step=9, steps=None"):
        study.run("mine", schedule=lambda step, steps: 4 if step < 9 else 0)


def test_a_learner_that_cannot_start_ends_the_study() -> None:
    message = (
        r"'mine' .*: learner-0 failed: .*'exp_avg\|momentum_buffer', but no parameter has such"
    )
    with pytest.raises(DilocoError, match=message):
        made(seeds=1).run("mine", settings={"sync.moments": {}})  # its optimizer is plain SGD


class ShortLater:
    """Returns a wrong shape in a merge of more than one contribution."""

    def __init__(self, numel: int) -> None:
        self.vectors: list[Tensor] = []

    def add(self, vector: Tensor, weight: float) -> None:
        self.vectors.append(vector)

    def result(self) -> Tensor:
        merged = torch.stack(self.vectors).mean(0)
        return merged if len(merged) < 9 else merged[1:]


class DivergesLater(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if len(parameter) > 9:
                parameter.data.fill_(math.nan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"merge": ShortLater},
            r"a merge of 'mine' .* returned shape \[\d+\], not a tensor of shape",
        ),
        ({"outer": DivergesLater}, r"a merge of 'mine' with seed=0 failed: "),
        ({"outer": lambda params, lr: 1}, "returned an int without step"),
        ({"codec": lambda: 3}, "is an int without nbytes, encode, decode"),
        ({"codec": lambda: 1 / 0}, "its function raises ZeroDivisionError"),
    ],
)
def test_a_method_with_wrong_values_ends_the_study(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DilocoError, match=message):
        made(seeds=1).run("mine", settings=SYNC, **given)


def ending(learner: int, learners: int, seed: int) -> Iterator[Any]:
    stream = batches(learner, learners, seed)
    return iter([next(stream) for _ in range(5)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds=0 is out of range"),
        ({"seeds": []}, "seeds=0 is out of range"),
        ({"steps": 0}, "steps=0 is out of range"),
        ({"learners": 0}, "learners=0 is out of range"),
        ({"device": "gpx"}, "device='gpx' in .* is not a valid device"),
        ({"loss": lambda m, b: loss(m, b)[None]}, r"loss\(model, batch\) returned shape \[1\]"),
        ({"loss": lambda m, b: loss(m, b).item()}, r"loss\(model, batch\) returned a float"),
        ({"model": lambda: None}, r"model\(\) returned a NoneType"),
        ({"inner": lambda m: None}, r"inner\(model\) returned a NoneType"),
        ({"evaluation": list}, r"evaluation\(\) returned no batch"),
        ({"batches": ending}, "ended after 5 batches: yield batches without end"),
    ],
)
def test_a_wrong_argument_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DilocoError, match=message):
        made(**changes).run("decoupled", settings=SYNC)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("decopled", {}, "name='decopled' is not known: did you mean 'decoupled'"),
        ("data-parallel", {"merge": "mean"}, "is the reference, which has no settings"),
        ("mine", {"merge": "media"}, "rule='media' in .* is not known"),
        ("mine", {"merge": 3}, "merge=3 is an int"),
        ("mine", {"quorum": 3}, "quorum=3 in .* exceeds learners=2"),
        ("mine", {"settings": {"sync_every": 3}}, "the key 'sync_every': write it with its table"),
        ("mine", {"settings": {"sync.sync_evry": 3}}, "sync_evry"),
    ],
)
def test_a_wrong_method_is_one_sentence(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made().run(name, **given)


def test_a_method_that_has_not_run_is_named() -> None:
    with pytest.raises(ConfigError, match="name='mine' has not been run, only none"):
        made().losses("mine")
    with pytest.raises(ConfigError, match="has no finished method"):
        made().table()
    with pytest.raises(ConfigError, match="0 methods cannot be drawn"):
        made().plot("unused.svg")


def test_the_lab_is_part_of_the_package_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dd.lab.Study is Study
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])
    with pytest.raises(ModuleNotFoundError, match="run pip install -e packages/lab in the clone"):
        _ = dd.lab
