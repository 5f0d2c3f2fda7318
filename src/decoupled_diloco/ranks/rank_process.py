"""One rank's place in its learner: what leader and followers do alike.

All ranks meet at every boundary by one exchange of documents (`group`), in which the leader's has
the *plan*: what every rank does to its parameters there. Between two steps the exchange is under
way while the step is trained; where the training loop waits anyway (joining, holding, closing) it
is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import ConfigError, DilocoError, TransportError
from decoupled_diloco.learner.boundary import LearnerProgress
from decoupled_diloco.learner.checkpointer import require_stateful
from decoupled_diloco.learner.learner_checkpoint import OPTIMIZER
from decoupled_diloco.learner.learner_model import (
    Model,
    TrainedModel,
    give_buffers_memory,
    plain,
    refuse_what_cannot_be_written,
    refuse_what_is_not_finite,
)
from decoupled_diloco.learner.optimizers import InnerOptimizers
from decoupled_diloco.learner.option_groups import ParticipantOptions, StateSharing, Timeouts
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.ranks.group import Exchange, chosen_sync_ranks
from decoupled_diloco.ranks.rank_checkpoints import LeaderCheckpointer
from decoupled_diloco.ranks.rank_context import RankState, RankSurroundings
from decoupled_diloco.ranks.rank_model import RankModel, described, joined, reshard, sharded_modules
from decoupled_diloco.ranks.rank_store import CarriedValues, RankedStore
from decoupled_diloco.ranks.sync_ranks import CarriedExchange, CarrierLink, cut_for
from decoupled_diloco.ranks.tensors import RankTensors
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tokens import read_secret

Document = dict[str, Any]

MARK = ".ranks"
"""A file by which all ranks see that they have one folder."""

_ERRORS: dict[str, type[DilocoError]] = {
    kind.__name__: kind for kind in (ConfigError, TransportError)
}


class RankSeat:
    """See the module; used by the thread that trains.

    Args:
        model: This rank's part of the model.
        around: By which it meets the others.

    Attributes:
        model: This rank's part of the learner's model, once it has met the others.
        key: By which carriers open the leader's server.
        trained: That part with its optimizers, from `train` on.
        store: By which rank 0 tells the ranks what is ordered of the parameters.
        hosts: Of each rank.
        progress: As of the last plan that was carried out.
    """

    model: RankModel
    trained: TrainedModel
    store: RankedStore
    key: str
    hosts: tuple[str, ...]

    def __init__(self, model: Model, around: RankSurroundings) -> None:
        self._given = model
        self._module = plain(model)
        self._sharded = sharded_modules(model)  # walking a large model takes a millisecond
        self.around = around
        self.group = around.group
        self.tensors: RankTensors | None = None
        self.carried = CarriedValues()
        self.link: CarrierLink | None = None
        self.failure: BaseException | None = None
        self.under_way: Exchange | None = None
        self.progress = LearnerProgress()
        self._held: dict[int, str] = {}
        self._calls = 0
        self._state: RankState | None = None

    async def take(
        self,
        arguments: dict[str, Any],
        stateful: Mapping[str, Any],
        folder: Path | None,
        check: Callable[[], None],
    ) -> RankSeat:
        """Meets the others, once; returns itself.

        Args:
            arguments: What has to be the same on every rank, by name.
            stateful: What checkpoints keep beside the model, the inner optimizer among it.
            folder: Where checkpoints are, or ``None``: none are kept.
            check: What else may be wrong on this rank alone; raises `ConfigError`.

        Raises:
            ConfigError: On every rank, if something is wrong on one; the rank is named.
            TransportError: A rank is gone.
        """
        mine: Document = {"arguments": arguments, "host": self.around.host()}
        try:
            refuse_what_cannot_be_written(self._module)
            give_buffers_memory(self._module)
            refuse_what_is_not_finite(self._module)
            check()
            if folder is not None:
                self._state = self.around.sharded_state(self._module, stateful)
                mine["mark"] = _marked(folder) if self.leads else ""
            mine["key"] = runtime().secret() if self.leads else ""
            mine |= described(self._module, self._given, self.group.rank)
        except ConfigError as error:
            mine["problem"] = str(error)
        documents = await self.group.exchanged(mine)
        for rank, document in enumerate(documents):
            if document.get("problem"):
                raise ConfigError(f"rank {rank}: {document['problem']}")
            _refuse_difference(documents[0]["arguments"], document["arguments"], rank)
        self.key = str(documents[0]["key"])
        self.hosts = tuple(str(document["host"]) for document in documents)
        carriers = chosen_sync_ranks(arguments["sync_ranks"] or 1, self.hosts)
        self.model = joined(self._module, documents, carriers)
        self.store = RankedStore(self.model.layout)
        if folder is not None:
            await self._require_shared(folder, documents[0]["mark"])
        return self

    @property
    def leads(self) -> bool:
        return self.group.rank == 0

    async def _require_shared(self, folder: Path, mark: str) -> None:
        """Refuses a folder that is another one on another machine."""
        sees = (folder / MARK).is_file() and (folder / MARK).read_text() == mark
        for rank, document in enumerate(await self.group.exchanged({"sees": sees})):
            if not document["sees"]:
                raise ConfigError(
                    f"rank {rank} does not see what rank 0 has written in {folder}: give "
                    "checkpoint= a folder on a disk that all ranks share"
                )

    def train(self, optimizers: InnerOptimizers | None) -> TrainedModel:
        """This rank's part of the model with its optimizers."""
        self.trained = TrainedModel(
            self._given,
            optimizers,
            self.model.layout,
            buffers_in_place=True,
            settle=self.reshard,
        )
        return self.trained

    @contextmanager
    def tells_errors(self) -> Iterator[None]:
        """Raises what is wrong in the block on the other ranks, too."""
        try:
            yield
        except DilocoError as error:
            self.leave(error)
            raise

    def exchange(self, context: Context) -> CarriedExchange:
        """Rank 0's payloads, which the carriers have."""
        return CarriedExchange(
            context,
            sharding=self.model.sharding,
            values=self.carried,
            store=self.store,
            key=self.key,
            hosts=self.hosts,
            around=self.around,
        )

    def checkpointer(self, *arguments: Any) -> LeaderCheckpointer:
        """Rank 0's checkpoints, which all ranks write; see `Checkpointer`."""
        return LeaderCheckpointer(self.store, self.group.size, *arguments)

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that was taken last, by the plans carried out."""
        return tuple(self._held[fragment] for fragment in sorted(self._held))

    def check_model(self) -> None:
        """Reports a change of the model to all ranks."""
        try:
            self.trained.guard.check()
        except ConfigError as error:
            self.leave(error)
            raise

    def next_step(self) -> str:
        """The name of the step that begins, by which ranks see that they make the same calls."""
        self._calls += 1
        return f"step {self._calls}"

    async def carry_out(self, plan: Document) -> tuple[int, ...]:
        """Does what a plan says; returns the fragments whose global weights are taken."""
        writes = any(order[0] == "write" for order in plan["orders"])
        try:
            if self.tensors is not None:
                with self.trained.following() if writes else nullcontext():
                    await self.tensors.carry_out(plan["orders"])
        except DilocoError as error:
            self.leave(error)
            raise
        if plan.get("facts"):
            self.progress = LearnerProgress(**plan["facts"])
        applied = {int(fragment): version for fragment, version in plan["applied"].items()}
        self._held |= applied
        return tuple(applied)

    def admit(self, plan: MergePlan) -> RankTensors:
        """The run's cut is known: from here on plans can be carried out."""
        self.model = replace(self.model, sharding=cut_for(plan, self.model.sharding))
        self.tensors = RankTensors(
            self.model,
            plan.fragments,
            self.group.rank,
            self.group.all_to_all,
            self.carried,
            before_write=self.reshard,
            failed=self._failed,
            state=self._state,
        )
        return self.tensors

    def carry(
        self,
        plan: MergePlan,
        learner: str,
        addresses: Sequence[str],
        options: ParticipantOptions,
        client: Callable[[], Client] | None,
    ) -> None:
        """Does its part as a carrier, if it is one beside the leader.

        Args:
            plan: The run's.
            learner: This learner's id.
            addresses: Where rank 0 may be found.
            options: Among them the auth token and the certificates.
            client: Makes what dials the syncer; default: by the token and tls.
        """
        if not self.leads and self.group.rank in self.model.sharding.carriers:
            self.link = CarrierLink(
                self.group.rank,
                addresses,
                partial(self.around.client, "carrier", self.key, addresses, within=True),
                client
                or partial(
                    self.around.client, learner, read_secret(options.auth_token), tls=options.tls
                ),
                plan,
                self.model.sharding,
                self.carried,
                self._failed,
            )

    async def meet(self, at: str, **said: Any) -> list[Document]:
        """What every rank says here; waits for all, and for what was ordered before."""
        self.group.watch.place = at
        if self.tensors is not None:
            await self.tensors.idle()
        self.start(at, **said)
        return await self.arrive()

    def start(self, at: str, **said: Any) -> None:
        """Begins an exchange."""
        assert self.under_way is None
        self.group.watch.place = at
        self.under_way = self.group.exchange({"at": at, **said})

    async def arrive(self) -> list[Document]:
        """Ends the exchange that is under way.

        Raises:
            ConfigError: The ranks are not at the same place of their programs.
            DilocoError: What a rank has failed of, on every rank.
        """
        exchange, self.under_way = self.under_way, None
        assert exchange is not None
        documents = await exchange.wait()
        for rank, document in enumerate(documents):
            if "failed" in document:
                kind = _ERRORS.get(document.get("kind", ""), TransportError)
                raise kind(f"rank {rank} of this learner: {document['failed']}")
        for rank, document in enumerate(documents):
            if document["at"] != documents[0]["at"]:
                raise ConfigError(
                    f"rank {rank} of this learner is at {document['at']}, rank 0 at "
                    f"{documents[0]['at']}: every rank makes the same calls, step by step"
                )
        return documents

    def raise_failure(self) -> None:
        """What went wrong behind."""
        if self.failure is not None:
            raise self.failure

    def leave(self, failed: BaseException | None = None) -> None:
        """No further exchange; says why, if it is an error."""
        if failed is not None and self.under_way is None:
            self.start("error", failed=str(failed)[:300], kind=type(failed).__name__)
        if self.tensors is not None:
            self.tensors.close()
        self.group.watch.close()
        self._end(TransportError(f"this learner has ended: {failed or 'it was closed'}"))
        if self.link is not None:
            self.link.close()

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        self._end(error)

    def _end(self, error: BaseException) -> None:
        self.carried.fail(error)
        self.store.failed(error)

    def reshard(self) -> None:
        """See `model.reshard`."""
        reshard(self._sharded)


