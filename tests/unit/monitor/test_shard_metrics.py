"""Metrics of a shard, read from its state; thousands of learners do not block the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.config.sync import DeviceSettings
from decoupled_diloco.monitor.counters import SECONDS_BOUNDS, Durations, ShardTally
from decoupled_diloco.monitor.metric_sources import WatchedShard
from decoupled_diloco.monitor.metric_table import PROCESS, SHARD
from decoupled_diloco.monitor.shard_metrics import ShardMetrics
from decoupled_diloco.protocol.messages import LOSS_MAX, Leave, StepReport
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.protocol.syncer_state import Identity, Member, Score
from decoupled_diloco.runtime import now
from decoupled_diloco.storage.mirror import Standing
from decoupled_diloco.transport.interface import Channel, Stats
from memory_transport import MemoryNetwork, MemoryServer

FRAGMENTS = 4


@pytest.fixture
def shard(tmp_path: Path) -> WatchedShard:
    config = RunConfig(run={"max_steps": 9, "learners": 3}, sync={"fragments": FRAGMENTS})
    machine = SyncerMachine(options_of(config), 0)
    heard = dict[str, float]()
    network = MemoryNetwork()

    async def refuse(channel: Channel) -> None:
        await channel.close("this address serves only metrics")

    server = MemoryServer(network, on_channel=refuse)
    server.stats = Stats(1, 2, 3, 4)
    server.certificate_ends_at = 2e9
    durable = tmp_path / "durable"
    durable.mkdir()
    (durable / "journal").write_bytes(b"x" * 77)
    return WatchedShard(config, machine, ShardTally(), server, lambda: heard, tmp_path, durable)


def join(shard: WatchedShard, learner: str, tokens: int = 100, loss: float = 2.0) -> None:
    state = shard.machine.state
    state.members[learner] = Member(learner, 1, 10, 5, now() + 10)
    state.identities[learner] = Identity(1, "n", tokens=tokens, steps=5)
    shard.heard()[learner] = now()
    shard.tally.count_message(learner, StepReport(5, tokens, 0.5, 40, loss))


def leave(shard: WatchedShard, learner: str) -> None:
    del shard.machine.state.members[learner]
    del shard.heard()[learner]


async def scraped(metrics: ShardMetrics) -> dict[tuple[str, ...], float]:
    """Return values by name and labels."""
    text = (await metrics({})).body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_every_declared_metric_is_exported(shard: WatchedShard) -> None:
    join(shard, "a")
    shard.machine.state.members["a"].step_seconds = 0.5
    shard.tally.contributions["folded"] += 1
    shard.machine.state.site("site-a")
    shard.machine.state.scores["a"] = Score([0.5])
    shard.tally.evicted("a", "its connection broke and its lease ran out")
    shard.tally.evicted("a", "left: it was asked to stop")
    Standing("s3://b/x", "run", 3, "writer", wall=100.0, backlog_bytes=5).write(shard.folder)
    found = {name for name, *_ in await scraped(ShardMetrics(shard))}
    assert found == {name for each in SHARD for name in each.series} | set(PROCESS)


async def test_the_backlog_of_the_store_is_exported_by_shard_0(shard: WatchedShard) -> None:
    names = ("ddiloco_shard_store_backlog_bytes",), ("ddiloco_shard_store_state_timestamp_seconds",)
    assert not {*names} & (await scraped(ShardMetrics(shard))).keys(), "the run has no store"
    Standing("s3://b/x", "run", 3, "writer", wall=100.0, backlog_bytes=5).write(shard.folder)
    found = await scraped(ShardMetrics(shard))
    assert [found[name] for name in names] == [5, 100.0]


async def test_each_site_has_its_own_series(shard: WatchedShard) -> None:
    state = shard.machine.state
    for learner in ("a", "b", "direct"):
        join(shard, learner)
    for learner in ("a", "b"):
        state.members[learner].connected, state.members[learner].relay = True, "site-a"
    state.relays["site-a"] = ""
    state.site("site-b").refuse(7)
    state.site("site-a").accept(100, [90, 95])
    found = await scraped(ShardMetrics(shard))
    sites: dict[str, dict[tuple[str, ...], float]] = {}
    for (name, *labels), value in found.items():
        _, is_of_site, rest = name.partition("ddiloco_shard_site_")
        if is_of_site:
            sites.setdefault(rest, {})[*labels] = value
    assert sites == {
        "connected": {("site-a",): 1, ("site-b",): 0},
        "learners": {("site-a",): 2, ("site-b",): 0},
        "sums_total": {
            ("site-a", "accepted"): 1,
            ("site-a", "refused"): 0,
            ("site-b", "accepted"): 0,
            ("site-b", "refused"): 1,
        },
        "contributions_total": {("site-a",): 2, ("site-b",): 0},
        "sent_bytes_total": {("site-a",): 100, ("site-b",): 7},
        "relayed_bytes_total": {("site-a",): 185, ("site-b",): 0},
    }


async def test_values_match_the_state(shard: WatchedShard) -> None:
    join(shard, "a", loss=2.5)
    join(shard, "b", tokens=300, loss=LOSS_MAX)
    found = await scraped(ShardMetrics(shard))
    assert found["ddiloco_shard_learners",] == 2
    assert found["ddiloco_shard_tokens_total",] == 400
    assert found["ddiloco_shard_learner_run_step", "a"] == 15
    assert found["ddiloco_shard_learner_discarded_tokens_total", "a"] == 40 / FRAGMENTS
    assert found["ddiloco_shard_discarded_tokens_total",] == 80 / FRAGMENTS
    assert found["ddiloco_shard_learner_loss", "a"] == 2.5
    assert found["ddiloco_shard_learner_loss", "b"] == math.inf
    assert found["ddiloco_shard_sent_bytes_total", "control"] == 1
    assert found["ddiloco_shard_received_bytes_total", "data"] == 4
    assert found["ddiloco_shard_durable_bytes",] == 77
    assert found["ddiloco_certificate_expiry_timestamp_seconds",] == 2e9
    assert ("ddiloco_shard_learner_step_seconds", "a") not in found, "it is unknown so far"


async def test_a_vanished_learner_is_exported_and_one_that_left_is_not(
    shard: WatchedShard,
) -> None:
    metrics = ShardMetrics(shard)
    for learner in ("crashed", "left"):
        join(shard, learner)
    before = await scraped(metrics)
    shard.tally.count_message("left", Leave("bye"))
    for learner in ("crashed", "left"):
        leave(shard, learner)
    found = await scraped(metrics)
    heard = "ddiloco_shard_learner_heard_timestamp_seconds"
    assert found[heard, "crashed"] == pytest.approx(before[heard, "crashed"])
    assert found["ddiloco_shard_learner_connected", "crashed"] == 0
    assert ("ddiloco_shard_learner_run_step", "crashed") not in found
    assert (heard, "left") not in found


async def test_devices_that_are_away_cause_no_alert(shard: WatchedShard) -> None:
    sync = shard.config.sync.model_copy(update={"devices": DeviceSettings()})
    config = shard.config.model_copy(update={"sync": sync})
    metrics = ShardMetrics(dataclasses.replace(shard, config=config))
    join(shard, "phone")
    found = await scraped(metrics)
    assert ("ddiloco_shard_quorum_learners",) not in found, "DilocoQuorumUnmet compares with it"
    leave(shard, "phone")  # its visit broke off
    found = await scraped(metrics)
    assert ("ddiloco_shard_learner_heard_timestamp_seconds", "phone") not in found
    assert ("ddiloco_shard_quorum_learners",) in await scraped(ShardMetrics(shard))


def test_discarded_tokens_are_counted_across_incarnations() -> None:
    tally = ShardTally()
    for discarded in (10, 30, 0, 5):  # its process dies after the second
        tally.count_message("a", StepReport(1, 1, 0.1, discarded))
    assert tally.discarded_fragment_tokens == 35


def test_durations_are_counted_by_their_bounds() -> None:
    durations = Durations()
    for seconds in (SECONDS_BOUNDS[0], SECONDS_BOUNDS[0] * 1.01, 1e9):
        durations.add(seconds)
    assert (durations.counts[0], durations.counts[1], durations.counts[-1]) == (1, 1, 1)
    assert sum(durations.counts) == 3


async def test_the_event_loop_stays_responsive_during_a_scrape_of_4000_learners(
    shard: WatchedShard,
) -> None:
    for number in range(4000):
        join(shard, f"learner-{number}")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(other())
    found = await scraped(ShardMetrics(shard))
    beside.cancel()
    assert sum(name == "ddiloco_shard_learner_loss" for name, *_ in found) == 4000
    assert turns >= len(SHARD)
