"""Ed25519 keys: parties and shards sign with private files, and others verify the signatures."""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from decoupled_diloco.errors import ConfigError, StorageError

PREFIX = "ed25519:"
RAW_BYTES = 32
"""Length of a public key."""


@dataclass(frozen=True)
class PublicKey:
    """A public signing key.

    Attributes:
        raw: The key's 32 bytes.
    """

    raw: bytes

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Return the key that a text of the form ``ed25519:BASE64`` stands for.

        Raises:
            ConfigError: The text has another form.
        """
        try:
            raw = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        except (ValueError, binascii.Error):
            raw = b""
        if not text.startswith(PREFIX) or len(raw) != RAW_BYTES:
            raise ConfigError(
                f"key={text[:80]!r} is not a public key: write {PREFIX} and {RAW_BYTES} bytes in "
                "base64, as ddiloco parties create-key prints them"
            )
        return cls(raw)

    def __str__(self) -> str:
        return PREFIX + base64.b64encode(self.raw).decode()

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Whether the owner of this key has signed these bytes.

        Raises:
            ConfigError: `cryptography` is not installed.
        """
        from_bytes = ed25519().Ed25519PublicKey.from_public_bytes
        from cryptography.exceptions import InvalidSignature

        try:
            from_bytes(self.raw).verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey:
    """A private signing key, as `load_signing_key` reads it.

    Attributes:
        public: The key that verifies its signatures.
    """

    def __init__(self, private: object) -> None:
        self._private = private
        self.public = PublicKey(private.public_key().public_bytes_raw())  # type: ignore[attr-defined]

    def sign(self, data: bytes) -> bytes:
        """Return a signature of 64 bytes; the same for the same bytes."""
        signature: bytes = self._private.sign(data)  # type: ignore[attr-defined]
        return signature


def create_signing_key(path: Path) -> SigningKey:
    """Create a private key in a new file that only its owner can read.

    Raises:
        ConfigError: The file already exists, or `cryptography` is not installed.
        StorageError: The file cannot be written.
    """
    key = ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization

    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise ConfigError(
            f"{path} already exists, and no file is overwritten: use that key, or choose another "
            "name or folder"
        ) from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    return SigningKey(key)


def load_signing_key(path: str | Path) -> SigningKey:
    """Read a private key that `create_signing_key` has written.

    Raises:
        ConfigError: The file cannot be read or has no such key, other users can read it, or
            `cryptography` is not installed.
    """
    path, module = Path(path), ed25519()
    from cryptography.hazmat.primitives import serialization

    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            data = file.read()
    except OSError as error:
        raise ConfigError(
            f"signing key {str(path)!r} cannot be read: {error.strerror}: create one with ddiloco "
            "parties create-key, or correct the path"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"signing key {str(path)!r} has mode {mode:o}, so other users can read it: run chmod "
            f"600 {path}"
        )
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, module.Ed25519PrivateKey):
        raise ConfigError(
            f"signing key {str(path)!r} is not an Ed25519 private key without a passphrase: create "
            "one with ddiloco parties create-key"
        )
    return SigningKey(key)


def ed25519() -> ModuleType:
    """Return the module with the keys.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519 as module
    except ImportError:
        raise ConfigError(
            "signing keys need the extra tls: run pip install -e '.[tls]' in the clone"
        ) from None
    return module
