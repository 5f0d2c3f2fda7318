"""`[syncer]`: the CPU processes that merge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from decoupled_diloco.config.addresses import address_problem, require_store, without_password
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError

PORT_MAX = 65_535

LEASE_SECONDS_MIN = 2.0
"""The shortest lease in an object store: a renewal, a quarter of it, takes a tenth of a second."""

LEASE_SECONDS_MIN_GCS = 4.0
"""The shortest lease on GCS, which accepts one write of an object per second."""


class SyncerSettings(Settings):
    """`[syncer]`: the CPU processes that merge."""

    table: ClassVar[str] = "[syncer]"

    shards: int = Field(default=1, ge=1)
    """S: number of syncer processes, 1 to `fragments`. Each shard owns some of the fragments. Raise
    it if one process or the link of one host is the bottleneck, or so that a crash stops fewer
    fragments."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which the shards listen. The default accepts connections from this machine only.
    "0.0.0.0" or "::" listens on all interfaces; learners then use any address of this machine."""

    port: int = Field(default=7070, ge=0, le=PORT_MAX)
    """Port of the first shard. The other shards use the following ports. 0 picks free ports."""

    addresses: tuple[str, ...] = Field(default=(), strict=False)
    """URLs at which learners reach the shards, one per shard. Set them if the shards run on several
    machines or behind a proxy. A shard with a standby has two in one, as
    "http://a:7070|http://b:7070". Default: the host and the ports. If the host means all
    interfaces, each learner uses the host that it connected to."""

    token_file: Path | None = Field(default=None, strict=False)
    """File with the shared secret that learners must present, relative to the folder where the
    command starts. Default: the local launcher creates a secret for each run."""

    principals_file: Path | None = Field(default=None, strict=False)
    """File with a separate secret for each id, so that no process can act for another one. It has
    lines of TOML: learner-0 = "…", also for "shard-1" and following, and "evaluator". The path is
    relative to the folder where the command starts. A learner on another machine receives its own
    secret in a token_file. Default: one secret for all."""

    persist: bool = True
    """Whether each shard keeps its fragments on disk, in the run folder. It writes a checkpoint and
    a journal of merges, so every version that a learner has received survives a crash. That takes
    24 to 120 bytes per parameter, and writes 4 bytes per element for each merge. With false, a
    restarted shard takes its fragments from its learners, and its momentum starts at zero."""

    standby: bool = False
    """Whether each shard has a standby process. It takes over if its shard is dead, hangs, or
    cannot reach the run folder, and recovers the state from there. All processes of the shards must
    share the run folder. The standby listens on the port after those of the shards, and needs
    memory only once it is active."""

    lease_seconds: float = Field(default=5.0, ge=0.5)
    """Seconds that a silent shard keeps its leadership lease, at least 0.5. Its standby takes over
    one lease after the last sign of life. The default is half of the 10 s that learners wait on a
    silent connection. Raise it if the shared folder stalls for longer: otherwise a healthy shard
    steps down, and its fragments pause for some seconds."""

    lease_store: str = ""
    """Address of an object store for the leadership leases of the shards and their standbys, such
    as "s3://BUCKET/leases/x". The two processes of a shard then need no shared disk: with `store`
    in [run], a standby that takes over copies the newest state from there, which requires
    shards=1. Use one address for each run. `lease_seconds` must be at least 2 then, or 4 on GCS.
    Default: the run folder."""

    signing_key: Path | None = Field(default=None, strict=False)
    """File with the private key that signs the record of each merge, as `ddiloco parties
    create-key` writes it, the same for all shards. `ddiloco audit` verifies the records. The path
    is relative to the folder where the command starts. It needs the extra `tls`. Default: with
    `[privacy]` parties, each shard creates a key in RUN/audit; without parties, none signs."""

    record_payloads: bool = False
    """Whether each shard keeps every verified contribution and whole copy in the run folder.
    `ddiloco replay` can then compute the run's weights again, bit for bit. It takes the encoded
    size of all parameters (bf16: 2 bytes each) per learner and period. If the disk is full,
    recording stops and the run continues."""

    pool_mib: int = Field(default=256, ge=1)
    """Memory of one shard for payloads in transfer, MiB, at least 1. A shard needs about learners ×
    rounds in flight × the encoded size of a fragment. Raise it for large fragments or many
    learners."""

    threads: int = Field(default=1, ge=1)
    """Threads for the merge arithmetic of one shard, at least 1. One thread adds a payload at the
    speed of memory. Raise it for very large fragments on a separate host."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of leases without standbys."""
        names = () if self.standby else ("lease_seconds", "lease_store")
        return dict.fromkeys(names, "with standby=false")

    @model_validator(mode="after")
    def _check_lease_store(self) -> SyncerSettings:
        if self.lease_store:
            require_store("lease_store", self.lease_store)
            if self.lease_store.startswith("memory:"):
                raise ConfigError(
                    f"lease_store={self.lease_store!r} in [syncer] is in one process: name a store "
                    "that both processes of a shard reach"
                )
            on_gcs = self.lease_store.startswith("gs:")
            least = LEASE_SECONDS_MIN_GCS if on_gcs else LEASE_SECONDS_MIN
            if self.lease_seconds < least:
                reason = "each renewal is a request"
                if on_gcs:
                    reason += ", and GCS accepts one write of an object per second"
                raise ConfigError(
                    f"lease_seconds={self.lease_seconds} in [syncer] is too short for lease_store: "
                    f"it must be at least {least}, because {reason}"
                )
        return self

    @model_validator(mode="after")
    def _check_secrets(self) -> SyncerSettings:
        if self.token_file is not None and self.principals_file is not None:
            raise ConfigError(
                "[syncer] has both token_file and principals_file: keep the first for one secret, "
                "or the second for one secret per id"
            )
        return self

    @model_validator(mode="after")
    def _check_addresses(self) -> SyncerSettings:
        last = self.port + self.shards * (1 + self.standby) - 1
        if self.port and last > PORT_MAX:
            standby = " and standby=true" if self.standby else ""
            raise ConfigError(
                f"port={self.port} in [syncer] with shards={self.shards}{standby} needs ports up "
                f"to {last}, but {PORT_MAX} is the last: lower port"
            )
        if self.addresses and len(self.addresses) != self.shards:
            raise ConfigError(
                f"addresses in [syncer] has {len(self.addresses)} entries, but "
                f"shards={self.shards}: write one address per shard"
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
