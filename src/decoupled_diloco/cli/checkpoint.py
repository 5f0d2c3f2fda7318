"""`ddiloco checkpoint`: a consistent checkpoint of the whole run, now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    TokenFile,
    fail,
    tls_of,
)

GIVEN_UP = 1


def checkpoint(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run on this machine, or its syncer: http://HOST:PORT, "
            "with --token-file.",
        ),
    ],
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for all parts.")
    ] = 120.0,
) -> None:
    """Take a checkpoint of the whole run, without a pause; go back with train --checkpoint.

    Exit code 1: there is none, because a part could not be had, or not in time.
    """
    from decoupled_diloco.cli.checkpoint_client import take_checkpoint
    from decoupled_diloco.config.addresses import on_this_machine
    from decoupled_diloco.launch.folder import read_token
    from decoupled_diloco.launch.secrets import secrets_in
    from decoupled_diloco.storage.shared_folder import read_addresses
    from decoupled_diloco.units import format_bytes

    tls = tls_of(authority, certificate, key)
    if run.startswith(("http://", "https://")):
        address, token = run, read_token(token_file)
    else:
        address = on_this_machine(read_addresses(Path(run))[0])
        token, tls = secrets_in(Path(run), token_file, tls)
    found = take_checkpoint(address, token, timeout, tls)
    if found.state != "complete":
        which = f"checkpoint {found.number}" if found.number else "no checkpoint"
        late = f" after {timeout:g} s: it may still be completed" if found.state == "open" else ""
        fail(f"{which}: {found.state}{late}: {found.words}", GIVEN_UP)
    size = format_bytes(found.nbytes)
    typer.echo(f"checkpoint {found.number} of the whole run: {size}, {found.folder}")
    if found.missing:
        typer.echo(f"without {', '.join(found.missing)}")
