"""Deliberate breaks of the core and its storage; see `deliberate_breaks`."""

from __future__ import annotations

from deliberate_breaks import Break
from worlds.shrink import Changes

JOURNAL_ONE_MERGE_LATE = Break(
    "journal-one-merge-late",
    """\
late, self.late = getattr(self, "late", None), (fields, step.gradient.numpy().tobytes())
if late is not None:
    journal.append(*late)""",
    "a merge writes the journal record of the merge before it",
    noticed_by=2,
)

CORE = (
    Break(
        "earlier-epoch-stays",
        "if False:",
        "a process that joins again does not end its earlier epoch",
        noticed_by=50,
    ),
    Break(
        "lost-contribution-kept",
        "if sent is not None and not sent.lost:",
        "steps that were sent and may be merged are kept and sent again",
        Changes(options={"missed": "rebase"}),
        noticed_by=31,
    ),
    Break(
        "merged-steps-carried",
        'mode: Mode = "rebase"',
        "merged steps are added to the merged copy again",
    ),
    Break(
        "in-flight-steps-kept",
        "if sent is not None and sent.version is not None:",
        "steps whose contribution is in flight are kept and sent again",
        Changes(options={"missed": "rebase"}),
        noticed_by=2,
    ),
    Break(
        "asked-twice-after-rejoin",
        "return False",
        "a learner that rejoins receives a request for what it already delivered",
        noticed_by=4,
    ),
    Break(
        "backlog-never-requested",
        "return False",
        "a learner with a backlog never receives a request for it",
        noticed_by=25,
    ),
    Break(
        "lost-request-in-flight",
        "if ask is not None and state.members.get(learner) is None:",
        "a request that was lost with its connection is treated as in flight",
        Changes(mishaps={"slips": 0.02}),
        noticed_by=297,
    ),
    Break(
        "backlog-first-fragment",
        "return (not waits, False, 0, 0, fragment)",
        "a backlog is requested by fragment number, so that some fragments never have their turn",
        Changes(endless=True),
        noticed_by=11,
    ),
    Break(
        "abandoned-payload-expected",
        "effects: list[SyncerEffect] = []",
        "a shard still expects a payload that it no longer waits for",
        noticed_by=2,
    ),
    Break(
        "final-round-not-retried",
        "if (failed or unfinished) and False:",
        "a final round that lacks a learner is not repeated",
        noticed_by=11,
    ),
    Break(
        "final-sweep-keeps-rounds",
        "if False:",
        "the closing sweep leaves open rounds as they are",
        noticed_by=14,
    ),
    Break(
        "reconnected-holder-not-asked",
        "pass",
        "a learner that reconnects does not receive the request for its copy again",
        Changes(mishaps={"copies_slip": 0.3}),
        noticed_by=8,
    ),
    Break(
        "restart-counter-zero",
        "entry.base, entry.version = held, Version(state.term, 0)",
        "after a restart, a shard counts versions from 0",
        noticed_by=2,
    ),
    Break(
        "term-used-again",
        "state.terms[shard] = max(1, state.terms.get(shard, 0))",
        "a shard that restarts receives its earlier term and uses versions again",
        noticed_by=1,
    ),
    Break(
        "epoch-used-again",
        "known = Enrolled(max(1, known.epoch if known else 1), joining.nonce, True, index)",
        "a learner that restarts receives its earlier epoch",
        noticed_by=2,
    ),
    Break(
        "clock-goes-back",
        "state.clock = advanced(0, steps, 1 + quorum % len(steps))",
        "the clock follows the learners back",
        noticed_by=2,
    ),
    Break(
        "quorum-of-one",
        "return len(entry.delivered) > 0",
        "one contribution is enough for any quorum",
    ),
    Break(
        "round-waits-for-all",
        "waits = round.awaited",
        "a round waits for every learner that received a request",
        Changes(
            options={
                "wait": "never",
                "quorum": 1,
                "participants": "reported",
                "fragments": 2,
                "shards": 1,
            },
            without_standbys=True,
            endless=True,
        ),
    ),
    Break(
        "failed-merge-no-pause",
        "entry.retry_at = now",
        "a failed merge is tried again at once",
        noticed_by=114,
    ),
    Break(
        "learner-waits-for-link",
        'return [] if self.state.shards[0].linked else [Hold("a shard is gone")]',
        "a learner waits for a broken link",
        noticed_by=15,
    ),
    Break(
        "steps-counted-per-shard",
        "if True:",
        "a synchronous learner counts its steps by each shard's clock",
        noticed_by=2040,
    ),
    Break(
        "abandoned-round-ignored",
        "return []",
        "a learner ignores that a round was abandoned",
        Changes(mishaps={"corruption": 0.05, "impatience": 1.0}),
        noticed_by=45,
    ),
    Break(
        "lease-not-renewed",
        "if member is not None and member.step < 3:",
        "messages do not renew a learner's lease",
    ),
    Break(
        "no-whole-copy-after-gap",
        """\
whole = newest is None or view.fetch_whole
if newest is not None and follows is None:
    return []""",
        "a learner that missed a version waits for a difference that fits",
        noticed_by=9,
    ),
    JOURNAL_ONE_MERGE_LATE,
    Break(
        "acts-after-lease",
        'return self.state.phase == "active"',
        "a shard acts after its leadership lease has ended",
        noticed_by=56,
    ),
    Break(
        "silent-claim-awaited",
        "if newest.number > 0:",
        "a standby waits for a claim that is not renewed",
        noticed_by=1,
    ),
)
"""Breaks of the state machines, and of the order in which shells write to the disk."""

