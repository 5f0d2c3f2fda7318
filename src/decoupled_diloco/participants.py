"""`Learner` takes part in a run; `Observer` follows one.

```python
learner = Learner(model, "http://syncer:7070", auth_token=auth_token)
for batch in loader:
    loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
    if not learner.step(loss):
        break
learner.close()
```

**Parts.** `Learner` is the public interface, and each of its parts is one object:

- `learner.membership.Membership` joins the run. Its *background* (`learner.background`, a thread
  with one event loop) keeps the connections to the coordinator and the shards.
- `learner.learner_model.TrainedModel` has the program's model and inner optimizers, and their
  checks.
- `learner.boundary.Boundary` works between two steps: it applies staged copies, copies due
  fragments, counts, and takes checkpoints. `learner.ending.Closing` works after the last step.
- `learner.reports.StepReports` reports each step to counters and to an experiment tracker.
- A *party* is the ranks that act as one learner. `learner.party.Solo` is a single process.
  `ranks.rank_party.LeaderRank` is rank 0 of several. Its boundary's orders become a plan, which all
  ranks execute one step later. `ranks.rank_party.FollowerRank` is any other rank. It has a model
  and a place among the ranks, but no membership.

**Threads.** The *training thread* calls everything in this module. In `step` it takes the
background's lock, passes `StepFinished` to the machine, executes the orders of the boundary under
the lock, and queues the others. The *background thread* drains the queue, sends, receives, and
passes events to the machine, under the same lock. Its *worker* encodes and decodes. A thread of the
checkpointer writes files. So `step` waits for a decision and for its own copies, never for a
transfer, an encoding or a disk.

**One step**, from here to the network: `Learner.step` → `Solo.step` → `Boundary.at` →
`Background.submit` → `Driver.decide` → `LearnerMachine.handle` → `LearnerTensors.apply` and
`snapshot`. `ShardLinks.send` sends the report.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from decoupled_diloco.errors import ConfigError, DilocoError
from decoupled_diloco.learner import process
from decoupled_diloco.learner.arguments import checkpointer_of, require_model, transfers_of
from decoupled_diloco.learner.boundary import Boundary
from decoupled_diloco.learner.checkpointer import Checkpointer, Written, all_stateful
from decoupled_diloco.learner.data_leases import DataLeases
from decoupled_diloco.learner.ending import Closing
from decoupled_diloco.learner.launched import Launched, launched_as
from decoupled_diloco.learner.learner_checkpoint import OPTIMIZER
from decoupled_diloco.learner.learner_model import (
    LastWeights,
    Model,
    TrainedModel,
    device_text,
    plain,
    refuse_what_is_not_finite,
)
from decoupled_diloco.learner.loops import StepTokens, attached, batches_of
from decoupled_diloco.learner.membership import Membership, open_tape
from decoupled_diloco.learner.optimizers import InnerOptimizers, Moments, Optimizers
from decoupled_diloco.learner.option_groups import (
    Checkpointing,
    MakeTape,
    Observability,
    ParticipantOptions,
    PartyFiles,
    StateSharing,
    SyncerConnection,
    Timeouts,
    chosen,
    in_one_line,
)
from decoupled_diloco.learner.parameter_store import (
    FollowedStore,
    ModuleStore,
    MomentStore,
    ParameterStore,
)
from decoupled_diloco.learner.party import Party, Solo
from decoupled_diloco.learner.payloads import BodyExchange
from decoupled_diloco.learner.reports import StepLosses, StepReports
from decoupled_diloco.learner.shared import Context
from decoupled_diloco.merge.layout import named_tensors, unwrapped
from decoupled_diloco.protocol.leaving import ASKED_TO_STOP
from decoupled_diloco.protocol.messages import GainsMeasured, Paused
from decoupled_diloco.ranks.group import chosen_sync_ranks, is_sharded, ranks_of_this_job
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import evaluation_of
from decoupled_diloco.transport.tls import TLSConfig

if TYPE_CHECKING:
    from decoupled_diloco.ranks.rank_process import RankSeat

logger = logging.getLogger(__name__)

T = TypeVar("T")

Tokens = int | float | torch.Tensor
Loss = float | torch.Tensor | None


def _no_learner() -> None:
    """Stand in for a learner in a pickle; see `Learner.__reduce__`."""


class Learner:
    """A training job's part in a run. It never makes the training loop wait.

    The constructor joins the run and overwrites the model's parameters with the global weights. If
    this is the first learner, its model's weights become the global ones. The constructor waits for
    the join. Steps do not wait for other processes, except with the run's setting
    ``wait="at_overlap"``.

    Args:
        model: The model. Its trainable parameters are synchronized in place, as are its floating
            buffers if the run's setting ``buffers`` is ``"mean"`` or ``"one"``. Frozen parameters
            are not. All tensors are on one device of any type. Wrappers (`torch.compile`, DDP,
            Fabric's) do not change the tensors' names. A rank that has several stages of a pipeline
            passes a list of them, in the pipeline's order.
        syncer: Address of a shard, such as ``"http://host:7070"``, or of several; any shard refers
            the learner to the others. Default: the address that the launcher has passed to this
            program, if the run has a ``command`` (see `docs/how-to/own-script.md`). Then other
            arguments with default values take the run's values.
        name: Name of this learner in the run, the same after each restart: 1 to 64 letters, digits,
            ``.``, ``_``, ``-``. Default: host name and process id.
        auth_token: The run's auth token, if it has one: the text of its token file, with or without
            the newline at its end.
        tls: Certificates for a syncer at ``https://``. Default: the system's CAs, and no
            certificate for this process.
        optimizer: The inner optimizer, or several in a list or dict (a GAN; Muon beside AdamW).
            Checkpoints hold its state. An optimizer that keeps separate copies of the weights would
            undo each global update. It is rejected in the first steps, unless the copies are
            registered (`register_weight_copies`) or refreshed (`on_weights_updated`).
        checkpoint: Folder of the learners' checkpoints, or `Checkpointing`. Default: none.
        timeouts: How long to wait for the syncer. Default: ``Timeouts()``.
        state_sharing: The state that a new learner gets from another one. Default: the optimizer's.
        observability: Experiment tracker, metrics endpoint and event tape. Default: none.
        sync_ranks: How many ranks of a multi-rank learner exchange data with the syncer, each its
            part of every fragment: a number, ``"hosts"`` (one per host), or ``"all"``. Default:
            rank 0 alone.
        party: The files of this learner's party, if several organizations train. Default: none.

    Raises:
        ConfigError: There is no ``syncer``, and no launcher has started this program; the model
            differs from the run's (the message names the first tensor that differs), or has NaN or
            infinite weights; the name, an address or the auth token is not valid; or a state in
            ``Checkpointing(state=…)`` cannot be saved, or does not fit its checkpoint.
        StorageError: The checkpoints cannot be read.
        AccessError: The syncer rejects the auth token.
        TransportError: A limit of ``timeouts`` has passed, or the port of the metrics address is
            in use.
    """

    def __init__(
        self,
        model: Model,
        syncer: str | Sequence[str] | SyncerConnection | None = None,
        *,
        name: str | None = None,
        auth_token: str | None = None,
        tls: TLSConfig | None = None,
        optimizer: Optimizers | None = None,
        checkpoint: str | Path | Checkpointing | None = None,
        timeouts: Timeouts | None = None,
        state_sharing: StateSharing | None = None,
        observability: Observability | None = None,
        sync_ranks: int | Literal["hosts", "all"] | None = None,
        party: PartyFiles | None = None,
    ) -> None:
        require_model(model)
        given = ParticipantOptions(
            name,
            auth_token,
            tls,
            chosen("timeouts", timeouts, Timeouts),
            chosen("observability", observability, Observability),
            sync_ranks,
            Checkpointing.of(checkpoint),
            chosen("party", party, PartyFiles),
        )
        sharing = chosen("state_sharing", state_sharing, StateSharing)
        if syncer is None:
            syncer, given = launched_as("learner").fill(given)
        connection = SyncerConnection.of(syncer)
        objects = all_stateful(optimizer, given.checkpoint.state)
        optimizers = objects.get(OPTIMIZER)
        # The parts of a one-rank learner; a multi-rank learner replaces some of them below.
        exchange: Callable[[Context], BodyExchange] = BodyExchange
        kind: Callable[..., Checkpointer] = Checkpointer
        device = ""
        seat = self._seat_of(model, given, sharing, objects)
        self._party: Party
        # An error on one rank is raised on all ranks: the others wait for it to join.
        with nullcontext() if seat is None else seat.reports_errors():
            if seat is None:
                chosen_sync_ranks(given.sync_ranks or 1, ["this one"])
                store, trained = _alone(model, optimizers)
            else:
                trained, store = seat.train(optimizers), seat.store
                exchange, kind, sharing = seat.exchange, seat.checkpointer, StateSharing(())
                device = f", and {seat.group.size - 1} more ranks"
            self._trained, self._losses = trained, StepLosses()
            if seat is not None and not seat.leads:
                from decoupled_diloco.ranks.rank_party import FollowerRank

                self._party = FollowerRank(seat, connection, given)
            else:
                transfers = transfers_of(objects, sharing.objects)
                # Before the folder is read: the earlier learner may still write a checkpoint.
                process.take_over(given.participant_name, connection.addresses)
                checkpointer = checkpointer_of(given, trained.module, objects, kind)
                membership = Membership(
                    store,
                    connection,
                    given,
                    name=given.participant_name,
                    role="learner",
                    exchange=exchange,
                    checkpointer=checkpointer,
                    transfers=transfers,
                    device=device_text(trained.given) + device,
                )
                boundary = Boundary(membership, checkpointer, transfers, trained)
                ending = Closing(boundary, given.timeouts.flush)
                reports = StepReports(membership, given)
                if seat is None:
                    self._party = Solo(boundary, ending, reports)
                else:
                    from decoupled_diloco.ranks.rank_party import LeaderRank

                    self._party = LeaderRank(seat, boundary, ending, reports)
        self._counter = StepTokens(model)
        try:
            self._enter()
        except BaseException:
            self._counter.close()  # the model stays the program's, which may try again
            raise

    def _seat_of(
        self,
        model: Model,
        options: ParticipantOptions,
        sharing: StateSharing,
        objects: Mapping[str, Any],
    ) -> RankSeat | None:
        """Meet the other ranks of this learner; ``None``: it has one rank."""
        if ranks_of_this_job() == 1 and not is_sharded(model):
            return None
        # Imported here: it needs much of torch.distributed, which a one-rank learner does not.
        from decoupled_diloco.ranks.rank_process import seated

        return blocking(seated(model, options, sharing, objects))

    def _enter(self) -> None:
        """Join the run, and wait for it."""
        blocking(self._party.join())
        process.enter(self)

    _thread: int | None = None
    """The thread that trains, from its first `step` on."""

    _unreported = 0
    """Tokens of the unfinished step at the end of a loader; see `wrap`."""

    _closed_why = ""
    _is_fork = False

    _stopped = False
    """`step` has returned ``False`` because of SIGTERM."""

    _ended = False
    """`step` has returned ``False`` because the run has ended."""

    _warned = False

    @property
    def _leases(self) -> DataLeases:
        """This learner's leases of data partitions, for an `ElasticLoader`."""
        return self._party.leases

    @property
    def name(self) -> str:
        """This learner's name in the run."""
        return self._party.name

    @property
    def addresses(self) -> tuple[str, ...]:
        """The syncer's addresses, as passed to this learner."""
        return self._party.addresses

    @property
    def steps(self) -> int:
        """Steps of this learner, including those of earlier incarnations if they are known."""
        return self._party.progress.steps

    @property
    def tokens(self) -> int:
        """Tokens of this learner, including those of earlier incarnations if they are known.

        For a multi-rank learner it is the sum over the ranks; the last two steps are an estimate.
        """
        return self._party.progress.tokens

    @property
    def discarded_tokens(self) -> int:
        """Tokens whose training was overwritten before it was merged, averaged over fragments."""
        return self._party.progress.discarded_tokens

    @property
    def global_step(self) -> int:
        """The run's step. It never decreases, and differs by a few steps between learners."""
        return self._party.progress.global_step

    @property
    def budget_reached(self) -> bool:
        """Whether the run has reached its budget: stop training and `close`."""
        return self._party.progress.budget_reached

    @property
    def ended(self) -> bool:
        """Whether every shard has finished, so no newer weights will arrive."""
        return self._party.progress.over

    @property
    def rejection_reason(self) -> str:
        """Why the syncer rejects this learner now; empty if it does not.

        Another run uses its address, or another process uses this learner's name. Training
        continues without the syncer, and the learner keeps retrying. A program that prefers to
        stop can check this property.
        """
        return self._party.progress.refused

    @property
    def run_config(self) -> dict[str, Any]:
        """The run's settings that all learners share, received from the syncer."""
        return self._party.admission.settings

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""
        return self._party.versions

    @property
    def incarnation(self) -> int:
        """Number of times that this learner has joined the run, at least 1; a restart adds 1."""
        return self._party.admission.epoch

    @property
    def index(self) -> int:
        """This learner's number in the run, from 0 to `count` - 1.

        The coordinator assigns every new name the lowest free number. A learner that restarts
        with the same name keeps its number. All ranks of a learner share one number.

            torch.manual_seed(1337 + learner.index)  # other data in each learner

        Without ``name=``, each process has a new name, and so a new number: pass names if the
        number selects a part of a data set.
        """
        return self._party.admission.index

    @property
    def count(self) -> int:
        """Number of learners in the run at this learner's join, at least 1.

        It is the larger of the run's setting ``learners`` and the number of names that have ever
        joined. It does not change while this process runs.
        """
        return self._party.admission.count

    def checkpoint(self, run_checkpoint: int | None = None) -> Future[Written] | None:
        """Take a checkpoint now; call it between two steps, in the thread of the training loop.

        Args:
            run_checkpoint: The number of the run's checkpoint that it belongs to.

        Returns:
            A future that is done when the file is written or has failed; `None` if this learner
            takes no checkpoints.
        """
        if self._is_fork:
            self._refuse("checkpoint()")
        return self._party.checkpoint(run_checkpoint)

    def step(self, loss: Loss = None, *, tokens: Tokens | None = None) -> bool:
        """Finish one inner step: call it after ``optimizer.step()``.

        It applies the global weights that have arrived, copies the fragments that are due and
        queues the report. Everything else happens in the background.

        Args:
            loss: The step's training loss, for displays: a float, or a tensor with one element.
                The call does not wait for a tensor on a GPU; it is reported with a later step.
            tokens: The tokens (or samples) trained on since the last call, 0 or more: all
                accumulated batches, without padding. Each rank passes its own. A number, or a
                tensor with one element; the call waits for a tensor on a GPU. A step with 0 tokens
                counts as a step. Default: counted from the inputs of ``model(...)`` in training
                mode (`loops.TokenCounter`). Pass it if the model has several pipeline stages, is
                compiled in place, or is called through a `torch.compile` wrapper that was not
                passed to this learner. Pass it in all steps or in none.

        Returns:
            Whether the run continues. After ``False``, stop training and call `close`.

        Raises:
            ConfigError: A parameter was replaced, untied, unfrozen, cast or moved since the join,
                or a synchronized buffer changed its form; ``tokens`` is negative, NaN or not a
                number, or was passed in earlier steps and not in this one; ``loss`` is not a
                number, or is a whole number without ``tokens``; the optimizer keeps separate
                copies of the weights; or the learner is closed.
            TransportError: ``Timeouts.disconnect`` has passed without any reachable shard.
        """
        if self._closed:
            self._refuse("step()")
        if tokens is None and isinstance(loss, Integral) and not isinstance(loss, bool):
            given = in_one_line(int(loss))
            raise ConfigError(
                f"step({given}): pass the number of tokens as tokens={given}; loss is a float or a "
                "tensor"
            )
        if self._stopped:
            raise SystemExit(process.EXIT_CODE)
        self._thread = process.this_thread()
        goes_on = blocking(self._take_step(loss, tokens))
        if not goes_on:
            self._ends()
        return goes_on

    async def _take_step(self, loss: Loss, tokens: Tokens | None) -> bool:
        """Do what `step` does, as a coroutine; see `runtime.blocking` for what it may wait for."""
        return await self._party.step(self._counter.read(tokens), self._losses.read(loss))

    def _ends(self) -> None:
        """Warn a program that continues although `step` has returned ``False``."""
        if process.asked_to_stop() and not self.budget_reached:
            self._stopped = True
            logger.warning(
                "%s: SIGTERM received: step() returns False; close the learner and exit",
                self.name,
            )
        elif self._ended and not self._warned:
            self._warned = True
            logger.warning(
                "%s: step() called after it returned False: the run is over, and this training is "
                "not merged; end the outer loop as well (if learner.ended: break)",
                self.name,
            )
        self._ended = True

    @property
    def _closed(self) -> bool:
        return self._party.closed

    def _refuse(self, what: str) -> NoReturn:
        """Raise an error because the learner is closed, or was copied by a fork."""
        if self._is_fork:
            raise ConfigError(
                f"{what} called on learner {self.name!r} in a forked child process: use the "
                "learner in the process that created it, or create another one in the child"
            )
        raise ConfigError(
            f"{what} called on closed learner {self.name!r}{self._closed_why}: call it before "
            "close, or create a new Learner to rejoin"
        )

    def wrap(self, loader: Iterable[T], tokens: Callable[[T], Tokens] | None = None) -> Iterator[T]:
        """Iterate over a loader's batches; call `step` after each batch, and `close` at the end.

            for batch in learner.wrap(loader):
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        If the learner has ``optimizer=``, a step is finished when the loop's body has called
        ``optimizer.step`` (of at least one of several optimizers), so gradient accumulation works.
        Otherwise each batch is a step. A batch whose body ends with ``break`` is not counted. At
        the end of the loader the learner remains in the run for another epoch, which continues an
        unfinished step. When the run ends, the loop ends, and the model has the final weights.

        Args:
            loader: The batches.
            tokens: Returns the tokens of one batch. Default: see `step`.

        Raises:
            ConfigError, TransportError: See `step`.
        """
        if self._closed:
            return iter(self._no_batches())
        return batches_of(self, self._trained.optimizers, loader, tokens)

    def _no_batches(self) -> Iterable[T]:
        """Return no batches, for a program with an outer loop over epochs."""
        if self._is_fork:
            self._refuse("wrap()")
        if self._stopped:
            raise SystemExit(process.EXIT_CODE)
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: wrap() returns no more batches because the learner is closed%s: end the "
                "outer loop as well (if learner.ended: break)",
                self.name,
                ": the run has ended" if self.ended else self._closed_why,
            )
        return ()

    def attach(self, tokens: Callable[[], Tokens] | None = None) -> AbstractContextManager[None]:
        """Call `step` after each ``optimizer.step()`` in a loop that cannot be changed.

            with learner.attach():
                train(model, optimizer)

        With several optimizers a step is finished when each of them has stepped at least once.
        When the run ends, the block is left at its ``optimizer.step()``, and the learner closes.

        Args:
            tokens: Returns the tokens trained on since its last call. Default: see `step`.

        Raises:
            ConfigError: The learner has no ``optimizer=``; see also `step`.
            TransportError: See `step`.
        """
        return attached(self, self._trained.optimizers, tokens)

    def request_stop(self) -> None:
        """Request a stop: from now on no `step` waits, and `step` returns ``False``.

        A signal handler may call it. If the program has no handler for SIGTERM, the learner
        installs one that does. With several ranks, call it on rank 0: `step` soon returns
        ``False`` on all ranks, at the same step; they must `close` together.
        """
        self._party.request_stop()

    def state_dict(self) -> dict[str, Any]:
        """Return this learner's counters, so that they continue after a restart.

        It is for loops that write their own checkpoints; checkpoints of ``checkpoint=`` contain it.
        It has no weights, because a learner that joins receives the global ones. Also save the
        inner optimizer and the position in the data.
        """
        return {"learner": self.name, "steps": self.steps, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count from a `state_dict`.

        Raises:
            ConfigError: The state belongs to another learner, or is not a learner's state.
        """
        if state.get("learner") != self.name:
            raise ConfigError(
                f"the state belongs to learner {state.get('learner')!r}, and this is "
                f"{self.name!r}: load the state that this learner has saved"
            )
        self._party.count_from(int(state["steps"]), int(state["tokens"]))

    def flush(self, timeout: float, why: str = ASKED_TO_STOP) -> bool:
        """Send the training that is not merged yet; no step may follow, only `close`.

        It is for a process that has been asked to stop. The learner's fragments, and those of the
        other learners, are merged ahead of schedule. If too few learners are live for a quorum, it
        returns at once.

        Args:
            timeout: Seconds to wait at most; 0: send nothing.
            why: The reason, for the event tape and displays.

        Returns:
            Whether all of it was merged.
        """
        if self._is_fork:
            self._refuse("flush()")
        return blocking(self._party.flush(timeout, why))

    def on_weights_updated(self, callback: Callable[[tuple[str, ...]], None]) -> None:
        """Call a function whenever global weights have been written into the model.

        It is called now, with the names of all synchronized tensors, because the join has written
        them. Later it is called at the end of each `step` that has applied fragments, with the
        names of their tensors. A fragment may have only a part of a tensor's elements. Use the
        callback to refresh copies of the weights, for example in an optimizer or an average. The
        optimizer is then no longer checked for copies.
        """
        self._trained.on_updated(callback)

    def close(self) -> None:
        """Flush, save a last checkpoint, and leave the run.

        If the run has ended, or ends now because this learner has made all steps of the budget (or
        its share of the tokens), `close` waits for the closing sweep. Then the model has the final
        global weights. Otherwise it calls `flush` with ``Timeouts.flush``. A warning has the number
        of tokens that are discarded.
        """
        blocking(self._close())

    async def _close(self) -> None:
        if self._closed:
            return
        try:
            await self._party.close()
        finally:
            if self._closed:
                self._leave_process()

    def _leave_process(self) -> None:
        self._counter.close()
        process.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Return whether the only cause of the error is that a stop signal ended a worker."""
        return blocking(self.__aexit__(kind, error, traceback))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            await self._close()
        elif not self._closed:
            try:
                return await self._party.abort(error)
            finally:
                self._leave_process()
        return False

    async def _ends_in_order(self, error: BaseException) -> bool:
        """Return whether an exception in the loop means that the process was asked to stop."""
        return await self._party.requests_stop(error)

    def _replaced(self) -> None:
        """Close: another learner with the same name takes over in this process."""
        self._closed_why = " (another Learner with this name was created in this process)"
        try:
            self._party.replaced()
        finally:
            self._leave_process()

    def _forked(self) -> None:
        """Mark the copy in a forked child: it has no thread, and its locks may be held forever."""
        self._party.closed = self._is_fork = True

    def _program_ends(self) -> None:
        """Leave the run when the program ends without `close`, unless other ranks wait for this."""
        error = getattr(sys, "last_value", None)
        if self._party.ends_alone and process.is_main(self._thread):
            blocking(self.__aexit__(None if error is None else type(error), error, None))

    def __deepcopy__(self, memo: object) -> Self:
        """Return this learner, so that a copied model or Trainer refers to the same one."""
        return self

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        """Pickle the learner as ``None``, because threads and connections cannot be pickled."""
        return _no_learner, ()


class Observer:
    """Follows the published weights without training, for evaluation, dashboards or export.

    Args:
        model: The model. Its parameters become the global weights at every `pull`.
        syncer: See `Learner`. Default: the address that the launcher has passed to this program, if
            it is the run's ``evaluate_command``.
        name: Name of the observer, which no other participant may have. Default: ``observer-``,
            host name and process id.
        auth_token: See `Learner`.
        tls: See `Learner`.
        timeouts: How long to wait for the syncer; ``flush`` does not apply.
        event_tape: File to which the observer's events are appended.

    Raises:
        ConfigError: The model differs from the run's.
        AccessError: The syncer rejects the auth token.
        TransportError: A limit of ``timeouts`` has passed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        syncer: str | Sequence[str] | SyncerConnection | None = None,
        *,
        name: str | None = None,
        auth_token: str | None = None,
        tls: TLSConfig | None = None,
        timeouts: Timeouts | None = None,
        event_tape: str | Path | MakeTape | None = None,
    ) -> None:
        require_model(model, stages=False)
        reported = Observability(event_tape=event_tape)
        limits = chosen("timeouts", timeouts, Timeouts)
        given = ParticipantOptions(name, auth_token, tls, limits, reported)
        self._launched = Launched.read(os.environ)
        if syncer is None:
            syncer, given = launched_as("evaluator").fill(given)
        connection = SyncerConnection.of(syncer)
        self._evaluations: TapeWriter | None = None
        self._closed = False
        self._membership = Membership(
            MomentStore(ModuleStore(model), named_tensors(model), None),
            connection,
            given,
            name=given.name or f"observer-{given.participant_name}",
            role="observer",
        )
        self._enter()

    def _enter(self) -> None:
        """Join the run, and wait for it."""
        blocking(self._join())

    async def _join(self) -> None:
        try:
            await self._membership.join()
        except BaseException:
            self._leave("", abrupt=True)
            raise
        self._boundary()

    def _boundary(self) -> bool:
        """Apply the weights that have arrived; return whether there were any."""
        return bool(self._membership.background.submit(Paused()).applied)

    @property
    def name(self) -> str:
        """Name of the observer in the run."""
        return self._membership.name

    @property
    def global_step(self) -> int:
        """The run's step. It never decreases, and differs by a few steps between learners."""
        return self._membership.shared.machine.global_step

    @property
    def budget_reached(self) -> bool:
        """Whether the run has reached its budget."""
        return self._membership.state.ending

    @property
    def ended(self) -> bool:
        """Whether every shard has finished, so no newer weights will arrive."""
        return self._membership.state.over

    @property
    def rejection_reason(self) -> str:
        """Why the syncer rejects this process now; empty if it does not. It keeps retrying."""
        return self._membership.background.refused

    @property
    def run_config(self) -> dict[str, Any]:
        """The run's settings that all learners share, received from the syncer."""
        return self._membership.admission.settings

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""
        return self._membership.versions

    def pull(self) -> bool:
        """Copy the newest published weights into the model; return whether any were newer.

        Raises:
            TransportError: ``Timeouts.disconnect`` has passed without any reachable shard.
        """
        self._membership.raise_failure()
        return self._boundary()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the average of the global weights (``outer.average``) in a block.

            with observer.averaged():
                average_loss = evaluate(model)

        It is fetched from the shards. The buffers stay those of the global weights.

        Raises:
            ConfigError: The run keeps no average.
            TransportError, ProtocolError: The average cannot be fetched now.
        """
        with self._averaged(blocking(self._averages())):
            yield

    async def _averages(self) -> list[Tensor]:
        """Fetch the averages of the fragments' parameters; see `averaged`."""
        membership, found = self._membership, list[list[Tensor] | DilocoError]()
        if membership.shared.config.outer.average is None:
            raise ConfigError(
                "outer.average is not set, so the run keeps no average of its weights: start a run "
                "with outer.average, such as 0.5"
            )
        membership.background.fetch_averages(found.append)
        with membership.background.changed:
            while not found:
                membership.raise_failure()
                await membership.background.changed.wait(1.0)
        if isinstance(found[0], DilocoError):
            raise found[0]
        return found[0]

    @contextmanager
    def _averaged(self, averages: Sequence[Tensor]) -> Iterator[None]:
        tensors = self._membership.shared.tensors
        tensors.show(averages)
        try:
            yield
        finally:
            tensors.show(None)

    def _report(self, gains: GainsMeasured | None) -> None:
        """Send the shards what the evaluator has measured of the learners, if anything."""
        if gains is not None:
            self._membership.background.submit(gains)

    def wait(self, timeout: float) -> None:
        """Return after ``timeout`` seconds, or as soon as the observer is `done`."""
        blocking(self._stay(timeout))

    async def _stay(self, seconds: float) -> None:
        """Do what `wait` does, as a coroutine; see `runtime.blocking` for what it may wait for."""
        deadline = now() + seconds
        with self._membership.background.changed:
            while now() < deadline and not self.done:
                self._membership.raise_failure()
                await self._membership.background.changed.wait(min(0.5, max(0.0, deadline - now())))

    def updates(self, interval_seconds: float | None = None) -> Iterator[int]:
        """Copy the newest weights into the model at intervals, until the run's final weights.

            for step in observer.updates():
                observer.log(loss=evaluate(model))

        Args:
            interval_seconds: Seconds between the starts of two updates, more than 0. Default: the
                run's ``evaluate_interval_seconds``; 10 if no launcher has passed it.

        Yields:
            The run's step, whenever the model has newer weights. The last weights are the final
            ones.

        Raises:
            ConfigError: ``interval_seconds`` is 0 or less.
            TransportError: ``Timeouts.disconnect`` has passed without any reachable shard.
        """
        seconds = interval_seconds
        every_seconds = float(self._launched.evaluate_seconds or 10) if seconds is None else seconds
        if not every_seconds > 0:
            raise ConfigError(
                f"interval_seconds={seconds} is out of range: pass more than 0 seconds"
            )
        first, done = True, False
        while not done:
            began = now()
            done = self.done
            newer = self.pull()
            if newer or first or done:
                yield self.global_step
            first = False
            if not done:
                self.wait(max(0.0, began + every_seconds - now()))

    def log(self, loss: float, **metrics: float) -> None:
        """Record an evaluation of the weights that the model has, for the run's report.

        In a program that no launcher has started, the values are only logged.

        Args:
            loss: Mean loss on held-out data.
            metrics: Further numbers by name, such as ``accuracy=0.8``; ``tokens`` is the size of
                the held-out data.

        Raises:
            ConfigError: A value is not a number.
        """
        try:
            values = {name: float(value) for name, value in {"loss": loss, **metrics}.items()}
        except (TypeError, ValueError):
            raise ConfigError(
                f"log(loss={loss!r}, …) has a metric that is not a number: pass tensor.item()"
            ) from None
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        logger.info("step %d: %s", self.global_step, shown)
        path = self._launched.event_tape
        if not path or self._launched.role != "evaluator":
            return
        if self._evaluations is None:
            self._evaluations = open_tape(Path(path), "evaluator", {"machine": "evaluator"})
        self._evaluations.sample(now(), evaluation_of(self.global_step, values))
        self._evaluations.flush()

    @property
    def done(self) -> bool:
        """Whether the run has ended and its last weights have arrived; `pull` applies them."""
        state = self._membership.state
        return all(shard.finished for shard in state.shards) and all(
            view.fetching is None and view.latest is not None and view.latest.version == view.newest
            for view in state.fragments
        )

    def close(self) -> None:
        """Leave the run and free the thread and connections; a second call does nothing."""
        self._leave("")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._leave(f"{kind.__name__} in the training loop", abrupt=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    def _leave(self, farewell: str, *, abrupt: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self._membership.leave(farewell, abrupt=abrupt)
        if self._evaluations is not None:
            self._evaluations.close()
            self._evaluations = None


def _alone(model: Model, optimizers: InnerOptimizers | None) -> tuple[ParameterStore, TrainedModel]:
    """Return the parameter store and the model of a one-rank learner."""
    module = plain(model)
    # First, because it rejects tensors that the following checks cannot read.
    store: ParameterStore = ModuleStore(module)
    trained = TrainedModel(model, optimizers, store.layout)
    refuse_what_is_not_finite(module)
    trained.last = LastWeights(module.parameters(), optimizers)
    if trained.copies is not None:
        parameters = unwrapped(trained.given.named_parameters(remove_duplicate=False))
        store = FollowedStore(store, dict(parameters), trained.copies)
    if optimizers is not None:
        store = MomentStore(store, named_tensors(module), Moments(optimizers))
    return store, trained
