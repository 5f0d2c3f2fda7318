"""What became of the tokens that one life of a learner was trained on, read off its tape.

A merge takes one of P fragments of the model, so tokens are counted **per fragment**: a step over n
tokens is n *fragment tokens* of each fragment. What a fragment was trained on since its counters
were last reset is open; an ``Apply`` closes it: part of it is in the merged copy, the rest was
thrown away. Counts are whole numbers, so that sums are exact.

A life that goes on from a checkpoint has in its parameters what an earlier one was trained on since
the fragment's version. These tokens are *carried*: they stay the earlier life's, whose trace ends
with it, unless this life gets them merged: then they are *brought*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MAY_BE_MERGED = "what it sent as"
"""How the learner's machine begins to say why it threw away what may have been merged."""

TOOK_PART = "its contribution is in"
"""How it begins to say that only what came after its snapshot was thrown away."""

UNDER_WAY = "its contribution is under way"
"""How it begins to say the same of what it sent, which was too late for this copy, and follows."""

Name = tuple[int, int]
"""The name of a pull: term and number."""


class GivenUpTokens(NamedTuple):
    """``tokens`` that were thrown away although ``sent``, a part of them, may have been merged.

    ``sent``: the pull that it answered, and its tokens. Of these, ``carried`` were an earlier
    life's; they are not among ``tokens``. ``under_way``: all of it was sent, and the life has not
    heard yet what became of it.
    """

    fragment: int
    tokens: int
    carried: int
    sent: tuple[Name, int] | None
    under_way: bool


class Open(NamedTuple):
    """``tokens`` of a fragment that no merged copy has closed; ``held``: the version it came from.

    ``carried``: what an earlier life was trained on, beside them.
    What the shards merged of this life into a newer version is among them. That needs no record of
    what was sent, which is lost with the last records of a process that is killed.
    """

    fragment: int
    tokens: int
    carried: int
    held: tuple[int, int] | None


@dataclass(slots=True)
class Ledger:
    """Fragment tokens of one life."""

    trained: int = 0  # tokens of its steps: each counts once for every fragment
    merged: int = 0  # in merged copies that it took, of its own training and of an earlier one
    in_flight: int = 0  # trained between a snapshot and the merged copy that overwrote it
    missed: int = 0  # overwritten by a version that it had no part in
    given_up: list[GivenUpTokens] = field(default_factory=list)  # its outcome was not known then
    brought: dict[int, int] = field(default_factory=dict)  # of what is merged, an earlier life's
    _carried: dict[int, int] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)
    _sent: dict[int, tuple[Name, int]] = field(default_factory=dict)
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def stepped(self, tokens: int) -> None:
        self.trained += tokens

    def sent(self, fragment: int, ask: Name, tokens: int) -> None:
        self._sent[fragment] = (ask, tokens)

    def restored(self, fragment: int, version: tuple[int, int], tokens: int) -> None:
        """A checkpoint was taken up, with this many tokens since this version."""
        self._carried[fragment] = tokens
        self._held[fragment] = version

    def holds(self, fragment: int, version: tuple[int, int]) -> None:
        """The fragment is that of this version (term, counter) from now on."""
        self._held[fragment] = version

    def renamed(self, fragment: int, *, staged: bool = False) -> None:
        """The shard came back and restored the fragment: what it had been sent is gone.

        Not if the copy that is renamed was ``staged``: what was sent before may be in that one.
        """
        if not staged:
            self._sent.pop(fragment, None)

    def applied(self, fragment: int, mode: str, discarded: int, why: str) -> None:
        """A merged copy was taken over; ``discarded``: as the protocol counted it."""
        sent = self._sent.pop(fragment, None)
        if mode == "rebase":
            return  # the counters go on, nothing is closed
        since = self._since.get(fragment, 0)
        carried = self._carried.pop(fragment, 0)
        closed = self.trained - since
        if mode != "overwrite" and sent is not None:
            closed = min(closed, max(0, sent[1] - carried))
        if why.startswith(TOOK_PART):
            discarded = min(discarded, closed)  # steps can be missing where the tape is torn
            self.merged += closed - discarded + carried
            self.brought[fragment] = self.brought.get(fragment, 0) + carried
            self.in_flight += discarded
        elif why.startswith(UNDER_WAY):
            discarded = min(discarded, closed)
            self.in_flight += discarded
            late = closed - discarded
            self.given_up.append(GivenUpTokens(fragment, late, carried, sent, True))
        else:
            discarded = min(max(0, discarded - carried), closed)
            self.merged += closed - discarded
            if why.startswith(MAY_BE_MERGED):
                self.given_up.append(GivenUpTokens(fragment, discarded, carried, sent, False))
            else:
                self.missed += discarded
        self._since[fragment] = since + closed

    def open(self, fragments: int) -> list[Open]:
        """What the life has left open, one entry a fragment."""
        return [
            Open(
                p, self.trained - self._since.get(p, 0), self._carried.get(p, 0), self._held.get(p)
            )
            for p in range(fragments)
        ]
