"""Descriptions of virtual learners and relays: their speeds, their links, and when they join."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.messages import Role


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """One learner of a virtual run.

    Attributes:
        name: Its id.
        step_seconds: Mean duration of an inner step.
        variance: Standard deviation of a step's duration, as a share of the mean.
        latency: One-way delay to every shard and the coordinator, in seconds.
        jitter: Additional random delay, uniform between zero and this, in seconds.
        up_bytes_per_second: Bandwidth that all its uploads share.
        down_bytes_per_second: Bandwidth that all its downloads share.
        tokens_per_step: Tokens per inner step, if the workload does not define them.
        joins_at: When its process starts, in seconds. Infinity: only when it is started explicitly.
        shared_link: Name of a link that it shares with all learners that have the same name here.
            Their payloads queue behind each other. The first learner's bandwidths apply.
        role: An observer only follows the published copies.
        ranks: Number of its processes.
        sync_ranks: Number of its sync ranks, which communicate with the syncer.
        relay: Name of the relay that it dials first; empty: it dials the shards.
        staged: Each rank has its own tensors, like the stages of a pipeline. Otherwise all ranks
            have all tensors.
    """

    name: str
    step_seconds: float = 1.0
    variance: float = 0.0
    latency: float = 0.001
    jitter: float = 0.0
    up_bytes_per_second: float = float("inf")
    down_bytes_per_second: float = float("inf")
    tokens_per_step: int = 8
    joins_at: float = 0.0
    role: Role = "learner"
    shared_link: str = ""
    ranks: int = 1
    sync_ranks: int = 1
    staged: bool = False
    relay: str = ""


@dataclass(frozen=True, slots=True)
class RelaySpec:
    """One relay of a virtual run.

    Attributes:
        name: Its name.
        upstream: Name of the relay behind which it is; empty: it dials the shards.
        latency: One-way delay of its link, in seconds, in addition to that of its peers.
        up_bytes_per_second: Bandwidth that its sums share.
        down_bytes_per_second: Bandwidth that the copies that it fetches share.
    """

    name: str
    upstream: str = ""
    latency: float = 0.001
    up_bytes_per_second: float = float("inf")
    down_bytes_per_second: float = float("inf")
