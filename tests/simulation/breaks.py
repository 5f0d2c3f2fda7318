"""The core and its storage, broken on purpose: each break is a few words of real code replaced."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.learner.store import ModuleStore
from decoupled_diloco.protocol import (
    asking,
    learner_fragments,
    syncer,
    syncer_fill,
    syncer_members,
    syncer_rounds,
)
from decoupled_diloco.protocol.coordinator import CoordinatorMachine
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.shard_lease import ShardLeaseMachine
from decoupled_diloco.protocol.syncer_state import FragmentState
from decoupled_diloco.simulate.shrink import Changes
from decoupled_diloco.storage.journal import Journal
from decoupled_diloco.syncer import durable
from decoupled_diloco.syncer.durable import ShardDisk
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.syncer.shard_lease import ShardLease


@dataclass(frozen=True)
class Break:
    """A function in which some words are replaced by others.

    Attributes:
        what: What goes wrong, in words.
        owner: The module or class of the function.
        name: The function.
        old: The words.
        new: What stands there instead.
        changes: What makes worlds in which it matters likelier.
        noticed_by: The seed of a world that has noticed it: it is tried first.
    """

    what: str
    owner: Any
    name: str
    old: str
    new: str
    changes: Changes = field(default_factory=Changes)
    noticed_by: int = 0

    @contextmanager
    def broken(self) -> Iterator[None]:
        """As long as the context lasts, the code is broken."""
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        old = textwrap.dedent(self.old)
        assert source.count(old) == 1, f"{self.name} has no longer the words {old!r}"
        found: dict[str, Any] = {}
        exec(source.replace(old, self.new), function.__globals__, found)
        setattr(self.owner, self.name, found[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, function)


WITH_THE_NEXT = """\
late, self.late = getattr(self, "late", None), (fields, step.gradient.numpy().tobytes())
    if late is not None:
        journal.append(*late)"""
"""What a merge writes to the journal: what the one before should have written."""

CORE = (
    Break(
        "a process that joins anew does not end the epoch before",
        syncer.SyncerMachine,
        "_greeted",
        "if member is not None and member.epoch < hello.epoch:",
        "if False:",
        noticed_by=50,
    ),
    Break(
        "what was sent and may have been merged is kept and sent again",
        learner_fragments,
        "apply_mode",
        "if sent is not None:",
        "if sent is not None and not sent.lost:",
        Changes(options={"missed": "rebase"}),
        noticed_by=31,
    ),
    Break(
        "what was merged is carried over on top of the merge",
        learner_fragments,
        "apply_mode",
        "mode: Mode = sent.taken.alignment",
        'mode: Mode = "rebase"',
    ),
    Break(
        "what is under way is kept as well, and sent again",
        learner_fragments,
        "apply_mode",
        "if sent is not None:",
        "if sent is not None and sent.version is not None:",
        Changes(options={"missed": "rebase"}),
        noticed_by=2,
    ),
    Break(
        "who comes back is asked again for what its earlier life has handed in",
        FragmentState,
        "has_since_version",
        "return self.made.get(learner) == self.version",
        "return False",
        noticed_by=4,
    ),
    Break(
        "who is in arrears is never asked again",
        asking,
        "_can_be_served",
        "return _held_base(state, options, member, fragment) is not None",
        "return False",
        noticed_by=25,
    ),
    Break(
        "a pull that went with the connection is thought to be under way",
        syncer_rounds,
        "forget_asks",
        "ask.name not in known",
        "state.members.get(learner) is None",
        Changes(mishaps={"slips": 0.02}),
        noticed_by=23,
    ),
    Break(
        "who is in arrears is asked for the first fragment, whichever waits longest",
        asking,
        "_urgency",
        'member.heard_at.get(fragment, float("-inf"))',
        "0.0",
        Changes(endless=True),
        noticed_by=11,
    ),
    Break(
        "a body that is no longer waited for is still expected",
        syncer_rounds,
        "_fall_out",
        "[Unexpect(ask.path, reason)]",
        "[]",
        noticed_by=9,
    ),
    Break(
        "a closing round that lacks somebody is not tried again",
        syncer_rounds,
        "_swept",
        "and entry.sweep_tries < SWEEP_TRIES_MAX",
        "and False",
        noticed_by=11,
    ),
    Break(
        "the closing sweep leaves open rounds as they are",
        syncer_rounds,
        "begin_sweep",
        "if round.settled_at is None:",
        "if False:",
        noticed_by=14,
    ),
    Break(
        "a seed that connects anew is not asked again",
        syncer.SyncerMachine,
        "_greeted",
        "effects += syncer_fill.member_gone(state, hello.learner, why_void)",
        "pass",
        Changes(mishaps={"copies_slip": 0.3}),
        noticed_by=8,
    ),
    Break(
        "after a restart versions are counted from 0",
        syncer_fill,
        "_install",
        "Version(state.term, held.counter)",
        "Version(state.term, 0)",
        noticed_by=2,
    ),
    Break(
        "a shard that starts again is given the term it had, and uses versions again",
        CoordinatorMachine,
        "_new_process",
        "state.terms.get(shard, 0) + 1",
        "max(1, state.terms.get(shard, 0))",
        noticed_by=1,
    ),
    Break(
        "a learner that starts again is given the epoch it had",
        CoordinatorMachine,
        "_join_asked",
        "(known.epoch if known else 0) + 1",
        "max(1, known.epoch if known else 1)",
        noticed_by=2,
    ),
    Break(
        "the clock follows the learners back",
        syncer.SyncerMachine,
        "_advance_clock",
        "state.clock = advanced(state.clock, steps, quorum)",
        "state.clock = advanced(0, steps, 1 + quorum % len(steps))",
        noticed_by=2,
    ),
    Break(
        "one contribution is enough, whatever the quorum",
        syncer_rounds,
        "has_quorum",
        "len(entry.delivered) >= options.quorum",
        "len(entry.delivered) > 0",
    ),
    Break(
        "a round waits for all that it has asked",
        syncer_rounds,
        "_progress",
        "round.awaited and (not round.delivery_over or waits_for_leaver(state, round))",
        "round.awaited",
        Changes(endless=True),
        noticed_by=2,
    ),
    Break(
        "a merge that has failed is tried again at once",
        syncer_rounds,
        "merge_failed",
        "now + min(longest, first * 2.0**entry.failures)",
        "now",
        noticed_by=114,
    ),
    Break(
        "a learner whose link is broken waits for it",
        LearnerMachine,
        "_hold_or_release",
        'if self.options.wait == "never":\n        return []',
        'if self.options.wait == "never":\n'
        '        return [] if self.state.shards[0].linked else [Hold("a shard is gone")]',
        noticed_by=15,
    ),
    Break(
        "who waits for others counts its steps as each shard has told it",
        LearnerMachine,
        "_count_alike",
        'if not self.options.in_step or self.role != "learner":',
        "if True:",
        noticed_by=2040,
    ),
    Break(
        "nobody is told that a round is given up",
        LearnerMachine,
        "_told",
        "self.state.fragments[fragment].owed_at = None",
        "return []",
        Changes(mishaps={"corruption": 0.05, "impatience": 1.0}),
        noticed_by=45,
    ),
    Break(
        "a lease is not renewed by what is heard",
        syncer_members,
        "renew",
        "member.connected:",
        "member.step < 3:",
    ),
    Break(
        "who has missed a version waits for one that fits",
        learner_fragments,
        "_fetch",
        "whole = follows is None or view.fetch_whole",
        "whole = newest is None or view.fetch_whole\n"
        "    if newest is not None and follows is None:\n"
        "        return []",
        noticed_by=5,
    ),
    Break(
        "a version is on the disk only with the next one, though everybody has heard of it",
        ShardDisk,
        "merge",
        "journal.append(fields, as_bytes(step.gradient).numpy().data)",
        WITH_THE_NEXT,
        noticed_by=2,
    ),
    Break(
        "a shard acts on when its lease is over",
        ShardLeaseMachine,
        "holds",
        " and now < self.state.valid_until",
        "",
        noticed_by=56,
    ),
    Break(
        "a claim that is not renewed is waited for",
        ShardLeaseMachine,
        "_free",
        "asked_at < self._silent_at(standing)",
        "standing.number > 0",
        noticed_by=1,
    ),
)
"""Breaks of the machines, and of a shell's promise to the disk."""

