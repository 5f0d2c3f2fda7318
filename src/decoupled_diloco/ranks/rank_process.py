"""A rank's context in its learner: what the leader and the followers do alike.

All ranks meet at every boundary: they exchange documents (`group`). The leader's document has the
*plan*: what every rank does to its parameters at this boundary. Between two steps, the exchange
runs while the step is trained. Where the training loop waits anyway (joining, holding, closing),
the ranks wait for the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from decoupled_diloco.config.addresses import is_store
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
from decoupled_diloco.ranks.rank_store import RankedStore, SyncRankValues
from decoupled_diloco.ranks.sync_ranks import SyncRankExchange, SyncRankLink, sharding_for
from decoupled_diloco.ranks.tensors import RankTensors
from decoupled_diloco.runtime import runtime
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tokens import read_secret

Document = dict[str, Any]

MARK = ".ranks"
"""A file in the checkpoint folder by which the ranks verify that they share the folder."""

_ERRORS: dict[str, type[DilocoError]] = {
    kind.__name__: kind for kind in (ConfigError, TransportError)
}


class RankSeat:
    """See the module; only the training thread may use it.

    Args:
        model: This rank's part of the model.
        around: Provides the other ranks.

    Attributes:
        model: This rank's part of the learner's model, after `take`.
        key: The key of the leader's server, for the sync ranks; after `take`.
        trained: The part of the model with its optimizers, after `train`.
        store: The parameter store of rank 0; its orders become plans. After `take`.
        hosts: The host of each rank, after `take`.
        sync_rank_values: The ranges of fragments that this rank has as a sync rank.
        link: The link to the leader; only on a sync rank other than rank 0.
        failure: The error of a background thread, if any.
        under_way: The exchange that was started and not yet awaited, if any.
        progress: The learner's progress according to the last plan that was executed.
    """

    model: RankModel
    trained: TrainedModel
    store: RankedStore
    key: str
    hosts: tuple[str, ...]

    def __init__(self, model: Model, around: RankSurroundings) -> None:
        self._given = model
        self._module = plain(model)
        self._sharded = sharded_modules(model)  # kept: to walk a large model takes a millisecond
        self.around = around
        self.group = around.group
        self.tensors: RankTensors | None = None
        self.sync_rank_values = SyncRankValues()
        self.link: SyncRankLink | None = None
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
        """Meet the other ranks and compare arguments, once; return this object.

        Args:
            arguments: Arguments that must be the same on every rank, by name.
            stateful: Objects that checkpoints keep besides the model, such as the inner optimizer.
            folder: The folder for checkpoints; ``None``: none are kept.
            check: Verifies what may be wrong on this rank alone; raises `ConfigError`.

        Raises:
            ConfigError: On every rank, if there is an error on one; the message has its rank.
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
            # Not raised here: the other ranks would wait in the exchange until its timeout.
            mine["problem"] = str(error)
        documents = await self.group.exchanged(mine)
        for rank, document in enumerate(documents):
            if document.get("problem"):
                raise ConfigError(f"rank {rank}: {document['problem']}")
            _reject_difference(documents[0]["arguments"], document["arguments"], rank)
        self.key = str(documents[0]["key"])
        self.hosts = tuple(str(document["host"]) for document in documents)
        sync_ranks = chosen_sync_ranks(arguments["sync_ranks"] or 1, self.hosts)
        self.model = joined(self._module, documents, sync_ranks)
        self.store = RankedStore(self.model.layout)
        if folder is not None:
            await self._require_shared(folder, documents[0]["mark"])
        return self

    @property
    def leads(self) -> bool:
        return self.group.rank == 0

    async def _require_shared(self, folder: Path, mark: str) -> None:
        """Reject a folder that is not the same one on all machines."""
        sees = (folder / MARK).is_file() and (folder / MARK).read_text() == mark
        for rank, document in enumerate(await self.group.exchanged({"sees": sees})):
            if not document["sees"]:
                raise ConfigError(
                    f"rank {rank} does not see what rank 0 wrote into {folder}: pass checkpoint= a "
                    "folder on a disk that all ranks share"
                )

    def train(self, optimizers: InnerOptimizers | None) -> TrainedModel:
        """Create and return `trained`."""
        self.trained = TrainedModel(
            self._given,
            optimizers,
            self.model.layout,
            buffers_in_place=True,
            settle=self.reshard,
        )
        return self.trained

    @contextmanager
    def reports_errors(self) -> Iterator[None]:
        """Raise an error of the block on the other ranks, too."""
        try:
            yield
        except DilocoError as error:
            self.leave(error)
            raise

    def exchange(self, context: Context) -> SyncRankExchange:
        """Return rank 0's exchange of payloads, which the sync ranks hold."""
        return SyncRankExchange(
            context,
            sharding=self.model.sharding,
            values=self.sync_rank_values,
            store=self.store,
            key=self.key,
            hosts=self.hosts,
            around=self.around,
        )

    def checkpointer(self, *arguments: Any) -> LeaderCheckpointer:
        """Return rank 0's checkpointer; all ranks write the checkpoints. See `Checkpointer`."""
        return LeaderCheckpointer(self.store, self.group.size, *arguments)

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment, by index, according to the plans that were executed."""
        return tuple(self._held[fragment] for fragment in sorted(self._held))

    def check_model(self) -> None:
        """Verify that the model has not changed.

        Raises:
            ConfigError: It has; the other ranks receive the error, too.
        """
        try:
            self.trained.guard.check()
        except ConfigError as error:
            self.leave(error)
            raise

    def next_step(self) -> str:
        """Return the name of the next step; ranks compare it to verify that they are in step."""
        self._calls += 1
        return f"step {self._calls}"

    async def carry_out(self, plan: Document) -> tuple[int, ...]:
        """Execute a plan; return the fragments whose global weights were applied."""
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
        """Take the run's partition of the model; from now on, plans can be executed."""
        self.model = replace(self.model, sharding=sharding_for(plan, self.model.sharding))
        self.tensors = RankTensors(
            self.model,
            plan.fragments,
            self.group.rank,
            self.group.all_to_all,
            self.sync_rank_values,
            before_write=self.reshard,
            failed=self._failed,
            state=self._state,
        )
        return self.tensors

    def open_link(
        self,
        plan: MergePlan,
        learner: str,
        addresses: Sequence[str],
        options: ParticipantOptions,
        client: Callable[[], Client] | None,
    ) -> None:
        """Open the link to the leader, if this rank is a sync rank other than the leader.

        Args:
            plan: The run's merge plan.
            learner: This learner's id.
            addresses: Possible addresses of rank 0.
            options: The participant's options, with the auth token and the certificates.
            client: Creates the syncer's client; default: an HTTP client with token and TLS.
        """
        if not self.leads and self.group.rank in self.model.sharding.sync_ranks:
            self.link = SyncRankLink(
                self.group.rank,
                addresses,
                partial(self.around.client, "sync-rank", self.key, addresses, within=True),
                client
                or partial(
                    self.around.client, learner, read_secret(options.auth_token), tls=options.tls
                ),
                plan,
                self.model.sharding,
                self.sync_rank_values,
                self._failed,
            )

    async def meet(self, at: str, **report: Any) -> list[Document]:
        """Exchange documents and wait for all ranks, after the orders of earlier plans are done.

        Args:
            at: This rank's place in the program.
            report: Other fields of its document.

        Returns:
            The document of each rank.

        Raises:
            ConfigError, DilocoError: See `arrive`.
        """
        self.group.watch.place = at
        if self.tensors is not None:
            await self.tensors.idle()
        self.start(at, **report)
        return await self.arrive()

    def start(self, at: str, **report: Any) -> None:
        """Start an exchange; `arrive` waits for it. Arguments as for `meet`."""
        assert self.under_way is None
        self.group.watch.place = at
        self.under_way = self.group.exchange({"at": at, **report})

    async def arrive(self) -> list[Document]:
        """Wait for the exchange that is under way, and return the document of each rank.

        Raises:
            ConfigError: The ranks are not at the same place in their programs.
            DilocoError: A rank has failed; every rank raises its error.
        """
        exchange, self.under_way = self.under_way, None
        assert exchange is not None
        documents = await exchange.wait()
        # Errors come first: a rank that failed is at another place, which is only a consequence.
        for rank, document in enumerate(documents):
            if "failed" in document:
                kind = _ERRORS.get(document.get("kind", ""), TransportError)
                raise kind(f"rank {rank} of this learner: {document['failed']}")
        for rank, document in enumerate(documents):
            if document["at"] != documents[0]["at"]:
                raise ConfigError(
                    f"rank {rank} of this learner is at {document['at']}, rank 0 at "
                    f"{documents[0]['at']}: every rank must make the same calls in every step"
                )
        return documents

    def raise_failure(self) -> None:
        """Raise the background thread's error, if any."""
        if self.failure is not None:
            raise self.failure

    def leave(self, failed: BaseException | None = None) -> None:
        """End this rank's part in the learner; send an error, if any, to the other ranks."""
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
        self.sync_rank_values.fail(error)
        self.store.failed(error)

    def reshard(self) -> None:
        """Make FSDP2 hold its shards; see `model.reshard`."""
        reshard(self._sharded)


