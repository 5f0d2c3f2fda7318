"""`[privacy]`: what the processes of a run may learn about one learner's training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict, Field, model_validator

from decoupled_diloco.config.parties import KeyText, Parties, PartySettings
from decoupled_diloco.config.settings import Settings
from decoupled_diloco.config.sync import SyncSettings
from decoupled_diloco.config.syncer import SyncerSettings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.privacy.accountant import (
    MissingAccountantError,
    noise_multiplier_for,
    periods_allowed,
)

if TYPE_CHECKING:
    from decoupled_diloco.privacy.dp import Mechanism

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


class DpSettings(Settings):
    """`[privacy.dp]`: differential privacy of each learner (docs/how-to/privacy.md).

    The published weights then reveal at most ε about everything that one learner contributes.
    """

    table: ClassVar[str] = "[privacy.dp]"

    clip: float = Field(gt=0)
    """C: the largest norm of what a learner contributes in one period of `sync_every` steps,
    greater than 0. Longer contributions are scaled down. A smaller C means less noise, and more
    training that is cut off. Start with the usual norm of a run without noise."""

    noise_multiplier: float = Field(gt=0)
    """z: standard deviation of the noise on each merged sum, in multiples of `clip`, greater than
    0. A mean of n learners has the noise z·C/n per element. `ddiloco privacy` prints ε for it. With
    `secure_sums`, each learner adds a share of the noise to its own contribution. The noise is then
    up to 1.4 times as large, because a sum must have enough of it after dropouts, too."""

    clip_quantile: float | None = Field(default=None, gt=0, lt=1)
    """The share of contributions that should be within the clip, such as 0.5; greater than 0 to
    less than 1. After each merge of a fragment, its clip changes toward that quantile of the norms,
    from `clip` on (Andrew et al. 2021). Each merge then publishes a noisy count, too. A tenth of
    the account is for counts, so that the noise of sums is 1.05·z. The counts are useful if
    z·√`fragments` is not much larger than the number of learners. Default: the clip does not
    change."""

    clip_rate: float = Field(default=0.2, gt=0, le=1)
    """How fast the clip changes, greater than 0 to 1: in a merge, its logarithm changes by this
    times the difference of the shares."""

    epsilon_max: float = Field(gt=0)
    """ε: the most that the run may reveal about a learner, greater than 0. When a learner has spent
    it, its contributions are no longer merged. It may train on, and the others continue."""

    delta: float = Field(gt=0, lt=1)
    """δ: the probability with which more may be revealed, greater than 0 to less than 1 / learners.
    With 1 / learners, publishing everything of one random learner would be allowed."""

    periods: int | None = Field(default=None, ge=1)
    """The most merges of each fragment in which a learner takes part, at least 1. Lower it to leave
    a part of ε for a later run on the same data. Default: as many as `epsilon_max` allows."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of an adaptive clip without these."""
        return {"clip_rate": "without clip_quantile"} if self.clip_quantile is None else {}

    def mechanism(self, numel: int) -> Mechanism:
        """How contributions are clipped and merges get noise, for a number of elements."""
        from decoupled_diloco.privacy.dp import Mechanism  # torch takes seconds

        if self.clip_quantile is None:
            return Mechanism(self.clip, self.noise_multiplier, numel)
        first = (self.clip, self.noise_multiplier, numel)
        return Mechanism.with_quantile(*first, self.clip_quantile, self.clip_rate)

    def verify(self, *, discrete: bool) -> int:
        """Check the limit with dp-accounting, and return the largest one.

        Args:
            discrete: Whether the noise consists of integers, as in secure sums.

        Raises:
            MissingAccountantError: It is not installed.
            ConfigError: ε is spent in the first period, or the limit is too large.
        """
        limits = (self.epsilon_max, self.delta)
        allowed = periods_allowed(self.noise_multiplier, *limits, discrete=discrete)
        if not allowed:
            least = noise_multiplier_for(1, *limits, discrete=discrete)
            raise ConfigError(
                f"epsilon_max={self.epsilon_max:g} in [privacy.dp] is spent before the first "
                f"period ends with noise_multiplier={self.noise_multiplier:g}: raise "
                f"noise_multiplier to at least {least:.3g}, or raise epsilon_max"
            )
        if self.periods is not None and self.periods > allowed:
            raise ConfigError(
                f"periods={self.periods} in [privacy.dp] costs more than epsilon_max="
                f"{self.epsilon_max:g}: it must be at most {allowed}, or leave it out"
            )
        return allowed


