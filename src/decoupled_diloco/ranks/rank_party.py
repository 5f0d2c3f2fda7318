"""The party of a multi-rank learner: rank 0 takes part in the run, the other ranks follow it.

*Leader.* Rank 0 has the connections and the only `LearnerMachine`, which is one step ahead. At
boundary b, rank 0 already reports to the machine the step that ends at b + 1. The machine's orders
become the plan of b + 1, which travels to all ranks while this step is trained. So no step waits
for a plan, and every rank does the same at the same boundary.

*Followers* execute the plans, and report how many tokens they trained.

Source: rule 18 of the method's description (`docs/how-to/many-gpus.md`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, ClassVar

from decoupled_diloco.config.method import plan_of, read_public
from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.learner import process
from decoupled_diloco.learner.boundary import Boundary, LearnerProgress
from decoupled_diloco.learner.checkpointer import Written
from decoupled_diloco.learner.data_leases import DataLeases
from decoupled_diloco.learner.ending import Closing
from decoupled_diloco.learner.membership import Admission
from decoupled_diloco.learner.option_groups import ParticipantOptions, SyncerConnection
from decoupled_diloco.learner.reports import StepReports
from decoupled_diloco.merge import Layout
from decoupled_diloco.protocol.leaving import ASKED_TO_STOP
from decoupled_diloco.protocol.messages import StepFinished
from decoupled_diloco.ranks.rank_checkpoints import LeaderCheckpointer
from decoupled_diloco.ranks.rank_process import Document, RankSeat
from decoupled_diloco.ranks.sync_ranks import SyncRankExchange
from decoupled_diloco.runtime import now
from decoupled_diloco.tape.samples import LossMeasured

FIRST = "its first step"
HOLDING = "a step that holds"
JOINING = "joining"
CLOSING = "close"
FLUSHING = "flush"
"""A rank's place in the program, which it sends to the other ranks."""

REPLACED = "another Learner with its name was created in its process"

NOTHING: Document = {"orders": [], "applied": {}}
"""A plan without orders."""

CONTACT_SECONDS = 30.0
"""Longest time between two exchanges while the leader waits. The other ranks wait in a collective,
which has a timeout."""


