"""What a process asks of its surroundings."""

from __future__ import annotations

import asyncio
import os

import pytest

from decoupled_diloco.runtime import runtime


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has such threads")
def test_an_event_loop_beside_a_training_thread_takes_no_core_from_it() -> None:
    found = []

    async def main() -> None:
        found.append(os.sched_getscheduler(0))
        found.append(await asyncio.to_thread(os.sched_getscheduler, 0))

    here = os.sched_getscheduler(0)
    runtime().beside(main, "loop").join(10.0)
    expected = os.SCHED_BATCH if here == os.SCHED_OTHER else here
    assert found == [expected, expected], "and its workers"
    assert os.sched_getscheduler(0) == here
