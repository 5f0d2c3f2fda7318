"""What a run has revealed about its learners, from the accounts on its tape (rule 25)."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.privacy.accountant import MissingAccountantError, epsilon_spent
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.facts import LearnerLog
from decoupled_diloco.run_model.phrases import ABSENT


@dataclass(frozen=True, slots=True)
class PrivacyStatus:
    """The account of one learner.

    ``periods``: the most merges of a fragment in which it took part. ``periods_max``: from when on
    it is merged no longer. ``epsilon``: an upper limit, because not every fragment may have had as
    many; ``None``: the package that computes it is not installed.
    """

    learner: str
    periods: int
    periods_max: int
    epsilon: float | None
    epsilon_max: float
    delta: float

    @property
    def spent(self) -> str:
        """What it has spent, for a cell of a table."""
        if self.epsilon is None:
            return f"{self.periods} of {self.periods_max} periods"
        shown = f"{self.epsilon:.0f}" if self.epsilon >= 100 else f"{self.epsilon:.3g}"
        return f"ε {shown} of {self.epsilon_max:g}"

    @property
    def detail(self) -> str:
        """The rest of the account, in words."""
        periods = f"{self.periods} of {self.periods_max} periods"
        return f"{self.learner}, after {periods}, with δ = {self.delta:g}"


def privacy_of(run: RunModel, learner: LearnerLog) -> PrivacyStatus | None:
    """Return the account of a learner; ``None`` without differential privacy."""
    dp, privacy = run.settings_of("privacy", "dp"), run.settings_of("privacy")
    if not dp:
        return None
    periods = max(learner.merges.values(), default=0)
    try:
        discrete = bool(privacy.get("secure_sums"))
        epsilon = epsilon_spent(dp["noise_multiplier"], periods, dp["delta"], discrete=discrete)
    except MissingAccountantError:
        epsilon = None
    limits = (dp["periods"], epsilon, dp["epsilon_max"], dp["delta"])
    return PrivacyStatus(learner.name, periods, *limits)


def most_spent(run: RunModel) -> PrivacyStatus | None:
    """Return the account of the learner that has spent most; ``None``: there is none."""
    accounts = [privacy_of(run, learner) for learner in run.learners.values()]
    known = [account for account in accounts if account is not None]
    return max(known, key=lambda account: account.periods, default=None)


def spent_cell(run: RunModel, learner: LearnerLog) -> str:
    """Return a learner's account for a cell of a table."""
    account = privacy_of(run, learner)
    return ABSENT if account is None else account.spent
