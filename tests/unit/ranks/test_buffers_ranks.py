"""A sync rank leaves out unchanged buffers, like a single-process learner (rule 18)."""

from __future__ import annotations

import asyncio
from typing import cast

import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import (
    as_bytes,
    gather,
    joined_digest,
    layout_of,
    tensors_of,
)
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.ranks.rank_store import SyncRankValues
from decoupled_diloco.ranks.sync_ranks import SyncRank, raised
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from decoupled_diloco.transport.interface import Client

COPY, PUBLISHED, NEXT = 1, 2, 3


class Wire:
    """A client that keeps the last payload instead of sending it."""

    def __init__(self) -> None:
        self.body: Tensor = torch.empty(0)

    async def put(self, url: str, body: memoryview, *, base: str, first: int, total: int) -> None:
        assert (first, total) == (0, len(body))
        self.body = as_bytes(bytes(body))

    async def get(self, url: str, out: memoryview, *, base: str, first: int, total: int) -> None:
        assert (first, total) == (0, len(out)) == (0, self.body.numel())
        out[:] = self.body.numpy().data


async def test_a_sync_rank_sends_and_fetches_only_buffers_that_have_changed() -> None:
    model = nn.BatchNorm1d(4)
    model.register_buffer("mask", torch.ones(64, 64))
    layout = layout_of(model)
    plan = plan_of(layout, RunConfig(run={"max_steps": 8}, sync={"fragments": 1}))
    (part,), numel = plan.fragments, layout.numel
    begin = gather(part, tensors_of(model, layout))
    held, wire = SyncRankValues(), Wire()
    sync_rank = SyncRank(
        plan, [(0, numel)], 0, held, lambda: cast("Client", wire), asyncio.to_thread
    )
    shard, version = ShardTensors(plan, (0,)), Version(1, 0)
    shard.install(0, begin.clone())
    shard.installed(0, version)

    theta = begin.clone()
    theta[:8] += 0.5
    theta[12:16] = 7.0  # the variances
    held.put(COPY, theta)
    held.put(PUBLISHED, begin)
    where = {"fragment": 0, "url": "/x", "base": ""}
    asked = {"copy": COPY, "published": PUBLISHED, "residuals": [], "codec": "bf16", "scale": 1.0}
    answer = raised(
        await sync_rank.answer({"do": "encode", "job": 1, "leaves": None, **where, **asked})
    )
    raised(await sync_rank.answer({"do": "put", "job": 1, **where}))
    assert wire.body.numel() == 2 * 8 + 1 + 4 * 4
    digest, body = joined_digest(bytes.fromhex(answer["digests"])), wire.body
    shard.verify(0, Asking(1, 1), shard.unpacked(0, body, version), digest)
    shard.fold(0, Asking(1, 1), 1, 1)
    copy = shard.published(0, Version(1, 1), shard.merge(0))
    assert copy.whole[12:16].tolist() == [7.0] * 4

    wire.body = copy.difference
    fetched = {"number": NEXT, "on": PUBLISHED, "nbytes": 2 * 8 + 1 + 4 * 4}
    raised(await sync_rank.answer({"do": "fetch", **where, **fetched}))
    assert torch.equal(held.future(NEXT).result(0), shard.whole(0))