async def seated(
    model: Model,
    options: ParticipantOptions,
    sharing: StateSharing,
    objects: Mapping[str, Any],
    around: RankSurroundings | None = None,
) -> RankSeat:
    """Return this rank's place, once all ranks have arrived and their arguments agree.

    Raises:
        ConfigError: On every rank, if one rank finds an error.
    """
    reshard(sharded_modules(model))
    folder = _folder_of(options)

    def check() -> None:
        if tuple(sharing.objects) not in NOT_SHARED:
            raise ConfigError(
                f"StateSharing(objects={tuple(sharing.objects)!r}): a multi-rank learner shares no "
                "state: leave state_sharing= out"
            )
        for name, thing in objects.items():
            if folder is not None:
                require_stateful(name, thing)

    # What must be the same on every rank.
    alike: dict[str, Any] = {
        "name": options.name,
        "checkpoint": str(folder),
        "checkpoint interval_seconds": options.checkpoint.interval_seconds,
        "checkpoint state": sorted(objects),
        "sync_ranks": options.sync_ranks,
        "tracker": options.observability.tracker,
        "metrics_address": options.observability.metrics_address,
    }
    alike |= {f"timeouts.{f.name}": getattr(options.timeouts, f.name) for f in fields(Timeouts)}
    return await RankSeat(model, around or RankSurroundings()).take(alike, objects, folder, check)


NOT_SHARED: tuple[object, ...] = ((), (OPTIMIZER,))
"""What ``StateSharing.objects`` of a multi-rank learner may be: nothing, or the default."""


def _folder_of(options: ParticipantOptions) -> Path | None:
    folder, name = options.checkpoint.folder, options.name
    return None if folder is None or name is None else Path(folder) / name


def _marked(folder: Path) -> str:
    """Writes what all ranks have to see."""
    mark = runtime().unique_id()
    try:
        runtime().disk.put(folder / MARK, mark.encode())
    except OSError as error:
        raise ConfigError(
            f"checkpoint=: {folder} cannot be written ({error.strerror}): give a folder that this "
            "process may write to, or leave it out"
        ) from error
    return mark


def _refuse_difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    for name, value in first.items():
        if other.get(name) != value:
            raise ConfigError(
                f"rank {rank} of this learner has {name}={other.get(name)!r}, rank 0 has "
                f"{value!r}: give every rank the same arguments"
            )
