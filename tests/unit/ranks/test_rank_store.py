"""The leader's store: a cancelled task that waits, and moments, which it cannot have."""

from __future__ import annotations

import asyncio

import pytest
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.merge import layout_of, partition
from decoupled_diloco.ranks.rank_store import RankedStore


def test_a_learner_of_several_ranks_is_rejected_by_a_run_that_merges_moments() -> None:
    layout = layout_of(nn.Linear(3, 2))
    message = r"\[sync.moments\] .* several ranks: train this learner with one rank, or take"
    with pytest.raises(ConfigError, match=message):
        RankedStore(layout).admit(layout.with_moments(("exp_avg",)))


def test_a_spread_is_ordered_although_its_waiting_task_was_cancelled() -> None:
    layout = layout_of(nn.Linear(3, 2))
    store = RankedStore(layout)
    (fragment,) = partition(layout, 1)

    async def leaves() -> None:
        values = store.handle(fragment.numel, "")
        waiting = asyncio.ensure_future(store.spread(fragment, values))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(leaves())
    assert ["spread", 0, 1] in store.take()
    assert not store.waits
