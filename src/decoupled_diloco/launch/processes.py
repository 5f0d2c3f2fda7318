"""What the processes of a run are called, and what all of them do."""

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
from decoupled_diloco.storage.claims import CLAIMS, ClaimStore
from decoupled_diloco.tape import TapeWriter

logger = logging.getLogger(__name__)

EVALUATOR = "evaluator"
LOGGER = "logger"


def process_of(shard: int, *, standby: bool) -> str:
    """What a process of a shard is called."""
    return f"shard-{shard}-standby" if standby else f"shard-{shard}"


def evaluator_name(config: RunConfig) -> str:
    """A name of its own, since a second one of the same name would take over from the first.

    Where ids have secrets or certificates there is one evaluator, by the name that they are for.
    """
    if config.syncer.principals_file is not None or config.tls.client_ca_cert is not None:
        return EVALUATOR
    return f"{EVALUATOR}-{runtime().unique_id()[:8]}"


def reopen_claims(folder: Path, config: RunConfig) -> None:
    """The claims of an earlier launch, whose processes are all gone, do not say it is over."""
    syncer = config.syncer
    if syncer.standby:
        (folder / CLAIMS).mkdir(exist_ok=True)
        for shard in range(syncer.shards):
            of_shard = folder / CLAIMS / process_of(shard, standby=False)
            ClaimStore(of_shard, "", syncer.lease_seconds, "launcher").reopen()


def open_tape(
    folder: Path, who: str, header: Mapping[str, Any], *, file: str | None = None
) -> TapeWriter:
    """A process's tape in a run folder; a full disk ends it, and nothing else.

    Args:
        file: Name of the file; default: ``who``. Two processes that act for one shard in turns
            have a file each.
    """
    path = folder / "tape" / f"{file or who}.jsonl"
    return TapeWriter(path, who, header, on_failure=lambda error: logger.error("%s", error))


def stop_with_parent() -> None:
    """Ends this process when its standard input is closed: the launcher is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
