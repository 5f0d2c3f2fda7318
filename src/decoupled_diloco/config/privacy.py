"""`[privacy]`: what the processes of a run may learn about one learner's training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    from decoupled_diloco.config.run import RunConfig

THRESHOLD_MIN = 2
"""A sum of one contribution is that contribution."""

WITH_SECURE_SUMS = "with secure_sums=true in [privacy]"

UNUSED_BY_SUMS = {
    "sync.codec.uplink": ", which sends fixed-point numbers",
    "sync.codec.error_feedback": ", which leaves out next to nothing",
    "sync.codec.feedback_decay": ", which leaves out next to nothing",
    "sync.merge.norm_gate": ", whose learners clip their contributions themselves",
    "sync.merge.oversized": ", whose learners clip their contributions themselves",
    "sync.late.policy": ", because a masked contribution counts for its own round only",
    "sync.late.max_versions": ", because a masked contribution counts for its own round only",
    "sync.late.discount": ", because a masked contribution counts for its own round only",
    "sync.late.discount_of": ", because a masked contribution counts for its own round only",
}
"""Settings that have no effect in a run with secure sums, and why."""


class PrivacySettings(Settings):
    """`[privacy]`: what other processes learn about one learner's training."""

    table: ClassVar[str] = "[privacy]"

    secure_sums: bool = False
    """Whether the syncer learns only sums of contributions. Learners mask their contributions, and
    the masks cancel in the sum (Bonawitz et al. 2017). The merge is the same, except for rounding
    to `bits`. A round takes three more messages. It needs the extra `tls`. docs/security.md says
    what this protects against."""

    threshold: int | None = Field(default=None, ge=THRESHOLD_MIN)
    """The least number of contributions in a sum, 2 to `learners`. A round with fewer is abandoned,
    and its learners contribute to the next one. A sum always needs more than half of the learners
    that began it. It also raises `quorum`. Default: more than half of `learners`."""

    bits: int | None = Field(default=None)
    """Bits of each number of a contribution, 8 to 24. A sum needs log2(learners) more. The payload
    has 4 bytes per parameter if both exceed 24 bits, and 3 otherwise. Default: 24, or fewer if the
    sum would not fit into 32 bits."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of secure sums without these."""
        return (
            {}
            if self.secure_sums
            else dict.fromkeys(("threshold", "bits"), "without secure_sums=true")
        )


def threshold_of(config: RunConfig) -> int:
    """The least number of contributions in a sum; 0 without secure sums."""
    privacy = config.privacy
    if not privacy.secure_sums:
        return 0
    return privacy.threshold or max(THRESHOLD_MIN, config.run.learners // 2 + 1)


def check_secure_sums(config: RunConfig) -> None:
    """Reject what cannot be combined with secure sums.

    Raises:
        ConfigError: A setting requires single contributions.
    """
    privacy, sync, learners = config.privacy, config.sync, config.run.learners
    if not privacy.secure_sums:
        return
    threshold = threshold_of(config)
    if threshold > learners:
        raise ConfigError(
            f"threshold={threshold} in [privacy] exceeds learners={learners} in [run], so no sum "
            "would ever be opened: lower threshold or start more learners"
        )
    from decoupled_diloco.merge.fixed_point import FixedPoint  # torch takes seconds

    FixedPoint.of(privacy.bits, learners)
    why = "because a shard must not see single contributions"
    refused = (
        ("rule", sync.merge.rule, ("rda", "mean"), sync.merge.table),
        ("buffers", sync.merge.buffers, ("mean", "local"), sync.merge.table),
        ("participation", sync.participation, ("active", "all"), sync.table),
        ("record_payloads", config.syncer.record_payloads, (False,), config.syncer.table),
    )
    for name, given, allowed, table in refused:
        if given not in allowed:
            shown = " or ".join(
                repr(a).lower() if isinstance(a, bool) else repr(a) for a in allowed
            )
            raise ConfigError(
                f"{name}={given!r} in {table} cannot be combined with secure_sums=true in "
                f"[privacy], {why}: set {name}={shown}"
            )
    for index, name in enumerate(config.learner_ids):
        if config.learner.ranks_of(index) > 1 and config.learner.sync_ranks != 1:
            raise ConfigError(
                f"sync_ranks={config.learner.sync_ranks!r} in [learner] cannot be combined with "
                f"secure_sums=true in [privacy], because one rank of {name} masks the whole "
                "contribution: set sync_ranks=1"
            )
