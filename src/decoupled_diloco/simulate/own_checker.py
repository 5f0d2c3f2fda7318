"""What must hold where learners open rounds by themselves (``participants = "own"``, rule 21).

A round is opened when a contribution is here, and merges it at once; the closing round asks
everybody. Of what a learner sends of a fragment no more is merged than once in H of its own steps,
and once as it goes. One may have been long under way, the next in arrears for that, and the one
after it in time: two more are allowed. Nothing that is here lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from decoupled_diloco.protocol.effects import Fold, Merge, RoundOpened
from decoupled_diloco.protocol.syncer_state import SyncerState
from decoupled_diloco.simulate.system import System


class OwnChecker:
    """Watches one world; raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._shards = {shard.name: shard for shard in system.shard_processes}
        self._first: dict[tuple[str, int, int, str, int], int] = {}
        self._folded: Counter[tuple[str, int, int, str, int]] = Counter()
        if system.options.participants == "own":
            system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        shard = self._shards.get(who)
        if shard is None or shard.machine is None:
            return
        self._nothing_lies(who, shard.machine.state)
        merging = {effect.fragment for effect in effects if isinstance(effect, Merge)}
        for effect in effects:
            if isinstance(effect, RoundOpened) and not effect.closing:
                text = f"{who} opens a round of fragment {effect.fragment}, and nothing is here"
                assert effect.fragment in merging, text
            elif isinstance(effect, Fold) and shard.machine.state.phase == "running":
                member = shard.machine.state.members[effect.learner]
                place = (who, shard.life, effect.fragment, effect.learner, member.epoch)
                self._merges(place, member.step)

    def _nothing_lies(self, who: str, state: SyncerState) -> None:
        """What is here is being merged, or waits for its turn."""
        for fragment, entry in state.fragments.items() if state.phase == "running" else ():
            lies = entry.folded and fragment not in state.rounds and fragment not in state.queue
            assert not lies, f"{who} has a contribution to fragment {fragment}, and merges it not"

    def _merges(self, place: tuple[str, int, int, str, int], step: int) -> None:
        """A learner's contribution is folded, at so many of its own steps."""
        who, _, fragment, learner, _ = place
        self._folded[place] += 1
        steps, times = step - self._first.setdefault(place, step), self._folded[place]
        allowed = steps // self.system.options.period + 4
        text = f"{who} merges {learner} into fragment {fragment} {times} times in {steps} steps"
        assert times <= allowed, f"{text}: at most {allowed}"
