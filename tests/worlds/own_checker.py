"""Rules for learners that open rounds by themselves (``participants = "own"``, rule 21).

A contribution that arrives opens a round, which merges it at once. The closing round requests
contributions from all learners. At most one contribution of a learner to a fragment is merged per H
of its own steps, plus one when it leaves. Two more are allowed: one may arrive very late, the next
is delayed by that backlog, and the one after it is in time. No contribution is left unmerged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.messages import Fold, Merge, RoundOpened
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco_lab.simulate.system import System


class OwnChecker:
    """Checks one world. It raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._shards = {shard.name: shard for shard in system.shard_processes}
        self._first: dict[tuple[str, int, int, str, int], int] = {}
        self._folded: Counter[tuple[str, int, int, str, int]] = Counter()
        if system.options.participants == "own":
            system.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        shard = self._shards.get(process)
        if shard is None or shard.machine is None:
            return
        self._none_is_left(process, shard.machine.state)
        merging = {effect.fragment for effect in effects if isinstance(effect, Merge)}
        for effect in effects:
            if isinstance(effect, RoundOpened) and not effect.closing:
                text = (
                    f"{process} opens a round of fragment {effect.fragment} without a contribution"
                )
                assert effect.fragment in merging, text
            elif isinstance(effect, Fold) and shard.machine.state.phase == "running":
                member = shard.machine.state.members[effect.learner]
                place = (process, shard.life, effect.fragment, effect.learner, member.epoch)
                self._merges(place, member.step)

    def _none_is_left(self, process: str, state: SyncerState) -> None:
        """Check that every folded contribution is being merged, or waits in the queue."""
        for fragment, entry in state.fragments.items() if state.phase == "running" else ():
            left = entry.folded and fragment not in state.rounds and fragment not in state.queue
            assert not left, f"{process} does not merge a contribution to fragment {fragment}"

    def _merges(self, place: tuple[str, int, int, str, int], step: int) -> None:
        """Check that a learner's contributions are not folded too often for its own steps."""
        process, _, fragment, learner, _ = place
        self._folded[place] += 1
        steps, times = step - self._first.setdefault(place, step), self._folded[place]
        allowed = steps // self.system.options.period + 4
        text = f"{process} merges {learner} into fragment {fragment} {times} times in {steps} steps"
        assert times <= allowed, f"{text}: at most {allowed}"
