"""A learner on a machine that can reach only one other machine, by the commands of the page.

The machine is linked only to the near end, as a compute node to its login node. The syncer is at
the far end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco.config import dump_config
from decoupled_diloco.config.run import RunConfig
from docs.snippets import ROOT, blocks_of
from network.network_spaces import FAR, FAR_ADDRESS, NEAR, Link, link, run_ip, spaces, unavailable
from process.process_runs import config_of, until

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are available"),
]

INSIDE = NEAR.replace("near", "inside")
LOGIN, NODE = "10.90.0.1", "10.90.0.2"
PAGE = [block.text for block in blocks_of(ROOT / "docs" / "how-to" / "clouds.md")]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Link]:
    """Create the link between syncer and login node, and a node behind the login node."""
    with link(tmp_path, mbit=None) as made, spaces(INSIDE):
        try:
            run_ip(
                "link", "add", "dd2", "netns", NEAR, "type", "veth", "peer", "dd3", "netns", INSIDE
            )
            for space, device, address in ((NEAR, "dd2", LOGIN), (INSIDE, "dd3", NODE)):
                run_ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
                run_ip("-n", space, "link", "set", device, "up")
            yield made
        finally:
            for process in made.started[1:]:  # the process groups that `run` has started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def begun(made: Link, folder: Path, **tables: Any) -> RunConfig:
    """Start a syncer of two shards at the far end."""
    config = config_of(
        folder / "run",
        run={"max_steps": 30, "learners": 1, "evaluator": False},
        sync={"quorum": 1},
        syncer={"shards": 2, "host": "0.0.0.0", "port": 7070, "token_file": folder / "token"},
        **tables,
    )
    (folder / "homelab.toml").write_text(dump_config(config))
    (folder / "token").write_text("a secret")
    made.start(FAR, "syncer", str(folder / "homelab.toml"))
    until(lambda: (folder / "run" / "addresses").exists(), "the syncer listens", 120)
    return config


def printed(words: str, **changes: str) -> str:
    """Return the block of the page with these words, with this network's addresses."""
    (text,) = (text for text in PAGE if words in text)
    names = {"syncer.example": FAR_ADDRESS, "login": LOGIN, "homelab": "homelab.toml", **changes}
    for name, address in names.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", address, text)
    return text.replace("ddiloco ", f"{sys.executable} -m decoupled_diloco.cli ")


def run(made: Link, space: str, script: str, folder: Path) -> subprocess.Popen[bytes]:
    """Run bash in a namespace, as the leader of a separate process group."""
    with (folder / f"log-{len(made.started)}").open("wb") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, "bash", "-c", script],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            start_new_session=True,
        )
    made.started.append(process)
    return process


def assert_there_is_no_way(folder: Path) -> None:
    dial = f"import socket; socket.create_connection(({FAR_ADDRESS!r}, 7070), 3)"
    ended = subprocess.run(
        ["ip", "netns", "exec", INSIDE, sys.executable, "-c", dial], capture_output=True, text=True
    )
    assert "Network is unreachable" in ended.stderr


def test_a_learner_connects_through_a_relay(made: Link, tmp_path: Path) -> None:
    if shutil.which("socat") is None:
        pytest.skip("socat is not here")
    begun(made, tmp_path)
    assert_there_is_no_way(tmp_path)
    run(made, NEAR, printed("socat") + "wait", tmp_path)
    learner = run(made, INSIDE, printed("--syncer http://login"), tmp_path)
    assert learner.wait(200) == 0, made.logs()
    assert (tmp_path / "run" / "tape" / "shard-1.jsonl").exists()


@pytest.mark.long
def test_a_learner_connects_through_a_proxy(made: Link, tmp_path: Path) -> None:
    certificates = encrypted.made(tmp_path / "tls", host=FAR_ADDRESS)
    begun(made, tmp_path, tls=encrypted.tables(certificates))
    assert_there_is_no_way(tmp_path)
    proxy = f"{sys.executable} {Path(__file__).with_name('connect_proxy.py')} 3128"
    run(made, NEAR, proxy, tmp_path)
    learner = run(made, INSIDE, printed("https_proxy="), tmp_path)
    assert learner.wait(200) == 0, made.logs()
    asked = (tmp_path / "log-1").read_text()
    for port in (7070, 7071):
        assert f"CONNECT {FAR_ADDRESS}:{port}" in asked
