"""Loading a workload by name, built in or custom."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads import BUILT_IN, OF_THE_LAB, Workload, load_workload

OWN = '''
import torch
from decoupled_diloco.workloads import Workload

class Line(Workload):
    """A workload with one weight that learns y = 2 x."""

    def __init__(self, options):
        self.options = options

    def model(self):
        return torch.nn.Linear(1, 1, bias=False)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(self, part, parts, start=0):
        while True:
            yield torch.ones(3, 1)

    def loss(self, model, batch):
        return (model(batch) - 2 * batch).square().mean()

    def tokens(self, batch):
        return len(batch)

    def evaluate(self, model):
        with torch.no_grad():
            return {"loss": self.loss(model, torch.ones(1, 1)).item()}

def line(options):
    options["changed"] = True
    return Line(options)

class Half:
    def model(self): ...
    def loss(self, model, batch): ...

def half(options):
    return Half()

number = 3
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "own_workload_of_a_test"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("import module_that_is_nowhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("name", OF_THE_LAB)
def test_the_error_for_a_missing_distribution_has_the_install_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoupled_diloco.workloads.entry_points", lambda **_: [])
    with pytest.raises(
        ConfigError,
        match=f"'{name}' is not installed: run pip install -e packages/lab in the clone",
    ):
        load_workload(name, {})


@pytest.mark.parametrize("name", [*BUILT_IN, *OF_THE_LAB])
def test_named_workloads_are_loaded(name: str) -> None:
    workload = load_workload(name, {"seed": 3, "total_steps": 100})
    assert isinstance(workload, Workload)


def test_a_custom_workload_in_the_current_folder_is_loaded(own: str) -> None:
    options = {"seed": 0, "x": [1]}
    workload = load_workload(f"{own}:line", options)
    assert options == {"seed": 0, "x": [1]}, "the function got a copy"
    model = workload.model()
    optimizer = workload.optimizer(model)
    for batch in itertools.islice(workload.batches(0, 1), 50):
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert workload.evaluate(model)["loss"] < 1e-4
    assert (workload.schedule(9), workload.sample(model), workload.describe()) == (1.0, None, {})


def test_the_error_for_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        load_workload("gtp", {})
    assert str(error.value) == (
        "workload 'gtp' is not known: did you mean 'gpt'? Write a custom workload as "
        "'module:function'"
    )


def test_a_missing_module_is_rejected(own: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_workload("no_such_module.inner:make", {})
    assert str(error.value) == (
        "workload 'no_such_module.inner:make': module 'no_such_module.inner' is neither installed "
        f"nor in {tmp_path}: start the command in the module's folder, or install the module"
    )


def test_an_import_that_fails_inside_the_module_keeps_its_traceback(own: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="module_that_is_nowhere"):
        load_workload(f"{own}_broken:make", {})


def test_the_error_for_a_missing_function_suggests_the_nearest(own: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_workload(f"{own}:lime", {})
    assert str(error.value) == (
        f"workload '{own}:lime': {own} has no function 'lime': did you mean 'line'?"
    )


def test_a_module_attribute_that_is_not_callable_is_rejected(own: str) -> None:
    with pytest.raises(ConfigError, match="has no function 'number'"):
        load_workload(f"{own}:number", {})


@pytest.mark.parametrize("name", [":make", "module:", ":"])
def test_an_incomplete_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_workload(name, {})
    assert str(error.value) == f"workload {name!r} is not of the form 'module:function'"


def test_a_result_that_is_not_a_workload_is_rejected(own: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_workload(f"{own}:half", {})
    assert str(error.value) == (
        f"workload '{own}:half' returned a Half without optimizer, batches, tokens, schedule, "
        "evaluate, sample, describe: return an object with the methods of "
        "decoupled_diloco.workloads.Workload"
    )
