"""`ddiloco export`: write the weights of a run in a format for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, folder_of
from decoupled_diloco.cli.shared_options import RunFolder
from decoupled_diloco.config.addresses import is_store

if TYPE_CHECKING:
    from decoupled_diloco.export.run_export import Exported


class ExportFormat(StrEnum):
    """The format of an export."""

    native = "native"
    huggingface = "huggingface"


class ExportOptions(CommandOptions):
    """Options of `ddiloco export`."""

    run: RunFolder = ""
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the export here. Default: RUN/export; ./export for an object store.",
        ),
    ] = None
    format: Annotated[
        ExportFormat,
        typer.Option(help="Format: native for dd.load_model, huggingface for transformers."),
    ] = ExportFormat.native
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Export these weights of the same model, a safetensors file. Default: the run's "
            "own.",
        ),
    ] = None
    average: Annotated[
        bool,
        typer.Option(
            "--average",
            help="Export the average of the weights over the last versions (outer.average).",
        ),
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False


@command(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write the weights of a run, with all files that are needed to load them."""
    import torch

    from decoupled_diloco.export.run_export import export_run

    torch.set_num_threads(1)
    run = chosen_run(options.run, "ddiloco export runs/quickstart")
    exported = export_run(
        folder_of(run, "weights.safetensors", "checkpoints", "durable", "coordinator"),
        options.out or (Path("export") if is_store(run) else None),
        format=options.format.value,
        weights=options.weights,
        average=options.average,
        force=options.force,
    )
    _print(exported)


def _print(exported: Exported) -> None:
    from decoupled_diloco.units import format_bytes

    step = "" if exported.global_step is None else f" (step {exported.global_step})"
    typer.echo(f"exported {exported.run}{step} to {exported.folder}:")
    longest = max(len(path.name) for path in exported.files)
    for path in exported.files:
        typer.echo(f"  {path.name:<{longest}}  {format_bytes(_bytes_of(path)):>9}")
    typer.echo("load it with:")
    folder = str(exported.folder)
    if exported.format == "plain":
        typer.echo("  from safetensors.torch import load_file")
        typer.echo(f"  tensors = load_file({str(exported.folder / 'model.safetensors')!r})")
        typer.echo("  model.load_state_dict(tensors, strict=False)  # your own model")
    elif exported.format == "native":
        typer.echo(f"  model = decoupled_diloco.load_model({folder!r})")
    else:
        typer.echo(f"  model = transformers.AutoModelForCausalLM.from_pretrained({folder!r})")
        if any(path.name == "tokenizer.json" for path in exported.files):
            typer.echo(f"  tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r})")


def _bytes_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder, which some tokenizers write."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)
