"""A learner cannot claim to hold a version that was never published (rule 13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoupled_diloco.protocol.messages import Holding, Published, Version
from decoupled_diloco.syncer.seals import Seals

KEY = "0123456789abcdef" * 2
V = Version(3, 41)


def held(key: str = KEY) -> Holding:
    """Return a learner's report of a version that was published under a key."""
    message = Seals(key).sealed(Published(2, V, None, "digest", "", "/whole", 9))
    assert (message.version, message.digest, message.clock) == (V, "digest", 9)
    return Holding(message.fragment, message.version, message.digest, message.seal)


def test_a_published_version_is_genuine_in_every_process_with_the_key() -> None:
    assert Seals(KEY).genuine([held()]) == (held(),)


@pytest.mark.parametrize(
    "made_up",
    [
        replace(held(), version=Version(3, 42)),
        replace(held(), version=Version(4, 41)),
        replace(held(), fragment=1),
        replace(held(), digest="another"),
        replace(held(), seal=""),
        replace(held(), seal="ü"),
        held("fedcba9876543210" * 2),
    ],
    ids=["counter", "term", "fragment", "digest", "no seal", "not ASCII", "key"],
)
def test_an_invented_version_is_removed_and_the_others_stay(made_up: Holding) -> None:
    assert Seals(KEY).genuine([made_up, held()]) == (held(),)
