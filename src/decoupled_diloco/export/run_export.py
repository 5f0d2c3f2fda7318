"""Export of a run folder, and loading of a native export as a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from decoupled_diloco._version import __version__
from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.export_folder import export_folder, read_facts, require_free
from decoupled_diloco.export.huggingface import require_huggingface, write_huggingface
from decoupled_diloco.export.run_weights import Found, fill, find_weights, misfit
from decoupled_diloco.merge import layout_of
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.workloads import Workload, workload_of

Format = Literal["native", "huggingface"]
CONFIG = "run.toml"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """Result of `export_run`."""

    folder: Path
    # the requested format, or "plain": only tensors, because the learners trained another model
    # than the workload's
    format: Format | Literal["plain"]
    run: str
    global_step: int | None  # the step of the weights, or None if unknown
    files: tuple[Path, ...]


def export_run(
    run: Path,
    out: Path | None = None,
    *,
    format: Format = "native",
    weights: Path | None = None,
    average: bool = False,
    force: bool = False,
) -> Exported:
    """Write a run's global weights, with all files that are needed to use them.

    Like `ddiloco train`, this looks for a custom workload in the current folder.

    Args:
        out: The folder to write; default: `export` in the run folder.
        format: "native" for `load_model`, "huggingface" for transformers.
        weights: A safetensors file with other weights of the same model.
        average: Write the average of the weights that the run keeps (`outer.average`).
        force: Whether to replace an earlier export in `out`.

    Raises:
        ConfigError: `run` is not a run folder, `weights` do not match the model, the run keeps no
            average, `out` is not empty, or transformers has no layout for this model.
        StorageError: There are no weights yet, or the folder cannot be written.
    """
    out = run / "export" if out is None else out
    config = _config_of(run)
    require_free(out, force=force)
    if config.workload is None and format == "native":
        found = find_weights(run, config, weights, average=average)
        return _export_plain(out, config, found, force=force)
    workload, model = _built(config)
    if format == "huggingface":
        require_huggingface(workload, model)
    found = find_weights(run, config, weights, average=average)
    if weights is None and format == "native" and misfit(model, found.tensors):
        return _export_plain(out, config, found, force=force)
    fill(model, found.tensors, found.source)
    with export_folder(out, _facts(config, model, found, format), force=force) as folder:
        if format == "huggingface":
            write_huggingface(workload, model, folder)
        else:
            state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
            save_weights(folder / WEIGHTS, state)
            (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
    return _exported(out, format, config, found)


def _export_plain(out: Path, config: RunConfig, found: Found, *, force: bool) -> Exported:
    """Export only the weights of a custom model, which only the learners' code can build."""
    facts = _common_facts(config, found) | {"format": "plain", "workload": None}
    with export_folder(out, facts, force=force) as folder:
        save_weights(folder / WEIGHTS, found.tensors)
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
    return _exported(out, "plain", config, found)


def _exported(
    out: Path, format: Format | Literal["plain"], config: RunConfig, found: Found
) -> Exported:
    files = tuple(out / name for name in read_facts(out)["files"])
    return Exported(out, format, config.run.name, found.global_step, files)


def load_model(folder: str | Path) -> nn.Module:
    """Load the model of a native export with its weights, in evaluation mode.

    `load_workload` must find a custom workload: installed, or in the current folder. Relative
    paths in its options also start at the current folder.

    Raises:
        StorageError: The folder contains no export, or the files cannot be read.
        ConfigError: The export has another format, or the workload now builds another model.
    """
    folder = Path(folder)
    facts = read_facts(folder)
    if facts.get("format") == "plain":
        raise ConfigError(
            f"{folder} has the weights of a model that only your own code builds: load them with "
            f"model.load_state_dict(safetensors.torch.load_file('{folder / WEIGHTS}'), "
            "strict=False)"
        )
    if facts.get("format") != "native":
        raise ConfigError(
            f"{folder} is an export for transformers: load it with from_pretrained, or export the "
            "run with --format native"
        )
    _, model = _built(load_config(folder / CONFIG, plugins=False))
    if layout_of(model).fingerprint != facts.get("layout"):
        raise ConfigError(
            f"the workload now builds another model than the one in {folder}: use the code with "
            "which the run was trained, or export again"
        )
    fill(model, load_weights(folder / WEIGHTS), folder / WEIGHTS)
    return model.eval()


def _config_of(run: Path) -> RunConfig:
    if not (run / CONFIG).is_file():
        what = "does not exist" if not run.exists() else f"has no {CONFIG}"
        raise ConfigError(
            f"{run} is not a run folder: it {what}: pass the folder that ddiloco train wrote, "
            "runs/<name> by default"
        )
    return load_config(run / CONFIG)


def _built(config: RunConfig) -> tuple[Workload, nn.Module]:
    workload = workload_of(config)
    return workload, workload.model()


def _facts(config: RunConfig, model: nn.Module, found: Found, format: Format) -> dict[str, Any]:
    layout = layout_of(model)
    return _common_facts(config, found) | {
        "format": format,
        "workload": config.required_workload.name,
        "parameters": layout.numel,
        "layout": layout.fingerprint,
    }


def _common_facts(config: RunConfig, found: Found) -> dict[str, Any]:
    return {
        "decoupled_diloco": __version__,
        "run": config.run.name,
        "global_step": found.global_step,
        "versions": found.versions,
    }
