"""A native export has the model of the run, and loads back unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import decoupled_diloco as dd
from decoupled_diloco.cli.main import app
from decoupled_diloco.config import load_config
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.export.run_export import export_run
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.workloads import load_workload
from unit.export.export_runs import keep_durable, run_folder

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

class Own:
    def __init__(self, options): self.options = options
    def model(self): return Net()
    def optimizer(self, model): ...
    def batches(self, part, parts, start=0): ...
    def loss(self, model, batch): ...
    def tokens(self, batch): ...
    def schedule(self, step): return 1.0
    def evaluate(self, model): return {"loss": 0.0}
    def sample(self, model, prompt="", length=0): ...
    def describe(self): return {}

make = Own
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_model_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_model_of_a_test:make"
    sys.modules.pop("own_model_of_a_test", None)


def same(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ["gpt", "moe", "speech", "vit"])
def test_an_export_loads_back_and_evaluates_the_same(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    model = run_folder(run, name)
    exported = export_run(run)
    assert exported.folder == run / "export"
    assert [path.name for path in exported.files] == [
        "model.safetensors",
        "run.toml",
        "export.json",
    ]
    loaded = dd.load_model(exported.folder)
    assert same(loaded, model)
    assert not loaded.training
    config = load_config(exported.folder / "run.toml")
    workload = load_workload(config.workload.name, config.workload_options())
    assert workload.evaluate(loaded) == workload.evaluate(model)


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "run", tied=True)
    loaded = dd.load_model(export_run(tmp_path / "run").folder)
    assert same(loaded, model)
    assert loaded.head.weight is loaded.embedding.weight
    stored = (tmp_path / "run/export/model.safetensors").stat().st_size
    assert stored < 4 * sum(p.numel() for p in model.parameters()) + 4096, "stored once"


def test_a_custom_model_with_all_kinds_of_tensors(tmp_path: Path, own: str) -> None:
    model = run_folder(tmp_path / "run", own)
    export_run(tmp_path / "run", tmp_path / "out")
    loaded = dd.load_model(tmp_path / "out")
    assert same(loaded, model)
    assert loaded.body.weight.dtype is torch.bfloat16
    names = load_weights(tmp_path / "out/model.safetensors").keys()
    assert {"frozen", "norm.running_mean", "norm.num_batches_tracked"} <= names


def test_the_facts_name_step_versions_and_layout(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    export_run(tmp_path / "run")
    facts = json.loads((tmp_path / "run/export/export.json").read_text())
    assert facts["format"] == "native"
    assert (facts["run"], facts["workload"], facts["global_step"]) == ("small", "gpt", 8)
    assert facts["versions"] == {"0": "1.0", "1": "1.1", "2": "1.2", "3": "1.3"}
    assert facts["decoupled_diloco"] == dd.__version__
    assert len(facts["layout"]) == 64
    again = tmp_path / "again"
    export_run(tmp_path / "run", again)
    assert json.loads((again / "export.json").read_text()) == facts


def test_shares_are_enough_without_the_combined_result(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "run")
    (tmp_path / "run/weights.safetensors").unlink()
    assert same(dd.load_model(export_run(tmp_path / "run").folder), model)
    assert not (tmp_path / "run/weights.safetensors").exists(), "the run itself is unchanged"


def test_a_run_without_weights_names_the_missing_files(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", missing=1)
    with pytest.raises(StorageError) as error:
        export_run(tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run has no weights: weights.safetensors is written when the run is finished, "
        f"and shard-1.safetensors in {tmp_path}/run/checkpoints when a shard is. Before that, "
        "shards store theirs after the first learner has joined, unless syncer.persist is false: "
        "start a learner, let the run finish, or pass a safetensors file with --weights"
    )
    assert not (tmp_path / "run/export").exists()


def test_durable_state_is_exported_as_of_the_last_merge(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = run_folder(run)
    now = keep_durable(run, "running")
    exported = export_run(run)
    loaded = dd.load_model(exported.folder)
    assert not same(loaded, before), "the files of an earlier end are older"
    assert torch.equal(torch.cat([p.reshape(-1) for p in loaded.parameters()]), now)
    assert exported.global_step == 11
    assert json.loads((run / "export/export.json").read_text())["versions"]["3"] == "1.1"


@pytest.mark.parametrize("phase", ["running", "finished"])
def test_the_average_is_exported_from_the_durable_state(tmp_path: Path, phase: str) -> None:
    newest = []
    for merges in (1, 2):
        run = tmp_path / f"run-{merges}"
        run_folder(run, outer={"average": 0.9})
        newest.append(keep_durable(run, phase, merges))
    exported = export_run(run, average=True)
    average = torch.cat([p.reshape(-1) for p in dd.load_model(exported.folder).parameters()])
    # The average is of Θ, from which the published copies differ by the rounding of bf16.
    torch.testing.assert_close(average, (newest[0] + newest[1]) / 2, rtol=0, atol=2e-3)
    assert exported.global_step == 11
    assert json.loads((run / "export/export.json").read_text())["versions"]["3"] == "1.2"


def test_an_average_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"outer.average is not set, so the run keeps no average"):
        export_run(tmp_path / "run", average=True)
    run_folder(tmp_path / "other", outer={"average": 0.5})
    with pytest.raises(
        StorageError, match=r"no average of the weights: .* syncer.persist is false"
    ):
        export_run(tmp_path / "other", average=True)
    with pytest.raises(ConfigError, match=r"cannot be combined with average=True"):
        export_run(tmp_path / "other", weights=tmp_path / "other.safetensors", average=True)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--average"])
    assert isinstance(result.exception, ConfigError), result.exception


def test_the_result_of_a_finished_run_is_exported(tmp_path: Path) -> None:
    before = run_folder(tmp_path / "run")
    keep_durable(tmp_path / "run", "finished")
    assert same(dd.load_model(export_run(tmp_path / "run").folder), before)


def test_a_shard_without_complete_state_is_reported(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    keep_durable(tmp_path / "run", "running")
    (checkpoint,) = (tmp_path / "run/durable/shard-1").glob("*.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"shard-1 has no whole checkpoint of its fragments; .*"):
        export_run(tmp_path / "run")


def test_a_model_that_only_the_learners_have_is_exported_as_tensors(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = run_folder(run)
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace("layers = 2", "layers = 1"))
    result = CliRunner().invoke(app, ["export", str(run)])
    assert result.exit_code == 0, result.output
    assert f"tensors = load_file('{run}/export/model.safetensors')" in result.output
    model.load_state_dict(load_weights(run / "export/model.safetensors"), strict=False)
    facts = json.loads((run / "export/export.json").read_text())
    assert (facts["format"], facts["workload"]) == ("plain", None)
    with pytest.raises(ConfigError, match="a model that only your own code builds"):
        dd.load_model(run / "export")
    with pytest.raises(ConfigError, match=r"has 'blocks.1.*', which the model lacks"):
        export_run(run, tmp_path / "out", format="huggingface")


def test_other_weights_of_the_same_model(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", missing=1)
    other = load_workload("gpt", {"layers": 2, "width": 32, "heads": 2, "seed": 9}).model()
    save_weights(tmp_path / "other.safetensors", other.state_dict())
    exported = export_run(tmp_path / "run", weights=tmp_path / "other.safetensors")
    assert same(dd.load_model(exported.folder), other)
    assert exported.global_step is None


def test_weights_of_another_model_are_rejected(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    file = tmp_path / "other.safetensors"
    state = load_workload("gpt", {"layers": 2, "width": 32, "heads": 2}).model().state_dict()
    for change, sentence in (
        ({"head.weight": torch.ones(3)}, r"'head.weight' of shape \(3,\), but .* \(256, 32\)"),
        ({"tail": torch.ones(3)}, "has 'tail', which the model lacks"),
    ):
        save_weights(file, {**state, **change})
        with pytest.raises(ConfigError, match=sentence):
            export_run(tmp_path / "run", weights=file)
    del state["norm.weight"]
    save_weights(file, state)
    with pytest.raises(ConfigError, match=r"lacks 'norm.weight', which the model has"):
        export_run(tmp_path / "run", weights=file)
    with pytest.raises(StorageError, match="does not exist"):
        export_run(tmp_path / "run", weights=tmp_path / "none")
    assert not (tmp_path / "run/export").exists()


def test_a_folder_with_something_in_it_is_left_alone_without_force(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    out = tmp_path / "out"
    export_run(tmp_path / "run", out, format="huggingface")
    (out / "notes.txt").write_text("mine")
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(ConfigError, match="is not empty: choose another --out, or --force"):
        export_run(tmp_path / "run", out)
    assert sorted(path.name for path in out.iterdir()) == before
    export_run(tmp_path / "run", out, force=True)
    assert sorted(path.name for path in out.iterdir()) == [
        "export.json",
        "model.safetensors",
        "notes.txt",
        "run.toml",
    ]
    dd.load_model(out)


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        export_run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(StorageError, match="cannot be written"):
        export_run(tmp_path / "run", tmp_path / "out" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_folder_that_is_not_an_export_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"contains no export, because it has no export\.json"):
        dd.load_model(tmp_path)
    (tmp_path / "export.json").write_text("torn")
    with pytest.raises(StorageError, match=r"export\.json cannot be read"):
        dd.load_model(tmp_path)


def test_an_export_of_another_model_than_the_code_builds_is_rejected(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    out = export_run(tmp_path / "run").folder
    text = (out / "run.toml").read_text()
    (out / "run.toml").write_text(text.replace("layers = 2", "layers = 3"))
    with pytest.raises(ConfigError, match="now builds another model than the one in"):
        dd.load_model(out)


def test_the_command_prints_its_files_and_how_to_use_them(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == f"exported small (step 8) to {tmp_path}/run/export:"
    assert f"load_model('{tmp_path}/run/export')" in result.output


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_not_a_run_folder_is_rejected(tmp_path: Path, there: bool) -> None:
    folder = tmp_path if there else tmp_path / "none"
    what = "has no run.toml" if there else "does not exist"
    with pytest.raises(ConfigError) as error:
        export_run(folder)
    assert str(error.value) == (
        f"{folder} is not a run folder: it {what}: pass the folder that ddiloco train wrote, "
        "runs/<name> by default"
    )


def test_optional_packages_are_imported_only_when_used() -> None:
    script = (
        "import sys, decoupled_diloco, decoupled_diloco.cli.main\n"
        "print({'torch', 'transformers', 'sklearn', 'tokenizers'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
