"""Deliberate breaks of secure sums; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break

SECURE_TRIAL = (
    Break(
        "half-opens-a-sum",
        "return max(threshold, 1)",
        "half of a cohort can open its sum",
        test="unit/privacy/test_attackers.py"
        "::test_a_lying_shard_never_gets_both_secrets_of_a_learner",
    ),
    Break(
        "cohort-below-threshold",
        "if not members:",
        "a cohort has fewer learners than the threshold",
        test="unit/protocol/test_secure_rounds.py"
        "::test_rule_24_the_cohort_has_at_least_the_threshold",
    ),
    Break(
        "answer-to-closed-request-counts",
        "pass",
        "a claim counts for a later request, whose claim has not arrived",
        test="unit/protocol/test_secure_rounds.py"
        "::test_rule_24_a_claim_counts_for_its_own_request_only",
    ),
    Break(
        "trained-parameters-shared",
        "if False:",
        "a shard can request the parameters of a learner in a run with secure sums",
        test="unit/protocol/test_learner_late.py"
        "::test_rule_24_a_learner_shares_no_parameters_once_the_run_has_weights",
    ),
    Break(
        "opened-training-sent-again",
        "view.sent = None",
        "training of an opened and abandoned sum is in the next one, too",
        test="unit/protocol/test_learner_late.py"
        "::test_rule_24_training_of_an_opened_sum_is_in_no_other_one",
    ),
    Break(
        "slowest-learner-left-out",
        "return False",
        "a round does not wait for a learner that was left out of the last one",
        test="unit/protocol/test_secure_rounds.py"
        "::test_rule_24_a_learner_that_was_left_out_is_waited_for",
    ),
    Break(
        "abandoned-sum-drops-training",
        'if message.verdict == "behind":',
        "a learner drops the training that it has masked in vain",
        test="unit/protocol/test_learner_late.py"
        "::test_rule_24_training_that_was_masked_in_vain_is_kept",
    ),
)
