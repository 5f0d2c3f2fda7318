"""What a shard offers for download: the newest whole copy of each fragment, and differences."""

from __future__ import annotations

import torch

from decoupled_diloco.merge import as_bytes
from decoupled_diloco.protocol.versions import Version
from decoupled_diloco.syncer.fragments import PublishedCopy
from decoupled_diloco.transport.bodies import BodyBooks

DIFFERENCES_KEPT = 2
"""Published differences of a fragment that can be fetched."""


class Downloads:
    """Published copies that learners may fetch.

    Of each fragment: the newest whole, which is the shard's own published copy, and the two newest
    differences, so that who is one version behind need not fetch four bytes an element. Who asks
    for an older body is told that it is gone, and fetches the newest whole.

    Args:
        bodies: The server's data plane.
    """

    def __init__(self, bodies: BodyBooks) -> None:
        self._bodies = bodies
        self._wholes: dict[int, str] = {}
        self._differences: dict[int, list[str]] = {}
        self._urls: dict[str, str] = {}

    def offer(self, fragment: int, version: Version, published: PublishedCopy) -> None:
        """Offers a version: whole, and as difference unless that is empty."""
        whole, difference = f"/whole/{fragment}/{version}", f"/difference/{fragment}/{version}"
        older = self._wholes.pop(fragment, whole)
        if older != whole:
            self._withdraw(older)
        self._wholes[fragment] = whole
        self._urls[whole] = self._bodies.offer(whole, _view(published.whole), published.digest)
        if published.difference.numel():
            kept = self._differences.setdefault(fragment, [])
            kept.append(difference)
            self._urls[difference] = self._bodies.offer(difference, _view(published.difference), "")
            while len(kept) > DIFFERENCES_KEPT:
                self._withdraw(kept.pop(0))

    def _withdraw(self, path: str) -> None:
        self._bodies.withdraw(path)
        del self._urls[path]

    def url(self, path: str) -> str:
        """The transport's URL of an offered path; empty for an empty path."""
        return self._urls[path] if path else ""


def _view(tensor: torch.Tensor) -> memoryview:
    return as_bytes(tensor).numpy().data
