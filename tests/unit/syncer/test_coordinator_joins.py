"""The coordinator's writes for joins: one record each, and one write for all that wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import public_text
from decoupled_diloco.errors import StorageError
from decoupled_diloco.merge import layout_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import DataReport
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.run_model.data_usage import read_data
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.coordinator_states import STATES
from decoupled_diloco.syncer import coordinator
from decoupled_diloco.syncer.coordinator import CoordinatorHost
from decoupled_diloco.syncer.shard_lease import NoStandby
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import BodyBooks
from decoupled_diloco.transport.pool import ReceivePool

LAYOUT = json.dumps(layout_of(nn.Linear(4, 3)).to_json())


class Line:
    """The coordinator's end of a connection: records sent messages, receives those of `speak`."""

    last_received = 0.0

    closed = False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.said: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    def speak(self, message: Any) -> None:
        self.said.put_nowait(encode(message))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> dict[str, object]:
        return await self.said.get()

    async def close(self, reason: str = "") -> None:
        self.sent.append(reason)

    @property
    def epoch(self) -> int | None:
        """The incarnation in the coordinator's admission; ``None`` before the admission."""
        answers = [m for m in self.sent if isinstance(m, dict) and m["type"] == "Admitted"]
        return answers[0]["epoch"] if answers else None


class Life:
    """One process of a coordinator in a folder."""

    def __init__(self, folder: Path, claim: int = 0) -> None:
        self.folder = folder
        shard_lease = NoStandby()
        shard_lease.number, shard_lease.nonce = claim, str(claim)
        self.tasks: list[asyncio.Task[None]] = []
        self.failures: list[BaseException] = []
        config = self.config = RunConfig(
            run={"name": "test", "folder": folder, "max_steps": 10}, sync={"fragments": 1}
        )
        self.host = CoordinatorHost(
            config,
            ("http://127.0.0.1:1",),
            folder,
            lambda header: TapeWriter(folder / "tape", "coordinator", header),
            self.failures.append,
            BodyBooks(ReceivePool(1 << 20), Limits()),
            shard_lease,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    def ask(self, name: str, nonce: str = "n") -> Line:
        """Send a join; the answer may take until the join is on disk."""
        line = Line()
        join = messages.Join(name, nonce, "learner", LAYOUT)
        self.spawn(self.host.serve_join(cast("Channel", line), join))
        return line

    async def join(self, *names: str, nonce: str = "n") -> list[Line]:
        """Send these joins at the same time, and wait until all are admitted."""
        lines = [self.ask(name, nonce) for name in names]
        await until(lambda: all(line.epoch for line in lines))
        return lines

    @property
    def epochs(self) -> dict[str, int]:
        return {name: each.epoch for name, each in self.host.machine.state.learners.items()}

    async def crash(self) -> None:
        """End the process like a kill: the files on disk stay as they are."""
        closing = asyncio.ensure_future(self.host.close())
        for task in self.tasks:
            task.cancel()
        before = [(path, path.read_bytes()) for path in self.files()]
        await asyncio.gather(closing, *self.tasks, return_exceptions=True)
        await asyncio.sleep(0.05)
        for path in self.files():
            path.unlink()
        for path, content in before:
            path.write_bytes(content)
        self.host.tape.close()
        self.host._ledger.close()

    def files(self) -> list[Path]:
        return sorted((self.folder / STATES).glob("*.json"))

    @property
    def _documents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.files()]

    @property
    def state(self) -> dict[str, Any]:
        """The newest state that was written as a whole."""
        return [each["state"] for each in self._documents if "state" in each][-1]

    @property
    def lines(self) -> list[str]:
        """The learners whose records were written after that state."""
        names: list[str] = []
        for each in self._documents:
            names = [] if "state" in each else [*names, *each["joined"]]
        return names

    @property
    def whole(self) -> list[str]:
        return sorted(self.state["learners"])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Callable[..., Life]]:
    lives: list[Life] = []

    def begin_one(folder: Path = tmp_path, claim: int = 0) -> Life:
        lives.append(Life(folder, claim))
        return lives[-1]

    yield begin_one
    for life in lives:
        await life.crash()


Begin = Callable[..., Life]


async def test_the_first_join_writes_the_whole_state_and_later_ones_a_record_each(
    begin: Begin,
) -> None:
    life = begin()
    await life.join("a")
    assert (life.whole, life.lines) == (["a"], [])
    await life.join("b")
    await life.join("c")
    assert (life.whole, life.lines) == (["a"], ["b", "c"])


async def test_a_second_live_process_with_a_name_may_try_again(begin: Begin) -> None:
    """The first may be about to end: its node agent starts the second at the same time."""
    life = begin()
    (first,) = await life.join("a", nonce="first")
    second = life.ask("a", nonce="second")
    await asyncio.sleep(0)
    first.last_received = now() + 60.0
    await until(lambda: second.sent)
    refusal = decode(second.sent[0], (messages.JoinRefused,))
    assert refusal.retry
    assert "a live process" in refusal.reason


