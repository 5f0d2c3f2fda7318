"""Metrics of a shard, read from its state and its counters at each scrape."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.monitor.exposition import Labelled, Values, info, page, planes
from decoupled_diloco.monitor.metric_sources import WatchedShard
from decoupled_diloco.monitor.metric_table import SHARD
from decoupled_diloco.protocol.messages import LOSS_MAX
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.storage.mirror import Standing
from decoupled_diloco.tape.samples import BytesMoved
from decoupled_diloco.transport.documents import Document

FORGET_SECONDS = 86_400.0
"""A learner that disappeared is exported for a day, so that the number of series is bounded."""


@dataclass(frozen=True)
class _Space:
    free: int
    size: int
    durable: int
    store_backlog: int | None  # None: no store, or another shard
    store_state: float | None


@dataclass(frozen=True, slots=True)
class _Row:
    """One learner at this scrape; ``None`` for unknown values."""

    learner: str
    connected: bool
    heard: float
    run_step: int | None
    tokens: int | None
    discarded: float | None
    step_seconds: float | None
    loss: float | None


class ShardMetrics:
    """Answers scrapes of one shard."""

    def __init__(self, shard: WatchedShard) -> None:
        self._shard = shard
        self._heard: dict[str, float] = {}
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, query: Mapping[str, str]) -> Document:
        """See `transport.documents`."""
        # One scrape at a time bounds the load on the event loop.
        async with self._one_at_a_time:
            space = await asyncio.to_thread(self._read_disk)
            return await page(SHARD, self._values(space))

    def _values(self, space: _Space | None) -> Mapping[str, Callable[[], Values]]:
        shard, state, tally = self._shard, self._shard.machine.state, self._shard.tally
        fragments, devices = shard.config.sync.fragments, shard.config.sync.devices is not None
        sent, received = planes(BytesMoved.of(shard.server.stats))
        rows = list(self._rows())
        rounds, instant = list(state.rounds.values()), now()
        waiting = [round for round in rounds if round.quorum_at is None]
        through = Counter(member.relay for member in state.members.values() if member.connected)

        def age(of: list[float]) -> float:
            return max((instant - opened for opened in of), default=0.0)

        def each(name: str) -> Callable[[], Labelled]:
            return lambda: [((row.learner,), getattr(row, name)) for row in rows]

        def of_site(name: str) -> Callable[[], Labelled]:
            return lambda: [((site,), getattr(sent, name)) for site, sent in state.sites.items()]

        def on_disk(name: str) -> Callable[[], float | None]:
            return lambda: None if space is None else getattr(space, name)

        name = f"shard-{shard.machine.shard}"
        return {
            "ddiloco_info": lambda: info(name, shard.config.run.name),
            "ddiloco_certificate_expiry_timestamp_seconds": (
                lambda: shard.server.certificate_ends_at
            ),
            "ddiloco_shard_clock_steps": lambda: state.clock,
            "ddiloco_shard_phase": lambda: [((state.phase,), 1)],
            "ddiloco_shard_term": lambda: state.term,
            "ddiloco_shard_rounds_total": lambda: [
                ((verdict,), tally.rounds[verdict]) for verdict in ("merged", "abandoned", "idle")
            ],
            "ddiloco_shard_contributions_total": lambda: [
                ((what,), count) for what, count in sorted(tally.contributions.items())
            ],
            "ddiloco_shard_round_seconds": lambda: tally.round_durations,
            "ddiloco_shard_merge_seconds": lambda: tally.merge_durations,
            "ddiloco_shard_open_rounds": lambda: len(rounds),
            "ddiloco_shard_open_round_seconds": lambda: age([r.opened_at for r in rounds]),
            "ddiloco_shard_quorum_learners": lambda: None if devices else shard.config.sync.quorum,
            "ddiloco_shard_quorum_wait_seconds": lambda: age([r.opened_at for r in waiting]),
            "ddiloco_shard_learners": lambda: len(state.members),
            "ddiloco_shard_stepping_learners": lambda: state.members_stepping,
            "ddiloco_shard_observers": lambda: len(state.observers),
            "ddiloco_shard_tokens_total": lambda: state.tokens,
            "ddiloco_shard_discarded_tokens_total": lambda: (
                tally.discarded_fragment_tokens / fragments
            ),
            "ddiloco_shard_sent_bytes_total": lambda: sent,
            "ddiloco_shard_received_bytes_total": lambda: received,
            "ddiloco_shard_disk_free_bytes": on_disk("free"),
            "ddiloco_shard_disk_size_bytes": on_disk("size"),
            "ddiloco_shard_durable_bytes": on_disk("durable"),
            "ddiloco_shard_store_backlog_bytes": on_disk("store_backlog"),
            "ddiloco_shard_store_state_timestamp_seconds": on_disk("store_state"),
            "ddiloco_shard_site_connected": lambda: [
                ((site,), site in state.relays) for site in state.sites
            ],
            "ddiloco_shard_site_learners": lambda: [
                ((site,), through[site]) for site in state.sites
            ],
            "ddiloco_shard_site_sums_total": lambda: [
                ((site, verdict), count)
                for site, sent in state.sites.items()
                for verdict, count in (("accepted", sent.sums), ("refused", sent.refused))
            ],
            "ddiloco_shard_site_contributions_total": of_site("contributions"),
            "ddiloco_shard_site_sent_bytes_total": of_site("sent_bytes"),
            "ddiloco_shard_site_relayed_bytes_total": of_site("relayed_bytes"),
            "ddiloco_shard_learner_connected": each("connected"),
            "ddiloco_shard_learner_heard_timestamp_seconds": each("heard"),
            "ddiloco_shard_learner_run_step": each("run_step"),
            "ddiloco_shard_learner_tokens_total": each("tokens"),
            "ddiloco_shard_learner_discarded_tokens_total": each("discarded"),
            "ddiloco_shard_learner_score": lambda: [
                ((name,), each.score) for name, each in state.scores.items()
            ],
            "ddiloco_shard_learner_failures_total": lambda: [
                ((name,), count) for name, count in tally.failures.items()
            ],
            "ddiloco_shard_learner_preemptions_total": lambda: [
                ((name,), count) for name, count in tally.preemptions.items()
            ],
            "ddiloco_shard_learner_step_seconds": each("step_seconds"),
            "ddiloco_shard_learner_loss": each("loss"),
        }

    def _rows(self) -> Iterator[_Row]:
        """The live learners, and those that disappeared without leaving."""
        state, reports = self._shard.machine.state, self._shard.tally.reports
        devices = self._shard.config.sync.devices is not None  # they are expected to be away
        connected = self._shard.heard()
        since_epoch = runtime().wall() - now()
        for learner in state.members:
            heard = connected.get(learner)
            # A disconnected member keeps the time of its last byte.
            if heard is not None or learner not in self._heard:
                self._heard[learner] = now() if heard is None else heard
        gone = [
            learner
            for learner, heard in self._heard.items()
            if learner not in state.members
            and (devices or learner not in reports or heard < now() - FORGET_SECONDS)
        ]
        for learner in gone:
            del self._heard[learner]
        for learner, heard in self._heard.items():
            member, known = state.members.get(learner), state.identities.get(learner)
            report = reports.get(learner)
            yield _Row(
                learner,
                learner in connected,
                heard + since_epoch,
                None if member is None else member.run_step,
                None if known is None else known.earlier_tokens + known.tokens,
                None if report is None else self._discarded(report.discarded_tokens),
                member.step_seconds if member is not None and member.step_seconds else None,
                None if report is None else _loss(report.loss),
            )

    def _discarded(self, fragment_tokens: int) -> float:
        return fragment_tokens / self._shard.config.sync.fragments

    def _read_disk(self) -> _Space | None:
        """Return the disk usage; ``None`` if it cannot be read."""
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self._shard.folder)
            is_first = self._shard.machine.shard == 0
            store = Standing.read(self._shard.folder) if is_first else None
            return _Space(
                usage.free,
                usage.total,
                _bytes_in(self._shard.durable),
                None if store is None else store.backlog_bytes,
                None if store is None or not store.number else store.wall,
            )
        return None


def _bytes_in(folder: Path) -> int:
    """Return the size of a folder's files; a file may disappear during the walk."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _loss(reported: float | None) -> float | None:
    """Convert a reported loss: a loss that is not a number is reported as `LOSS_MAX`."""
    return math.inf if reported is not None and reported >= LOSS_MAX else reported
