"""A whole system in one process: real shards in a separate event loop, over loopback HTTP."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from decoupled_diloco import Learner, Observability, Observer, Timeouts
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import on_this_machine
from decoupled_diloco.config.run import advertised
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.launch.secrets import (
    accepted_tokens,
    own_tls,
    served_tls,
    signing_key_of,
)
from decoupled_diloco.learner.option_groups import SyncerConnection
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Client
from decoupled_diloco.transport.tokens import Tokens
from free_ports import free_ports

PATIENCE_SECONDS = 90.0
TOKENS = 8


def patient(**given: Any) -> Timeouts:
    """Return timeouts that end a test whose shards are gone, without a flush at the end."""
    return Timeouts(**{"disconnect": PATIENCE_SECONDS, "flush": 0.0, **given})


class Model(nn.Module):
    """A tiny model with an embedding, matrices, a vector, a frozen tensor and a buffer."""

    def __init__(self, seed: int = 0, width: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(11, width)
            self.hidden = nn.Linear(width, width)
            self.head = nn.Linear(width, 11)
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("seen", torch.zeros(2))
        self.to(dtype)


class System:
    """The shards of one run, which can be stopped and started again on the same ports."""

    def __init__(
        self,
        folder: Path,
        *,
        tokens: Tokens | None = None,
        token: str | None = None,
        pool_bytes: int = 1 << 20,
        **tables: Any,
    ) -> None:
        run = {"name": "test", "learners": 2, "max_steps": 40, "evaluator": False}
        sync = {
            "fragments": 4,
            "sync_every": 4,
            "overlap_steps": 1,
            # The default ladder leaves bf16 when a busy machine makes the link look slow.
            "codec": {"uplink": "bf16"},
        }
        self.folder = folder
        self.config = RunConfig(
            run={**run, "folder": folder, **tables.get("run", {})},
            sync={**sync, **tables.get("sync", {})},
            outer={"lr": 0.7, "momentum": 0.5, **tables.get("outer", {})},
            syncer={"shards": 1, **tables.get("syncer", {})},
            tls=tables.get("tls", {}),
            privacy=tables.get("privacy", {}),
            workload=tables.get("workload", {}),
            data=tables.get("data", {}),
        )
        self.pool_bytes = pool_bytes
        self.token = token
        self.tokens = tokens or accepted_tokens(self.config, token)
        self.ports = free_ports(self.config.syncer.shards)
        self.addresses = advertised(self.config, self.ports)
        self.shards: dict[int, Shard] = {}
        self.errors: dict[int, BaseException] = {}
        self._running: dict[int, Any] = {}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def start(self, *shards: int, config: RunConfig | None = None) -> None:
        """Start these shards, or all, and return once they listen."""
        for shard in shards or range(len(self.ports)):
            listening = threading.Event()
            main = self._serve(shard, config or self.config, listening.set)
            future = asyncio.run_coroutine_threadsafe(main, self.loop)
            self._running[shard] = future
            future.add_done_callback(lambda _, event=listening: event.set())
            assert listening.wait(PATIENCE_SECONDS)

    async def _serve(self, shard: int, config: RunConfig, started: Callable[[], None]) -> None:
        header = {"machine": "shard", "shard": shard, "settings": config.public()}
        tapes = [open_tape(self.folder, f"shard-{shard}", header)]

        def coordinator_tape(header: Mapping[str, Any]) -> Any:
            tapes.append(open_tape(self.folder, "coordinator", header))
            return tapes[-1]

        try:
            process = self.shards[shard] = Shard(
                config,
                shard,
                addresses=self.addresses,
                folder=self.folder,
                server=lambda on_channel: HttpServer(
                    host=config.syncer.host,
                    port=self.ports[shard],
                    tokens=self.tokens,
                    on_channel=on_channel,
                    pool_bytes=self.pool_bytes,
                    tls=served_tls(config),
                ),
                client=HttpClient(token=self.token, tls=own_tls(config, f"shard-{shard}")),
                tape=tapes[0],
                coordinator_tape=coordinator_tape if shard == 0 else None,
                signing_key=signing_key_of(config, shard, self.folder),
            )
            await process.run(started)
        except BaseException as error:
            self.errors[shard] = error
        finally:
            for tape in tapes:
                tape.close()
            host = self.shards[shard].host if shard in self.shards else None
            if host is not None:
                # In a real run the process would end. A cancelled write continues in its thread.
                await asyncio.sleep(1.0 if host._writing else 0.0)
                host._ledger.close()

    def stop(self, *shards: int) -> None:
        """End these shards, or all, as SIGTERM would."""
        for shard in shards or list(self._running):
            if shard in self.shards:
                self.loop.call_soon_threadsafe(self.shards[shard].stop)
            self._running.pop(shard).result(PATIENCE_SECONDS)

    def wait_finished(self) -> None:
        """Wait until every shard has ended by itself because the run is over."""
        for future in self._running.values():
            future.result(PATIENCE_SECONDS)
        assert not self.errors, self.errors
        assert all(shard.finished for shard in self.shards.values())

    def call(self, work: Callable[[], Any]) -> Any:
        """Call a function in the shards' loop, so that their state does not change meanwhile."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_SECONDS)

    def close(self) -> None:
        """End everything."""
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def learner(self, model: nn.Module, name: str, **options: Any) -> Learner:
        """Join with a real `Learner`, with its tape in the run folder."""
        tape = self.folder / "tape" / f"{name}.jsonl"
        reported = Observability(event_tape=tape)
        options = {"timeouts": patient(), "observability": reported, **options}
        return Learner(model, options.pop("syncer", self.dialled), name=name, **options)

    def observer(self, model: nn.Module, **options: Any) -> Observer:
        """Follow with a real `Observer`."""
        options = {"timeouts": patient(), "name": "watcher", **options}
        return Observer(model, self.dialled, **options)

    @property
    def dialled(self) -> tuple[str, ...]:
        """The addresses of the shards for participants in this process."""
        return tuple(map(on_this_machine, self.addresses))

    def by(self, client: Callable[[], Client]) -> SyncerConnection:
        """Return a connection to the shards with another client, for ``syncer=``."""
        return SyncerConnection(self.dialled, client)

    def rounds(self) -> int:
        """Return the number of rounds that all shards have opened so far."""
        return sum(shard.machine.state.rounds_opened for shard in self.shards.values())


