"""Deliberate breaks of differential privacy; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break

ACCOUNT = "unit/protocol/test_privacy_account.py::test_"
TENSORS = "unit/syncer/test_private_tensors.py::test_"
SHARES = "unit/privacy/test_noise_shares.py::test_"
RUNS = "simulation/test_privacy_simulation.py::test_"

PRIVACY = (
    Break(
        "spent-learner-merged",
        "return False",
        "a learner that has spent its ε is merged on",
        test=ACCOUNT + "a_learner_at_its_limit_is_not_asked_and_the_others_continue",
    ),
    Break(
        "learner-merged-twice-at-once",
        "return False",
        "a late contribution and the next one are in one merge",
        test=ACCOUNT + "a_late_contribution_and_the_next_one_are_in_different_merges",
    ),
    Break(
        "merge-not-accounted",
        "pass",
        "a merge is not in the account of the learners in it",
        test=ACCOUNT + "each_merge_counts_once_for_each_learner_in_it",
    ),
    Break(
        "account-forgotten",
        "pass",
        "a restarted shard begins with empty accounts",
        test=ACCOUNT + "a_restarted_shard_continues_the_account",
    ),
    Break(
        "lost-merges-not-accounted",
        "pass",
        "merges that are missing on the disk count for no learner",
        test=ACCOUNT + "versions_that_are_missing_on_the_disk_count_for_all",
    ),
    Break(
        "private-state-shared",
        "shares = True",
        "a learner sends the state of its optimizer, without noise, to another learner",
        test=ACCOUNT + "no_learner_shares_the_state_of_its_optimizer",
    ),
    Break(
        "contribution-not-clipped",
        "return 1.0",
        "a contribution above the clip is merged unchanged",
        test=TENSORS + "a_dishonest_learner_moves_the_sum_by_at_most_the_clip",
    ),
    Break(
        "merge-without-noise",
        "pass",
        "a merge gets no noise",
        test=TENSORS + "what_is_published_has_the_noise",
    ),
    Break(
        "share-without-noise",
        "pass",
        "a learner adds no noise to a secure sum",
        test=SHARES + "the_least_number_of_survivors_has_exactly_the_noise",
    ),
    Break(
        "private-norm-sent",
        "sent = min(1.0, norm / bound)",
        "a secure sum reveals the mean norm of the contributions without noise",
        test=SHARES + "nothing_but_the_elements_depends_on_a_contribution",
    ),
    Break(
        "discrete-noise-counted-as-continuous",
        "if False:",
        "ε of discrete noise is not an upper limit",
        test="unit/privacy/test_accountant.py"
        "::test_discrete_noise_has_at_most_the_computed_epsilon",
    ),
    Break(
        "other-bound-accepted",
        "if False:",
        "a learner adds noise in units of the bound that a shard chooses",
        test=RUNS + "a_learner_takes_part_in_no_sum_with_another_bound",
    ),
    Break(
        "ranks-do-not-clip",
        "if False:",
        "a multi-rank learner sends contributions above the clip",
        test=RUNS + "a_learner_clips_its_contributions_itself",
    ),
    Break(
        "count-without-noise",
        "return 0.0",
        "an adaptive clip reveals how many contributions were within it, without noise",
        test="unit/privacy/test_dp.py::test_a_count_has_the_noise_of_its_fragment",
    ),
    Break(
        "clip-forgotten",
        "pass",
        "a restarted shard begins with the first clip again",
        test=TENSORS + "a_restart_continues_with_the_clip_in_force",
    ),
)
