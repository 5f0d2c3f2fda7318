"""Start `ddiloco track` and `ddiloco mirror` from shard 0, if no launcher starts the shards.

A launcher of all shards starts them itself. Elsewhere, as on Kubernetes, shard 0 does: every run
has a shard 0, which has the addresses of the others. The other shards stay until `ddiloco track`
has read their tapes to the end.
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
from decoupled_diloco.launch.processes import LOGGER, MIRROR
from decoupled_diloco.transport.reachability import listens
from decoupled_diloco.transport.tls import TLSConfig

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 10.0
"""Pause before a restart after a failure."""

LAST_SECONDS = 60.0
"""Time that a shard waits after the end of the run until everything is logged."""

LOOK_SECONDS = 0.5
"""Interval at which another shard checks whether shard 0 has ended."""


async def until_logged(shard_0: str) -> None:
    """Wait in another shard until shard 0 has ended, for at most `LAST_SECONDS`.

    Args:
        shard_0: The address of shard 0, as other machines dial it.
    """
    addresses = [on_this_machine(each) for each in alternatives(shard_0)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_SECONDS):
            while None in [await listens(each) for each in addresses]:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)


class Companion:
    """Runs a command beside shard 0, and restarts it when it fails.

    Args:
        name: Its name, for the log.
        arguments: The command and its arguments. It must end when its standard input closes.
        token: The auth token for the shards, which is passed through a pipe.
    """

    def __init__(self, name: str, arguments: Sequence[str], token: str | None = None) -> None:
        self._name = name
        self._arguments = [*arguments, "--stop-with-parent"]
        self._token = token
        self._last_seconds = 0.0
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process; the shards must listen already."""
        self._running = asyncio.create_task(self._run())

    async def ended(self) -> None:
        """Wait until the end of the run is logged, for at most `LAST_SECONDS`."""
        if self._running is None:
            return
        _, waiting = await asyncio.wait({self._running}, timeout=LAST_SECONDS)
        if waiting:
            logger.warning("the last metrics are not logged within %g s", LAST_SECONDS)

    async def stop(self, last_seconds: float = 0.0) -> None:
        """End the process, and give it this many seconds for its last work."""
        self._last_seconds = last_seconds
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while (code := await self._run_once()) != 0:
            if code == ConfigError.exit_code:
                logger.error(
                    "the %s has ended, see above; the run continues without it", self._name
                )
                return
            logger.warning("the %s has ended with code %s; restarting", self._name, code)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _run_once(self) -> int:
        """Run the process once; it ends when its standard input closes."""
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
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                async with asyncio.timeout(self._last_seconds):
                    await asyncio.shield(process.wait())
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.shield(process.wait())


def run_logger(
    places: Sequence[str],
    addresses: Sequence[str],
    folder: Path,
    token: str | None,
    tls: TLSConfig | None,
) -> Companion:
    """Return the process that logs a run to experiment trackers.

    Args:
        places: Trackers; see `monitor.sinks`.
        addresses: Addresses of the shards, as other machines dial them.
        folder: The run folder.
        token: The auth token for the shards.
        tls: CA and certificate for the shards.
    """
    arguments = ["track", ",".join(map(on_this_machine, addresses))]
    arguments += [part for place in places for part in ("--to", place)]
    arguments += ["--out", str(folder.absolute())]
    if tls is not None:
        files = (tls.ca_cert, tls.cert, tls.key)
        for option, file in zip(("--ca-cert", "--cert", "--key"), files, strict=True):
            arguments += [] if file is None else [option, str(file)]
    return Companion(LOGGER, arguments, token)


def run_mirror(folder: Path) -> Companion:
    """Return the process that mirrors a run folder to its object store."""
    return Companion(MIRROR, ["mirror", str(folder.absolute())])


@contextlib.contextmanager
def _readable(secret: str | None) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Pass a secret to a process without a file.

    Yields:
        The option with the path of a pipe, and the descriptors that the process must inherit.
    """
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