class PrivacySettings(Settings):
    """`[privacy]`: what other processes learn about one learner's training."""

    table: ClassVar[str] = "[privacy]"
    model_config = ConfigDict(arbitrary_types_allowed=True)

    parties: Path | None = Field(default=None, strict=False)
    """File with the parties of the run: their learners, public keys, and limits. All parties hold
    the same file, and `ddiloco parties check` prints its digest. The path is relative to the folder
    where the command starts. It needs the extra `tls`. Default: the run has no parties."""

    members: tuple[PartySettings, ...] = Field(default=(), strict=False)
    """The parties, as the file `parties` lists them. `run.toml` in the run's folder has them here,
    so a run resumes with the parties of its start."""

    least_parties: int | None = None
    """As the file `parties` has it: the least number of parties in a secure sum."""

    syncer_key: KeyText | None = None
    """As the file `parties` has it: the public key that signs the records of merges."""

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

    dp: DpSettings | None = None
    """Differential privacy. Default: the weights may reveal anything."""

    def inapplicable(self) -> Mapping[str, str]:
        """The settings of secure sums without these."""
        return (
            {}
            if self.secure_sums
            else dict.fromkeys(("threshold", "bits"), "without secure_sums=true")
        )

    @property
    def agreed(self) -> Parties | None:
        """The parties of the run; `None`: it has none."""
        if not self.members:
            return None
        return Parties(
            parties=self.members, syncer_key=self.syncer_key, least_parties=self.least_parties
        )

    @model_validator(mode="after")
    def _fill_in_periods(self) -> PrivacySettings:
        """Computes the limit of `[privacy.dp]`, or checks it where dp-accounting is installed.

        A learner receives the number from the syncer, and needs no package for it.
        """
        if self.dp is None:
            return self
        try:
            allowed = self.dp.verify(discrete=self.secure_sums)
        except MissingAccountantError:
            if self.dp.periods is None:
                raise
            return self
        if self.dp.periods is None:
            object.__setattr__(self.dp, "periods", allowed)
        return self

    @model_validator(mode="after")
    def _check_members(self) -> PrivacySettings:
        if self.parties is not None:
            raise ConfigError(
                f"parties={str(self.parties)!r} in [privacy] names a file, which only load_config "
                "reads: use it, or list the parties as members"
            )
        agreed = self.agreed  # validates them together
        if agreed is not None and agreed.least_parties is not None and not self.secure_sums:
            raise ConfigError(
                f"least_parties={agreed.least_parties} in parties.toml would be ignored without "
                "secure_sums=true in [privacy]: set it, or take least_parties out"
            )
        return self


def check_dp(
    dp: DpSettings,
    sync: SyncSettings,
    syncer: SyncerSettings,
    *,
    learners: int,
    store: str,
    has_sites: bool,
    is_secure: bool,
) -> None:
    """Reject what would break the bound on one learner's part in a merge, or lose its account.

    Args:
        dp: The settings of differential privacy.
        sync: `[sync]` of the run.
        syncer: `[syncer]` of the run.
        learners: Number of learners.
        store: The object store of `[run]`; empty: there is none.
        has_sites: Whether learners are behind relays.
        is_secure: Whether the run has secure sums.

    Raises:
        ConfigError: A setting cannot be combined with `[privacy.dp]`.
    """
    if dp.delta * learners >= 1:
        raise ConfigError(
            f"delta={dp.delta:g} in [privacy.dp] is not below 1 / learners = {1 / learners:g}, so "
            "it would allow publishing all that one random learner has: write "
            f"{0.1 / learners:.0e} or less"
        )
    if sync.moments is not None:
        raise ConfigError(
            "[sync.moments] cannot be combined with [privacy.dp], because moments are values "
            "without a bound: take [sync.moments] out"
        )
    merge = sync.merge
    unbounded = (
        (
            "wait",
            sync.wait,
            "never",
            sync.table,
            "learners would wait for one that has spent its ε",
        ),
        ("rule", merge.rule, "mean", merge.table, "one learner changes another rule without bound"),
        ("weighting", merge.weighting, "uniform", merge.table, "the counted tokens are not public"),
        ("norm_gate", merge.norm_gate, 0, merge.table, "a limit from the norms of others leaks"),
        ("buffers", merge.buffers, "local", merge.table, "buffers are values without a bound"),
        ("persist", syncer.persist, True, syncer.table, "a restart would forget what was spent"),
        (
            *("record_payloads", syncer.record_payloads, False, syncer.table),
            "it would keep what the noise hides, and the noise itself is never stored",
        ),
        ("store", store, "", "[run]", "a mirror may lack what was spent last"),
    )
    for name, given, wanted, table, why in unbounded:
        if is_secure and name == "norm_gate":
            continue  # learners clip their contributions themselves
        if given != wanted:
            shown = str(wanted).lower() if isinstance(wanted, bool) else repr(wanted)
            fix = f"set {name}={shown}" if wanted != "" else f"take {name} out"
            raise ConfigError(
                f"{name}={given!r} in {table} cannot be combined with [privacy.dp], because {why}: "
                f"{fix}"
            )
    if has_sites and not is_secure:
        raise ConfigError(
            "[[sites]] cannot be combined with [privacy.dp], because a shard cannot clip single "
            "contributions in a relay's sum: take [[sites]] out, or set secure_sums=true"
        )
