"""`[syncer]`: the CPU processes that merge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from decoupled_diloco.config.addresses import address_problem, without_password
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError

PORT_MAX = 65_535


class SyncerSettings(Settings):
    """`[syncer]`: the CPU processes that merge."""

    table: ClassVar[str] = "[syncer]"

    shards: int = Field(default=1, ge=1)
    """S: syncer processes, 1 to fragments; each owns some fragments. Raise it when one process or
    one host's link is the bottleneck, or so that a crash stops fewer fragments."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address the shards listen on. The default is reached from this machine only; "0.0.0.0" or
    "::" opens them to the network: learners then use whichever address of this machine they
    dial."""

    port: int = Field(default=7070, ge=0, le=PORT_MAX)
    """Port of the first shard; the others take the following ones. 0: any free ports."""

    addresses: tuple[str, ...] = Field(default=(), strict=False)
    """The URLs by which learners reach the shards, one per shard, when these run on several
    machines or behind a proxy; for a shard with a standby both, as "http://a:7070|http://b:7070".
    Default: host and ports; in the place of a host that means all interfaces, the one that the
    learner has dialled."""

    token_file: Path | None = Field(default=None, strict=False)
    """File with the shared secret that learners must show, relative to where the command is
    started. Default: the local launcher makes one up for each run."""

    principals_file: Path | None = Field(default=None, strict=False)
    """File with a secret for each id instead of one for all, so that no process can speak for
    another one: lines of TOML, learner-0 = "…", also for "shard-1" and following, and "evaluator".
    Relative to where the command is started. A learner elsewhere gets its own one in a token_file.
    Default: one secret for all."""

    durable: bool = True
    """Whether each shard keeps its fragments on disk, in the run folder: a checkpoint and a journal
    of merges, so that every version that a learner has received survives a crash; 12 to 120 bytes a
    parameter, and 4 bytes an element written for each merge. false: a shard that starts again takes
    its fragments from what its learners hold, and its momentum starts afresh."""

    standbys: int = Field(default=0, ge=0, le=1)
    """Processes that stand by for each shard, 0 or 1. A standby takes over when its shard is dead,
    hangs, or cannot reach the run folder, which all processes of the shards must share; it recovers
    what is in there. It listens on the port that follows those of the shards, and costs memory once
    it acts."""

    lease_seconds: float = Field(default=5.0, ge=0.5)
    """How long a silent shard may still be alive before its standby takes over, seconds, at least
    0.5. A takeover begins a lease after the last sign of life. Half of what learners wait for a
    silent connection (10 s); raise it if the shared folder stalls for longer: then a healthy shard
    steps down, and its fragments rest for some seconds."""

    record_payloads: bool = False
    """Whether each shard keeps every contribution and whole copy that it has verified, in the run
    folder, so that `ddiloco replay` can compute the run's weights again, bit for bit. That is the
    uplink codec's size of all parameters (bf16: 2 bytes each) for every learner and period, for as
    long as there is space; then it ends, and the run goes on."""

    pool_mib: int = Field(default=256, ge=1)
    """Memory for bodies on their way in and out of one shard, MiB, at least 1. A shard needs room
    for about learners × rounds in flight × the encoded size of a fragment."""

    threads: int = Field(default=1, ge=1)
    """Threads of one shard's merge arithmetic, at least 1. Folding in a body runs at memory speed
    with one; raise it for very large fragments on a host of its own."""

    def inapplicable(self) -> Mapping[str, str]:
        """Without standbys there are no leases of shards."""
        return {} if self.standbys else {"lease_seconds": "with standbys=0"}

    @model_validator(mode="after")
    def _check_secrets(self) -> SyncerSettings:
        if self.token_file is not None and self.principals_file is not None:
            raise ConfigError(
                "[syncer] has both token_file and principals_file: keep one, for one secret for "
                "all or one for each id"
            )
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> SyncerSettings:
        last = self.port + self.shards * (1 + self.standbys) - 1
        if self.port and last > PORT_MAX:
            standbys = f" and standbys={self.standbys}" if self.standbys else ""
            raise ConfigError(
                f"port={self.port} with shards={self.shards}{standbys} needs ports up to {last}, "
                f"but {PORT_MAX} is the last: lower port"
            )
        if self.addresses and len(self.addresses) != self.shards:
            raise ConfigError(
                f"addresses has {len(self.addresses)} entries, but shards={self.shards}: "
                "give one address per shard"
            )
        for address in (each for all_of_one in self.addresses for each in all_of_one.split("|")):
            problem = address_problem(address)
            if problem:
                why = f" ({problem})" if "://" in address else f", for example 'http://{address}'"
                raise ConfigError(
                    f"address {without_password(address)!r} in [syncer] is not a URL: "
                    f"write it as 'http://host:port'{why}"
                )
        return self
