"""The rules of parties with limited shares: each merge has a share of each party within its limits.

The shares are recomputed from the weights of the contributions and the factors of the order. If the
upper limits of the parties in a merge are less than 1 in sum, all of them are reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum, isclose
from typing import Any

from decoupled_diloco.protocol.messages import Merge
from decoupled_diloco.protocol.syncer_state import Ask
from decoupled_diloco_lab.simulate.system import System

ROUNDING = 1e-9


class QuotaChecker:
    """Checks one world. It raises `AssertionError` at the event that breaks a rule.

    Attributes:
        limited: Number of merges in which a limit held a party.
    """

    def __init__(self, system: System) -> None:
        self.limited = 0
        self._quotas = {quota.party: quota for quota in system.options.quotas}
        self._shards = {shard.name: shard for shard in system.shard_processes}
        if self._quotas and not system.options.secure:
            system.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        shard = self._shards.get(process)
        if shard is None or shard.machine is None:
            return
        for effect in effects:
            if isinstance(effect, Merge):
                round = shard.machine.state.rounds[effect.fragment]
                self._merge(round.folded, dict(effect.factors))
                self.limited += bool(effect.factors)

    def _merge(self, folded: Sequence[Ask], factors: dict[str, float]) -> None:
        weights: defaultdict[str, list[float]] = defaultdict(list)
        for ask in folded:
            weights[ask.party].append(ask.weight)
        total = fsum(weight for each in weights.values() for weight in each)
        shares = {p: fsum(each) / total * factors.get(p, 1.0) for p, each in weights.items()}
        assert isclose(fsum(shares.values()), 1.0), f"a factor changes the weight of all: {shares}"
        present = [self._quotas[party] for party in shares]
        room = fsum(quota.most for quota in present)
        for quota in present:
            share, most = shares[quota.party], quota.most / min(1.0, room)
            assert share <= most + ROUNDING, f"{quota} has the share {share}"
            assert share >= min(quota.least, most) - ROUNDING, f"{quota} has the share {share}"
