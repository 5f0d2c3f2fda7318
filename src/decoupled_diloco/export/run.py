"""From a run folder to an export, and from an export to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from decoupled_diloco._version import __version__
from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.folder import export_folder, read_facts, require_free
from decoupled_diloco.export.huggingface import require_huggingface, write_huggingface
from decoupled_diloco.export.weights import Found, fill, find_weights, misfit
from decoupled_diloco.merge import layout_of
from decoupled_diloco.storage.weights import load_weights, save_weights
from decoupled_diloco.workloads import Workload, workload_of

Format = Literal["native", "huggingface"]
CONFIG = "run.toml"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """What `export_run` has written."""

    folder: Path
    # as asked for; "plain": tensors alone, because the learners trained another model than the
    # workload's
    format: Format | Literal["plain"]
    run: str
    global_step: int | None  # the step of the weights, or None if not known
    files: tuple[Path, ...]


def export_run(
    run: Path,
    out: Path | None = None,
    *,
    format: Format = "native",
    weights: Path | None = None,
    force: bool = False,
) -> Exported:
    """Writes a run's global weights with all that is needed to use them.

    A workload of one's own is looked for in the folder where the command was started, as by
    `ddiloco train`.

    Args:
        out: The folder to write; default: `export` in the run folder.
        format: "native": loads back by `load_exported`; "huggingface": by transformers.
        weights: A safetensors file with other weights of the same model.

    Raises:
        ConfigError: It is no run folder, given weights do not fit, `out` is not empty, or
            transformers has no layout for this model.
        StorageError: There are no weights yet, or the folder cannot be written.
    """
    out = run / "export" if out is None else out
    config = _config_of(run)
    require_free(out, force=force)
    if config.workload is None and format == "native":
        return _export_plain(out, config, find_weights(run, config, weights), force=force)
    workload, model = _built(config)
    if format == "huggingface":
        require_huggingface(workload, model)
    found = find_weights(run, config, weights)
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
    """The weights of learners that trained a model of their own, which only their code builds."""
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


def load_exported(folder: str | Path) -> nn.Module:
    """The model of a native export, with its weights, in evaluation mode.

    A workload of one's own must be where `load_workload` finds it: installed, or in the folder
    where the program was started. Relative paths in its options hold from there, too.

    Raises:
        StorageError: It holds no export, or the files cannot be read.
        ConfigError: It is of another format, or the workload builds another model now.
    """
    folder = Path(folder)
    facts = read_facts(folder)
    if facts.get("format") == "plain":
        raise ConfigError(
            f"{folder} has the weights of a model that only your own code builds: give them to "
            f"it with model.load_state_dict(safetensors.torch.load_file('{folder / WEIGHTS}'), "
            "strict=False)"
        )
    if facts.get("format") != "native":
        raise ConfigError(
            f"{folder} is an export for transformers: load it with its from_pretrained, or export "
            "with --format native"
        )
    _, model = _built(load_config(folder / CONFIG, plugins=False))
    if layout_of(model).fingerprint != facts.get("layout"):
        raise ConfigError(
            f"the workload builds another model now than the one in {folder}: use the code that "
            "the run was trained with, or export again"
        )
    fill(model, load_weights(folder / WEIGHTS), folder / WEIGHTS)
    return model.eval()


def _config_of(run: Path) -> RunConfig:
    if not (run / CONFIG).is_file():
        what = "does not exist" if not run.exists() else f"has no {CONFIG}"
        raise ConfigError(
            f"{run} is no run folder: it {what}: give the folder that ddiloco train has written, "
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
