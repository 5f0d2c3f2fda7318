"""Rank 0 of a learner of many ranks: it takes part in the run, and plans a step ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from decoupled_diloco.errors import Error
from decoupled_diloco.learner.checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.checkpointer import Written
from decoupled_diloco.learner.launched import finds_its_run
from decoupled_diloco.learner.learner import TOLD_TO_GO
from decoupled_diloco.learner.modules import Model
from decoupled_diloco.learner.plan import StepPlan
from decoupled_diloco.observe.samples import LossMeasured
from decoupled_diloco.protocol.events import Paused, StepFinished
from decoupled_diloco.ranks.carriers import CarriedExchange
from decoupled_diloco.ranks.checkpoints import LeaderCheckpointer
from decoupled_diloco.ranks.many import (
    BEFORE,
    CLOSING,
    FIRST,
    HANDING_IN,
    HOLDING,
    JOINING,
    NOTHING,
    NoLeases,
    OfMany,
)
from decoupled_diloco.ranks.seat import Document, RankSeat, seated
from decoupled_diloco.ranks.store import RankedStore
from decoupled_diloco.runtime import blocking, now

KEEP_IN_TOUCH_SECONDS = 30.0
"""While the leader waits it lets the others know at least so often that it is there."""


class TokenCount:
    """The learner's tokens: those of steps whose ranks have reported, and a guess of the rest.

    The machine is told of a step before it is trained. The guess is the last step that is known; a
    difference is made up for when it is known.
    """

    def __init__(self) -> None:
        self._steps = self._tokens = self._told = self._told_steps = self._last = 0

    def reported(self, tokens: int) -> None:
        """All ranks have told of one more step."""
        self._steps += 1
        self._tokens += tokens
        self._last = tokens

    @property
    def ahead(self) -> tuple[int, int]:
        """Steps and tokens that the machine was told of, and nobody has reported."""
        return self._told_steps - self._steps, self._told - self._tokens

    def next(self) -> int:
        """What the machine is told of its next step."""
        self._told_steps += 1
        unknown = self._told_steps - self._steps
        tokens = max(0, self._tokens + unknown * self._last - self._told)
        self._told += tokens
        return tokens


class LeaderRank(OfMany):
    """Rank 0 of a learner of many ranks."""

    @finds_its_run("learner")
    def __init__(
        self,
        model: Model,
        syncer: str | Sequence[str] | None = None,
        *,
        seat: RankSeat | None = None,
        **arguments: Any,
    ) -> None:
        self._seat = seat or blocking(seated(model, arguments))
        self._count = TokenCount()
        self._plan: Document = dict(NOTHING)
        self._applied: dict[str, str] = {}
        self._admitted: Document = {}
        self._at = JOINING
        self._met_at = now()
        self._ranked = RankedStore(self._seat.model.layout)
        self._seat.on_end = self._ranked.failed
        self._facts, self._held = dict(BEFORE), {}
        self._exchange = partial(
            CarriedExchange,
            sharding=self._seat.model.sharding,
            values=self._seat.carried,
            store=self._ranked,
            key=self._seat.key,
            hosts=self._seat.hosts,
            around=self._seat.around,
        )
        self._keeper = partial(
            LeaderCheckpointer,
            self._ranked,
            self._seat.group.size,
            lambda **asked: self._carriers.ask_all(**asked),
        )
        arguments["donate"] = ()
        try:
            super().__init__(model, syncer, store=self._ranked, **arguments)
        except Error as error:
            self._seat.leave(error)
            raise
        self.leases = NoLeases()

    _checkpointer: LeaderCheckpointer

    def _device_text(self) -> str:
        """The leader's device; those of the other ranks are like it."""
        return f"{super()._device_text()}, and {self._seat.group.size - 1} more ranks"

    def _require_carriers(self, carriers: object) -> None:
        """The seat has looked at them."""

    @property
    def _carriers(self) -> CarriedExchange:
        exchange = self._background.bodies
        assert isinstance(exchange, CarriedExchange)
        return exchange

    async def _begin(self) -> None:
        self._enter_run()
        if self._admitted:
            await self._conduct()  # the carriers can come
        if self._background.restoring:
            await self._checkpointer.read()
        await super()._begin()

    @property
    def _at(self) -> str:
        """Where in the program this rank is, for the others' watch too."""
        return self._seat.group.watch.place

    @_at.setter
    def _at(self, place: str) -> None:
        self._seat.group.watch.place = place

    async def _join(self) -> None:
        await super()._join()
        self._facts = self._facts_now()
        self._applied |= {
            str(p): str(view.held) for p, view in enumerate(self._shared.machine.state.fragments)
        }
        self._told_of_restored(await self._conduct("joined"))

    async def _wait(self, seconds: float) -> None:
        """Has the other ranks do what is ordered while this one waits."""
        background = self._background
        self._enter_run()
        self._seat.raise_failure()
        self._checkpointer.raise_failure()
        if not (
            self._admitted or self._ranked.waits or now() - self._met_at > KEEP_IN_TOUCH_SECONDS
        ):
            await super()._wait(min(seconds, KEEP_IN_TOUCH_SECONDS))
            return
        background.changed.__exit__(None, None, None)
        try:
            await self._conduct()
        finally:
            background.changed.__enter__()

    def _enter_run(self) -> None:
        """Once the run has let this learner in, the other ranks are told its settings."""
        shared = self._background.shared
        if shared is None or self._seat.tensors is not None:
            return
        self._seat.admit(shared.tensors.plan).saving = self._checkpointer.saving
        self._admitted = {
            "name": self.name,
            "layout": shared.tensors.plan.layout.to_json(),
            "settings": shared.config.public(),
            "epoch": shared.machine.epoch,
            "index": self.index,
            "count": self.count,
            "addresses": self._carriers.addresses,
        }

    async def _conduct(self, last: str = "", **besides: Any) -> tuple[int, ...]:
        """One exchange with all ranks, which wait; ``last``: they wait no longer."""
        plan = self._next_plan() | besides
        if self._admitted:
            plan["admitted"], self._admitted = self._admitted, {}
        await self._seat.meet(self._at, plan=plan, last=last)
        self._met_at = now()
        return await self._carry_out(plan)

    def _next_plan(self) -> Document:
        applied, self._applied = self._applied, {}
        tensors = self._seat.tensors
        orders = [] if tensors is None else self._ranked.take()
        facts = self._facts if self._background.shared is None else self._facts_now()
        return {"orders": orders, "applied": applied, "facts": facts}

    def _facts_now(self) -> Document:
        state, before = self._shared.machine.state, self._checkpointer.counted
        discarded = state.discarded_tokens // len(state.fragments)
        steps, tokens = self._untrained
        return {
            "steps": before.steps + state.step - steps,
            "tokens": before.tokens + state.tokens - tokens,
            "discarded": before.discarded_tokens + discarded,
            "global": self._shared.machine.global_step,
            "ending": state.ending,
            "over": state.over,
            "refused": self._background.refused[:200],
            "go": self._waits and not (state.ended or state.leaving),
        }

    def _at_boundary(self, event: StepFinished | Paused, loss: float | None = None) -> StepPlan:
        """What the machine orders is not done here: it becomes a part of the next plan."""
        plan = super()._at_boundary(event, loss)
        fragments = self._shared.machine.state.fragments
        self._applied |= {str(p): str(fragments[p].held) for p in plan.applied}
        return plan

    async def _take_step(self, tokens: int, loss: float | None) -> bool:
        """The plan that is carried out was made a step ago."""
        self._raise_failure()
        self._seat.raise_failure()
        self._check_model()
        self._check_optimizer()
        began = now()
        said: Document = {"tokens": tokens, "loss": loss}
        if self._seat.under_way is None:
            self._reported(await self._seat.meet(FIRST, **said))
            self._decide()
            self._seat.start(FIRST, plan=self._plan)
            said = {}
        self._reported(await self._seat.arrive())
        plan = self._plan
        applied = await self._carry_out(plan)
        if plan["hold"]:
            self._at = HOLDING
            applied += await self._hold()
            applied += await self._conduct("released")
        if applied and self._after_apply is not None:
            self._after_apply(applied)
        self._decide()
        self._seat.start(self._step_name(), plan=self._plan, **said)
        self._stepped(began, applied, self._loss)
        return bool(plan["facts"]["go"])

    def _decide(self) -> None:
        """The plan of the next boundary."""
        told = self._at_boundary(StepFinished(self._count.next()), self._loss)
        if self._wanted is not None or self._checkpointer.due:
            self._keep(None)
        self._plan = {**self._next_plan(), "hold": told.hold}

    _wanted: Future[Written] | None = None

    def checkpoint(self, run_checkpoint: int | None = None) -> Future[Written] | None:
        """See `Learner.checkpoint`; it is taken at the end of the next step but one."""
        if self._seat.under_way is None or self._checkpointer.folder is None:
            return super().checkpoint(run_checkpoint)
        self._wanted = self._wanted or Future()
        return self._wanted

    def _keep(self, run_checkpoint: int | None) -> Future[Written] | None:
        writing, wanted = super()._keep(run_checkpoint), self._wanted
        if writing is not None and wanted is not None:
            writing.add_done_callback(lambda done: wanted.set_result(done.result()))
            self._wanted = None
        return writing

    def _outline(self, run_checkpoint: int | None) -> LearnerCheckpoint | None:
        """Of the boundary that is planned, which is ahead of the one that was carried out."""
        outline, facts = super()._outline(run_checkpoint), self._facts_now()
        steps, tokens = self._untrained
        return outline and replace(
            outline,
            fragments=tuple(
                replace(held, steps=max(0, held.steps - steps), tokens=max(0, held.tokens - tokens))
                for held in outline.fragments
            ),
            steps=facts["steps"],
            tokens=facts["tokens"],
            discarded_tokens=facts["discarded"],
            global_step=facts["global"],
        )

    def _reported(self, documents: Sequence[Document]) -> None:
        self._met_at = now()
        if "tokens" not in documents[0]:
            return
        counted = [documents[rank] for rank in self._seat.model.counted]
        self._count.reported(sum(int(document["tokens"]) for document in counted))
        losses = [document["loss"] for document in documents if document["loss"] is not None]
        self._loss = sum(losses) / len(losses) if losses else None
        if self._loss is not None:
            self._background.sample(
                LossMeasured(self.steps, self.global_step, self.tokens, self._loss)
            )

    _loss: float | None = None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None and not self._closed:
            self._seat.leave(error)
        return await super().__aexit__(kind, error, traceback)

    def hand_in(self, seconds: float, why: str = TOLD_TO_GO) -> bool:
        """See `Learner.hand_in`; every rank calls it."""
        return blocking(self._hand_in_together(seconds, why))

    async def _hand_in_together(self, seconds: float, why: str) -> bool:
        await self._last_plan()
        self._at = HANDING_IN
        handed = await self._hand_in(seconds, why)
        await self._conduct("handed", handed=handed)
        return handed

    async def _close(self) -> None:
        if self._closed:
            return
        await self._last_plan()
        self._at = CLOSING
        await super()._close()
        await self._conduct("closed")
        self._seat.leave()

    async def _last_plan(self) -> None:
        """What was planned for a step that will not come is done now."""
        if self._seat.under_way is not None:
            self._reported(await self._seat.arrive())
            await self._carry_out(self._plan)
            self._untrained = self._count.ahead

    _untrained = (0, 0)
    """Steps and tokens that the machine was told of, and that will not come."""
