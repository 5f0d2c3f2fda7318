"""What was measured on real runs and enters predictions; a test compares each with its folder."""

from __future__ import annotations

MERGE_ELEMENTS = 1 << 24
"""Elements of the fragment whose merging was timed (`benchmarks/results/merging`)."""

FOLD_SECONDS = 0.0053
"""Folding one contribution of that size in, one thread, with the radial-directional average."""

MERGE_SECONDS = 0.0642
"""The rest of its merge: result, outer step, publishing, digest."""

STEP_OVERHEAD = 0.0027
"""Share of an inner step inside `learner.step()` (`benchmarks/results/step_overhead`)."""

LINK_SHARE = 0.88
"""Share of a link of 50 ms with losses that bodies fill (`benchmarks/results/data_plane_wan`)."""

TRAFFIC_OVERHEAD = 0.0163
"""All that is no body, as a share of them, at most (`benchmarks/results/step_overhead`)."""

HANDLING_SECONDS = 0.0032
"""What processes take for a body besides moving and merging it (`benchmarks/results/plan_real`)."""

SYNCER_BYTES = 26
"""Bytes a parameter that all shards together need at most: 16 are held (master, published copy,
momentum, offers), the rest comes and goes (`benchmarks/results/shard_memory`)."""

SHARD_BYTES = 0.28e9
"""What a shard's process needs besides, for any model (the same folder)."""

COPY_BYTES = 4
"""Bytes a parameter of the whole published copy, which a new learner fetches, and then keeps."""

UTILIZATION_ERRORS = {"never": 0.0026, "at_overlap": 0.1141}
"""Largest difference of predicted and measured utilisation, for learners that never wait and for
those that do (`benchmarks/results/plan_real`)."""

MEASURED_MBIT = (0.4, 20.0)
"""Slowest and fastest link on which these differences were found, each with two learners of a small
model: what is planned for other links and models is extrapolated (the same folder)."""

TRAFFIC_ERRORS = {"never": 0.159, "at_overlap": 0.312}
"""Largest difference of predicted and measured traffic, as a share (the same folder)."""


def fold_seconds(numel: float) -> float:
    """Folding one contribution in, one core."""
    return FOLD_SECONDS * numel / MERGE_ELEMENTS


def merge_seconds(numel: float) -> float:
    """From the last contribution folded in to the published copy, one core."""
    return MERGE_SECONDS * numel / MERGE_ELEMENTS


def core_seconds(learners: int, numel: float) -> float:
    """A whole merge of so many learners' contributions, one core."""
    return learners * fold_seconds(numel) + merge_seconds(numel)


WIRE_LOSS_PERCENT = {"int4": (0.31, -0.18, 0.80)}
"""By how much the loss differs from that of bf16, mean and 95 % interval: AdamW inside, a GPT of
0.2 M parameters (`benchmarks/results/traffic`)."""

PERIOD_LOSS_PERCENT = {48: 2.36, 96: 4.85, 200: 8.71}
"""By how much the loss was higher than with H = 24, after 600 steps: three seeds, AdamW inside, a
GPT of 0.2 M parameters (`benchmarks/results/schedule`)."""
