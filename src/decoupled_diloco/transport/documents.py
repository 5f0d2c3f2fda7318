"""Documents and web pages that a server provides in addition to the two planes.

The transport does not interpret their contents. A `Query` answers plain GETs of authenticated
peers, for example for the event tape, which `ddiloco status` reads. An `Order` answers a POST,
which no website can make a browser send unnoticed. `transport.fetch` is the client side. A
`Website` answers browsers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aiohttp import web

FACT_PREFIX = "X-Fact-"


class NoSuchDocumentError(Exception):
    """The query matches no document; the text lists the available ones."""


@dataclass(frozen=True)
class Document:
    """An answer: bytes, and a few facts about them that travel as headers."""

    body: bytes
    facts: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"


Query = Callable[[Mapping[str, str]], Awaitable[Document]]
"""Answers a request with these parameters; raises `NoSuchDocumentError`."""


Restrict = Callable[[tuple[str, ...], str, Document], Document]
"""Returns what a peer may see of a document, by the names that it has proved and the path; raises
`RequestRefusal` if it may see nothing of it."""


Order = Callable[[tuple[str, ...]], Awaitable[Document]]
"""Carries out an order of a peer that has proved these names; raises `RequestRefusal`."""


class Website(Protocol):
    """Pages at separate paths, with their own access control."""

    def serves(self, path: str) -> bool:
        """Whether it answers at this path."""
        ...

    def is_authenticated(self, request: web.BaseRequest) -> bool:
        """Whether the request proves that its sender may see the pages."""
        ...

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; may take as long as a viewer stays connected.

        Raises:
            RequestRefusal: The request is rejected.
        """
        ...

    async def shut_down(self) -> None:
        """Notify all viewers that the server is stopping, and end their answers promptly."""
        ...
