"""`ddiloco certificates`: what encrypted connections need, made and renewed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import fail

if TYPE_CHECKING:
    from decoupled_diloco.launch.certificates import CertificateFolder

DAYS = 365


class Action(StrEnum):
    """What to do with a folder of certificates."""

    new = "new"
    add = "add"
    renew = "renew"
    list = "list"


def certificates(
    what: Annotated[
        Action,
        typer.Argument(
            metavar="new|add|renew|list",
            help="new: an authority, and the syncer's certificate. add: one for each id. renew: "
            "sign these again, or all, with the same keys. list: what there is, and until when.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files are.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Ids, such as learner-0 and evaluator."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="new, renew: a name or address by which the syncer is dialled; those of this "
            "machine itself are always in its certificate.",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, metavar="DAYS", help="new, add, renew: how long.")
    ] = DAYS,
) -> None:
    """Certificates for encrypted connections: an authority of the run's own and what it signs."""
    try:
        from decoupled_diloco.launch.certificates import CertificateFolder
    except ImportError:
        fail(
            "certificates need the extra tls: pip install 'decoupled-diloco[tls]' (in a clone: "
            "pip install -e '.[tls]')"
        )
    names, hosts = names or [], hosts or []
    if names and what in (Action.new, Action.list):
        fail(f"{what.value} takes no NAME: the hosts of the syncer are given by --name")
    if hosts and what in (Action.add, Action.list):
        fail(f"--name would be ignored by {what.value}: an id is no host")
    if hosts and what is Action.renew and names not in ([], ["syncer"]):
        fail("--name is for the syncer's certificate: renew FOLDER syncer --name HOST")
    if not names and what is Action.add:
        fail("add wants ids: ddiloco certificates add FOLDER learner-0 learner-1 evaluator")
    found = CertificateFolder(folder)
    if what is Action.new:
        found.begin(hosts, days)
        _tell_settings(folder)
    elif what is Action.add:
        found.add(names, days)
        _tell_copies(folder, names)
    elif what is Action.renew:
        renewed = found.renew(names, days, hosts)
        typer.echo(f"renewed for {days} days: {', '.join(renewed)}; running processes take them up")
    else:
        _list(found)


def _tell_settings(folder: Path) -> None:
    typer.echo(
        f"{folder} holds an authority and the syncer's certificate. In the run's file:\n\n"
        f'[tls]\ncertificate = "{folder}/syncer.pem"\nkey = "{folder}/syncer.key"\n'
        f'authority = "{folder}/authority.pem"\n\n'
        "and, to have who dials show a certificate of its own (ddiloco certificates add):\n\n"
        f'client_authority = "{folder}/authority.pem"\nclients = "{folder}"\n\n'
        f"{folder}/authority.key signs: keep it, and give it to nobody"
    )


def _tell_copies(folder: Path, names: list[str]) -> None:
    for name in dict.fromkeys(names):
        typer.echo(
            f"{name}: give its machine {folder}/authority.pem, {folder}/{name}.pem and "
            f"{folder}/{name}.key"
        )


def _list(folder: CertificateFolder) -> None:
    listed = folder.listing()
    width = max(len(each.name) for each in listed)
    for each in listed:
        left = f"{each.days_left:.0f} days left" if each.days_left > 0 else "EXPIRED"
        lacks = "" if each.has_key else ", no key here"
        names = f" ({', '.join(each.names)})" if each.names and each.names != (each.name,) else ""
        typer.echo(f"{each.name:{width}}  {each.ends:%Y-%m-%d}  {left}{lacks}{names}")
