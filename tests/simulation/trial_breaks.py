"""Deliberate breaks from an outside trial: small changes that a tired programmer could make.

Hardly any world notices these, so each names the fastest test that does; see `deliberate_breaks`.
"""

from __future__ import annotations

from deliberate_breaks import Break
from simulation.device_breaks import DEVICES
from simulation.privacy_breaks import PRIVACY

TRIAL = (
    Break(
        "late-tick-connected-only",
        "member.lease_until += longer if member.connected else 0.0",
        "a late tick extends only the leases of connected learners",
        test="unit/protocol/test_shard_members.py"
        "::test_rule_13_a_late_tick_gives_a_reconnecting_learner_time",
    ),
    Break(
        "renewal-counted-from-answer",
        "state.valid_until = now + self.lease_seconds * (1 - MARGIN)",
        "a renewed leadership lease counts from the answer to its renewal",
        test="unit/protocol/test_lease_machine.py"
        "::test_a_renewed_lease_counts_from_the_start_of_its_renewal",
    ),
    Break(
        "restore-ignores-newer-holder",
        "True",
        "a restoring shard ignores a learner's newer version",
        test="unit/protocol/test_shard_fill.py"
        "::test_a_shard_does_not_restore_from_a_disk_that_is_behind_a_learner",
    ),
    Break(
        "decoded-without-limit",
        "if True:",
        "a shard decodes any number of payloads at a time",
        test="unit/syncer/test_uploads.py::test_few_contributions_are_decoded_at_a_time",
    ),
    Break(
        "whole-copy-unverified",
        "values = values_of(body, numel)",
        "a learner does not check the digest of a whole copy",
        test="unit/learner/test_exchange.py"
        "::test_a_whole_copy_is_staged_only_if_its_digest_is_the_announced_one",
    ),
    Break(
        "message-before-checkpoint",
        "asyncio.get_running_loop().call_soon(self._observe_checkpoint, checkpoint)",
        "a shard handles a message before the checkpoint ahead of it",
        test="unit/syncer/test_sessions.py::test_a_newer_number_is_handled_before_its_message",
    ),
    Break(
        "copy-before-checkpoint",
        "asyncio.get_running_loop().call_soon(here.deliver, CheckpointHeard(checkpoint))",
        "a learner handles a message before the checkpoint ahead of it",
        test="simulation/test_worlds.py"
        "::test_a_learner_handles_a_checkpoint_before_the_message_that_announces_it",
    ),
    Break(
        "record-digest-unchecked",
        "if False:",
        "the digest of a journal record is not checked",
        test="unit/storage/test_journal.py"
        "::test_any_changed_byte_of_a_record_ends_the_journal_before_it",
    ),
    Break(
        "claim-linked-before-sync",
        "pass",
        "a claim has its name before the disk has its content",
        test="unit/storage/test_claims.py"
        "::test_after_a_power_failure_a_claim_is_complete_or_absent",
    ),
    Break(
        "ready-before-disk",
        "elif False:",
        "a shard reports that it is ready before its first versions are on disk",
        test="simulation/test_worlds.py"
        "::test_a_shard_is_ready_once_its_disk_has_its_first_versions",
    ),
    Break(
        "first-norm-zero-keeps-memory",
        "if False:",
        "a first contribution of norm 0 leaves what the memory held before",
        test="property/merge/test_merge_properties.py::test_any_tree_equals_the_flat_fold",
    ),
    Break(
        "topk-slot-twice",
        "if not bool((chosen[:, 1:] >= chosen[:, :-1]).all()):",
        "a top-k payload may have the same slot twice",
        test="outside/test_codecs.py::TestStrangeBodies::test_indices_that_do_not_ascend",
    ),
    Break(
        "anyone-writes-payload",
        "if False:",
        "a learner can write the payload of another learner's request",
        test="contract/transport/test_bodies.py::test_put_to_the_payload_of_another_learner",
    ),
    Break(
        "silent-upload-keeps-memory",
        "if True:",
        "an upload that stops keeps its memory forever",
        test="contract/transport/test_bodies.py::test_peer_disappears_mid_put_for_good",
    ),
    Break(
        "tokens-beyond-reports",
        "return event.tokens",
        "a contribution counts more tokens than its learner reported",
        test="unit/protocol/test_beliefs.py::test_rule_13_tokens_weigh_no_more_than_was_reported",
    ),
    Break(
        "arrival-during-merge-on-time",
        "return entry.version.counter - ask.base.counter",
        "a payload that arrives while its round merges is not late",
        test="unit/protocol/test_shard_late.py"
        "::test_rule_4_an_arrival_during_a_merge_is_late_by_one",
    ),
    Break(
        "capped-steps-keep-tokens",
        "steps, tokens = float(cap), float(believed)",
        "a contribution with capped steps keeps all its tokens",
        test="unit/protocol/test_shard_deliveries.py::test_rule_6_counters_are_capped",
    ),
    Break(
        "restored-learner-far-ahead",
        "pass",
        "after a restore, one learner can be more than a period ahead of most",
        test="unit/protocol/test_shard_fill.py"
        "::test_rule_13_a_restored_clock_is_that_of_most_learners",
    ),
    Break(
        "failed-merge-counts-as-made",
        "if False:",
        "after a failed merge, its learners receive no request for the same version",
        test="unit/protocol/test_slow_copies.py"
        "::test_rule_4_a_failed_merge_does_not_undo_later_folds",
    ),
    Break(
        "partition-settled-early",
        "if state.ended:",
        "a data partition is settled before its last steps are merged",
        test="unit/protocol/test_leases.py::test_the_number_of_unmerged_leases_is_limited",
    ),
    Break(
        "longer-lease-ignored",
        "lease = self.lease_seconds",
        "a standby ignores that the holder's lease is longer",
        test="unit/protocol/test_lease_machine.py::test_a_longer_lease_of_the_holder_is_respected",
    ),
    Break(
        "old-base-not-declined",
        "if False:",
        "a learner does not decline a request for a version that it no longer holds",
        test="unit/protocol/test_learner_machine.py::test_a_request_for_an_older_base_is_declined",
    ),
    Break(
        "older-process-heard",
        "if known is None:",
        "the coordinator accepts messages of an older process with the same id",
        test="unit/protocol/test_leases.py::test_a_new_process_continues_the_leases_of_its_predecessor",
    ),
    Break(
        "replay-digest-unchecked",
        'problem = ""',
        "the digest of a replayed merge is not checked",
        test="unit/syncer/test_durable.py"
        "::test_a_version_that_the_journal_does_not_reproduce_is_not_restored",
    ),
    Break(
        "commit-before-journal",
        """\
self.tensors.commit(fragment, step)
journal.append(fields, as_bytes(step.gradient).numpy().data)""",
        "a merge changes the tensors before the journal has it",
        test="unit/syncer/test_durable.py::test_a_merge_is_on_disk_before_the_tensors_change",
    ),
    Break(
        "previous-checkpoint-deleted",
        "self._delete_before(number)",
        "a shard keeps only its newest checkpoint",
        test="unit/syncer/test_durable.py"
        "::test_a_torn_checkpoint_is_named_and_the_previous_one_gives_the_same_bits",
    ),
    Break(
        "claim-not-confirmed-after",
        "pass",
        "a claim is not confirmed after a merge",
        test="unit/syncer/test_shard_lease.py"
        "::test_a_result_of_a_task_during_a_newer_claim_is_not_announced",
    ),
    Break(
        "older-whole-copy-offered",
        "pass",
        "older whole copies stay available",
        test="unit/syncer/test_downloads.py::test_the_newest_whole_and_two_differences_are_kept",
    ),
    Break(
        "seal-without-digest",
        'text = f"{fragment} {version}".encode()',
        "a seal does not cover the digest",
        test="unit/syncer/test_seals.py::test_an_invented_version_is_removed_and_the_others_stay",
    ),
    Break(
        "run-checkpoint-deleted",
        "ordinary = self._files()",
        "a learner deletes files that belong to a run checkpoint",
        test="unit/learner/test_learner_checkpoint.py::test_parts_of_the_runs_checkpoints_are_kept_until_they_are_forgotten",
    ),
    Break(
        "buffers-carried",
        "pass",
        "a learner carries its own buffers over to a merged copy",
        test="unit/learner/test_parameter_store.py"
        "::test_buffers_are_overwritten_when_parameters_are_combined",
    ),
    Break(
        "checkpoint-not-copied",
        "copy = self._state()",
        "a checkpoint is written from state that training still changes",
        test="unit/learner/test_checkpointer.py"
        "::test_a_copy_that_waits_for_a_slow_disk_is_not_overwritten",
    ),
    Break(
        "in-flight-residual-lost",
        "return self.residuals[fragment]",
        "a checkpoint lacks the residual of a contribution in flight",
        test="unit/learner/test_residuals.py"
        "::test_a_checkpoint_has_the_residual_before_a_contribution_made_again",
    ),
    Break(
        "failed-step-moves-momentum",
        "outer = entry.outer",
        "a failed outer step changes the momentum",
        test="unit/syncer/test_shard_tensors.py"
        "::test_a_diverged_outer_step_leaves_the_fragment_as_it_was",
    ),
    Break(
        "residual-without-decay",
        "u.add_(residual[elements])",
        "error feedback ignores its decay β",
        test="unit/learner/test_residuals.py::test_a_residual_fades_by_its_decay",
    ),
    Break(
        "copies-fetched-without-limit",
        "if False:",
        "a learner fetches any number of copies at a time",
        test="unit/protocol/test_slow_copies.py"
        "::test_rule_5_the_number_of_fetches_equals_the_slots",
    ),
    Break(
        "text-renamed-before-sync",
        "pass",
        "a file replaces its predecessor before the disk has its content",
        test="simulation/test_crash_points.py::test_a_full_disk_leaves_a_text_file_intact",
    ),
    Break(
        "rebase-keeps-rounding",
        "return self._upload(minus.published)",
        "a rebase keeps what a published copy lost in a parameter's dtype",
        test="unit/learner/test_exchange.py::test_rebase_does_not_keep_rounding_errors",
    ),
    Break(
        "tick-before-arrivals",
        "for _ in range(0):",
        "a shard checks leases before it handles what has arrived",
        test="unit/syncer/test_late_ticks.py::test_arrived_messages_are_handled_before_the_tick",
    ),
    Break(
        "probation-ignored",
        "if False:",
        "a learner counts at once after it joined with a fresh optimizer",
        test="unit/protocol/test_trust.py"
        "::test_a_contribution_on_probation_is_discarded_with_a_reason",
    ),
    Break(
        "probation-counts-for-quorum",
        "return len(self.present)",
        "a request to a learner with weight 0 completes the quorum",
        test="unit/protocol/test_trust.py"
        "::test_the_window_closes_only_with_a_quorum_of_learners_with_weight",
    ),
    Break(
        "weightless-training-kept",
        "if False:",
        "training with weight 0 stays in the parameters and is merged later",
        test="unit/protocol/test_trust.py"
        "::test_a_discarded_contribution_is_dropped_with_the_next_copy",
    ),
    Break(
        "whole-contribution-scored",
        "self._add(fragment, each, 1.0)",
        "a score is that of a whole contribution, and not of its share of a merge",
        test="unit/launch/test_scoring.py::test_a_gain_is_that_of_a_share_of_a_merge",
    ),
    Break(
        "oversized-learner-granted",
        "target = limit",
        "a learner of ten times the size counts twice as much as the others",
        test="unit/protocol/test_norm_gate.py"
        "::test_a_learner_of_ten_times_the_size_counts_like_the_others",
    ),
    Break(
        "exclusion-ignored",
        "if False:",
        "an excluded learner still counts",
        test="unit/protocol/test_trust.py::test_a_learner_with_a_low_score_is_excluded_and_returns",
    ),
    Break(
        "all-excluded",
        "standing.excluded = True",
        "scores may exclude half of the learners",
        test="unit/protocol/test_trust.py::test_fewer_than_half_of_the_learners_are_excluded",
    ),
    Break(
        "anyone-scores",
        'if options.trust == "off":',
        "a learner may score the others",
        test="unit/protocol/test_trust.py::test_only_an_observer_scores",
    ),
    Break(
        "scores-forgotten",
        "pass",
        "a shard that restarts has lost the scores",
        test="unit/protocol/test_trust.py::test_a_restarted_shard_has_the_scores",
    ),
    *DEVICES,
    *PRIVACY,
    Break(
        "share-above-limit",
        "return {p: level * shares[p] for p in present}",
        "the share of a party in a merge exceeds its limit",
        test="unit/protocol/test_quotas.py"
        "::test_a_party_above_its_limit_has_its_limit_and_the_others_keep_their_proportion",
    ),
    Break(
        "quota-of-absent-party-kept",
        "if False:",
        "upper limits stay too low for the parties that take part",
        test="unit/protocol/test_quotas.py"
        "::test_upper_limits_are_relaxed_in_proportion_if_too_few_parties_take_part",
    ),
    Break(
        "factors-not-ordered",
        "pass",
        "a merge ignores the limits of the parties",
        test="unit/protocol/test_relayed.py::test_a_merge_names_the_factors_of_the_parties",
    ),
    Break(
        "mixed-sum-accepted",
        "mixed = False",
        "a sum of several parties counts for one of them",
        test="unit/protocol/test_relayed.py::test_a_sum_of_two_parties_with_limits_is_refused",
    ),
    Break(
        "merge-not-in-trail",
        "pass",
        "a merge has no record in the audit trail",
        test="integration/test_audit.py::test_a_whole_run_agrees_with_its_records",
    ),
    Break(
        "removed-record-unnoticed",
        "elif False:",
        "a record of the audit trail can be removed",
        test="unit/syncer/test_audit_trail.py::test_a_removed_record_is_named",
    ),
    Break(
        "other-lanes-sent",
        "return document",
        "a party receives the records of other parties' learners",
        test="unit/show/test_page_of_a_party.py"
        "::test_a_party_gets_its_lines_of_a_tape_and_no_metrics",
    ),
    Break(
        "any-party-stops",
        "if found:",
        "any party ends the run",
        test="unit/syncer/test_coordinator_requests.py"
        "::test_others_are_refused_with_those_that_may",
    ),
    Break(
        "stop-forgotten",
        "return by_steps or by_tokens",
        "a restarted coordinator continues a run that a user has ended",
        test="unit/protocol/test_coordinator_machine.py"
        "::test_a_stopped_run_continues_only_with_another_budget",
    ),
    Break(
        "other-parties-accepted",
        "pass",
        "a learner trains with other parties than those in its own file",
        test="integration/test_joining.py::test_a_learner_joins_for_a_party_that_both_sides_know",
    ),
)
