"""Keys, key agreement, mask streams and secret sharing.

The primitives are X25519, HKDF-SHA256, ChaCha20 and AES-256-GCM of the package `cryptography`.
Shamir's secret sharing is over the prime field of 2^256 + 297 elements, so a secret of 32 bytes is
one element.

Shapes: N elements of a fragment; F its scalars.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from decoupled_diloco.errors import ConfigError, ProtocolError
from decoupled_diloco.merge.fixed_point import Integers

SECRET_BYTES = 32

PRIME = 2**256 + 297
"""The smallest prime above 2^256."""

SHARE_BYTES = 33

_CHUNK = 1 << 18
"""Bytes that fit into a core's own cache."""

Draw = Callable[[int], bytes]
"""Returns that many unpredictable bytes."""


def require_cryptography() -> None:
    """Check that the package `cryptography` is installed, which the functions below import.

    A process without secure sums does not need it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "secure_sums=true in [privacy] needs the package cryptography: "
            "run pip install -e '.[tls]' in the clone"
        ) from error


class KeyPair:
    """A key pair of X25519 (RFC 7748).

    Args:
        private: The private key, 32 bytes.
    """

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.private = private
        self._key = X25519PrivateKey.from_private_bytes(private)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, purpose: bytes) -> bytes:
        """Return the secret that the owners of both keys share for a purpose, 32 bytes.

        Raises:
            ProtocolError: The other key is not valid.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise ProtocolError(f"a public key is not valid: {error}") from error
        return HKDF(SHA256(), SECRET_BYTES, salt=None, info=purpose).derive(shared)


def mask(secret: bytes, elements: int, scalars: int) -> Integers:
    """Return the stream of pseudorandom integers of a secret.

    Args:
        secret: 32 bytes; never used for another stream.
        elements: N.
        scalars: F.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = np.zeros(8 * scalars + 4 * elements, dtype=np.uint8)
    # The secret is used once, so a constant nonce is safe.
    encryptor = Cipher(ChaCha20(secret, bytes(16)), mode=None).encryptor()
    for start in range(0, stream.size, _CHUNK):
        part = stream[start : start + _CHUNK]  # in place: a stream of zeros, encrypted
        encryptor.update_into(part.data, part.data)
    return Integers(
        torch.from_numpy(stream[8 * scalars :].view("<i4").astype(np.int32, copy=False)),
        torch.from_numpy(stream[: 8 * scalars].view("<i8").astype(np.int64, copy=False)),
    )


def seal(secret: bytes, message: bytes) -> bytes:
    """Encrypt a message with a secret that encrypts nothing else."""
    sealed: bytes = _aead(secret).encrypt(bytes(12), message, None)
    return sealed


def unseal(secret: bytes, sealed: bytes) -> bytes:
    """Decrypt a message.

    Raises:
        ProtocolError: It was changed, or encrypted with another secret.
    """
    from cryptography.exceptions import InvalidTag

    try:
        message: bytes = _aead(secret).decrypt(bytes(12), sealed, None)
    except (InvalidTag, ValueError) as error:
        raise ProtocolError("an encrypted share was changed on its way") from error
    return message


def _aead(secret: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(secret)


def split(secret: bytes, holders: int, threshold: int, draw: Draw) -> list[bytes]:
    """Divide a secret into shares, any ``threshold`` of which determine it (Shamir 1979).

    Args:
        secret: 32 bytes.
        holders: The number of shares.
        threshold: Fewer shares than this reveal nothing about the secret; 1 to ``holders``.
        draw: The source of randomness.

    Returns:
        The shares of holders 1, 2, …, 33 bytes each.
    """
    assert 1 <= threshold <= holders, f"threshold={threshold} for {holders} holders"
    # 16 bytes more than the field has: the result is uniform up to 2^-128.
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [int.from_bytes(draw(48), "big") % PRIME for _ in range(threshold - 1)]
    shares = []
    for holder in range(1, holders + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * holder + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join(shares: Sequence[bytes], coefficients: Sequence[int]) -> bytes:
    """Return the secret that shares determine.

    Args:
        shares: As many shares as are needed.
        coefficients: `coefficients_at_zero` of their holders.

    Raises:
        ProtocolError: The shares are not those of one secret.
    """
    numbers = (int.from_bytes(share, "big") for share in shares)
    total = sum(c * number for c, number in zip(coefficients, numbers, strict=True)) % PRIME
    if total >= 1 << 256:
        raise ProtocolError("the shares of a secret contradict each other")
    return total.to_bytes(SECRET_BYTES, "big")


def coefficients_at_zero(holders: Sequence[int]) -> list[int]:
    """Return Lagrange's coefficients of these holders' shares."""
    result = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above = above * other % PRIME
                below = below * (other - holder) % PRIME
        result.append(above * pow(below, -1, PRIME) % PRIME)
    return result


def digest_of(*parts: bytes) -> bytes:
    """Return SHA-256 of parts, each with its length, so that no other parts have the same text."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()
