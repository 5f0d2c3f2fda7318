"""Seals on published versions, so that nobody can say that it holds what was never published.

A shard that starts again takes a fragment from a learner that holds a newer version than its own
disk. Who could make such a version up would put any weights in the place of the run's. So shards
seal each version together with the digest of its values, by a key that the coordinator keeps and
gives to shards alone; a learner shows the seal with what it says it holds (rule 13).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

from decoupled_diloco.protocol.messages import Holding, Published, Version

SEAL_BYTES = 12
"""2⁹⁶ guesses: and each costs a connection."""


class Seals:
    """Makes and checks seals.

    Args:
        key: The run's; nobody but coordinator and shards has it.
    """

    def __init__(self, key: str) -> None:
        self._key = bytes.fromhex(key)

    def sealed(self, message: Published) -> Published:
        """The announcement with its seal."""
        return replace(message, seal=self._of(message.fragment, message.version, message.digest))

    def genuine(self, held: Iterable[Holding]) -> tuple[Holding, ...]:
        """Those that have been published."""
        return tuple(holding for holding in held if self._is_genuine(holding))

    def _is_genuine(self, holding: Holding) -> bool:
        own = self._of(holding.fragment, holding.version, holding.digest)
        return hmac.compare_digest(own.encode(), holding.seal.encode())

    def _of(self, fragment: int, version: Version, digest: str) -> str:
        text = f"{fragment} {version} {digest}".encode()  # break: seal-without-digest
        return blake2b(text, key=self._key, digest_size=SEAL_BYTES).hexdigest()
