"""Runs with a custom codec, merge rule and outer optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from decoupled_diloco.cli.run_commands import TrainOptions
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.method import public_text
from decoupled_diloco.config.plugins import load_plugins
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge.codec import _codecs
from decoupled_diloco.protocol.coordinator_machine import CoordinatorMachine
from decoupled_diloco.protocol.messages import Progress, Received
from decoupled_diloco.run_model import run_of
from decoupled_diloco.show.explain import explain_round
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.replay import machine_of, replay_run
from decoupled_diloco_lab.simulate.weights_replay import replay_weights
from integration.real_system import Model, System, Trainer, equal, parameters, training

Make = Callable[..., System]

METHODS = """
import torch

class Half:
    group = 1
    def nbytes(self, numel):
        return 2 * numel
    def encode(self, vector):
        return vector.half().view(torch.uint8)
    def decode(self, body, numel):
        return body.view(torch.float16).float()

def half():
    return Half()

def trimmed_mean(contributions, weights, momentum):
    if len(contributions) < 3:
        return weights @ contributions + 0.1 * momentum
    return contributions.sort(0).values[1:-1].mean(0) + 0.1 * momentum

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("momentum", torch.zeros_like(p))
            m.lerp_(p.grad, 0.5)
            p.sub_(m, alpha=self.param_groups[0]["lr"])

def shorter(step, steps):
    return 12 if step < steps // 2 else 3