CLAIMS = (
    Break(
        "a version is told of without asking the storage for a newer claim",
        ShardLease,
        "confirm",
        "newest != self.number or not self.holds()",
        "False",
    ),
    Break(
        "a process that was replaced is given a fresh term",
        CoordinatorMachine,
        "_shard_greeted",
        "if superseded:",
        "if False:",
    ),
)
"""Breaks of what holds even if two processes of a shard act at once."""

STORAGE = (
    Break(
        "a record of the journal is not forced to the disk",
        Journal,
        "append",
        "self._disk.sync_file(self._file)",
        "pass",
    ),
    Break(
        "a merge is written to the journal by the next one",
        ShardDisk,
        "merge",
        "journal.append(fields, as_bytes(step.gradient).numpy().data)",
        WITH_THE_NEXT,
        noticed_by=2,
    ),
    Break(
        "the checkpoint before is deleted before the next one is written",
        ShardDisk,
        "checkpoint",
        "if self._journal is not None:\n        self._journal.settle()",
        "for file in self._files('.safetensors'):\n        runtime().disk.remove(file)",
    ),
    Break(
        "merges go on in the old journal when a checkpoint has failed",
        ShardDisk,
        "checkpoint",
        "if begun:\n        self._begin(journal)",
        "pass",
    ),
    Break(
        "a checkpoint's digests are not looked at",
        durable,
        "_load_checked",
        "digests.get(name) != digest(tensor)",
        "False",
    ),
    Break(
        "what a full disk took of a record stays in the journal",
        Journal,
        "_undo",
        "self.settle()\n    self._file.seek(self.nbytes)",
        "pass",
    ),
)
"""Breaks of a shard's disk."""

SHELLS = (
    Break(
        "a rebase keeps what a published copy has lost in a parameter's dtype",
        ModuleStore,
        "_reference",
        "cast_like(minus.fragment, minus.layout, self._upload(minus.published))",
        "self._upload(minus.published)",
    ),
    Break(
        "leases are looked at before what has arrived is heard",
        Shard,
        "_tick",
        "range(3)",
        "range(0)",
    ),
)
"""Breaks of what virtual worlds do without: the real tensors, the real event loop."""
