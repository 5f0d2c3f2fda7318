"""`ddiloco certs`: create and renew the certificates that encrypted connections require."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_groups import Commands
from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import fail, listed

if TYPE_CHECKING:
    from decoupled_diloco.launch.certificates import CertificateFolder

DAYS = 365
SYNCER = "syncer"
"""The name of the syncer's certificate."""

certs = Commands(
    name="certs",
    help="Create and renew the certificates for encrypted connections: a CA and what it signs.",
    renamed={"new": "create-ca"},
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with the certificates.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Host name or IP address at which learners reach the syncer, or the relay. Can be "
        "given several times. The certificate then names this machine, too.",
    ),
]
Represents = Annotated[
    tuple[str, ...],
    typer.Option(
        "--represents",
        metavar="NAME[,NAME…]",
        parser=listed,
        help="For a relay: the processes that it may represent, such as learner-0,learner-1.",
    ),
]
Days = Annotated[
    int,
    typer.Option(
        "--valid-days", min=1, metavar="DAYS", help="Days for which certificates are valid."
    ),
]


class CreateOptions(CommandOptions):
    """Options of `ddiloco certs create-ca`."""

    folder: Folder
    hosts: Hosts = None
    days: Days = DAYS


@command(CreateOptions)
def create_ca(options: CreateOptions) -> None:
    """Create a CA for a run, and the syncer's certificate."""
    _folder(options.folder).begin(options.hosts or [], options.days)
    _print_settings(options.folder)


class AddOptions(CommandOptions):
    """Options of `ddiloco certs add`."""

    folder: Folder
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Process names, such as learner-0 and evaluator."),
    ]
    hosts: Hosts = None
    represents: Represents = ()
    days: Days = DAYS


@command(AddOptions)
def add(options: AddOptions) -> None:
    """Create a certificate for each process that connects to the syncer."""
    _require_one(options.names, options.represents, options.hosts)
    hosts = options.hosts or ()
    _folder(options.folder).add(options.names, options.days, hosts, options.represents)
    for name in dict.fromkeys(options.names):
        typer.echo(
            f"{name}: copy {options.folder}/authority.pem, {options.folder}/{name}.pem and "
            f"{options.folder}/{name}.key to its machine"
        )


class RenewOptions(CommandOptions):
    """Options of `ddiloco certs renew`."""

    folder: Folder
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Process names. Default: all certificates."),
    ] = None
    hosts: Hosts = None
    represents: Represents = ()
    days: Days = DAYS


@command(RenewOptions)
def renew(options: RenewOptions) -> None:
    """Sign certificates again, with the same keys; running processes load them."""
    names, hosts = options.names or [], options.hosts or []
    _require_one(names or [SYNCER], options.represents, hosts)
    if options.represents and names in ([], [SYNCER]):
        fail("--represents is for a relay's certificate: name it, as in certs renew FOLDER site-a")
    renewed = _folder(options.folder).renew(names, options.days, hosts, options.represents)
    typer.echo(
        f"renewed for {options.days} days: {', '.join(renewed)}; running processes load them"
    )


class CertsListOptions(CommandOptions):
    """Options of `ddiloco certs list`."""

    folder: Folder


@command(CertsListOptions)
def list_certs(options: CertsListOptions) -> None:
    """List the certificates in a folder, and when each expires."""
    listed = _folder(options.folder).listing()
    width = max(len(each.name) for each in listed)
    for each in listed:
        left = f"{each.days_left:.0f} days left" if each.days_left > 0 else "EXPIRED"
        lacks = "" if each.has_key else ", no key here"
        names = f" ({', '.join(each.names)})" if each.names and each.names != (each.name,) else ""
        typer.echo(f"{each.name:{width}}  {each.ends:%Y-%m-%d}  {left}{lacks}{names}")


for name, each in (
    ("create-ca", create_ca),
    ("add", add),
    ("renew", renew),
    ("list", list_certs),
):
    certs.command(name)(each)


def _require_one(
    names: Sequence[str], represents: Sequence[str], hosts: Sequence[str] | None
) -> None:
    if len(names) > 1 and (represents or hosts):
        option = "--represents" if represents else "--host"
        fail(f"{option} is for one certificate, not for {', '.join(names)}: give only its name")


def _folder(path: Path) -> CertificateFolder:
    try:
        from decoupled_diloco.launch.certificates import CertificateFolder
    except ImportError:
        fail("ddiloco certs requires the extra tls: run pip install -e '.[tls]' in the clone")
    return CertificateFolder(path)


def _print_settings(folder: Path) -> None:
    typer.echo(
        f"{folder} holds a CA and the syncer's certificate. Add to the run's TOML file:\n\n"
        f'[tls]\ncert = "{folder}/syncer.pem"\nkey = "{folder}/syncer.key"\n'
        f'ca_cert = "{folder}/authority.pem"\n\n'
        "To require a certificate from every process that connects (ddiloco certs add):\n\n"
        f'client_ca_cert = "{folder}/authority.pem"\nclients = "{folder}"\n\n'
        f"{folder}/authority.key signs certificates: keep it secret"
    )
