"""The fate of the tokens that one incarnation of a learner trained on, read from its tape.

A merge takes one of P fragments of the model, so tokens are counted **per fragment**: a step over n
tokens adds n *fragment tokens* to each fragment. The tokens of a fragment since its counters were
last reset are *open*. An ``Apply`` closes them: a part is in the merged copy, and the rest was
discarded. Counts are integers, so that sums are exact.

An incarnation that continues from a checkpoint has tokens in its parameters that an earlier one
trained on since the fragment's version. These tokens are *carried*. They count for the earlier
incarnation, unless this one gets them merged: then they are *brought*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

MAY_BE_MERGED = "its contribution may be in"
"""Prefix of an ``Apply``'s reason if it discarded tokens that may have been merged."""

TOOK_PART = "its contribution is in"
"""Prefix of the reason if it discarded only tokens trained after the snapshot."""

UNDER_WAY = "its contribution is under way"
"""Prefix of the reason if the contribution was too late for this copy and will be merged later."""

Name = tuple[int, int]
"""The identity of a pull: term and number."""


class GivenUpTokens(NamedTuple):
    """Discarded ``tokens`` of which a part, ``sent``, may have been merged.

    ``sent``: the pull that the contribution answered, and its tokens. ``carried``: the tokens in
    ``sent`` of an earlier incarnation, which are not in ``tokens``. ``under_way``: all tokens were
    sent, and the incarnation has not received the outcome yet.
    """

    fragment: int
    tokens: int
    carried: int
    sent: tuple[Name, int] | None
    under_way: bool


class Open(NamedTuple):
    """Tokens of a fragment that no merged copy has closed.

    ``carried``: additional tokens of an earlier incarnation. ``held``: the version that the
    fragment is based on. ``tokens`` includes the tokens that shards merged into newer versions. So
    the account does not depend on records of sent contributions, which a kill can lose.
    """

    fragment: int
    tokens: int
    carried: int
    held: tuple[int, int] | None


@dataclass(slots=True)
class Ledger:
    """Fragment tokens of one incarnation."""

    trained: int = 0  # tokens of its steps; each counts once per fragment
    merged: int = 0  # in merged copies that it applied, from its own and earlier training
    in_flight: int = 0  # trained between a snapshot and the merged copy that overwrote it
    missed: int = 0  # overwritten by a version without its contribution
    given_up: list[GivenUpTokens] = field(default_factory=list)  # outcome unknown at that time
    brought: dict[int, int] = field(default_factory=dict)  # in `merged`, but of earlier training
    _carried: dict[int, int] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)
    _sent: dict[int, tuple[Name, int]] = field(default_factory=dict)
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def stepped(self, tokens: int) -> None:
        self.trained += tokens

    def sent(self, fragment: int, ask: Name, tokens: int) -> None:
        self._sent[fragment] = (ask, tokens)

    def restored(self, fragment: int, version: tuple[int, int], tokens: int) -> None:
        """Start from a checkpoint that has this many tokens since this version."""
        self._carried[fragment] = tokens
        self._held[fragment] = version

    def holds(self, fragment: int, version: tuple[int, int]) -> None:
        """Record that the fragment is based on this version (term, counter) from now on."""
        self._held[fragment] = version

    def renamed(self, fragment: int, *, staged: bool = False) -> None:
        """Record that the shard restarted and restored the fragment, and lost what it received.

        If the renamed copy was ``staged``, that copy may contain the sent contribution.
        """
        if not staged:
            self._sent.pop(fragment, None)

    def applied(self, fragment: int, mode: str, discarded: int, why: str) -> None:
        """Record that a merged copy was applied; ``discarded`` is the protocol's count."""
        sent = self._sent.pop(fragment, None)
        if mode == "rebase":
            return  # a rebase keeps the counters and closes nothing
        since = self._since.get(fragment, 0)
        carried = self._carried.pop(fragment, 0)
        closed = self.trained - since
        if mode != "overwrite" and sent is not None:
            closed = min(closed, max(0, sent[1] - carried))
        if why.startswith(TOOK_PART):
            discarded = min(discarded, closed)  # a torn tape can lack steps
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
        """Return the open tokens, one entry per fragment."""
        return [
            Open(
                p, self.trained - self._since.get(p, 0), self._carried.get(p, 0), self._held.get(p)
            )
            for p in range(fragments)
        ]