async def test_joins_during_a_write_share_the_next_write(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = begin()
    await life.join("a")
    writes: list[list[str]] = []
    append = life.host._states.append
    monkeypatch.setattr(
        life.host._states, "append", lambda records: writes.append(list(records)) or append(records)
    )
    await life.join("b", "d", "c")
    assert writes == [["b"], ["c", "d"]]
    assert life.lines == ["b", "c", "d"]


async def test_a_join_is_on_disk_before_it_is_answered(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = begin()
    await life.join("a")
    line = Line()
    told: list[int | None] = []
    append = life.host._states.append

    def noted(records: dict[str, Any]) -> None:
        told.append(line.epoch)
        append(records)
        told.append(line.epoch)

    monkeypatch.setattr(life.host._states, "append", noted)
    join = messages.Join("b", "n", "learner", LAYOUT)
    life.spawn(life.host.serve_join(cast("Channel", line), join))
    await until(lambda: line.epoch)
    assert told == [None, None]


async def test_a_join_with_a_change_of_the_whole_state_is_written_with_it(begin: Begin) -> None:
    life = begin()
    await life.join("a")
    await life.join("b")
    hello = messages.ShardHello(0, "n", life.host._settings)
    line = life.ask("c")  # its write begins first
    other = life.ask("d")
    await asyncio.sleep(0)
    life.host.shard_greeted(hello, lambda message: None)  # a new term: the whole state is written
    await until(lambda: line.epoch and other.epoch)
    assert life.whole == ["a", "b", "c", "d"]
    assert life.lines == []


async def test_a_crash_between_record_and_rewrite_loses_no_learner(begin: Begin) -> None:
    life = begin()
    await life.join("a")
    await life.join("b")
    await life.crash()
    assert (life.whole, life.lines) == (["a"], ["b"])
    again = begin()
    assert again.epochs == {"a": 1, "b": 1}
    (line,) = await again.join("b", nonce="another process")
    assert line.epoch == 2
    assert again.whole == ["a", "b"], "a new process adds no records to another one's"


async def test_a_corrupted_record_is_an_error_and_is_not_skipped(begin: Begin) -> None:
    life = begin()
    await life.join("a")
    await life.join("b")
    await life.crash()
    life.files()[-1].write_text('{"joined": {"b": {"epoch"')
    with pytest.raises(StorageError, match="move the run folder away to start a new run"):
        begin()


async def test_records_that_could_not_be_added_are_written_once_there_is_space(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "RETRY_SECONDS", 0.01)
    life = begin()
    await life.join("a")
    taken = tmp_path / STATES / ".00000002.json.0.part"
    taken.mkdir()
    first = life.ask("b")
    await until(lambda: life.host._writing)
    second = life.ask("c")
    await until(lambda: "c" in life.epochs)
    taken.rmdir()
    await until(lambda: first.epoch and second.epoch)
    assert sorted({*life.whole, *life.lines}) == ["a", "b", "c"]


async def test_an_order_that_waited_for_the_disk_is_not_sent_to_a_newer_process(
    tmp_path: Path,
) -> None:
    """Otherwise a shard would act in the term of its earlier process."""
    life = Life(tmp_path)
    host, told = life.host, dict[str, list[Any]]()
    settings = public_text(life.config)
    host._driver._is_waiting = True  # a slow disk
    for nonce in ("first", "second"):
        told[nonce] = []
        host.shard_greeted(messages.ShardHello(0, nonce, settings, 0), told[nonce].append)
    host._driver._is_waiting = False
    host._driver._go_on()
    await until(lambda: bool(told["second"]))
    terms = {
        nonce: [m.term for m in answers if isinstance(m, messages.ShardAdmitted)]
        for nonce, answers in told.items()
    }
    assert terms == {"first": [], "second": [2]}
    await life.crash()


async def test_an_answer_uses_the_connection_with_the_newest_message(tmp_path: Path) -> None:
    """The other connections may be dead without having been found so."""
    life = Life(tmp_path)
    first = life.ask("a")
    second = life.ask("a")
    await until(lambda: first.epoch and second.epoch)
    before = len(second.sent)
    first.speak(DataReport(parts=4, want=1, leases=()))
    await until(lambda: any(m.get("type") == "LeasesGiven" for m in first.sent))
    assert len(second.sent) == before
    await life.crash()


async def test_decisions_during_a_write_of_the_state_are_in_the_next_ledger(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash comes between the two writes: the leases in the state include every decision."""
    monkeypatch.setattr(coordinator, "RETRY_SECONDS", 0.01)
    life = begin()
    (line,) = await life.join("a")
    line.speak(DataReport(parts=4, want=1, leases=()))
    await until(lambda: any(m.get("type") == "LeasesGiven" for m in line.sent))
    await life.crash()
    life = begin()
    monkeypatch.setattr(life.host._ledger, "append", out_of_order)
    life.ask("a", "another process")
    await until(lambda: life.host._driver.waiting and life.state["learners"]["a"]["epoch"] == 2)
    await life.crash()
    begin()
    account = read_data(tmp_path)
    assert not account.problems
    assert account.turns[0][0].standing == "returned"


async def test_decisions_during_a_write_of_the_ledger_are_in_the_next_ledger(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt writes the state at that time."""
    monkeypatch.setattr(coordinator, "RETRY_SECONDS", 0.01)
    life = begin(claim=1)
    lines = await life.join("a", "b")
    monkeypatch.setattr(life.host._ledger, "append", out_of_order)
    for line in lines:
        line.speak(DataReport(parts=4, want=1, leases=()))
    await until(lambda: life.host._driver.waiting and life.state["data"]["entries"] == 3)
    await life.crash()
    begin(claim=2)
    account = read_data(tmp_path)
    assert not account.problems
    assert [part.spans[0].learner for part in account.turns[0].values()] == ["a", "b"]


def out_of_order(entries: object) -> None:
    raise StorageError("the disk is out of order")
