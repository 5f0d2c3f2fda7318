"""What the process of a shard does."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import public_text
from decoupled_diloco.launch.collecting import Survivors
from decoupled_diloco.launch.processes import open_tape, process_of
from decoupled_diloco.launch.secrets import accepted_tokens
from decoupled_diloco.observe.open_files import SPARE, open_files_allowed
from decoupled_diloco.observe.samples import TookOver
from decoupled_diloco.observe.sources import TAPE_PATH
from decoupled_diloco.observe.tape import TapeWriter
from decoupled_diloco.observe.versions import versions
from decoupled_diloco.storage.claims import CLAIMS, ClaimStore
from decoupled_diloco.syncer.checkpoint_requests import CHECKPOINT_PATH, answer
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.syncer.tapes import TapeDocuments
from decoupled_diloco.transport.base import Limits
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http import HttpClient, HttpServer
from decoupled_diloco.units import MIB

logger = logging.getLogger(__name__)

CONNECTIONS_PER_LEARNER = 4
"""Control channels to coordinator and shard, and two for bodies."""


def run_shard(
    config: RunConfig,
    shard: int,
    *,
    port: int,
    addresses: tuple[str, ...],
    folder: Path,
    token: str | None,
    standby: bool = False,
) -> None:
    """Serves one shard until the run is over, or SIGTERM or SIGINT.

    Where the shard has a standby, this process waits for its turn before it listens.

    Raises:
        LeaseError: the other process acts for the shard now.
        Error: the port is taken, or state on disk cannot be read or written.
    """
    process_name = process_of(shard, standby=standby)
    tokens = accepted_tokens(config, token)
    limits = limits_here(config.run.learners)
    header = {
        "machine": "shard",
        "shard": shard,
        "settings": json.loads(public_text(config)),
        "versions": versions(),
    }
    tapes: list[TapeWriter] = []
    files = {f"shard-{shard}": process_name}
    if shard == 0:
        files["coordinator"] = "coordinator" + process_name.removeprefix("shard-0")

    def begin_tape(who: str, header: Mapping[str, Any]) -> TapeWriter:
        tapes.append(open_tape(folder, who, header, file=files[who]))
        return tapes[-1]

    async def serve(shard_lease: ShardLease | NoStandby) -> bool:
        loop = asyncio.get_running_loop()
        tape = begin_tape(f"shard-{shard}", header)
        if isinstance(shard_lease, ShardLease):
            taken = TookOver(process_name, shard, shard_lease.number, shard_lease.waited_seconds)
            tape.sample(time.monotonic(), taken)
        paths = {who: folder / "tape" / f"{file}.jsonl" for who, file in files.items()}

        async def checkpoint_asked(query: Mapping[str, str]) -> Document:
            return answer(process.host, query)

        tapes_of_process = TapeDocuments(config.run.name, shard, addresses, paths)
        process = Shard(
            config,
            shard,
            addresses=addresses,
            folder=folder,
            server=lambda on_channel: HttpServer(
                host=config.syncer.host,
                port=port,
                tokens=tokens,
                on_channel=on_channel,
                health=lambda: process.health(),
                about=lambda: process.describe(),
                queries={TAPE_PATH: tapes_of_process, CHECKPOINT_PATH: checkpoint_asked},
                pool_bytes=config.syncer.pool_mib * MIB,
                limits=limits,
            ),
            client=HttpClient(token=token),
            tape=tape,
            coordinator_tape=partial(begin_tape, "coordinator") if shard == 0 else None,
            shard_lease=shard_lease,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        await process.run()
        return process.finished

    survivors = Survivors()
    survivors.begin()
    try:
        if config.syncer.standbys:
            finished = asyncio.run(take_turn(config, shard, folder, standby=standby, serve=serve))
        else:
            finished = asyncio.run(serve(NO_STANDBY))
    finally:
        survivors.end()
        for each in tapes:
            each.close()
    if not finished:
        # Only the end of the run is a success: whoever supervises this process starts it again.
        raise KeyboardInterrupt


def limits_here(learners: int) -> Limits:
    """A server's limits, with as many connections as this system lets a process have."""
    limits = Limits()
    allowed = open_files_allowed(limits.connections)
    if allowed is None:
        return limits
    connections = max(1, allowed - SPARE)
    if connections < CONNECTIONS_PER_LEARNER * learners:
        logger.warning(
            "this system allows a process %d open files: too few for the connections of %d "
            "learners, %d each: raise the limit with `ulimit -Hn`",
            allowed,
            learners,
            CONNECTIONS_PER_LEARNER,
        )
    return replace(limits, connections=connections)


async def take_turn(
    config: RunConfig,
    shard: int,
    folder: Path,
    *,
    standby: bool,
    serve: Callable[[ShardLease], Coroutine[Any, Any, bool]],
) -> bool:
    """Waits for a shard's claim and serves by it; returns whether the run is over.

    Raises:
        Error: see `run_shard`.
    """
    name = process_of(shard, standby=standby)
    store = ClaimStore(
        folder / CLAIMS / f"shard-{shard}", uuid.uuid4().hex, config.syncer.lease_seconds, name
    )
    facts = {"machine": "lease", "waits": standby}
    told = {"nonce": store.nonce, "lease_seconds": store.lease_seconds}
    shard_lease = ShardLease(
        store, open_tape(folder, f"{name}.claims", {**facts, **told}), waits=standby
    )
    finished, loop = False, asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shard_lease.give_up)
    logger.info("%s waits for its claim in %s", name, store.folder)
    try:
        if await shard_lease.gained():
            finished = await serve(shard_lease)
        else:
            finished = shard_lease.run_over
    finally:
        await shard_lease.end(finished=finished)
    return finished
