"""`[privacy]`: what the parties of a run agree on, and what they may learn about each other."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, Field, model_validator

from decoupled_diloco.config.parties import KeyText, Parties, PartySettings
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError


class PrivacySettings(Settings):
    """`[privacy]`: collaboration between parties that do not trust each other fully."""

    table: ClassVar[str] = "[privacy]"
    model_config = ConfigDict(arbitrary_types_allowed=True)

    parties: Path | None = Field(default=None, strict=False)
    """File with the parties of the run: their learners, public keys, and limits. All parties hold
    the same file, and `ddiloco parties check` prints its digest. The path is relative to the folder
    where the command starts. It needs the extra `tls`. Default: the run has no parties."""

    members: tuple[PartySettings, ...] = Field(default=(), strict=False)
    """The parties, as the file `parties` lists them. `run.toml` in the run's folder has them here,
    so a run resumes with the parties of its start."""

    syncer_key: KeyText | None = None
    """As the file `parties` has it: the public key that signs the records of merges."""

    @property
    def agreed(self) -> Parties | None:
        """The parties of the run; `None`: it has none."""
        if not self.members:
            return None
        return Parties(parties=self.members, syncer_key=self.syncer_key)

    @model_validator(mode="after")
    def _check_members(self) -> PrivacySettings:
        if self.parties is not None:
            raise ConfigError(
                f"parties={str(self.parties)!r} in [privacy] names a file, which only load_config "
                "reads: use it, or list the parties as members"
            )
        if self.members:
            Parties(parties=self.members)
        return self
