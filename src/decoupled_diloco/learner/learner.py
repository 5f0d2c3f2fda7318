"""`Learner`: one's own training loop as part of a run.

```python
learner = Learner(model, syncer="http://syncer:7070", token=token)
for batch in loader:
    loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
    if not learner.step(tokens=batch.numel()):
        break
learner.close()
```
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast

import torch

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner import parts, process
from decoupled_diloco.learner.checkpoint import OPTIMIZER
from decoupled_diloco.learner.checkpointer import (
    Checkpointer,
    Counted,
    Written,
    all_stateful,
)
from decoupled_diloco.learner.checks import OptimizerChecks, refuse_what_is_not_finite
from decoupled_diloco.learner.counting import whole_tokens
from decoupled_diloco.learner.data_leases import DataLeases
from decoupled_diloco.learner.draws import LAST_STEP, Draws
from decoupled_diloco.learner.joining import JOIN_TIMEOUT_SECONDS
from decoupled_diloco.learner.last_weights import LastWeights
from decoupled_diloco.learner.launched import finds_its_run
from decoupled_diloco.learner.loops import batches_of, following
from decoupled_diloco.learner.losses import StepLosses
from decoupled_diloco.learner.model_guard import ModelGuard
from decoupled_diloco.learner.modules import Model, device_text, plain
from decoupled_diloco.learner.optimizers import Optimizers, several
from decoupled_diloco.learner.participation import addresses_in
from decoupled_diloco.learner.store import FollowedStore, ModuleStore, ParameterStore
from decoupled_diloco.learner.taking_part import TakingPart
from decoupled_diloco.learner.weight_copies import WeightCopies
from decoupled_diloco.merge import Layout
from decoupled_diloco.merge.layout import unwrapped
from decoupled_diloco.monitor.tally import LearnerTally
from decoupled_diloco.monitor.watched import WatchedLearner
from decoupled_diloco.observe.samples import LossMeasured
from decoupled_diloco.protocol.events import RandomDrawn, StepFinished
from decoupled_diloco.protocol.learner import UNFIT, is_worth_a_word
from decoupled_diloco.ranks.group import chosen_carriers, is_sharded, ranks_of_this_job
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.transport.base import Client
from decoupled_diloco.transport.tls import Tls

logger = logging.getLogger(__name__)

T = TypeVar("T")

Tokens = int | float | torch.Tensor
Loss = float | torch.Tensor | None

TOLD_TO_GO = "it is told to go"

CHECKPOINT_SECONDS = 30.0
"""How long `close` waits for the disk to have the checkpoint that is being written."""


def _no_learner() -> None:
    """What a pickled learner becomes."""


class Learner(TakingPart):
    """A training job's part in a run. It never makes the training loop wait.

    The constructor joins the run and overwrites the model's parameters with the global weights (if
    this is the first learner, the model's own become the global ones). It waits for that, and for
    nothing else ever after, unless the run's own settings say ``wait="at_overlap"``.

    Args:
        model: Its trainable parameters are synchronised, in place, and with the run's setting
            ``sync.buffers="mean"`` or ``"one"`` its floating buffers; frozen parameters are not. On
            any one device. Wrappers (`torch.compile`, DDP, Fabric's) do not change their names. If
            this rank has several stages of a pipeline: a list of them, in the pipeline's order.
        syncer: Address of a shard, as ``"http://host:7070"``, or of several; each knows the others.
            Default: what the launcher has passed to this program, if the run has a ``command`` (see
            `docs/how-to/own-script.md`). Then ``learner_id``, ``token``, ``tls``, ``checkpoint``,
            ``checkpoint_every_seconds``, ``hand_in_seconds``, ``give_up_seconds``, ``listen``,
            ``metrics``, ``carriers`` and ``tape`` have the run's values, unless they are given.
        token: The run's secret, if it has one: the text of its token file, with or without the
            newline at its end.
        tls: Certificates for a syncer at ``https://``: whom to trust, and what to show. Default:
            the system's authorities, and nothing.
        learner_id: A name of its own that stays the same across restarts: 1 to 64 letters, digits,
            ``.``, ``_``, ``-``. Default: host name and process id.
        optimizer: The inner optimizer, or several in a list or dict (a GAN; Muon beside AdamW).
            Checkpoints keep their state. Given without ``after_apply``, they are checked, here and
            in the first steps, not to hold weights of their own, which would undo what is applied
            (`checks.refuse_own_copies` says what is checked).
        after_apply: Called at the end of a step in which global weights were applied, with the
            fragments' numbers: the place to refresh an optimizer's own copies of the weights.
        give_up_seconds: Raise `TransportError` after so long without any shard. Default: train on
            and keep trying for ever.
        join_timeout: Raise `TransportError` if the run cannot be joined within so many seconds;
            `None`: try for ever. Default: 300, so that the syncer may be started a little later.
            If the launcher has passed a run folder that records the run's end, it is raised after
            seconds; without one, a run that has ended cannot be told from one that starts later.
        tape: File to which this learner's events are appended.
        stateful: Name to object with ``state_dict`` and ``load_state_dict``, kept in checkpoints
            beside the model and the optimizer: data loader, learning rate schedule, random state.
        checkpoint: Folder of this learner's checkpoints, in a folder of its own by ``learner_id``.
            A learner that is started again goes on from the newest: model, optimizer and stateful
            objects are put back, and fragments that the run has moved on from are overwritten.
        checkpoint_every_seconds: How often one is taken, at the end of a `step`: so call that last
            in the loop. The step waits for the copy to host memory alone. 0: only in `close`.
        donate: What this learner gives to one that begins without a checkpoint, and takes if it is
            such a one itself: ``"optimizer"`` and names of ``stateful`` objects that are not each
            learner's own. Empty: nothing. A learner of several ranks gives and takes nothing.
        listen: ``"host:port"`` at which other learners reach this one, to fetch what it gives
            straight from it; port 0: any. Default: a shard relays it.
        hand_in_seconds: How long `close` waits, if the run goes on without this learner, for what
            is trained and not merged yet to be taken. Default: 0, it is thrown away.
        carriers: How many ranks of a learner of several talk to the syncer, each with its part of
            every fragment: a number, ``"hosts"`` (one on each), or ``"all"``. Default: rank 0.
        log: Where this learner's numbers are logged about once a second: ``"tensorboard"``,
            ``"wandb"`` or ``"mlflow"``, or with what it is called there, as
            ``"tensorboard:runs/x"``. Of several ranks, rank 0 logs.
        metrics: ``"host:port"`` at which Prometheus can scrape `/metrics` of this learner, with the
            token; port 0: any free one, which the log tells. Of several ranks, rank 0 listens. It
            needs the extra ``metrics``.
        store: How to read and write the parameters; default: `ModuleStore(model)`.
        client: Makes the transport's client. Default: HTTP.

    Raises:
        ConfigError: there is no ``syncer``, and no launcher has started this program; the model
            differs from the run's (the first differing tensor is named), or has
            NaN or infinite weights, the id or address is no good, the optimizer holds copies, or
            something in ``stateful`` cannot be kept or does not fit its checkpoint; the token can
            be none.
        StorageError: the checkpoints cannot be read.
        AccessError: the syncer refuses the token.
        TransportError: ``join_timeout`` or ``give_up_seconds`` have passed, or the port of
            ``metrics`` is taken.
    """

    kind_of_rank: ClassVar[Callable[[], type[Learner]] | None] = None
    """Chooses the class for one rank of several. `ranks.learner`, which is built on this module,
    sets it."""

    def __new__(cls, model: Model, *arguments: Any, **named: Any) -> Self:
        """Creates the class for this rank if the learner has several: see `ranks.learner`."""
        own = cls is Learner and named.get("store") is None
        if own and (ranks_of_this_job() > 1 or is_sharded(model)):
            assert Learner.kind_of_rank is not None, "import Learner from decoupled_diloco"
            return cast("Self", object.__new__(Learner.kind_of_rank()))
        return super().__new__(cls)

    @finds_its_run("learner")
    def __init__(
        self,
        model: Model,
        syncer: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        learner_id: str | None = None,
        optimizer: Optimizers | None = None,
        stateful: Mapping[str, Any] | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every_seconds: float = 60.0,
        hand_in_seconds: float = 0.0,
        donate: Sequence[str] = ("optimizer",),
        listen: str | None = None,
        after_apply: Callable[[tuple[int, ...]], None] | None = None,
        give_up_seconds: float | None = None,
        join_timeout: float | None = JOIN_TIMEOUT_SECONDS,
        tape: str | Path | None = None,
        carriers: int | Literal["hosts", "all"] = 1,
        log: str | None = None,
        metrics: str | None = None,
        store: ParameterStore | None = None,
        client: Callable[[], Client] | None = None,
    ) -> None:
        assert syncer is not None, "the launcher's, if none is given"
        self._require_carriers(carriers)
        self._model = model if isinstance(model, torch.nn.Module) else plain(model)
        objects = all_stateful(optimizer, stateful)
        self._optimizers = objects.get(OPTIMIZER)
        self._take_optimizer(optimizer, after_apply is None)
        model = plain(model)
        if store is None:
            store = ModuleStore(model)  # First: what it cannot hold cannot be looked at either.
            refuse_what_is_not_finite(model)
            self._last = LastWeights(model.parameters(), self._optimizers)
        if self._copies is not None:
            store = self._followed(store, self._copies)
        self._guard = self._guard_of(model, store.layout)
        self._after_apply, self._waits, self._losses = after_apply, True, StepLosses()
        self._hand_in_seconds = parts.not_negative("hand_in_seconds", hand_in_seconds)
        self._transfers = parts.transfers_of(objects, donate, stateful or {}, listen, syncer, tls)
        # Before the folder is read: the earlier learner may still write a checkpoint.
        process.take_over(learner_id or parts.default_id(), addresses_in(syncer))
        self._checkpointer = parts.checkpointer_of(
            learner_id, model, objects, checkpoint, checkpoint_every_seconds, self._keeper
        )
        self._tally = LearnerTally()
        self._draws: Draws | None = Draws()
        name = self._checkpointer.learner
        self._log = parts.log_of(log, name)
        watchers = (parts.endpoint_of(metrics, name, token, self._look), self._log)
        self._watchers = [each for each in watchers if each is not None]
        super().__init__(
            store,
            syncer,
            name=name,
            role="learner",
            token=token,
            tls=tls,
            give_up_seconds=give_up_seconds,
            join_timeout=join_timeout,
            tape=tape,
            client=client,
            checkpointer=self._checkpointer,
            transfers=self._transfers,
            device=self._device_text(),
        )
        self.leases = DataLeases(self._background)

    def _enter(self) -> None:
        super()._enter()
        process.enter(self)

    _thread: int | None = None
    """The thread that trains, from its first `step` on."""

    def _require_carriers(self, carriers: object) -> None:
        chosen_carriers(carriers, ["this one"])

    def _device_text(self) -> str:
        return device_text(self._model)

    untold = 0
    """Tokens of the step that the end of a loader has interrupted: see `batches`."""

    _keeper: Callable[..., Checkpointer] = Checkpointer

    async def _join(self) -> None:
        try:
            await super()._join()
        except BaseException:
            self._end_watching()
            raise

    async def _begin(self) -> None:
        # Not in the constructor: on virtual machines that returns before the run lets it in.
        self._guard.compares_buffers = self._shared.config.sync.buffers != "local"
        await super()._begin()
        for each in self._watchers:
            each.start()

    def checkpoint(self, run_checkpoint: int | None = None) -> Future[Written] | None:
        """Takes a checkpoint now; call it between two steps, in the thread of the training loop.

        Args:
            run_checkpoint: The checkpoint of the whole run that it belongs to.

        Returns:
            Done when it is written, or its failure told; `None` if this learner keeps none.
        """
        if self._is_fork:
            self._refuse("checkpoint()")
        return self._keep(run_checkpoint)

    def step(self, tokens: Tokens, loss: Loss = None) -> bool:
        """One inner step is finished: call it after ``optimizer.step()``.

        Applies the global weights that have arrived, takes the snapshots that are due and hands the
        report over; all else goes on in the background.

        Args:
            tokens: The tokens (or samples) trained on since the last call, 0 or more: all
                accumulated batches, without padding. Each rank gives its own. A number, or a tensor
                with one element; a tensor on a GPU is waited for. A step with 0 tokens counts as a
                step.
            loss: The step's training loss, for the displays here and at the syncer: a number, or a
                tensor with one element. A tensor on a GPU is not waited for; it is reported with a
                later step.

        Returns:
            Whether the run goes on. After ``False``, stop training and `close`.

        Raises:
            ConfigError: a parameter was replaced, untied, unfrozen, cast or moved since the join,
                or a synchronised buffer changed its form; ``tokens`` is negative, NaN or not a
                number; ``loss`` is not a number; in the first step: the optimizer holds copies; or
                the learner is closed.
            TransportError: ``give_up_seconds`` have passed without any shard.
        """
        if self._closed:
            self._refuse("step()")
        if self._stopped:
            raise SystemExit(process.EXIT_CODE)
        self._thread = process.this_thread()
        goes_on = blocking(self.take_step(tokens, loss))
        if not goes_on:
            self._ends()
        return goes_on

    _stopped = False
    """`step` has returned ``False`` because of SIGTERM."""

    _ended = False
    """`step` has returned ``False`` because the run has ended."""

    def _ends(self) -> None:
        """`step` returns ``False``; a program that goes on all the same is noticed."""
        if process.asked_to_stop() and not self.finished:
            self._stopped = True
            logger.warning(
                "%s: SIGTERM received: step() returns False; close the learner and exit",
                self.name,
            )
        elif self._ended and not self._warned:
            self._warned = True
            logger.warning(
                "%s: step() is called after it returned False: the run is over, and this training "
                "is not merged; end the outer loop, too (if learner.over: break)",
                self.name,
            )
        self._ended = True

    _warned = False

    def _refuse(self, what: str) -> NoReturn:
        """Raises, because the learner is closed."""
        if self._is_fork:
            raise ConfigError(
                f"{what} called on learner {self.name!r} in a forked child process: use the "
                "learner in the process that created it, or create another one in the child"
            )
        raise ConfigError(
            f"{what} called on closed learner {self.name!r}{self._closed_why}: call it before "
            "close, or create a new Learner to rejoin"
        )

    _is_fork = False
    _closed_why = ""

    def batches(
        self, loader: Iterable[T], tokens: Callable[[T], Tokens] | None = None
    ) -> Iterator[T]:
        """The loader's batches; calls `step` after each that was trained, and in the end `close`.

            for batch in learner.batches(loader):
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        Given ``optimizer=``, a step is finished when a batch's body has called ``optimizer.step``,
        with several optimizers at least one of them: so gradient accumulation needs no help.
        Without it each batch is a step. A batch whose body is left by ``break`` is not counted. At
        the end of the loader the learner stays in the run, for another epoch, which continues with
        a step that is not finished. When the run is over the
        loop ends, and the model has the final weights.

        Args:
            tokens: What one batch is trained on. Default: counted where the model is called
                (`counting.TokenCounter`: padding is left out if there is an ``attention_mask``).

        Raises:
            ConfigError, TransportError: see `step`.
        """
        if self._closed:
            return iter(self._no_batches())
        return batches_of(self, self._model, self._optimizers, loader, tokens)

    def _no_batches(self) -> Iterable[T]:
        """After the end, for a program with an outer loop over epochs."""
        if self._is_fork:
            self._refuse("batches()")
        if self._stopped:
            raise SystemExit(process.EXIT_CODE)
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: batches() gives no more batches, because the learner is closed%s: end the "
                "outer loop, too (if learner.over: break)",
                self.name,
                ": the run is over" if self.over else self._closed_why,
            )
        return ()

    def following(self, tokens: Callable[[], Tokens] | None = None) -> AbstractContextManager[None]:
        """For a loop that cannot be changed: calls `step` after each ``optimizer.step()`` in it.

            with learner.following():
                train(model, optimizer)

        With several optimizers a step is finished when each of them has stepped at least once.
        When the run is over the loop is left at its ``optimizer.step()``, and the learner closes.

        Args:
            tokens: What was trained on since it was called last. Default: see `batches`.

        Raises:
            ConfigError: there is no ``optimizer=``, or see `step`.
            TransportError: see `step`.
        """
        return following(self, self._model, self._optimizers, tokens)

    async def take_step(self, tokens: Tokens, loss: Loss) -> bool:
        """What `step` does, as a coroutine: `runtime.blocking` says what it may wait for."""
        return await self._take_step(whole_tokens(tokens), self._losses.read(loss))

    async def _take_step(self, tokens: int, loss: float | None) -> bool:
        self._raise_failure()
        self._check_model()
        self._check_optimizer()
        began = now()
        plan = self._at_boundary(StepFinished(tokens, self.leases.taken()), loss)
        applied = plan.applied + (await self._hold() if plan.hold else ())
        if applied and self._after_apply is not None:
            self._after_apply(applied)
        if loss is not None:
            state = self._shared.machine.state
            self._background.sample(LossMeasured(state.step, self.global_step, state.tokens, loss))
        self._checkpointer.prepare()
        if self._checkpointer.due:
            self.checkpoint()
        self._stepped(began, applied, loss)
        state = self._shared.machine.state
        return self._waits and not (state.ended or state.leaving)

    _losses_not_finite = 0

    def _diverged(self) -> None:
        self._losses_not_finite += 1
        if is_worth_a_word(self._losses_not_finite, first=1):
            logger.warning(
                "%s: the loss of step %d is not finite (the %d. so far): %s",
                self.name,
                self.steps,
                self._losses_not_finite,
                UNFIT,
            )

    def _stepped(self, began: float, applied: tuple[int, ...], loss: float | None) -> None:
        """What others are told of a step that began to be handled then."""
        self._tally.stepped(began, now(), len(applied), loss)
        if loss is not None and not math.isfinite(loss):
            self._diverged()
        if self._draws is not None:
            self._look_at_draws(self._draws)
        if self._log is not None:
            self._log.stepped(began, self.global_step, self._look)

    def _look_at_draws(self, draws: Draws) -> None:
        step = self._shared.machine.state.step
        states = draws.stepped(step)
        if states:
            self._background.tell_later(RandomDrawn(states))
        if step >= LAST_STEP:
            self._draws = None

    def _guard_of(self, model: torch.nn.Module, layout: Layout) -> ModelGuard:
        return ModelGuard(model, layout)

    def _check_model(self) -> None:
        """Report a change of the model before anything is read from it or written to it."""
        try:
            self._guard.check()
        except ConfigError as error:
            self._background.fail(error)  # `close` sends nothing of a model that is another one
            raise

    _checks: OptimizerChecks | None = None

    def _take_optimizer(self, optimizer: Optimizers | None, checked: bool) -> None:
        if optimizer is not None:
            self._copies = WeightCopies(several(optimizer).values())
        if optimizer is not None and checked:
            self._checks = OptimizerChecks(self._model, optimizer)
            self._checks.look()

    def _check_optimizer(self) -> None:
        if self._checks is not None and self._checks.due():
            self._look_at_optimizer(self._checks)

    def _look_at_optimizer(self, checks: OptimizerChecks) -> None:
        checks.look()

    def _followed(self, store: ParameterStore, copies: WeightCopies) -> ParameterStore:
        parameters = dict(unwrapped(self._model.named_parameters(remove_duplicate=False)))
        return FollowedStore(store, parameters, copies)

    def stop_waiting(self) -> None:
        """Requests a stop: from now on no `step` waits, and `step` returns ``False``.

        A signal's handler may call it. If the program has no handler of its own for SIGTERM, the
        learner installs one that does. With several ranks, call it on rank 0: `step` soon returns
        ``False`` on all ranks, at the same step; they have to `close` together.
        """
        self._waits = False

    def state_dict(self) -> dict[str, Any]:
        """What this learner needs to count on after a restart: plain numbers.

        For loops that keep their own checkpoints; with ``checkpoint=`` it is kept already. Weights
        are not in it: a learner that joins takes the global ones. Keep the inner optimizer and the
        position in the data beside it.
        """
        return {"learner": self.name, "steps": self.steps, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on counting from a `state_dict`.

        Raises:
            ConfigError: it is another learner's, or not a learner's state.
        """
        if state.get("learner") != self.name:
            raise ConfigError(
                f"the state is of learner {state.get('learner')!r}, this is {self.name!r}: load "
                "each learner's own"
            )
        own = self._shared.machine.state
        self._checkpointer.counted = Counted(
            int(state["steps"]) - own.step,
            int(state["tokens"]) - own.tokens,
            self._checkpointer.counted.discarded_tokens,
        )

    def hand_in(self, seconds: float, why: str = TOLD_TO_GO) -> bool:
        """Hands in what is trained and not merged yet; no step may follow but `close`.

        For a process that is told to go. Its fragments are asked for ahead of time, and the other
        learners with it; where too few are live for a quorum it returns at once.

        Args:
            seconds: How long to wait at most; 0: hand in nothing.
            why: For the tape and displays.

        Returns:
            Whether all of it has been taken.
        """
        if self._is_fork:
            self._refuse("hand_in()")
        return blocking(self._hand_in(seconds, why))

    def close(self) -> None:
        """Hands in what there is, keeps a last checkpoint, says goodbye, and ends.

        If the run has ended, or ends now because this learner has made all steps of its budget (or
        its share of the tokens), it waits for the closing sweep; then the model holds the final
        global weights. Otherwise see `hand_in`; a warning names the tokens that are discarded.
        """
        blocking(self._close())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        in_order = False
        try:
            if error is not None and not self._closed and await self.ends_in_order(error):
                with process.workers_may_end():
                    await self._hand_in(self._hand_in_seconds, TOLD_TO_GO)
                    await self._keep_last()
                in_order = not self._waits and process.is_death_of_worker(error)
        finally:
            await super().__aexit__(kind, error, traceback)
        return in_order

    async def ends_in_order(self, error: BaseException) -> bool:
        """Whether an exception in the loop means that the process was asked to stop."""
        if self._checkpointer.changing:
            return False  # it came while the parameters were changed
        if process.is_death_of_worker(error):  # the worker may have received the signal first
            deadline = now() + process.SAME_SECONDS
            with self._background.changed:
                while self._waits and now() < deadline:
                    await self._wait(0.05)
        return isinstance(error, KeyboardInterrupt | SystemExit) or not self._waits

    async def _keep_last(self) -> None:
        """Writes a last checkpoint, if this learner keeps them."""
        self.checkpoint()
        await self._written(CHECKPOINT_SECONDS)

    def replaced(self) -> None:
        """Another learner with the same name takes over in this process."""
        logger.warning(
            "%s: another Learner with this name is created in this process: this one closes",
            self.name,
        )
        if self._background.failure is None and not self._checkpointer.changing:
            blocking(self._keep_last())
        self._closed_why = " (another Learner with its name was created in this process)"
        self._leave("another learner with its name takes over", abrupt=True)

    def forked(self) -> None:
        """This is the copy in a forked child; it has no thread, and locks may stay held."""
        self._closed = self._is_fork = True

    def program_ends(self) -> None:
        """The program ends without `close`."""
        error = getattr(sys, "last_value", None)
        if process.is_main(self._thread):
            blocking(self.__aexit__(None if error is None else type(error), error, None))

    async def _close(self) -> None:
        if self._closed:
            return
        with process.workers_may_end():
            await self._close_in_order()

    async def _close_in_order(self) -> None:
        optimizers = self._optimizers
        mode = nullcontext(False) if optimizers is None else optimizers.in_training_mode()
        with mode as changed:
            if changed and self._last is not None:
                self._last.mark()
            if self._background.failure is None:
                await self._submit_last()
            if changed and self.over and self._copies is not None:
                # So that leaving the mode keeps the run's final weights.
                self._copies.reset(self._model.parameters())
        self.leases.close()
        self._leave("the run is over" if self.over else "its loop has ended")

    async def _submit_last(self) -> None:
        if self._weights_replaced():
            return
        if self._waits:
            await self._await_the_end()
        if self.finished:
            await self._finish()
            await self._written(CHECKPOINT_SECONDS)
        else:
            await self._hand_in(self._hand_in_seconds, TOLD_TO_GO)
            if self._waits and self.steps and not self.finished:
                self._warn_of_early_end()
            await self._keep_last()

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: a copied model or Trainer that refers to a learner refers to the same one."""
        return self

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        """What is pickled refers to no learner: threads and connections cannot be pickled."""
        return _no_learner, ()

    def _leave(self, farewell: str, *, abrupt: bool = False) -> None:
        if self._closed:
            return
        process.leave(self)
        self._end_watching()
        super()._leave(farewell, abrupt=abrupt)
        self._checkpointer.close()

    def _end_watching(self) -> None:
        if self._last is not None:
            self._last.close()
        for each in self._watchers:
            each.close()

    def _look(self, read: Callable[[WatchedLearner], T]) -> T:
        """What is read of this learner as it is now, by another thread."""
        background = self._background
        with background.changed:
            return read(
                WatchedLearner(
                    name=self.name,
                    run=self._shared.config.run.name,
                    epoch=self.epoch,
                    steps=self.steps,
                    tokens=self.tokens,
                    discarded_tokens=self.discarded_tokens,
                    run_step=self.global_step,
                    state=self._shared.machine.state,
                    tally=self._tally,
                    client=background.client,
                )
            )