class NoLeases(DataLeases):
    """Rejects data leases: ranks cannot split the batches of a lease among themselves."""

    def __init__(self) -> None:
        self.taken = lambda: 0

    def open(self, parts: int, ahead: int, taken: Callable[[], int]) -> None:
        """See `DataLeases.open`.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "leased data need a single-process learner: with several ranks, split the data in the "
            "training program"
        )

    def close(self) -> None:
        """See `DataLeases.close`; there are no leases to close."""


class TokenCount:
    """Counts the learner's tokens: known ones of trained steps, and estimates of planned steps.

    The machine receives a step before it is trained. Its tokens are estimated as those of the last
    trained step. Later estimates correct the difference once the real number is known.
    """

    def __init__(self) -> None:
        self._steps = self._tokens = self._last = 0
        self._planned_steps = self._planned_tokens = 0

    def reported(self, tokens: int) -> None:
        """Add the tokens of one more step that all ranks have trained."""
        self._steps += 1
        self._tokens += tokens
        self._last = tokens

    @property
    def ahead(self) -> tuple[int, int]:
        """Steps and tokens that the machine has received, and the ranks have not reported yet."""
        return self._planned_steps - self._steps, self._planned_tokens - self._tokens

    def next(self) -> int:
        """Return the tokens to report to the machine for its next step, at least 0."""
        self._planned_steps += 1
        unknown = self._planned_steps - self._steps
        tokens = max(0, self._tokens + unknown * self._last - self._planned_tokens)
        self._planned_tokens += tokens
        return tokens


class LeaderRank:
    """Rank 0 of a multi-rank learner.

    Args:
        seat: Its context among the ranks.
        boundary: Its boundaries, whose orders become plans.
        ending: Flushes and closes the learner.
        reports: Logs and records each step.
    """

    ends_alone: ClassVar[bool] = False

    def __init__(
        self, seat: RankSeat, boundary: Boundary, ending: Closing, reports: StepReports
    ) -> None:
        self.closed = False
        self.boundary = boundary
        self.membership = boundary.membership
        self.addresses = self.membership.addresses
        self.leases: DataLeases = NoLeases()
        self._seat = seat
        self.ending = ending
        self._reports = reports
        exchange, checkpointer = self.membership.background.bodies, boundary.checkpointer
        assert isinstance(exchange, SyncRankExchange)
        assert isinstance(checkpointer, LeaderCheckpointer)
        self._exchange, self._checkpointer = exchange, checkpointer
        self._count = TokenCount()
        self._plan: Document = dict(NOTHING)
        self._admitted: Document = {}
        self._loss: float | None = None
        self._at = JOINING
        self._met_at = now()
        checkpointer.exchange = exchange

    @property
    def name(self) -> str:
        """See `Party`."""
        return self.membership.name

    @property
    def admission(self) -> Admission:
        """See `Party`."""
        return self.membership.admission

    @property
    def progress(self) -> LearnerProgress:
        """See `Party`; the tokens of the last two steps may be an estimate."""
        return self._seat.progress

    @property
    def versions(self) -> tuple[str, ...]:
        """See `Party`."""
        return self._seat.versions

    @property
    def _at(self) -> str:
        """This rank's place in the program, which the other ranks watch."""
        return self._seat.group.watch.place

    @_at.setter
    def _at(self, place: str) -> None:
        self._seat.group.watch.place = place

    async def join(self) -> None:
        """See `Party`."""
        try:
            await self._join()
        except BaseException as error:
            self._leave("", abrupt=True)
            if isinstance(error, DilocoError):
                self._seat.leave(error)
            raise

    async def _join(self) -> None:
        boundary = self.boundary
        await self.membership.join(self)
        self._enter_run()
        if self._admitted:
            await self._conduct()  # with it the sync ranks can connect, which `read` needs
        if self.membership.background.restoring:
            await self._checkpointer.read()
        boundary.begin()
        self._reports.start(self)
        self._seat.progress = boundary.progress
        fragments = self.membership.state.fragments
        boundary.applied |= {p: str(view.held) for p, view in enumerate(fragments)}
        await self._conduct("joined")

    async def wait(self, seconds: float) -> None:
        """Wait, and have all ranks execute orders that arrive meanwhile; see `Waits`."""
        changed = self.membership.background.changed
        self._enter_run()
        self._seat.raise_failure()
        self._checkpointer.raise_failure()
        if not (self._admitted or self._seat.store.waits or now() - self._met_at > CONTACT_SECONDS):
            await self.membership.wait(min(seconds, CONTACT_SECONDS))
            return
        # Release the caller's lock while the ranks meet: they may wait for values that the
        # background can only deliver with the lock.
        changed.__exit__(None, None, None)
        try:
            await self._conduct()
        finally:
            changed.__enter__()

    def _enter_run(self) -> None:
        """After the run has admitted this learner, send its settings to the other ranks, once."""
        shared = self.membership.background.shared
        if shared is None or self._seat.tensors is not None:
            return
        self._seat.admit(shared.tensors.plan).saving = self._checkpointer.saving
        layout, addresses = shared.tensors.plan.layout.to_json(), self._exchange.addresses
        self._admitted = {**asdict(self.admission), "layout": layout, "addresses": addresses}

    async def _conduct(self, last: str = "", **besides: Any) -> tuple[int, ...]:
        """Exchange a plan with the other ranks, which wait in `FollowerRank._follow`.

        Args:
            last: Ends their wait, if it is the value that they expect.
            besides: Other fields of the plan.

        Returns:
            The fragments whose global weights were applied.
        """
        plan = self._next_plan() | besides
        if self._admitted:
            plan["admitted"], self._admitted = self._admitted, {}
        await self._seat.meet(self._at, plan=plan, last=last)
        self._met_at = now()
        return await self._seat.carry_out(plan)

    def _next_plan(self) -> Document:
        applied, self.boundary.applied = self.boundary.applied, {}
        orders = [] if self._seat.tensors is None else self._seat.store.take()
        joined = self.membership.background.shared is not None
        progress = self.boundary.progress if joined else self._seat.progress
        facts = asdict(replace(progress, refused=progress.refused[:200]))
        return {
            "orders": orders,
            "applied": {str(p): version for p, version in applied.items()},
            "facts": facts,
        }

    async def step(self, tokens: int, loss: float | None) -> bool:
        """See `Party`; executes the plan that was made one step ago."""
        boundary, seat = self.boundary, self._seat
        self.membership.raise_failure()
        seat.raise_failure()
        seat.check_model()
        boundary.trained.check_optimizer()
        began = now()
        report: Document = {"tokens": tokens, "loss": loss}
        if seat.under_way is None:  # the first plan has no earlier step to travel with
            self._reported(await seat.meet(FIRST, **report))
            self._decide()
            seat.start(FIRST, plan=self._plan)
            report = {}
        self._reported(await seat.arrive())
        plan = self._plan
        applied = await seat.carry_out(plan)
        if plan["hold"]:
            self._at = HOLDING
            applied += await boundary.hold(self)
            applied += await self._conduct("released")
        boundary.trained.applied(applied)
        self._decide()
        seat.start(seat.next_step(), plan=self._plan, **report)
        self._reports.stepped(began, applied, self._loss)
        return bool(plan["facts"]["goes_on"])

    def _decide(self) -> None:
        """Make the plan of the next boundary."""
        orders = self.boundary.at(StepFinished(self._count.next()), self._loss)
        if self._checkpointer.due:
            self.boundary.keep()
        self._plan = {**self._next_plan(), "hold": orders.hold}

    def checkpoint(self, run_checkpoint: int | None) -> Future[Written] | None:
        """See `Party`; the checkpoint is taken at the end of the step after the next one."""
        if self._seat.under_way is None or self._checkpointer.folder is None:
            return self.boundary.keep(run_checkpoint)
        return self._checkpointer.want()

    def _reported(self, documents: Sequence[Document]) -> None:
        self._met_at = now()
        if "tokens" not in documents[0]:
            return
        counted = [documents[rank] for rank in self._seat.model.counted]
        self._count.reported(sum(int(document["tokens"]) for document in counted))
        losses = [document["loss"] for document in documents if document["loss"] is not None]
        self._loss = sum(losses) / len(losses) if losses else None
        if self._loss is not None:
            at = self.progress
            self.membership.background.sample(
                LossMeasured(at.steps, at.global_step, at.tokens, self._loss)
            )

    def count_from(self, steps: int, tokens: int) -> None:
        """See `Party`."""
        self.boundary.count_from(steps, tokens)
        self._seat.progress = replace(self._seat.progress, steps=steps, tokens=tokens)

    def request_stop(self) -> None:
        """See `Party`; the next plan has all ranks stop."""
        self.boundary.stop_requested = True

    async def flush(self, seconds: float, why: str) -> bool:
        """See `Party`; every rank calls it."""
        await self._last_plan()
        self._at = FLUSHING
        flushed = not self.closed and await self.ending.flush(self, seconds, why)
        await self._conduct("flushed", flushed=flushed)
        return flushed

    async def close(self) -> None:
        """See `Party`; every rank calls it."""
        await self._last_plan()
        self._at = CLOSING
        with process.workers_may_end():
            await self.ending.close(self)
            over = self.membership.state.over  # newer than what the other ranks have received
            end = ASKED_TO_STOP if self.boundary.stop_requested else "its loop has ended"
            self._leave("the run is over" if over else end)
        await self._conduct("closed")
        self._seat.leave()

    async def _last_plan(self) -> None:
        """Execute the plan of a step that will not be trained."""
        if self._seat.under_way is not None:
            self._reported(await self._seat.arrive())
            await self._seat.carry_out(self._plan)
            self.boundary.untrained = self._count.ahead

    async def requests_stop(self, error: BaseException) -> bool:
        """See `Party`; always false, because all ranks would have to stop at the same step."""
        return False

    async def abort(self, error: BaseException) -> bool:
        """See `Party`."""
        self._seat.leave(error)
        self._leave(f"{type(error).__name__} in the training loop", abrupt=True)
        return False

    def replaced(self) -> None:
        """See `Party`; the other ranks are replaced when they create their new `Learner`."""
        self._seat.leave(DilocoError(REPLACED))
        self._leave(REPLACED, abrupt=True)

    def _leave(self, farewell: str, *, abrupt: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        self._reports.close()
        self.membership.leave(farewell, abrupt=abrupt)
        self._checkpointer.close()


class FollowerRank:
    """Any other rank of a multi-rank learner.

    Args:
        seat: Its context among the ranks.
        connection: The syncer's addresses, and optionally the client to use.
        options: The participant's options, with the auth token and the certificates.
    """

    ends_alone: ClassVar[bool] = False

    def __init__(
        self, seat: RankSeat, connection: SyncerConnection, options: ParticipantOptions
    ) -> None:
        self.closed = False
        self.addresses = connection.addresses
        self.leases: DataLeases = NoLeases()
        self._seat = seat
        self._connection, self._options = connection, options
        self._admission: Admission | None = None
        self._flushed = False

    @property
    def name(self) -> str:
        """See `Party`."""
        return self.admission.name

    @property
    def admission(self) -> Admission:
        """See `Party`; received from rank 0."""
        assert self._admission is not None, "call join() first"
        return self._admission

    @property
    def progress(self) -> LearnerProgress:
        """See `Party`."""
        return self._seat.progress

    @property
    def versions(self) -> tuple[str, ...]:
        """See `Party`."""
        return self._seat.versions

    async def join(self) -> None:
        """See `Party`."""
        await self._follow(JOINING, "joined")

    async def _follow(self, at: str, last: str) -> tuple[int, ...]:
        """Execute the leader's plans until its document has ``last``; return applied fragments."""
        applied = tuple[int, ...]()
        while True:
            document = (await self._seat.meet(at))[0]
            if "admitted" in document["plan"]:
                self._admit(document["plan"]["admitted"])
            applied += await self._seat.carry_out(document["plan"])
            self._flushed = bool(document["plan"].get("flushed"))
            if document["last"] == last:
                return applied

    def _admit(self, admitted: Document) -> None:
        layout, addresses = admitted.pop("layout"), admitted.pop("addresses")
        self._admission = Admission(**admitted)
        process.take_over(self._admission.name, self.addresses)
        config = read_public(json.dumps(self._admission.settings))
        plan = plan_of(Layout.from_json(layout), config)
        self._seat.admit(plan)
        self._seat.trained.admit(plan, config.sync.merge.buffers != "local")
        name = self._admission.name
        self._seat.open_link(plan, name, addresses, self._options, self._connection.client)

    async def step(self, tokens: int, loss: float | None) -> bool:
        """See `Party`."""
        seat = self._seat
        seat.raise_failure()
        seat.check_model()
        self._seat.trained.check_optimizer()
        report: Document = {"tokens": tokens, "loss": loss}
        if seat.under_way is None:
            await seat.meet(FIRST, **report)
            seat.start(FIRST)
            report = {}
        plan = (await seat.arrive())[0]["plan"]
        applied = await seat.carry_out(plan)
        if plan["hold"]:
            applied += await self._follow(HOLDING, "released")
        self._seat.trained.applied(applied)
        seat.start(seat.next_step(), **report)
        return bool(plan["facts"]["goes_on"])

    def checkpoint(self, run_checkpoint: int | None) -> None:
        """See `Party`; does nothing, because the leader orders checkpoints."""

    def count_from(self, steps: int, tokens: int) -> None:
        """See `Party`."""
        self._seat.progress = replace(self._seat.progress, steps=steps, tokens=tokens)

    def request_stop(self) -> None:
        """See `Party`; does nothing, because only the leader's request counts."""

    async def flush(self, seconds: float, why: str) -> bool:
        """See `Party`; every rank calls it."""
        await self._last_plan()
        await self._follow(FLUSHING, "flushed")
        return self._flushed

    async def close(self) -> None:
        """See `Party`; every rank calls it."""
        await self._last_plan()
        self.closed = True
        await self._follow(CLOSING, "closed")
        self._seat.leave()

    async def _last_plan(self) -> None:
        if self._seat.under_way is not None:
            await self._seat.carry_out((await self._seat.arrive())[0]["plan"])

    async def requests_stop(self, error: BaseException) -> bool:
        """See `Party`; always false, because all ranks would have to stop at the same step."""
        return False

    async def abort(self, error: BaseException) -> bool:
        """See `Party`."""
        self.closed = True
        self._seat.leave(error)
        return False

    def replaced(self) -> None:
        """See `Party`; the other ranks are replaced when they create their new `Learner`."""
        self._seat.leave(DilocoError(REPLACED))
        self.closed = True
