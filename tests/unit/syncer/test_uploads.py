"""A shard's handling of an expected payload, without a task for each of thousands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import nn

from decoupled_diloco.merge import as_bytes, body_digest, digest
from decoupled_diloco.merge.packing import packed
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.syncer.data_plane import DECODED_MAX, Uploads
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import BodyBooks
from decoupled_diloco.transport.pool import ReceivePool
from unit.plans import plan_of

N = 12
_T = TypeVar("_T")


class Shard:
    """The parts of a shard that an intake needs; records started tasks and events."""

    def __init__(self) -> None:
        plan = plan_of(nn.Linear(4, 3, bias=False))
        self.bodies = BodyBooks(ReceivePool(1 << 20), Limits(stall_seconds=0.02))
        self.told: list[Any] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.stopped = False
        self.to_relays: list[tuple[str, Any]] = []
        self.intake = Uploads(
            ShardTensors(plan, (0,)),
            self.bodies,
            cast(Any, self),
            self,
            lambda relay, message: self.to_relays.append((relay, message)),
        )
        self.body = plan.uplink.encode(torch.linspace(-1, 1, N))

    def deliver(self, event: Any) -> None:
        self.told.append(event)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def run(self, task: Callable[[], _T]) -> _T:
        return task()

    def expect(self, learner: str, number: int = 1, relay: str = "") -> None:
        path, ask = f"/up/{learner}/{number}", Asking(1, number)
        self.intake.expect(
            messages.Expect(path, learner, 1, 1, 0, ask, "it is asked", "fp32", relay)
        )

    def announce(self, learner: str, number: int = 1) -> None:
        upload = messages.Upload(0, Asking(1, number), Version(1, 0), 2, 64, digest(self.body))
        self.intake.announce(learner, upload)

    async def put(self, learner: str, number: int = 1, nbytes: int = 4 * N) -> None:
        key = self.intake.url(f"/up/{learner}/{number}").removeprefix("/bodies/")
        stream = self.bodies.open(key, learner, (0, 4 * N), 4 * N, take_over=False)
        async with stream.receiving():
            stream.write(self.body.numpy().tobytes()[:nbytes])
        await settle()


async def test_few_contributions_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent of how many arrive together: each takes four bytes per element until it is
    folded.
    """
    shard, folding = Shard(), asyncio.Event()
    decoded: list[str] = []

    async def in_worker(task: Callable[[], _T]) -> _T:
        result = task()
        await folding.wait()  # a decoded contribution waits until the worker folds it
        return result

    monkeypatch.setattr(
        shard.intake._tensors, "verify", lambda *arguments: decoded.append("one") or 1.0
    )
    monkeypatch.setattr(shard.intake._tensors, "alike", lambda *arguments: ())
    shard.run = in_worker  # type: ignore[method-assign]
    names = [f"learner-{number}" for number in range(5)]
    for name in names:
        shard.expect(name)
        shard.announce(name)
        await shard.put(name)
    assert len(decoded) == DECODED_MAX
    folding.set()
    await asyncio.gather(*shard.tasks)
    assert len(shard.told) == 5


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def shard() -> AsyncIterator[Shard]:
    shard = Shard()
    yield shard
    for task in shard.tasks:
        task.cancel()
    await asyncio.gather(*shard.tasks, return_exceptions=True)


async def test_an_expected_payload_needs_no_task_until_it_arrives(shard: Shard) -> None:
    before = len(asyncio.all_tasks())
    for number in range(100):
        shard.expect(f"l{number}")
        shard.announce(f"l{number}")
    await settle()
    assert len(asyncio.all_tasks()) == before
    await shard.put("l7")
    assert len(shard.tasks) == 1
    assert [event.learner for event in shard.told] == ["l7"]


@pytest.mark.parametrize("announced_first", [True, False])
async def test_payload_and_announcement_may_arrive_in_any_order(
    shard: Shard, announced_first: bool
) -> None:
    shard.expect("a")
    if announced_first:
        shard.announce("a")
        await shard.put("a")
    else:
        await shard.put("a")
        assert shard.told == []
        shard.announce("a")
        await settle()
    (event,) = shard.told
    assert isinstance(event, messages.BodyArrived)
    assert (event.learner, event.ask, event.steps, event.tokens) == ("a", Asking(1, 1), 2, 64)


async def test_a_payload_that_stalls_is_reported_without_an_announcement(
    shard: Shard,
) -> None:
    shard.expect("a")
    await shard.put("a", nbytes=5)
    async with asyncio.timeout(5):
        while not shard.told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (event,) = shard.told
    assert isinstance(event, messages.BodyCorrupt)
    assert "5 of 48 bytes arrived" in event.reason


