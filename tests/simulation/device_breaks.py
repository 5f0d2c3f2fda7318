"""Deliberate breaks of devices (rule 23); a test notices each. See `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break

VISITS = "unit/protocol/test_visits.py::test_"
PLACES = "unit/protocol/test_places.py::test_"

DEVICES = (
    Break(
        "polynomial-discount-ignored",
        "return 1.0",
        "a contribution from an older version has its full weight",
        test=VISITS + "an_old_base_counts_less_and_counts_nothing_beyond_the_history",
    ),
    Break(
        "device-merged-twice",
        "return True",
        "a device is asked again for training that is already folded",
        test=VISITS + "a_device_that_comes_back_with_an_older_checkpoint_is_not_merged_twice",
    ),
    Break(
        "device-forgotten",
        "return False",
        "a shard forgets what a device has contributed when it leaves",
        test=VISITS + "a_device_that_comes_back_with_an_older_checkpoint_is_not_merged_twice",
    ),
    Break(
        "device-fetches-whole",
        "if False:",
        "a visit announces the newest version only",
        test=VISITS + "a_visit_announces_a_chain_of_differences",
    ),
    Break(
        "device-follows-while-training",
        "if False:",
        "a device fetches newer copies while it trains alone",
        test=VISITS + "a_device_that_trains_fetches_nothing_newer_until_it_has_contributed",
    ),
    Break(
        "outdated-training-kept",
        "if False:",
        "training that is too old to be merged is added to the newest copy",
        test=VISITS + "training_online_beyond_the_history_is_dropped",
    ),
    Break(
        "place-never-free",
        "pass",
        "a place is not free again when its device has contributed",
        test=PLACES + "at_most_a_cohort_holds_a_place",
    ),
    Break(
        "absent-device-drawn",
        "pass",
        "a device that has left gets a place",
        test=PLACES + "a_device_that_has_left_is_not_drawn",
    ),
    Break(
        "place-kept-forever",
        "if False:",
        "a device that does not come back keeps its place",
        test=PLACES + "a_device_that_does_not_come_back_in_time_frees_its_place",
    ),
    Break(
        "cohort-ignored",
        "while self.waiting:",
        "every device that is present gets a place",
        test=PLACES + "at_most_a_cohort_holds_a_place",
    ),
    Break(
        "broken-visit-keeps-residuals",
        "if False:",
        "a residual that a broken visit may have sent is sent again",
        test="integration/test_device_visits.py::test_a_visit_that_broke_off_drops_its_residuals",
    ),
)
