"""What both kinds of ranks of a learner of many have: see `ranks.learner`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from decoupled_diloco.errors import ConfigError, Error
from decoupled_diloco.learner.checks import OptimizerChecks
from decoupled_diloco.learner.data_leases import DataLeases
from decoupled_diloco.learner.learner import Learner
from decoupled_diloco.learner.model_guard import ModelGuard
from decoupled_diloco.learner.store import ParameterStore
from decoupled_diloco.learner.weight_copies import WeightCopies
from decoupled_diloco.merge import Layout
from decoupled_diloco.ranks.seat import Document, RankSeat

FIRST = "its first step"
HOLDING = "a step that holds"
JOINING = "joining"
CLOSING = "close"
HANDING_IN = "hand_in"
"""Where in the program a rank is, as it tells the others."""

NOTHING: Document = {"orders": [], "applied": {}}
"""A plan that orders nothing."""

BEFORE: Document = {
    "steps": 0,
    "tokens": 0,
    "discarded": 0,
    "global": 0,
    "ending": False,
    "over": False,
    "refused": "",
    "go": True,
}
"""What is known before the first plan."""


class NoLeases(DataLeases):
    """Of a learner of several ranks: each would have to take its own part of every batch."""

    def __init__(self) -> None:
        self.taken = lambda: 0

    def open(self, parts: int, ahead: int, taken: Callable[[], int]) -> None:
        """See `DataLeases.open`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "leased data are for learners of one process: with several ranks, split the data "
            "yourself"
        )

    def close(self) -> None:
        """See `DataLeases.close`: there are none."""


class OfMany(Learner):
    """What both kinds of ranks have; the run's facts are those of the last plan carried out."""

    _seat: RankSeat
    _facts: Document
    _held: dict[int, str]

    @property
    def steps(self) -> int:
        """See `Learner.steps`."""
        return int(self._facts["steps"])

    @property
    def tokens(self) -> int:
        """See `Learner.tokens`: of all ranks; the last two steps' may be a guess."""
        return int(self._facts["tokens"])

    @property
    def discarded_tokens(self) -> int:
        """See `Learner.discarded_tokens`."""
        return int(self._facts["discarded"])

    @property
    def global_step(self) -> int:
        """See `Learner.global_step`."""
        return int(self._facts["global"])

    @property
    def finished(self) -> bool:
        """See `Learner.finished`."""
        return bool(self._facts["ending"])

    @property
    def over(self) -> bool:
        """See `Learner.over`."""
        return bool(self._facts["over"])

    @property
    def refused(self) -> str:
        """See `Learner.refused`."""
        return str(self._facts["refused"])

    @property
    def versions(self) -> tuple[str, ...]:
        """See `Learner.versions`."""
        return tuple(self._held[fragment] for fragment in sorted(self._held))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Learner.load_state_dict`."""
        super().load_state_dict(state)
        self._facts |= {"steps": int(state["steps"]), "tokens": int(state["tokens"])}

    async def ends_in_order(self, error: BaseException) -> bool:
        """Never: the other ranks would have to end at the same step."""
        return False

    def replaced(self) -> None:
        """See `Learner.replaced`; the other ranks do the same when they create theirs."""
        why = "another Learner with its name was created in its process"
        self._closed_why = f" ({why})"
        self._seat.leave(Error(why))
        self._leave(why, abrupt=True)

    def program_ends(self) -> None:
        """See `Learner.program_ends`: the other ranks may not end now."""

    def _told_of_restored(self, applied: tuple[int, ...]) -> None:
        """A checkpoint's optimizer may have weights of its own, of before what was applied now."""
        tensors = self._seat.tensors
        if tensors is not None and tensors.restored and self._after_apply is not None:
            self._after_apply(applied)

    def _guard_of(self, model: nn.Module, layout: Layout) -> ModelGuard:
        return ModelGuard(model, layout, buffers_in_place=True, settle=self._seat.reshard)

    def _check_model(self) -> None:
        try:
            self._guard.check()
        except ConfigError as error:
            self._seat.leave(error)
            raise

    def _look_at_optimizer(self, checks: OptimizerChecks) -> None:
        self._seat.reshard()
        super()._look_at_optimizer(checks)

    def _followed(self, store: ParameterStore, copies: WeightCopies) -> ParameterStore:
        return store  # Each rank has its part of the parameters: see `_carry_out`.

    def _following(self) -> AbstractContextManager[None]:
        if self._copies is None:
            return nullcontext()
        self._seat.reshard()
        return self._copies.following(self._model.parameters())

    def _step_name(self) -> str:
        self._calls += 1
        return f"step {self._calls}"

    _calls = 0

    async def _carry_out(self, plan: Document) -> tuple[int, ...]:
        """Does what a plan says; returns the fragments whose global weights are taken."""
        writes = any(order[0] == "write" for order in plan["orders"])
        try:
            if self._seat.tensors is not None:
                with self._following() if writes else nullcontext():
                    await self._seat.tensors.carry_out(plan["orders"])
        except Error as error:
            self._seat.leave(error)
            raise
        self._facts = plan.get("facts") or self._facts
        applied = {int(fragment): version for fragment, version in plan["applied"].items()}
        self._held |= applied
        return tuple(applied)