async def test_a_payload_that_is_not_expected_any_more_reports_nothing(shard: Shard) -> None:
    shard.expect("a")
    shard.announce("a")
    shard.intake.unexpect(messages.Unexpect("/up/a/1", "it was requested again"))
    shard.expect("a", 2)
    shard.announce("a", 1)
    await settle()
    assert shard.told == []
    shard.announce("a", 2)
    await shard.put("a", 2)
    assert [event.ask for event in shard.told] == [Asking(1, 2)]


async def test_the_memory_of_a_rejected_payload_is_released(shard: Shard) -> None:
    shard.expect("a")
    await shard.put("a")
    shard.intake.unexpect(messages.Unexpect("/up/a/1", "its learner is gone"))
    await settle()
    assert shard.bodies.pool.in_use == 0


BASE = Version(1, 0)


async def test_a_payload_may_omit_the_buffers_of_its_base(shard: Shard) -> None:
    """It is recorded for replays with all buffers; a malformed one is rejected."""
    kept: dict[str, bytes] = {}
    model = nn.BatchNorm1d(4)
    model.register_buffer("mask", torch.ones(64, 64))
    plan = plan_of(model)
    tensors = ShardTensors(plan, (0,))
    values = torch.rand(plan.layout.numel)
    tensors.install(0, values)
    tensors.installed(0, BASE)
    shard.intake._tensors = tensors
    shard.intake._keep = lambda path, body: kept.update({path: bytes(body)})
    wire = plan.uplink_of(0)
    body = wire.encode(values)
    short = packed(body, values[8:], wire)
    assert short.numel() == 4 * 8 + 1
    bad = short.clone()
    bad[-1] = 0xFF
    for number, (sent, base) in enumerate([(short, BASE), (bad, BASE), (short, Version(9, 9))]):
        path = f"/up/a/{number}"
        shard.expect("a", number)
        key = shard.intake.url(path).removeprefix("/bodies/")
        upload = messages.Upload(0, Asking(1, number), base, 2, 64, body_digest(body, wire))
        shard.intake.announce("a", upload)
        nbytes = sent.numel()
        stream = shard.bodies.open(key, "a", (0, nbytes), nbytes, take_over=False)
        async with stream.receiving():
            stream.write(sent.numpy().tobytes())
        await settle()
    arrived, nonsense, unknown = shard.told
    assert isinstance(arrived, messages.BodyArrived)
    assert arrived.nbytes == short.numel()
    assert kept == {"/up/a/0": bytes(as_bytes(body).numpy())}
    assert "packed payload includes more buffers than the fragment has" in nonsense.reason
    assert "its base version is not known" in unknown.reason
    assert shard.bodies.pool.in_use == 0


def report(learner: str) -> messages.BodyArrived:
    """A relay's report that a payload has arrived there; it claims a million tokens."""
    return messages.BodyArrived(
        learner, 9, 0, Asking(1, 1), Version(7, 7), 10**6, 10**6, 48, norm=2.0
    )


@pytest.mark.parametrize("announced_first", [True, False])
async def test_a_payload_at_a_relay_has_the_counters_of_its_learner(
    shard: Shard, announced_first: bool
) -> None:
    shard.expect("a", relay="site-a")
    ((relay, order),) = shard.to_relays
    assert (relay, order.path, order.relay) == ("site-a", "/up/a/1", "")
    steps = [lambda: shard.announce("a"), lambda: shard.intake.reported("site-a", report("a"))]
    for step in steps if announced_first else reversed(steps):
        step()
    (event,) = shard.told
    assert (event.epoch, event.base, event.steps, event.tokens) == (1, Version(1, 0), 2, 64)
    assert (event.norm, event.relay) == (2.0, "site-a")


async def test_a_report_of_another_relay_is_ignored(shard: Shard) -> None:
    shard.expect("a", relay="site-a")
    shard.announce("a")
    shard.intake.reported("site-b", report("a"))
    shard.expect("b")
    shard.intake.reported("site-b", report("b"))
    assert not shard.told


async def test_a_relay_hears_that_a_payload_is_not_expected_any_more(shard: Shard) -> None:
    shard.expect("a", relay="site-a")
    shard.intake.unexpect(messages.Unexpect("/up/a/1", "a left", "site-a"))
    assert shard.to_relays[-1] == ("site-a", messages.Unexpect("/up/a/1", "a left"))
    shard.intake.reported("site-a", report("a"))
    shard.announce("a")
    assert not shard.told
