"""`ddiloco export`: the weights of a run as something to use."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from decoupled_diloco.export.run import Exported


class ExportFormat(StrEnum):
    """The program that will read the export."""

    native = "native"
    huggingface = "huggingface"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder, as runs/quickstart.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to; default: RUN/export.")
    ] = None,
    format: Annotated[
        ExportFormat, typer.Option(help="For load_exported (native), or for transformers.")
    ] = ExportFormat.native,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other weights of this model, a safetensors file."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an export that is already there.")
    ] = False,
) -> None:
    """The weights of a run with all that is needed to use them."""
    import torch

    from decoupled_diloco.export.run import export_run

    torch.set_num_threads(1)
    exported = export_run(run, out, format=format.value, weights=weights, force=force)
    _tell(exported)


def _tell(exported: Exported) -> None:
    from decoupled_diloco.units import format_bytes

    step = "" if exported.global_step is None else f", step {exported.global_step}"
    typer.echo(f"exported {exported.run}{step}, to {exported.folder}:")
    longest = max(len(path.name) for path in exported.files)
    for path in exported.files:
        typer.echo(f"  {path.name:<{longest}}  {format_bytes(_bytes_of(path)):>9}")
    typer.echo("use it with:")
    folder = str(exported.folder)
    if exported.format == "plain":
        typer.echo("  from safetensors.torch import load_file")
        typer.echo(f"  tensors = load_file({str(exported.folder / 'model.safetensors')!r})")
        typer.echo("  model.load_state_dict(tensors, strict=False)  # your own model")
    elif exported.format == "native":
        typer.echo(f"  model = decoupled_diloco.load_exported({folder!r})")
    else:
        typer.echo(f"  model = transformers.AutoModelForCausalLM.from_pretrained({folder!r})")
        if any(path.name == "tokenizer.json" for path in exported.files):
            typer.echo(f"  tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r})")


def _bytes_of(path: Path) -> int:
    """The size of a file, or of all files in a folder: some tokenizers write one."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)
