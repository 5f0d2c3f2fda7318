"""What answers browsers at a server; the transport does not know what it shows."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web


class Website(Protocol):
    """Pages at paths of their own. It checks by itself who may see them."""

    def serves(self, path: str) -> bool:
        """Whether it answers at this path."""
        ...

    def knows(self, request: web.BaseRequest) -> bool:
        """Whether a request shows that who sends it may see the pages."""
        ...

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers; may take as long as somebody looks.

        Raises:
            RequestRefusal: It does not.
        """
        ...

    async def farewell(self) -> None:
        """The server stops: tells those who look, and ends their answers within a moment."""
        ...
