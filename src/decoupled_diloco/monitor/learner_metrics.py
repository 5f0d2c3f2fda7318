"""Metrics of a learner at its own address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from decoupled_diloco.monitor.exposition import Values, info, page, planes
from decoupled_diloco.monitor.metric_sources import WatchedLearner
from decoupled_diloco.monitor.metric_table import LEARNER
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.tape.samples import BytesMoved
from decoupled_diloco.transport.documents import Document

Readers = dict[str, Callable[[], Values]]
"""A function per metric that returns its value."""


async def learner_metrics(
    look: Callable[[Callable[[WatchedLearner], Readers]], Readers],
    query: Mapping[str, str],
) -> Document:
    """Answer a scrape.

    Args:
        look: Calls a function with the current learner, while its lock is held.
        query: See `transport.documents`; there are no parameters.
    """
    return await page(LEARNER, look(_readers))


def _readers(learner: WatchedLearner) -> Readers:
    """Return the current values, and functions that need no lock and may read files."""
    client = learner.client
    return {
        **{name: partial(_as_is, value) for name, value in _values(learner).items()},
        "ddiloco_certificate_expiry_timestamp_seconds": lambda: client.certificate_ends_at,
    }


def _as_is(value: Values) -> Values:
    return value


def _values(learner: WatchedLearner) -> dict[str, Values]:
    state, tally = learner.state, learner.tally
    sent, received = planes(BytesMoved.of(learner.client.stats))
    behind = [
        view.latest is not None and view.latest.version != view.held for view in state.fragments
    ]
    applied_at = tally.applied_at
    if applied_at is not None:
        applied_at += runtime().wall() - now()
    return {
        "ddiloco_info": info(learner.name, learner.run),
        "ddiloco_learner_steps_total": learner.steps,
        "ddiloco_learner_tokens_total": learner.tokens,
        "ddiloco_learner_discarded_tokens_total": learner.discarded_tokens,
        "ddiloco_learner_run_step": learner.run_step,
        "ddiloco_learner_loss": tally.loss,
        "ddiloco_learner_step_seconds": state.step_seconds.value,
        "ddiloco_learner_step_overhead_seconds": (tally.calls, tally.seconds),
        "ddiloco_learner_epoch": learner.epoch,
        "ddiloco_learner_shards": len(state.shards),
        "ddiloco_learner_connected_shards": sum(shard.linked for shard in state.shards),
        "ddiloco_learner_versions_applied_total": tally.applied,
        "ddiloco_learner_applied_timestamp_seconds": applied_at,
        "ddiloco_learner_fragments_behind": sum(behind),
        "ddiloco_learner_sent_bytes_total": sent,
        "ddiloco_learner_received_bytes_total": received,
    }
