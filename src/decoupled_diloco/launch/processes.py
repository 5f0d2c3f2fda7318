"""Names of the processes of a run, and functions that all of them use."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.claims import CLAIMS, Claims, ClaimStore, ObjectClaims
from decoupled_diloco.storage.shared_folder import RELAY
from decoupled_diloco.tape import TapeWriter

logger = logging.getLogger(__name__)

EVALUATOR = "evaluator"
LOGGER = "logger"
MIRROR = "mirror"

MIRROR_SECONDS = 3600.0
"""Time for the last state in the store. The mirror itself gives up when it makes no progress."""

MIRROR_INTERRUPTED_SECONDS = 60.0
"""The same after Ctrl-C or SIGTERM, before the end of the run."""


def process_of(shard: int, *, standby: bool) -> str:
    """Return the name of a shard's process."""
    return f"shard-{shard}-standby" if standby else f"shard-{shard}"


def relay_process(site: str) -> str:
    """Return the name of the process of a site's relay, and of its tape."""
    return f"{RELAY}{site}"


def evaluator_name(config: RunConfig) -> str:
    """Return a unique name: a second evaluator with the same name would take over from the first.

    If ids have secrets or certificates, the run has one evaluator, with the name that they are for.
    """
    if config.syncer.principals_file is not None or config.tls.client_ca_cert is not None:
        return EVALUATOR
    return f"{EVALUATOR}-{runtime().unique_id()[:8]}"


def claims_of(config: RunConfig, folder: Path, shard: int, nonce: str, holder: str) -> Claims:
    """Return the claims of a shard: in the run folder, or in an object store.

    Raises:
        ConfigError: The store cannot be used: obstore is not installed.
    """
    syncer = config.syncer
    if syncer.lease_store:
        return ObjectClaims(syncer.lease_store, shard, nonce, syncer.lease_seconds, holder)
    of_shard = folder / CLAIMS / process_of(shard, standby=False)
    return ClaimStore(of_shard, nonce, syncer.lease_seconds, holder)


def reopen_claims(folder: Path, config: RunConfig) -> None:
    """Reopen the shards' claims of an earlier launch: they must not mark this launch as ended.

    Call it only when all processes of the earlier launch are gone.
    """
    syncer = config.syncer
    if syncer.standby:
        (folder / CLAIMS).mkdir(exist_ok=True)
        for shard in range(syncer.shards):
            claims_of(config, folder, shard, "", "launcher").reopen()


def open_tape(
    folder: Path, name: str, header: Mapping[str, Any], *, file: str | None = None
) -> TapeWriter:
    """Open a process's tape in a run folder; its write errors are logged and not raised.

    Args:
        folder: The run folder.
        name: Name of the process.
        header: JSON values for the start record.
        file: Name of the file. Default: ``name``. The two processes of a shard with a standby have
            separate files.
    """
    path = folder / "tape" / f"{file or name}.jsonl"
    return TapeWriter(path, name, header, on_failure=lambda error: logger.error("%s", error))


def stop_with_parent() -> None:
    """Watch standard input, and end this process when it closes: the launcher is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
