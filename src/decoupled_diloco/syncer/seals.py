"""Seals on published versions: a learner can only claim to hold versions that were published.

A restarted shard takes a fragment from a learner that holds a newer version than the shard's own
disk. A learner that could invent such a version could replace the run's weights with any others. So
shards seal each version together with the digest of its values. The key is kept by the coordinator
and given only to shards. A learner sends the seal with each version that it reports to hold (rule
13).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from decoupled_diloco.protocol.messages import Holding, Published, Version

SEAL_BYTES = 12
"""Length of a seal: 2⁹⁶ possible values, and each guess costs a connection."""


class Seals:
    """Creates and verifies seals.

    Args:
        key: The run's key in hexadecimal; only the coordinator and the shards have it.
    """

    def __init__(self, key: str) -> None:
        self._key = bytes.fromhex(key)

    def sealed(self, message: Published) -> Published:
        """Return the announcement with its seal."""
        return replace(message, seal=self._of(message.fragment, message.version, message.digest))

    def genuine(self, held: Iterable[Holding]) -> tuple[Holding, ...]:
        """Return the reported versions that were published."""
        return tuple(holding for holding in held if self._is_genuine(holding))

    def _is_genuine(self, holding: Holding) -> bool:
        own = self._of(holding.fragment, holding.version, holding.digest)
        return hmac.compare_digest(own.encode(), holding.seal.encode())

    def _of(self, fragment: int, version: Version, digest: str) -> str:
        text = f"{fragment} {version} {digest}".encode()  # break: seal-without-digest
        return blake2b(text, key=self._key, digest_size=SEAL_BYTES).hexdigest()
