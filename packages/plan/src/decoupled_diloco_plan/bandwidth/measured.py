"""Measured constants that predictions use; a test compares each with its results folder."""

from __future__ import annotations

MERGE_ELEMENTS = 1 << 24
"""Elements of the fragment whose merge was timed (`benchmarks/results/merging`)."""

FOLD_SECONDS = 0.0053
"""Seconds to fold in one contribution of that size, one thread, radial-directional average."""

MERGE_SECONDS = 0.0642
"""Seconds for the rest of its merge: result, outer step, publishing, digest."""

STEP_OVERHEAD = 0.0027
"""Share of an inner step inside `learner.step()` (`benchmarks/results/step_overhead`)."""

LINK_SHARE = 0.88
"""Share of a lossy 50 ms link that payloads fill (`benchmarks/results/data_plane_wan`)."""

TRAFFIC_OVERHEAD = 0.0163
"""Bytes other than payloads, as a share of payloads, at most (`benchmarks/results/step_overhead`).
"""

HANDLING_SECONDS = 0.0032
"""Seconds of processing per payload, without transfer and merge (`benchmarks/results/plan_real`).
"""

SYNCER_BYTES = 26
"""Bytes per parameter of all shards together, at most. They hold 16 (master, published copy,
momentum, offers); the rest is temporary (`benchmarks/results/shard_memory`)."""

MOMENT_BYTES = 8
"""Additional bytes per parameter of all shards together, for each name of a merged moment: in the
master and in the published copy. Not measured."""

SHARD_BYTES = 0.28e9
"""Additional memory of a shard process, for any model (the same folder)."""

COPY_BYTES = 4
"""Bytes per parameter of the whole published copy, which a new learner fetches and keeps."""

UTILIZATION_ERRORS = {"never": 0.0026, "at_overlap": 0.1141}
"""Largest difference between predicted and measured utilization, for learners that never wait and
for learners that wait (`benchmarks/results/plan_real`)."""

MEASURED_MBIT = (0.4, 20.0)
"""Slowest and fastest link of these measurements, each with two learners of a small model.
Predictions for other links and models are extrapolated (the same folder)."""

TRAFFIC_ERRORS = {"never": 0.159, "at_overlap": 0.312}
"""Largest relative difference between predicted and measured traffic (the same folder)."""


def fold_seconds(numel: float) -> float:
    """Return the seconds to fold in one contribution on one core."""
    return FOLD_SECONDS * numel / MERGE_ELEMENTS


def merge_seconds(numel: float) -> float:
    """Return the seconds from the last folded contribution to the published copy, on one core."""
    return MERGE_SECONDS * numel / MERGE_ELEMENTS


def core_seconds(learners: int, numel: float) -> float:
    """Return the seconds of a whole merge of `learners` contributions on one core."""
    return learners * fold_seconds(numel) + merge_seconds(numel)


WIRE_LOSS_PERCENT = {"int4": (0.31, -0.18, 0.80)}
"""Loss difference from bf16 in percent, mean and 95 % interval. Inner AdamW, GPT with 0.2 M
parameters (`benchmarks/results/traffic`)."""

PERIOD_LOSS_PERCENT = {48: 2.36, 96: 4.85, 200: 8.71}
"""Loss increase over H = 24 in percent after 600 steps, by period. Three seeds, inner AdamW, GPT
with 0.2 M parameters (`benchmarks/results/schedule`)."""
