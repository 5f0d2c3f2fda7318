"""`ddiloco audit`: prove which contributions are in which versions."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, folder_of
from decoupled_diloco.cli.shared_options import RunTape, exit_with, fail

if TYPE_CHECKING:
    from decoupled_diloco.launch.audit_run import AuditedContribution, ShardAudit

SOURCES = {
    "tape": "versions agree with the event tape",
    "journal": "with the journals",
    "weights": "with the final weights",
    "payloads": "contributions with the recorded payloads",
}


class AuditOptions(CommandOptions):
    """Options of `ddiloco audit`."""

    run: RunTape = ""
    learner: Annotated[str, typer.Option(metavar="NAME")] = ""
    """List the versions that contain contributions of this learner."""

    parties: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """Your copy of parties.toml, whose syncer_key must have signed the records. Default: the
    parties in the run's settings."""

    as_json: Annotated[bool, typer.Option("--json")] = False
    """Print everything as JSON."""


@command(AuditOptions)
def audit(options: AuditOptions) -> None:
    """Verify the signed record of each merge, and compare it with tape, weights and payloads.

    Exit code 1: a record was removed, moved, altered or added, or something does not agree.
    """
    from decoupled_diloco.config.parties import load_parties
    from decoupled_diloco.launch.audit_run import audit_run

    run = folder_of(chosen_run(options.run, "ddiloco audit runs/federation"))
    own = None if options.parties is None else load_parties(options.parties)
    shards = audit_run(run, own)
    of_learner = [
        each
        for shard in shards
        for each in shard.contributions
        if options.learner in ("", each.learner)
    ]
    if options.learner and not of_learner:
        fail(f"no version contains a contribution of {options.learner!r}")
    if options.as_json:
        typer.echo(json.dumps(_as_json(shards, of_learner)))
    else:
        for shard in shards:
            _print_shard(shard)
        _print_learners(of_learner, one=bool(options.learner))
    exit_with(1 if any(shard.problems for shard in shards) else 0)


def _print_shard(shard: ShardAudit) -> None:
    key = ", then ".join(map(str, shard.keys)) or "no key"
    pinned = "as parties.toml says" if shard.pinned else "which parties.toml does not name"
    count = len(shard.contributions)
    typer.echo(f"shard-{shard.shard}: {shard.versions} versions with {count} contributions")
    typer.echo(f"  signed with {key}, {pinned}")
    if any(each.is_masked for each in shard.contributions):
        typer.echo("  the contributions are masked: the syncer has received sums of them only")
    agree = [f"{n} {SOURCES[source]}" for source, n in shard.compared.items() if n]
    if agree:
        typer.echo(f"  {', '.join(agree)}")
    for note in shard.notes:
        typer.echo(f"  note: {note}")
    for problem in shard.problems:
        typer.echo(f"  PROBLEM: {problem}")
    if not shard.problems:
        typer.echo("  no record was removed, moved, altered or added")


def _print_learners(contributions: list[AuditedContribution], *, one: bool) -> None:
    by_learner: defaultdict[str, list[AuditedContribution]] = defaultdict(list)
    for each in contributions:
        by_learner[each.learner].append(each)
    for learner, mine in sorted(by_learner.items()):
        versions = {(each.shard, each.fragment, each.version) for each in mine}
        typer.echo(f"{learner}: {len(mine)} contributions, in {len(versions)} versions")
        for each in mine if one else ():
            relay = f", in a sum of {each.relay}" if each.relay else ""
            payload = "masked payload" if each.is_masked else "payload"
            typer.echo(
                f"  version {each.version} of fragment {each.fragment}: request {each.ask}, "
                f"{payload} {each.digest}, weight {each.weight:g}{relay}"
            )


def _as_json(shards: list[ShardAudit], contributions: list[AuditedContribution]) -> object:
    return {
        "shards": [
            {
                "shard": shard.shard,
                "keys": list(map(str, shard.keys)),
                "pinned": shard.pinned,
                "versions": shard.versions,
                "compared": shard.compared,
                "problems": shard.problems,
                "notes": shard.notes,
            }
            for shard in shards
        ],
        "contributions": [dataclasses.asdict(each) for each in contributions],
    }
