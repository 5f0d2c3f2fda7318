"""Deliberate breaks of the real shells; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break
from worlds.shrink import Changes

LEARNERS = (
    Break(
        "learner-ignores-lost-link",
        "pass",
        "a learner does not notice that its connection is lost",
        noticed_by=22,
    ),
    Break(
        "failed-fetch-unreported",
        "pass",
        "a failed download of a copy is not reported to the machine",
        noticed_by=7,
    ),
    Break(
        "coordinator-not-rejoined",
        "member = None",
        "a learner that loses the coordinator does not join again",
        noticed_by=7,
    ),
    Break(
        "model-not-restored",
        "pass",
        "a model is not restored from its checkpoint",
        noticed_by=31,
    ),
    Break(
        "last-copies-not-awaited",
        "while False:",
        "a learner leaves at the end without its last copies",
    ),
    Break(
        "applied-copy-not-published",
        "self.staged[fragment] = None",
        "the next difference is not added to the copy that was applied",
    ),
)

SHARDS = (
    Break(
        "timer-missing",
        "if False:",
        "machines do not wake at their deadlines",
        noticed_by=122,
    ),
    Break(
        "heard-unreported",
        "return []",
        "a shard does not report which learners sent something",
        noticed_by=7,
    ),
    Break(
        "failed-merge-unreported",
        "return None",
        "a failed merge is not reported to the machine",
        noticed_by=114,
    ),
    Break(
        "published-before-disk",
        "copy = tensors.merge(fragment)",
        "a version is published before it is on disk",
        noticed_by=2,
    ),
    Break(
        "older-connection-accepted",
        "return session is not None",
        "messages of a learner's older connection are accepted",
        noticed_by=7,
    ),
    Break(
        "orders-reordered",
        "self._sliced.appendleft((order, taken))",
        "orders overtake one another",
        noticed_by=1,
    ),
    Break(
        "arrived-payload-ignored",
        "pass",
        "a payload that arrives before it is announced is never used",
    ),
    Break(
        "whole-copy-zeroed",
        """\
self._urls[whole] = self._bodies.offer(
    whole, _view(published.whole * 0), published.digest
)""",
        "a shard offers zeros under a whole copy's name",
    ),
)

COORDINATOR = (
    Break(
        "id-always-taken",
        "return True",
        "every learner that joins is treated as a second process with its id",
    ),
    Break(
        "orders-before-disk",
        "if not self.waiting:",
        "orders are executed before the state that they rest on is on disk",
        noticed_by=77,
    ),
    Break(
        "joins-forgotten",
        "pass",
        "the coordinator does not write which learners joined",
        noticed_by=2,
    ),
)

TWO_RANKS = {"ranks": 2, "sync_ranks": 2, "staged": False}

RANKS = (
    Break(
        "empty-range-awaited",
        "if False:",
        "a sync rank without a range of a fragment waits for it",
        Changes(learners=TWO_RANKS),
        noticed_by=13,
    ),
    Break(
        "rank-writes-before-arrival",
        "self._receiving.pop(new)",
        "a rank writes a copy that it has not received yet",
        Changes(learners=TWO_RANKS),
        noticed_by=2,
    ),
    Break(
        "wrong-part-accepted",
        "if False:",
        "a learner accepts a copy although one sync rank's range is wrong",
        Changes(learners=TWO_RANKS, mishaps={"corruption": 0.2}),
        noticed_by=5,
    ),
    Break(
        "ranks-keep-no-copies",
        "pass",
        "sync ranks do not keep published copies",
        Changes(learners=TWO_RANKS),
        noticed_by=5,
    ),
    Break(
        "checkpoint-in-use-deleted",
        "needed = set(keep)",
        "a learner deletes the checkpoint from which it is about to resume",
        Changes(learners=TWO_RANKS),
        noticed_by=29,
    ),
)

SHELLS = (*LEARNERS, *SHARDS, *COORDINATOR, *RANKS)
