"""Residuals on the sync ranks of a multi-rank learner (rules 18 and 19)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import block_ranges, codec, joined_digest, layout_of
from decoupled_diloco.merge.codec import digested_by
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.ranks.rank_store import SyncRankValues
from decoupled_diloco.ranks.redistribute import Box, Sharding
from decoupled_diloco.ranks.sync_ranks import SyncRank, sharding_for
from decoupled_diloco.transport.http_client import HttpClient

NUMEL = 200_000
COPY, PUBLISHED, BEFORE, LEAVES, BACK = range(1, 6)


def plan(**sync: Any) -> MergePlan:
    layout = layout_of(nn.Linear(NUMEL, 1, bias=False))
    sync = {"fragments": 1, **(sync or {"codec": {"uplink": "int2"}})}
    return plan_of(layout, RunConfig(run={"max_steps": 8}, sync=sync))


class SyncRanks:
    """Sync ranks of one fragment, each with its range of the given values."""

    def __init__(self, count: int, **values: Tensor) -> None:
        self.plan = plan()
        self.ranges = block_ranges(NUMEL, count)
        self.values = [SyncRankValues() for _ in self.ranges]
        self.sync_ranks = [
            SyncRank(self.plan, [each], number, held, HttpClient, asyncio.to_thread)
            for number, (each, held) in enumerate(zip(self.ranges, self.values, strict=True))
        ]
        for (start, stop), held in zip(self.ranges, self.values, strict=True):
            held.put(COPY, values["theta"][start:stop])
            held.put(PUBLISHED, torch.zeros(stop - start))
            held.put(BEFORE, values["before"][start:stop])

    async def request(self, **request: Any) -> list[dict[str, Any]]:
        answers = [await sync_rank.answer(request) for sync_rank in self.sync_ranks]
        assert not any("error" in answer for answer in answers), answers
        return answers

    def whole(self, number: int) -> Tensor:
        return torch.cat([held.future(number).result(0) for held in self.values])

    async def encode(self, scale: float = 1.0) -> tuple[Tensor, str]:
        """Return the payload of all sync ranks, concatenated, and its digest."""
        request = {"copy": COPY, "published": PUBLISHED, "residuals": [BEFORE, BEFORE]}
        answers = await self.request(
            do="encode", job=1, fragment=0, codec="int2", leaves=LEAVES, scale=scale, **request
        )
        digest = joined_digest(bytes.fromhex("".join(each["digests"] for each in answers)))
        return torch.cat([sync_rank._payloads[1][0] for sync_rank in self.sync_ranks]), digest


async def test_three_sync_ranks_produce_the_payload_and_the_residual_of_one(tmp_path: Path) -> None:
    given = {name: torch.randn(NUMEL) for name in ("theta", "before")}
    one, three = SyncRanks(1, **given), SyncRanks(3, **given)
    (body, digest), (parts, digest_of_parts) = await one.encode(), await three.encode()
    assert torch.equal(body, parts)
    assert digest == digest_of_parts
    assert torch.equal(one.whole(LEAVES), three.whole(LEAVES))
    u = given["theta"] + given["before"] + given["before"]
    assert torch.equal(body, codec("int2").encode(u))

    await three.request(do="keep", folder=str(tmp_path), numbers=[PUBLISHED], residuals=[[LEAVES]])
    two = SyncRanks(2, **given)
    await two.request(do="adopt", folder=str(tmp_path), numbers=[6], residuals=[(0, BACK)])
    assert torch.equal(two.whole(BACK), one.whole(LEAVES))


async def test_the_ranges_have_the_norm_of_the_whole_and_are_scaled_alike() -> None:
    """So the leader can clip a contribution that no rank has as a whole (rule 25)."""
    given = {"theta": torch.randn(NUMEL), "before": torch.zeros(NUMEL)}
    three = SyncRanks(3, **given)
    answers = await three.request(do="measure", fragment=0, copy=COPY, published=PUBLISHED)
    squares = sum(float.fromhex(each["squares"]) for each in answers)
    assert squares == pytest.approx(float(given["theta"].double().square().sum()), rel=1e-6)
    body, _ = await three.encode(scale=0.25)
    assert torch.equal(body, codec("int2").encode(0.25 * given["theta"]))


async def test_several_residuals_are_kept_as_their_sum(tmp_path: Path) -> None:
    given = {name: torch.randn(NUMEL) for name in ("theta", "before")}
    two = SyncRanks(2, **given)
    await two.request(
        do="keep", folder=str(tmp_path), numbers=[PUBLISHED], residuals=[[BEFORE, BEFORE]]
    )
    await two.request(do="adopt", folder=str(tmp_path), numbers=[6], residuals=[(0, BACK)])
    assert torch.equal(two.whole(BACK), 2 * given["before"])


def test_a_fragment_that_a_codec_cannot_split_has_one_sync_rank() -> None:
    sharding = Sharding(((1,),), ((Box((0,), (1,)),) * 2,), (0, 1))
    with digested_by(64):  # groups of 128
        assert sharding_for(plan(codec={"uplink": ["bf16", "int2"]}), sharding).unsplit == (0,)
        assert sharding_for(plan(codec={"uplink": "bf16"}), sharding).unsplit == ()
