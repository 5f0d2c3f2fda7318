"""Any other rank of a learner of many: it carries out what rank 0 plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from decoupled_diloco.config.method import plan_of, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner import process
from decoupled_diloco.learner.launched import finds_its_run
from decoupled_diloco.learner.learner import TOLD_TO_GO
from decoupled_diloco.learner.losses import StepLosses
from decoupled_diloco.learner.modules import Model, plain
from decoupled_diloco.learner.optimizers import InnerOptimizers, Optimizers
from decoupled_diloco.learner.participation import addresses_in
from decoupled_diloco.merge import Layout
from decoupled_diloco.ranks.many import (
    BEFORE,
    CLOSING,
    FIRST,
    HANDING_IN,
    HOLDING,
    JOINING,
    NoLeases,
    OfMany,
)
from decoupled_diloco.ranks.seat import Document, RankSeat, seated
from decoupled_diloco.runtime import blocking


class FollowerRank(OfMany):
    """Any other rank of a learner of many ranks."""

    _handed = False

    @finds_its_run("learner")
    def __init__(
        self,
        model: Model,
        syncer: str | Sequence[str] | None = None,
        *,
        optimizer: Optimizers | None = None,
        after_apply: Callable[[tuple[int, ...]], None] | None = None,
        seat: RankSeat | None = None,
        **arguments: Any,
    ) -> None:
        self._optimizers = None if optimizer is None else InnerOptimizers(optimizer)
        self._closed, self._losses = False, StepLosses()
        self._token, self._tls = arguments.get("token"), arguments.get("tls")
        self._client = arguments.get("client")
        told = {**arguments, "optimizer": optimizer, "after_apply": after_apply}
        assert syncer is not None, "the launcher's, if none is given"
        self.addresses = addresses_in(syncer)
        self._seat = seat or blocking(seated(model, told))
        self._model, self._after_apply = plain(model), after_apply
        self._guard = self._guard_of(self._model, self._seat.model.layout)
        self._take_optimizer(optimizer, after_apply is None)
        self._facts, self._held = dict(BEFORE), {}
        self.leases = NoLeases()
        self._enter()

    async def _join(self) -> None:
        self._told_of_restored(await self._follow(JOINING, "joined"))

    def checkpoint(self, run_checkpoint: int | None = None) -> None:
        """See `Learner.checkpoint`: the leader tells when; on other ranks this is nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Learner.load_state_dict`."""
        if state.get("learner") != self.name:
            raise ConfigError(f"the state is of learner {state.get('learner')!r}, not {self.name}")
        self._facts |= {"steps": int(state["steps"]), "tokens": int(state["tokens"])}

    async def _follow(self, at: str, last: str) -> tuple[int, ...]:
        """Does what the leader orders, until it says the last."""
        applied = tuple[int, ...]()
        while True:
            document = (await self._seat.meet(at))[0]
            if "admitted" in document["plan"]:
                self._admit(document["plan"]["admitted"])
            applied += await self._carry_out(document["plan"])
            self._handed = bool(document["plan"].get("handed"))
            if document["last"] == last:
                return applied

    def _admit(self, admitted: Document) -> None:
        self.name, self._epoch = str(admitted["name"]), int(admitted["epoch"])
        self._index, self._count = int(admitted["index"]), int(admitted["count"])
        process.take_over(self.name, self.addresses)
        self._public = admitted["settings"]
        config = read_public(json.dumps(self._public))
        plan = plan_of(Layout.from_json(admitted["layout"]), config)
        self._seat.admit(plan)
        self._guard.compares_buffers = config.sync.buffers != "local"
        self._seat.carry(
            plan, self.name, admitted["addresses"], self._token, self._tls, self._client
        )

    async def _take_step(self, tokens: int, loss: float | None) -> bool:
        self._seat.raise_failure()
        self._check_model()
        self._check_optimizer()
        said: Document = {"tokens": tokens, "loss": loss}
        if self._seat.under_way is None:
            await self._seat.meet(FIRST, **said)
            self._seat.start(FIRST)
            said = {}
        plan = (await self._seat.arrive())[0]["plan"]
        applied = await self._carry_out(plan)
        if plan["hold"]:
            applied += await self._follow(HOLDING, "released")
        if applied and self._after_apply is not None:
            self._after_apply(applied)
        self._seat.start(self._step_name(), **said)
        return bool(plan["facts"]["go"])

    def hand_in(self, seconds: float, why: str = TOLD_TO_GO) -> bool:
        """See `Learner.hand_in`; every rank calls it."""
        return blocking(self._hand_in(seconds, why))

    async def _hand_in(self, seconds: float, why: str) -> bool:
        await self._last_plan()
        await self._follow(HANDING_IN, "handed")
        return self._handed

    async def _close(self) -> None:
        if self._closed:
            return
        await self._last_plan()
        self._leave("")
        await self._follow(CLOSING, "closed")
        self._seat.leave()

    async def _last_plan(self) -> None:
        if self._seat.under_way is not None:
            await self._carry_out((await self._seat.arrive())[0]["plan"])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if kind is None:
            await self._close()
        elif not self._closed:
            self._leave("")
            self._seat.leave(error)
        return False

    def _leave(self, farewell: str, *, abrupt: bool = False) -> None:
        self._closed = True
        process.leave(self)

    def _raise_failure(self) -> None:
        self._seat.raise_failure()

    def stop_waiting(self) -> None:
        """See `Learner.stop_waiting`: of the leader alone does it end anything."""

    @property
    def settings(self) -> dict[str, Any]:
        """See `Learner.settings`."""
        return dict(self._public)

    @property
    def epoch(self) -> int:
        """See `Learner.epoch`."""
        return self._epoch

    @property
    def index(self) -> int:
        """See `Learner.index`: the learner's number, the same on all of its ranks."""
        return self._index

    @property
    def count(self) -> int:
        """See `Learner.count`."""
        return self._count
