"""What a virtual learner is like: its speed, its link, when it comes."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.messages import Role


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """One learner of a virtual run.

    Attributes:
        name: its id.
        step_seconds: mean duration of an inner step.
        variance: standard deviation of a step's duration, as a share of the mean.
        latency: one way to every shard and the coordinator, seconds.
        jitter: further delay, uniform between zero and this, seconds.
        up_bytes_per_second: shared by all its uploads.
        down_bytes_per_second: shared by all its downloads.
        tokens_per_step: what one inner step trains, where the workload does not say.
        joins_at: when its process starts, seconds; infinity: only when somebody starts it.
        shared_link: name of a link that it shares with every learner that names it too: their
            bodies queue behind each other. The first one's bandwidths count.
        role: observers follow the published copies and no more.
        ranks: how many processes it has.
        carriers: how many of them talk to the syncer.
        staged: each rank has tensors of its own, as the stages of a pipeline; else all have all.
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
    carriers: int = 1
    staged: bool = False
