"""A learner that begins with nothing takes what a healthy one gives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.observe.tape import TapeReader
from integration.loops_that_keep import Loop, Make, Thread, recovered, stepping
from integration.system import (
    Model,
    Trainer,
    free_ports,
    training,
    until,
)
from replay import assert_replays


@pytest.mark.parametrize(
    ("listen", "secure"), [(None, False), ("127.0.0.1:0", False), ("127.0.0.1:0", True)]
)
def test_who_begins_with_nothing_takes_the_optimizer_of_a_healthy_learner(
    make: Make, tmp_path: Path, listen: str | None, secure: bool
) -> None:
    folder = encrypted.folder()
    tls = encrypted.tables(folder) if secure else {}
    system = make(run={"budget_steps": 100_000}, token="secret", tls=tls)
    system.start()
    options: dict[str, Any] = {"donate": ("optimizer", "data"), "listen": listen}
    options["token"] = "secret"
    shown = [encrypted.dialled(folder, f"learner-{n}") if secure else None for n in range(2)]
    donor = Loop(system, tmp_path / "donor", tls=shown[0], **options)
    donor.steps(5)
    with stepping(donor):
        joiner = Loop(
            system, tmp_path / "joiner", seed=1, name="learner-1", tls=shown[1], **options
        )
        moments = joiner.optimizer.state_dict()["state"]
        assert moments, "it has the donor's moments"
        assert joiner.position.batches >= 5
        assert all(float(each["step"]) == joiner.position.batches for each in moments.values())
        joiner.steps(2)
        joiner.learner.close()
    assert not donor.learner._background._transfers._blobs, "the copy is not kept"
    donor.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["donor"]) == ("donor", "learner-0")
    assert how["why"] == ("by a relay" if listen is None else "from itself")
    assert how["nbytes"] > 0
    system.stop()
    assert_replays(system.folder)


def test_a_state_is_not_given_in_plain_text_in_an_encrypted_run(tmp_path: Path) -> None:
    trusting = encrypted.dialled(encrypted.folder())
    for tls in (None, trusting):
        with pytest.raises(ConfigError, match=r"would give .* leave listen out"):
            Learner(Model(), "https://127.0.0.1:1", listen="127.0.0.1:0", tls=tls)
    with pytest.raises(ConfigError, match="certificates would be ignored for http://127"):
        Learner(Model(), "http://127.0.0.1:1", tls=trusting)


def test_a_donor_that_is_out_of_reach_is_relayed(make: Make, tmp_path: Path) -> None:
    system = make(run={"budget_steps": 100_000})
    system.start()
    donor = Loop(system, tmp_path, listen="127.0.0.1:0")
    donor.learner._background._transfers._listen = _nowhere  # type: ignore[method-assign]
    donor.steps(3)
    with stepping(donor):
        joiner = Loop(system, tmp_path, name="learner-1")
        joiner.learner.close()
    donor.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["why"]) == ("donor", "by a relay")


async def _nowhere() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


class Cutting:
    """Passes bytes on to an address, and cuts the first connections after so many of them."""

    def __init__(self, address: str, cuts: int, after_bytes: int) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self.target, self.after_bytes = (host, int(port)), after_bytes
        self.cuts_left, self.passed = cuts, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ends = [self.listener]
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                self.ends += (near, far)
                for ends in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        here = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                here += len(data)
                self.passed += len(data) if down else 0
                if down and self.cuts_left > 0 and here > self.after_bytes:
                    self.cuts_left -= 1
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_link_that_is_cut_while_a_donor_gives_costs_no_chunk_that_is_here(
    make: Make, tmp_path: Path
) -> None:
    system = make(run={"budget_steps": 100_000}, pool_bytes=1 << 26)
    system.start()
    donor = Loop(system, tmp_path, listen="127.0.0.1:0", width=1600)
    transfers = donor.learner._background._transfers
    listen, cutting = transfers._listen, list[Cutting]()

    async def by_a_bad_link() -> str:
        cutting.append(Cutting(await listen(), cuts=3, after_bytes=3 << 20))
        return cutting[0].address

    transfers._listen = by_a_bad_link  # type: ignore[method-assign]
    donor.steps(2)
    with stepping(donor):
        joiner = Loop(system, tmp_path, name="learner-1", width=1600)
        joiner.learner.close()
    donor.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["donor"], how["why"]) == ("donor", "learner-0", "from itself")
    assert cutting[0].cuts_left == 0, "the link was cut"
    cutting[0].close()
    tape = TapeReader(system.folder / "tape" / "learner-1.jsonl")
    chunks = [r.data["chunk"] for r in tape if r.type == "ChunkArrived"]
    assert chunks == list(range(len(chunks))), "none is fetched that was here"
    assert len(chunks) > 4
    assert how["nbytes"] <= cutting[0].passed < 2 * how["nbytes"]


def test_a_donor_that_dies_while_it_gives_is_replaced(make: Make, tmp_path: Path) -> None:
    system = make(run={"budget_steps": 100_000})
    system.start()
    first, second = Loop(system, tmp_path), Loop(system, tmp_path, name="learner-1")
    first.learner._background._transfers._deliver = _never  # type: ignore[method-assign]
    first.steps(3)
    second.steps(3)
    with stepping(first), stepping(second):
        joining = Thread(lambda: Loop(system, tmp_path, name="learner-2"))
        until(lambda: first.learner._background._transfers._blobs, "the first is asked")
        first.dead = True
        first.die()
        joiner = joining.result()
        joiner.learner.close()
    second.learner.close()
    (how,) = recovered(system, "learner-2")
    assert (how["way"], how["donor"]) == ("donor", "learner-1")


async def _never(order: object) -> None:
    await asyncio.sleep(3600)


def test_who_finds_no_donor_begins_afresh(make: Make, tmp_path: Path) -> None:
    system = make(run={"budget_steps": 100_000})
    system.start()
    with training(Trainer(system, "learner-0")):
        until(lambda: system.rounds() > 3, "the run is under way")
        joiner = Loop(system, tmp_path, name="learner-1")
        assert not joiner.optimizer.state_dict()["state"]
        joiner.learner.close()
    (how,) = recovered(system, "learner-1")
    assert how["way"] == "published"
