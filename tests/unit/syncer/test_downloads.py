"""The payloads that a shard offers, and for how long."""

from __future__ import annotations

import pytest
import torch

from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.syncer.data_plane import Downloads
from decoupled_diloco.syncer.shard_tensors import PublishedCopy
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import BodyBooks
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco.transport.tokens import RequestRefusal

NUMEL = 1000


def gone(bodies: BodyBooks, url: str) -> bool:
    try:
        bodies.look_up(url.removeprefix("/bodies/"))
    except RequestRefusal as refusal:
        return refusal.status == 410
    return False


async def test_the_newest_whole_and_two_differences_are_kept() -> None:
    bodies = BodyBooks(ReceivePool(1 << 20), Limits())
    downloads = Downloads(bodies, 2)
    wholes: list[str] = []
    differences: list[str] = []
    for number in range(5):
        version = Version(1, number)
        whole = torch.full((NUMEL,), float(number))
        difference = torch.zeros(2 * NUMEL if number else 0, dtype=torch.uint8)
        downloads.offer(7, version, PublishedCopy(difference, whole, f"digest {number}", "of it"))
        wholes.append(downloads.url(f"/whole/7/{version}"))
        if number:
            differences.append(downloads.url(f"/difference/7/{version}"))
    assert [gone(bodies, url) for url in wholes] == [True, True, True, True, False]
    assert [gone(bodies, url) for url in differences] == [True, True, False, False]
    assert bodies.look_up(differences[-1].removeprefix("/bodies/")).digest == "of it"
    assert sum(len(offer.body) for offer in bodies._offers.values()) == (4 + 2 + 2) * NUMEL
    assert bodies.look_up(wholes[-1].removeprefix("/bodies/")).digest == "digest 4"
    with pytest.raises(KeyError):
        downloads.url(f"/whole/7/{Version(1, 3)}")
    downloads.offer(7, version, PublishedCopy(torch.empty(0), torch.zeros(NUMEL), "again"))
    assert bodies.look_up(wholes[-1].removeprefix("/bodies/")).digest == "again"