CLAIMS = (
    Break(
        "claim-not-confirmed",
        "if False:",
        "a shard publishes a version without a check for a newer claim",
    ),
    Break(
        "replaced-process-admitted",
        "if False:",
        "a process that was replaced receives a new term",
    ),
)
"""Breaks of the rules that protect a run even if two processes of a shard act at once."""

STORAGE = (
    Break("journal-not-synced", "pass", "a record of the journal is not synced to the disk"),
    JOURNAL_ONE_MERGE_LATE,
    Break(
        "checkpoint-deleted-early",
        """\
for file in self._files(".safetensors"):
    runtime().disk.remove(file)
if False:""",
        "the previous checkpoint is deleted before the next one is written",
    ),
    Break(
        "old-journal-after-failure",
        "if False:",
        "after a failed checkpoint, merges go into the old journal",
    ),
    Break(
        "checkpoint-digests-unchecked",
        "wrong = [name for name, tensor in state.items() if False]",
        "the digests of a checkpoint are not checked",
    ),
    Break(
        "torn-record-stays",
        "return\nif True:",
        "a record that a full disk has torn stays in the journal",
    ),
)
"""Breaks of a shard's disk."""

DATA_LEASES = (
    Break(
        "returned-part-skips-a-batch",
        """\
start = returned[part]
return Leased(number, turn, part, start and start + 1, learner, epoch)""",
        "a returned partition continues one batch too late",
    ),
    Break(
        "trained-batches-called-durable",
        """\
effects = []
for number, held in book.holders.get(learner, {}).items():
    book.holders[learner][number] = replace(held, durable=held.trained)""",
        "all trained batches of a lost learner count as durable",
    ),
)
"""Breaks of data leases; a world of `test_leased_worlds` notices each."""

DURABLE_TOO_EARLY = Break(
    "batches-durable-too-early",
    "else leases.merged(data, self.state.step, self.state.step)",
    "a learner reports batches as durable before their steps are merged",
)

LATE_ANSWER = Break(
    "late-answer-renews-lease",
    """\
self.state.valid_until = now + self.lease_seconds
self.state.next_at = now + self.lease_seconds / 4
return []""",
    "a whole leadership lease counts from the answer to its renewal",
)
"""A model of processes that compete for a leadership lease notices this break."""
