"""Start `ddiloco track` beside shard 0 for `[run] trackers`, if no launcher starts the shards.

A launcher of all shards starts it itself. Elsewhere, as on Kubernetes, shard 0 does: there is one
wherever a run is placed, and it knows where the others are. They stay until it has read them to
the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from decoupled_diloco.config.addresses import alternatives, on_this_machine
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.placement import COMMAND
from decoupled_diloco.launch.processes import LOGGER
from decoupled_diloco.transport.reachability import listens
from decoupled_diloco.transport.tls import TLSConfig

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 10.0
"""One that has failed is started again after so long."""

LAST_SECONDS = 60.0
"""How long the shard waits, when the run is over, until all is logged."""

LOOK_SECONDS = 0.5
"""How often another shard looks whether shard 0 has gone."""


async def until_logged(shard_0: str) -> None:
    """Waits, in the process of another shard, until shard 0 has gone, but not for ever.

    Args:
        shard_0: Its address, as others dial it.
    """
    addresses = [on_this_machine(each) for each in alternatives(shard_0)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_SECONDS):
            while None in [await listens(each) for each in addresses]:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)


class RunLogger:
    """Starts `ddiloco track`, and again when it fails.

    Args:
        places: See `monitor.sinks`.
        addresses: Of the shards, as others dial them.
        folder: The run folder.
        token: What it shows to the shards; it goes through a pipe.
        tls: What it trusts and shows.
    """

    def __init__(
        self,
        places: Sequence[str],
        addresses: Sequence[str],
        folder: Path,
        token: str | None,
        tls: TLSConfig | None,
    ) -> None:
        self._arguments = ["track", ",".join(map(on_this_machine, addresses)), "--stop-with-parent"]
        self._arguments += [part for place in places for part in ("--to", place)]
        self._arguments += ["--out", str(folder.absolute())]
        if tls is not None:
            files = (tls.ca_cert, tls.cert, tls.key)
            for option, file in zip(("--ca-cert", "--cert", "--key"), files, strict=True):
                self._arguments += [] if file is None else [option, str(file)]
        self._token = token
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins; the shards must listen."""
        self._running = asyncio.create_task(self._run())

    async def ended(self) -> None:
        """Waits until it has logged the end of the run, but not for ever."""
        if self._running is None:
            return
        _, waiting = await asyncio.wait({self._running}, timeout=LAST_SECONDS)
        if waiting:
            logger.warning("the last numbers are not logged after %g s", LAST_SECONDS)

    async def stop(self) -> None:
        """Ends it."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while (code := await self._run_once()) != 0:
            if code == ConfigError.exit_code:
                logger.error("nothing is logged: what [run] log names refuses, see above")
                return
            logger.warning("the %s has ended with code %s: it is started again", LOGGER, code)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _run_once(self) -> int:
        """One life of the process, which ends when its standard input does."""
        with _readable(self._token) as (options, passed):
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *self._arguments,
                *options,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=passed,
                start_new_session=True,
            )
        try:
            return await process.wait()
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.shield(process.wait())


@contextlib.contextmanager
def _readable(secret: str | None) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """The option by which a process reads a secret that is in no file, and what it inherits."""
    if secret is None:
        yield [], ()
        return
    reading, writing = os.pipe()
    try:
        os.write(writing, secret.encode())
        os.close(writing)
        yield ["--auth-token-file", f"/dev/fd/{reading}"], (reading,)
    finally:
        os.close(reading)