class Trainer(threading.Thread):
    """One learner's training loop in a separate thread: random steps, then `close`."""

    def __init__(self, system: System, name: str, model: nn.Module | None = None, **options: Any):
        super().__init__(name=name)
        self.system = system
        self.model = model or Model()
        self.options = options
        self.pause = options.pop("pause", 0.003)
        self.steps_max: int | None = options.pop("steps_max", None)
        self.learner: Learner | None = None
        self.error: BaseException | None = None
        self.joined = threading.Event()
        self.enough = threading.Event()
        self.begin_gate: threading.Event | None = options.pop("gate", None)

    def run(self) -> None:
        rng = random.Random(self.name)
        try:
            with self.system.learner(self.model, self.name, **self.options) as learner:
                self.learner = learner
                self.joined.set()
                if self.begin_gate is not None:
                    assert self.begin_gate.wait(PATIENCE_SECONDS)
                while self._step(learner, rng) and not self.enough.is_set():
                    if self.steps_max is not None and learner.steps >= self.steps_max:
                        break
                    time.sleep(self.pause)
        except BaseException as error:
            self.error = error
        finally:
            self.joined.set()

    def _step(self, learner: Learner, rng: random.Random) -> bool:
        nudge(self.model, rng)
        return learner.step(1.0, tokens=TOKENS)

    def end(self) -> Learner:
        """Wait for the end of the loop, and raise its error."""
        self.join(PATIENCE_SECONDS)
        assert not self.is_alive(), f"{self.name} hangs"
        if self.error is not None:
            raise self.error
        assert self.learner is not None
        return self.learner


def nudge(model: nn.Module, rng: random.Random) -> None:
    """Take one step of "training": every trainable parameter changes a little."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=0.01)


@contextmanager
def training(*trainers: Trainer) -> Iterator[None]:
    """Start these loops and wait until all have joined; end them in any case."""
    for trainer in trainers:
        trainer.start()
    try:
        for trainer in trainers:
            assert trainer.joined.wait(PATIENCE_SECONDS)
        yield
    finally:
        for trainer in trainers:
            trainer.enough.set()
            trainer.join(PATIENCE_SECONDS)


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.005)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the trainable parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Return whether both have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    return {
        sample.name + "".join(sample.labels.get(label, "") for label in ("plane",)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