async def seated(
    model: Model,
    options: ParticipantOptions,
    sharing: StateSharing,
    objects: Mapping[str, Any],
    around: RankSurroundings | None = None,
) -> RankSeat:
    """Return this rank's context, once all ranks have arrived and their arguments agree.

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
        if is_store(str(options.checkpoint.folder)):
            raise ConfigError(
                f"checkpoint={options.checkpoint.folder!r} cannot be combined with several ranks: "
                "pass a folder that all ranks share; [run] store mirrors the run folder"
            )
        for name, thing in objects.items():
            if folder is not None:
                require_stateful(name, thing)

    # These must be the same on every rank.
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
"""Allowed values of ``StateSharing.objects`` for a multi-rank learner: none, or the default."""


def _folder_of(options: ParticipantOptions) -> Path | None:
    folder, name = options.checkpoint.folder, options.name
    return None if folder is None or name is None else Path(folder) / name


def _marked(folder: Path) -> str:
    """Write a mark into the checkpoint folder and return it; all ranks must see it."""
    mark = runtime().unique_id()
    try:
        runtime().disk.put(folder / MARK, mark.encode())
    except OSError as error:
        raise ConfigError(
            f"checkpoint=: {folder} cannot be written ({error.strerror}): pass a folder that this "
            "process may write to, or leave checkpoint= out"
        ) from error
    return mark


def _reject_difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    for name, value in first.items():
        if other.get(name) != value:
            raise ConfigError(
                f"rank {rank} of this learner has {name}={other.get(name)!r}, rank 0 has "
                f"{value!r}: pass the same arguments on every rank"
            )
