"""Deliberate breaks of relays; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break
from worlds.shrink import Changes

BEHIND = Changes(relays=True)

RELAYS = (
    Break(
        "folded-stay-after-sum",
        "asks = tuple(collection.folded)",
        "a relay sends the requests of its last sum again",
        BEHIND,
    ),
    Break(
        "relayed-contribution-not-awaited",
        "pass",
        "a closing round does not wait for a contribution that is at a relay",
        BEHIND,
        noticed_by=18,
    ),
    Break(
        "relay-keeps-corrupt-copy",
        "if False:",
        "a relay serves a published copy that arrived corrupted",
        BEHIND,
        noticed_by=130,
    ),
    Break(
        "lost-relay-keeps-requests",
        "relayed = list[Ask]()",
        "a shard waits for what a lost relay had",
        BEHIND,
    ),
)

RELAY_TRIAL = (
    Break(
        "sum-unchecked",
        "if False:",
        "a shard believes the weight of a relay's sum",
        test="unit/syncer/test_sum_uploads.py::test_a_sum_with_another_weight_is_rejected",
    ),
    Break(
        "sum-accepted-in-part",
        "incomplete = False",
        "a shard accepts a sum although one of its requests is void",
        test="unit/protocol/test_relayed.py::test_a_sum_is_accepted_only_as_a_whole",
    ),
    Break(
        "failed-sum-unreported",
        "return [note]",
        "a relay does not report a sum that it could not send",
        test="unit/protocol/test_relay_machine.py::test_a_sum_that_could_not_be_sent_is_reported",
    ),
    Break(
        "rerouted-request-not-repeated",
        "pass",
        "a request is not repeated after its learner came back on another way",
        test="unit/protocol/test_relayed.py"
        "::test_a_request_on_another_way_is_void_after_a_reconnection",
    ),
    Break(
        "relay-sends-at-once",
        "if False:",
        "a relay does not wait for its other children",
        test="unit/protocol/test_relay_machine.py::test_a_sum_is_sent_once_nothing_more_can_follow",
    ),
    Break(
        "relay-speaks-for-others",
        "pass",
        "a relay reports payloads of learners that are not behind it",
        test="unit/syncer/test_uploads.py::test_a_report_of_another_relay_is_ignored",
    ),
)
