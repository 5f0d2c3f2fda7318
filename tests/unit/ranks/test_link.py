"""The link between a learner's leader and another sync rank."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.merge import block_digests, codec, layout_of
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.ranks import sync_ranks as module
from decoupled_diloco.ranks.rank_store import SyncRankValues
from decoupled_diloco.ranks.redistribute import Box, Sharding
from decoupled_diloco.ranks.sync_ranks import LeaderLink, SyncRank, SyncRankLink
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tokens import Tokens

NUMEL = 200_000


def plan() -> MergePlan:
    layout = layout_of(nn.Linear(NUMEL, 1, bias=False))
    return plan_of(layout, RunConfig(run={"max_steps": 8}, sync={"fragments": 1}))


class End:
    """A sync rank other than the leader, which has no ranges in these tests."""

    def __init__(self) -> None:
        self.leader = LeaderLink()
        self.values = SyncRankValues()
        self.failures: list[BaseException] = []
        self.address = ""

    def link(self, address: str) -> SyncRankLink:
        sharding = Sharding(((1, NUMEL),), ((Box((0, 0), (1, NUMEL)),) * 2,), (0, 1))
        return SyncRankLink(
            1,
            [address],
            lambda: HttpClient(token="key", trusted=[address], principal="sync-rank"),
            lambda: HttpClient(principal="one"),
            plan(),
            sharding,
            self.values,
            self.failures.append,
        )


@asynccontextmanager
async def linked() -> AsyncIterator[End]:
    end = End()
    tokens = Tokens(run_token="key")
    server = HttpServer(tokens=tokens, on_channel=end.leader.stay)
    await server.start()
    end.address = server.address
    link = end.link(server.address)
    try:
        yield end
    finally:
        await asyncio.to_thread(link.close)
        await server.stop()
    assert not any(thread.name == "ddiloco-sync-rank" for thread in threading.enumerate())
    assert not end.failures


def digests_of(number: int) -> dict[str, object]:
    return {"do": "copy", "job": number, "fragment": 0, "values": number}


async def test_a_broken_link_fails_its_requests_and_a_new_link_opens() -> None:
    async with linked() as end:
        own = torch.randn(NUMEL)
        end.values.put(7, own)
        answer = await end.leader.request(digests_of(7))
        assert answer["digests"] == block_digests(own, codec("fp32")).hex()
        waits = asyncio.ensure_future(end.leader.request(digests_of(8)))
        await asyncio.sleep(0.2)
        assert end.leader._channel is not None
        end.leader._channel.shut("cut")
        with pytest.raises(TransportError, match="the link to a sync rank broke"):
            await waits
        end.values.put(8, own + 1)
        answer = await end.leader.request(digests_of(8))
        assert answer["digests"] == block_digests(own + 1, codec("fp32")).hex()


async def test_a_second_link_fails_the_requests_of_the_first() -> None:
    """The sync rank may notice a broken link before the leader does."""
    async with linked() as end:
        waits = asyncio.ensure_future(end.leader.request(digests_of(8)))
        await asyncio.wait([waits], timeout=0.2)
        client = HttpClient(token="key")
        await client.connect(end.address, "learner", "rank-1")
        async with asyncio.timeout(10):
            with pytest.raises(TransportError, match="the sync rank has connected again"):
                await waits
        await client.close()


async def test_a_sync_rank_without_a_range_of_a_fragment_keeps_nothing_of_it(
    tmp_path: Path,
) -> None:
    ranges = [(0, 0)]
    sync_rank = SyncRank(
        plan(), ranges, 1, SyncRankValues(), lambda: HttpClient(), asyncio.to_thread
    )
    request = {"do": "keep", "folder": str(tmp_path), "numbers": [1], "residuals": [[]]}
    assert await asyncio.wait_for(sync_rank.answer(request), 20.0) == {}
    assert not list(tmp_path.iterdir())  # noqa: ASYNC240


async def test_an_error_of_the_sync_rank_is_returned() -> None:
    async with linked() as end:
        request = {"do": "adopt", "folder": "/none", "numbers": [1], "residuals": []}
        answer = await end.leader.request(request)
        assert (answer["kind"], answer["error"][:9]) == ("StorageError", "/none has")


async def test_values_that_never_arrive_fail_the_waiting_request() -> None:
    async with linked() as end:
        waits = asyncio.ensure_future(end.leader.request(digests_of(3)))
        await asyncio.sleep(0.1)
        end.values.fail(TransportError("this learner has ended"))
        assert (await waits)["error"] == "this learner has ended"


async def test_the_address_of_an_unreachable_leader_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REACH_SECONDS", 0.3)
    end = End()
    link = end.link("http://127.0.0.1:9")
    for _ in range(100):
        if end.failures:
            break
        await asyncio.sleep(0.1)
    await asyncio.to_thread(link.close)
    (failure,) = end.failures
    assert isinstance(failure, ConfigError)
    assert "rank 1 cannot reach rank 0 at http://127.0.0.1:9" in str(failure)
    assert "leave out sync_ranks=" in str(failure)