def in_turn(learner, round):
    names = [each.name for each in round.learners]
    return learner.name == names[round.tick // 3 % len(names)]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Create a module with the methods in the folder where the program starts."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(_codecs)
    monkeypatch.chdir(tmp_path)
    name = f"methods_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(METHODS)
    yield name
    _codecs.clear()
    _codecs.update(before)


def tables_of(module: str) -> dict[str, Any]:
    sync = {"codec": {"uplink": f"{module}:half", "downlink": f"{module}:half"}}
    return {
        "run": {"max_steps": 24, "learners": 3},
        "sync": {**sync, "merge": {"rule": f"{module}:trimmed_mean"}},
        "outer": {"optimizer": f"{module}:Lion", "lr": 0.7, "momentum": None},
    }


def ended(
    make: Make, tables: dict[str, Any], folder: Path, **options: Any
) -> tuple[System, list[Trainer]]:
    """Train with the methods of a module in the folder, to the end of the run."""
    load_plugins(tables, folder)
    system = make(**tables)
    system.start()
    trainers = [
        Trainer(system, f"learner-{i}", Model(seed=i), **options)
        for i in range(tables["run"]["learners"])
    ]
    with training(*trainers):
        for trainer in trainers:
            trainer.end()
        system.wait_finished()
    return system, trainers


def test_a_run_with_own_methods_ends_with_equal_weights_and_replays(
    module: str,
    make: Make,
    tmp_path: Path,  # in this order, because tapes are replayed with the module
) -> None:
    tables = tables_of(module)
    tables["syncer"] = {"shards": 2, "record_payloads": True}
    system, trainers = ended(make, tables, tmp_path)
    first, *others = (parameters(trainer.model) for trainer in trainers)
    assert all(equal(first, each) for each in others)
    assert not equal(first, parameters(Model(seed=0)))
    for each in replay_weights(system.folder):
        assert each.merges
        assert (each.differences, each.final) == ([], "the same")
    (header, *_) = [
        r.data["header"]
        for r in TapeReader(system.folder)
        if r.kind == "start" and r.process == "learner-0"
    ]
    assert module in header["plugins"]


def test_a_run_with_its_own_schedule_and_participation_replays(
    module: str, make: Make, tmp_path: Path
) -> None:
    tables: dict[str, Any] = {
        "run": {"max_steps": 48, "learners": 2},
        "sync": {
            "fragments": 1,
            "sync_every": 12,
            "schedule": f"{module}:shorter",
            "participation": f"{module}:in_turn",
        },
    }
    system, _ = ended(make, tables, tmp_path, pause=0.01)
    results, problems = replay_run(system.folder)
    assert not problems
    assert [each for each in results if each.differences] == []
    records = list(TapeReader(system.folder))
    ticks = [r.data["tick"] for r in records if r.type == "RoundOpened" and r.data["tick"] < 48]
    assert ticks == [12, *range(24, 48, 3)]
    reasons = {r.data["why"] for r in records if r.type == "Send" and "Pull" in str(r.data)}
    assert "the participation rule includes it" in reasons
    run = run_of(records)
    explained = [x for i in range(1, len(ticks) + 1) for x in explain_round(run, i)]
    left_out = "without a request: the participation rule did not include it"
    assert any(left_out in each for each in explained)


def test_a_resume_names_a_module_that_has_changed(
    module: str, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {
        "run": {"learners": 1, "max_steps": 8},
        "outer": {"optimizer": f"{module}:Lion", "momentum": None},
    }
    system, _ = ended(make, tables, tmp_path)
    config = system.config.model_copy(
        update={"run": system.config.run.model_copy(update={"imports_from": tmp_path})}
    )
    (system.folder / "run.toml").write_text(dump_config(config))
    resumed = TrainOptions(config=str(system.folder), resume=True)
    resumed.load()
    assert module not in capsys.readouterr().out
    with (tmp_path / f"{module}.py").open("a") as file:
        file.write("# changed\n")
    resumed.load()
    printed = capsys.readouterr().out
    assert f"module '{module}' has changed since the last start of the run (sha256:" in printed
    assert "the run continues with the new one" in printed


def test_a_replay_without_the_functions_names_them(module: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = {"run": {"max_steps": 9}, "sync": {"schedule": "gone:schedule"}}
    header = {"settings": RunConfig(**tables).public(), "machine": "coordinator"}
    machine = machine_of({**header, "weights_from_file": False, "state": None})
    assert isinstance(machine, CoordinatorMachine)
    machine.state.phase = "running"
    with pytest.raises(ConfigError, match="schedule 'gone:schedule' is not loaded"):
        machine.handle(1.0, Received("shard-0", Progress(5, 5)))


@pytest.mark.parametrize("join", [System.learner, System.observer])
@pytest.mark.parametrize("function", ["os:system", "MODULE:half"])
def test_a_syncer_cannot_make_a_program_import_code(
    module: str, make: Make, join: Callable[..., Any], function: str
) -> None:
    """Its settings name an existing module, which must not be imported for that reason."""
    function = function.replace("MODULE", module)
    system = make(run={"max_steps": 1_000_000})
    system.start()
    trainer = Trainer(system, "learner-0", pause=0.05)
    with training(trainer):
        host = system.shards[0].host
        assert host is not None
        host._settings = public_text(system.config).replace('"bf16"', f'"{function}"')
        arguments = ("learner-1",) if join is System.learner else ()
        with pytest.raises(ConfigError) as error:
            join(system, Model(), *arguments)
    assert f"codec '{function}', which the run uses, is not registered" in str(error.value)
    assert f"decoupled_diloco.allow_codec('{function}')" in str(error.value)
    assert module not in sys.modules


def test_a_failing_merge_rule_costs_its_rounds_but_not_the_run(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    name = f"methods_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(
        "seen = []\n"
        "def rule(contributions, weights):\n"
        "    seen.append(1)\n"
        "    if 10 < len(seen) < 14: raise ValueError('now and then')\n"
        "    return weights @ contributions\n"
    )
    tables = {"run": {"learners": 1, "max_steps": 40}, "sync": {"merge": {"rule": f"{name}:rule"}}}
    system, (trainer,) = ended(make, tables, tmp_path)
    failed = [r for r in TapeReader(system.folder) if r.type == "Failed"]
    assert failed
    assert "raises ValueError('now and then')" in failed[0].data["reason"]
    assert not equal(parameters(trainer.model), parameters(Model()))
