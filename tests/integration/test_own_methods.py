"""Runs with a custom codec, merge rule and outer optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from decoupled_diloco.config.method import public_text
from decoupled_diloco.config.plugins import load_plugins
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge.codec import _codecs
from decoupled_diloco.tape import TapeReader
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

def trimmed_mean(contributions, weights):
    if len(contributions) < 3:
        return weights @ contributions
    return contributions.sort(0).values[1:-1].mean(0)

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            m.lerp_(p.grad, 0.5)
            p.sub_(m, alpha=self.param_groups[0]["lr"])
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


def test_a_run_with_own_methods_ends_with_equal_weights_and_replays(
    module: str,
    make: Make,
    tmp_path: Path,  # in this order, because tapes are replayed with the module
) -> None:
    tables = tables_of(module)
    load_plugins(tables, tmp_path)
    system = make(**tables, syncer={"shards": 2, "record_payloads": True})
    system.start()
    trainers = [Trainer(system, f"learner-{i}", Model(seed=i)) for i in range(3)]
    with training(*trainers):
        for trainer in trainers:
            trainer.end()
        system.wait_finished()
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
    load_plugins(tables, tmp_path)
    system = make(**tables)
    system.start()
    trainer = Trainer(system, "learner-0")
    with training(trainer):
        trainer.end()
        system.wait_finished()
    failed = [r for r in TapeReader(system.folder) if r.type == "Failed"]
    assert failed
    assert "raises ValueError('now and then')" in failed[0].data["reason"]
    assert not equal(parameters(trainer.model), parameters(Model()))
