"""What codecs left out, at the carriers of a learner of several ranks (rules 18 and 19)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.merge import block_ranges, codec, joined_digest, layout_of
from decoupled_diloco.merge.codec import digested_by
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.ranks.rank_store import CarriedValues
from decoupled_diloco.ranks.redistribute import Box, Sharding
from decoupled_diloco.ranks.sync_ranks import Carrier, cut_for
from decoupled_diloco.transport.http_client import HttpClient

NUMEL = 200_000
COPY, PUBLISHED, BEFORE, LEAVES, BACK = range(1, 6)


def plan(**sync: Any) -> MergePlan:
    layout = layout_of(nn.Linear(NUMEL, 1, bias=False))
    sync = {"fragments": 1, **(sync or {"codec": {"uplink": "int2"}})}
    return plan_of(layout, RunConfig(run={"max_steps": 8}, sync=sync))


class Carriers:
    """So many carriers of one fragment, each with its range of what is given."""

    def __init__(self, count: int, **values: Tensor) -> None:
        self.plan = plan()
        self.ranges = block_ranges(NUMEL, count)
        self.values = [CarriedValues() for _ in self.ranges]
        self.carriers = [
            Carrier(self.plan, [each], number, held, HttpClient, asyncio.to_thread)
            for number, (each, held) in enumerate(zip(self.ranges, self.values, strict=True))
        ]
        for (start, stop), held in zip(self.ranges, self.values, strict=True):
            held.put(COPY, values["theta"][start:stop])
            held.put(PUBLISHED, torch.zeros(stop - start))
            held.put(BEFORE, values["before"][start:stop])

    async def ask(self, **asked: Any) -> list[dict[str, Any]]:
        answers = [await carrier.answer(asked) for carrier in self.carriers]
        assert not any("error" in answer for answer in answers), answers
        return answers

    def whole(self, number: int) -> Tensor:
        return torch.cat([held.future(number).result(0) for held in self.values])

    async def encode(self) -> tuple[Tensor, str]:
        """The body, put together, and its digest."""
        asked = {"copy": COPY, "published": PUBLISHED, "residuals": [BEFORE, BEFORE]}
        answers = await self.ask(
            do="encode", job=1, fragment=0, codec="int2", leaves=LEAVES, **asked
        )
        digest = joined_digest(bytes.fromhex("".join(each["digests"] for each in answers)))
        return torch.cat([carrier._bodies[1][0] for carrier in self.carriers]), digest


async def test_three_carriers_make_the_body_and_the_residual_of_one(tmp_path: Path) -> None:
    given = {name: torch.randn(NUMEL) for name in ("theta", "before")}
    one, three = Carriers(1, **given), Carriers(3, **given)
    (body, digest), (parts, digest_of_parts) = await one.encode(), await three.encode()
    assert torch.equal(body, parts)
    assert digest == digest_of_parts
    assert torch.equal(one.whole(LEAVES), three.whole(LEAVES))
    u = given["theta"] + given["before"] + given["before"]
    assert torch.equal(body, codec("int2").encode(u))

    await three.ask(do="keep", folder=str(tmp_path), numbers=[PUBLISHED], residuals=[[LEAVES]])
    two = Carriers(2, **given)
    await two.ask(do="adopt", folder=str(tmp_path), numbers=[6], residuals=[(0, BACK)])
    assert torch.equal(two.whole(BACK), one.whole(LEAVES))


async def test_several_residuals_are_kept_as_their_sum(tmp_path: Path) -> None:
    given = {name: torch.randn(NUMEL) for name in ("theta", "before")}
    two = Carriers(2, **given)
    await two.ask(
        do="keep", folder=str(tmp_path), numbers=[PUBLISHED], residuals=[[BEFORE, BEFORE]]
    )
    await two.ask(do="adopt", folder=str(tmp_path), numbers=[6], residuals=[(0, BACK)])
    assert torch.equal(two.whole(BACK), 2 * given["before"])


def test_a_fragment_that_one_codec_of_the_ladder_cannot_be_cut_in_has_one_carrier() -> None:
    sharding = Sharding(((1,),), ((Box((0,), (1,)),) * 2,), (0, 1))
    with digested_by(64):  # groups of 128
        assert cut_for(plan(codec={"uplink": ["bf16", "int2"]}), sharding).uncut == (0,)
        assert cut_for(plan(codec={"uplink": "bf16"}), sharding).uncut == ()
