"""DiLoCo over hivemind's averaging, like OpenDiLoCo's `DiLoCoOptimizer`.

hivemind's own `Optimizer(use_local_updates=True)` averages parameters and has no outer optimizer.
OpenDiLoCo, which is built on hivemind, has one. Its parts are those of hivemind, and are combined
here in the same way:

* A `TrainingStateAverager` with ``offload_optimizer`` and ``custom_gradients`` holds the outer
  parameters and SGD with Nesterov momentum, and sends both to peers that join or come back.
* A `DecentralizedAverager` averages the pseudo-gradients, which are those of the offloaded
  parameters. The search for the group starts before they are complete (``scheduled_time``,
  ``require_trigger``), as in the example of `GradientAverager`.
* The first peer is a ``hivemind-dht`` at site 0, as in OpenDiLoCo's README.

Differences from OpenDiLoCo:

* The number of workers is the ``target_group_size``, so a complete group does not wait.
* The parameters are not averaged after each outer step, which would double the traffic.
* A round without a group ends after the link's timeout, and the worker continues with its own
  pseudo-gradient. If it then meets a peer of a later epoch, it loads that peer's state.
"""

import re
import time
from pathlib import Path
from typing import Any

import torch
from common import READY_SECONDS_MAX, Task, Training
from hivemind import DHT, DecentralizedAverager
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.utils import get_dht_time

MATCHMAKING_SECONDS = 5.0
"""Default of `DecentralizedAverager`."""

CHUNK_SECONDS_MAX = 15.0
"""Default of `hivemind.Optimizer`: after this time a round continues without a silent peer."""


def first_peer(task: Task) -> str:
    """Return the address that ``hivemind-dht`` logs for other peers."""
    log, deadline = Path(task.folder) / "center.log", time.monotonic() + READY_SECONDS_MAX
    pattern = re.compile(rf"/ip4/{re.escape(task.center)}/tcp/\d+/p2p/\w+")
    while time.monotonic() < deadline:
        if log.exists() and (found := pattern.search(log.read_text(errors="replace"))):
            return found.group()
        time.sleep(0.1)
    raise TimeoutError(f"no address of the first peer within {READY_SECONDS_MAX:g} s")


class Outer:
    """The outer optimizer of one peer, and its averaging rounds with the others."""

    def __init__(self, task: Task, training: Training) -> None:
        self.task, self.training = task, training
        self.dht = DHT(
            start=True,
            initial_peers=[first_peer(task)],
            host_maddrs=[f"/ip4/{task.addresses[task.worker]}/tcp/0"],
        )
        settings: dict[str, Any] = {
            "dht": self.dht,
            "min_matchmaking_time": MATCHMAKING_SECONDS,
            "allreduce_timeout": task.timeout_seconds,
            "next_chunk_timeout": CHUNK_SECONDS_MAX,
            "start": True,
        }
        self.state = TrainingStateAverager(
            prefix="run_state",
            params=list(training.model.parameters()),
            optimizer=self._optimizer,
            offload_optimizer=True,
            custom_gradients=True,
            **settings,
        )
        groups = self.state.optimizer.param_groups
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.averager = DecentralizedAverager(
            [parameter.grad for parameter in self.parameters],
            prefix="run_gradients",
            target_group_size=task.workers,
            allow_state_sharing=False,
            **settings,
        )
        self.control: Any = None
        self.rounds = {"averaged": 0, "alone": 0}
        self.period_begun = time.monotonic()

    def shutdown(self) -> None:
        for part in (self.averager, self.state, self.dht):
            part.shutdown()

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        momentum = self.task.outer_momentum
        return torch.optim.SGD(
            parameters, lr=self.task.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def load(self) -> None:
        """Load the state of another peer, if any; the inner optimizer's state is not shared."""
        self.state.load_state_from_peers(timeout=self.task.timeout_seconds)
        self.training.go_to(self.state.local_epoch * self.task.period)

    def step(self) -> None:
        """Call this after each inner step; at the end of a period it waits for the others."""
        done = self.training.steps - self.state.local_epoch * self.task.period
        left = self.task.period - done
        eta = left * (time.monotonic() - self.period_begun) / done
        if self.control is None and eta <= MATCHMAKING_SECONDS:
            self.control = self.averager.step(
                gather=self.state.local_epoch,
                scheduled_time=get_dht_time() + max(eta, MATCHMAKING_SECONDS),
                timeout=eta + self.task.timeout_seconds,
                require_trigger=True,
                wait=False,
            )
        if left == 0:
            self._end_period()
            self.period_begun = time.monotonic()

    def _end_period(self) -> None:
        self._load_gradients()
        epochs = self._average()
        if max(epochs, default=0) > self.state.local_epoch:
            self.load()
        else:
            self.state.step(increment_epoch=True, optimizer_step=True)
            self.state.state_sharing_priority = self.state.local_epoch

    @torch.no_grad()
    def _load_gradients(self) -> None:
        inner = self.state.main_parameters
        with self.averager.get_tensors() as gradients:
            for gradient, outer, own in zip(gradients, self.parameters, inner, strict=True):
                torch.sub(outer, own, out=gradient)

    def _average(self) -> list[int]:
        """Average with the others; return the epochs of all participants, if there were any."""
        control, self.control = self.control, None
        try:
            control.allow_allreduce()
            epochs = list(control.result(2 * self.task.timeout_seconds).values())
            self.rounds["averaged"] += 1
        except Exception as error:
            print(f"no averaging after epoch {self.state.local_epoch}: {error!r}", flush=True)
            control.cancel()
            self._load_gradients()  # a failed round may have changed some of them
            self.rounds["alone"] += 1
            return []
        return epochs


def main() -> None:
    task = Task.read()
    training = Training(task)
    outer = Outer(task, training)
    outer.load()
    training.wait_for_others()
    outer.period_begun = time.monotonic()
    while training.steps < task.steps:
        training.step()
        outer.step()
        training.ended()
    training.finish(**outer.rounds)
    outer.shutdown()


if __name__ == "__main__":
    main()
