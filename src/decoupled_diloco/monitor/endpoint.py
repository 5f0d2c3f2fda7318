"""HTTP endpoint for a learner's metrics, with its own event loop beside the training loop."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from decoupled_diloco.config.run import host_and_port
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.monitor.metric_table import METRICS_PATH
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.documents import Query
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.tokens import Tokens

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""Time that `close` waits for a scrape in progress."""


class MetricsEndpoint:
    """Serves `/metrics` until it is closed, or the program has ended.

    Args:
        address: ``"host:port"``; port 0 picks a free port.
        process: Name of the learner, for the log.
        token: Bearer token that a scraper must send, if any.
        answer: Answers a scrape.

    Raises:
        ConfigError: The address is not valid, or other machines can reach it without a token.
    """

    def __init__(self, address: str, process: str, token: str | None, answer: Query) -> None:
        host, port = host_and_port("metrics_address", address)

        async def refuse(channel: Channel) -> None:
            await channel.close("this address serves only metrics: dial the syncer")

        self._who = process
        self._server = HttpServer(
            host=host,
            port=port,
            tokens=Tokens(token),
            on_channel=refuse,
            pool_bytes=1 << 20,
            queries={METRICS_PATH: answer},
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> None:
        """Begin to listen, and log the address.

        Raises:
            TransportError: The port is in use, or the host is not an address of this machine.
        """
        started: Future[None] = Future()
        self._beside = runtime().beside(lambda: self._serve(started), "ddiloco-metrics")
        started.result()
        logger.info("%s: metrics at %s%s", self._who, self._server.address, METRICS_PATH)

    @property
    def address(self) -> str:
        """The URL at which it listens."""
        return self._server.address

    def close(self) -> None:
        """Stop; does nothing if it was not started."""
        loop, stop = self._loop, self._stop
        # The loop runs in another thread, and ends by itself with the program.
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
            self._beside.join(CLOSE_SECONDS)

    async def _serve(self, started: Future[None]) -> None:
        try:
            await self._server.start()
        except DilocoError as error:
            started.set_exception(error)
            return
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set_result(None)
        ends = [
            asyncio.ensure_future(each) for each in (self._stop.wait(), runtime().program_ended())
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        await self._server.stop()
