"""The settings of encrypted connections."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError


class TlsSettings(Settings):
    """`[tls]`: encrypted connections, by files that `ddiloco certificates` makes, or others."""

    table: ClassVar[str] = "[tls]"

    certificate: Path | None = Field(default=None, strict=False)
    """File with the shards' certificate, PEM, for the hosts at which they are dialled. With it the
    shards serve HTTPS, and their addresses begin with https://. Default: plain HTTP. All files here
    are relative to where the command is started; one that is renewed is loaded without a
    restart."""

    key: Path | None = Field(default=None, strict=False)
    """File with the private key of the certificate, PEM, without a passphrase."""

    authority: Path | None = Field(default=None, strict=False)
    """File with the certificates of those who may have signed the shards' certificate, PEM, for
    every process that dials them. Default: whom the system trusts."""

    client_authority: Path | None = Field(default=None, strict=False)
    """File with the certificates of those who sign for learners and others that dial, PEM. Each
    then shows a certificate that has its id as a name, and speaks for no other id; without a
    token_file or principals_file in [syncer] no token is needed. A shard shows its own certificate,
    where "shard-*" stands for all shards. Default: tokens alone decide."""

    clients: Path | None = Field(default=None, strict=False)
    """Folder with a certificate and a key for each process that dials: learner-0.pem and
    learner-0.key, and so on, evaluator.pem and evaluator.key. Default: they show none."""

    @property
    def serves(self) -> bool:
        """Whether the shards serve HTTPS themselves."""
        return self.certificate is not None

    @model_validator(mode="after")
    def _check_files_against_each_other(self) -> TlsSettings:
        if (self.certificate is None) != (self.key is None):
            has, lacks = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise ConfigError(f"[tls] has {has} without {lacks}: give both, or none")
        if self.client_authority is not None and not self.serves:
            raise ConfigError(
                f"client_authority={str(self.client_authority)!r} in [tls] would be ignored "
                "without certificate: set certificate and key, too, or take it out"
            )
        return self
