"""A learner that fetches whole copies endlessly is rejected; another learner continues."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.limits import Limits
from integration.real_system import System, Trainer, training, until

Make = Callable[..., System]
SHARE = Limits().copies_per_principal


async def greed(system: System) -> tuple[int, str]:
    """Fetch a whole fragment until that is rejected; return the number of fetches and why."""
    shard = system.shards[0]
    client = HttpClient(token=system.token, limits=Limits(retries=0))
    await client.connect(system.addresses[0], "learner", "liar")
    had: Counter[str] = Counter()
    try:
        while True:
            version = shard.machine.state.fragments[0].version
            url = f"/bodies/whole/0/{version}"
            body = memoryview(
                bytearray(4 * shard.parts.result().worker.tensors.plan.fragments[0].numel)
            )
            try:
                await client.get(url, body)
            except ProtocolError:
                continue  # the version is no longer the newest
            except TransportError as error:
                return had[url], str(error)
            had[url] += 1
    finally:
        await client.close()


def test_endless_fetches_are_limited_and_an_honest_learner_continues(make: Make) -> None:
    system = make(run={"max_steps": 100_000}, sync={"sync_every": 800})
    system.start()
    trainer = Trainer(system, "learner-0")
    with training(trainer):
        learner = trainer.learner
        assert learner is not None
        until(lambda: learner.steps > 10, "it trains")
        had, why = asyncio.run(greed(system))
        assert had == SHARE
        assert re.search(
            rf"'liar' has fetched /bodies/whole/0/1\.\d+ {SHARE} times, the limit", why
        )
        before, rounds = learner.steps, system.rounds()
        until(
            lambda: learner.steps > before + 50 and system.rounds() > rounds,
            "it continues to train",
        )
        assert trainer.error is None
        assert not learner.rejection_reason
