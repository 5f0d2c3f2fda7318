"""Cost of each event in a shard with thousands of learners, and the longest turn of its event loop.

A real shard, its coordinator, tape, disk and merge worker are in this process. The learners are
scripts at the other ends of in-memory channels that send what real learners would. Each kind of
event is timed twice: the state machine's handler alone, and the longest resulting turn of the event
loop, which delays a ping that arrives during it. Times are CPU times of the loop's thread, so that
other work on the machine has little effect. Wall-clock times are shown as well.

    python benchmarks/large.py
    python benchmarks/large.py --learners 1000 --repetitions 1 --name large_small
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from evidence import keep, options, spread, spreads

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.launch.gc_pauses import Survivors
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.merge import Codec, body_digest, layout_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Version
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.storage.weight_files import save_weights
from decoupled_diloco.syncer.shard import Shard
from memory_transport import MemoryClient, MemoryNetwork, MemoryServer

FRAGMENTS = PERIOD = 24
SYNC = {"fragments": FRAGMENTS, "sync_every": PERIOD, "overlap_steps": 2}
TOGETHER = 50
"""Number of learners that send a message in the same turn of the loop."""

AWAY_SECONDS = 3.5
"""Time after which the leases of broken connections have expired."""

Sample = tuple[float, float]
"""CPU seconds and wall-clock seconds."""


def now() -> Sample:
    return time.thread_time(), time.perf_counter()


def since(begun: Sample) -> Sample:
    cpu, wall = now()
    return cpu - begun[0], wall - begun[1]


class Turns:
    """Times the turns of the running event loop, from one poll of its sockets to the next."""

    def __init__(self) -> None:
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        self._select = selector.select
        selector.select = self._timed
        self.reset()

    def reset(self) -> None:
        """Discard earlier turns, and the past part of this one."""
        self.worst, self._begun = (0.0, 0.0), now()

    def _timed(self, timeout: float | None) -> Any:
        self.worst = max(self.worst, since(self._begun))
        try:
            return self._select(timeout)
        finally:
            self._begun = now()


class Handlers:
    """Times the handlers of the shard's state machine, by kind of event."""

    def __init__(self, shard: Shard) -> None:
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.effects: dict[str, int] = defaultdict(int)
        self._handle = shard.machine.handle
        shard.machine.handle = self._timed  # type: ignore[method-assign]

    def _timed(self, at: float, event: Any) -> Any:
        begun = now()
        effects = self._handle(at, event)
        sample = since(begun)
        kind = type(event.message if isinstance(event, messages.Received) else event).__name__
        if any(isinstance(effect, messages.RoundOpened) for effect in effects):
            kind += " that opens a round"
        elif any(isinstance(effect, messages.Evict) for effect in effects):
            kind += " that evicts"
        self.samples[kind].append(sample)
        self.effects[kind] = max(self.effects[kind], len(effects))
        return effects


class Learner:
    """The other end of a shard's channels: sends scripted messages, and answers requests."""

    def __init__(self, world: World, number: int) -> None:
        self.name = f"learner-{number}"
        self.world = world
        self.client = MemoryClient(world.network)
        self.channel: Any = None
        self.step = 0

    async def join(self) -> None:
        """Join at the coordinator, then greet the shard."""
        self.member = await self._dial(
            messages.Join(self.name, f"nonce of {self.name}", "learner", self.world.layout)
        )
        admitted = await self.member.receive()
        assert admitted["type"] == "Admitted", admitted
        await self.greet(admitted["epoch"])

    async def greet(self, epoch: int = 1) -> None:
        """Greet the shard on a new connection."""
        self.channel = await self._dial(
            messages.Hello(
                self.name, epoch, f"nonce of {self.name}", "learner", self.step, 0, None, ()
            )
        )
        while (await self.channel.receive())["type"] != "Welcome":
            pass

    async def _dial(self, first: messages.Join | messages.Hello) -> Any:
        channel = await self.client.connect(self.world.server.address, "learner", self.name)
        channel.send(encode(first))
        return channel

    def report(self) -> None:
        """Report one more step."""
        self.step += 1
        self.channel.send(encode(messages.StepReport(self.step, 64 * self.step, 1.0)))

    def received(self) -> list[dict[str, Any]]:
        """Return the shard's messages since the last call."""
        inbox = self.channel._inbox
        return [json.loads(inbox.pop()) for _ in range(len(inbox))]

    async def answer(self, pull: dict[str, Any]) -> None:
        """Deliver the requested contribution."""
        body = self.world.body(pull["fragment"])
        base, ask = (
            of(**{key: value for key, value in pull[name].items() if key != "type"})
            for of, name in ((Version, "base"), (Asking, "ask"))
        )
        upload = messages.Upload(
            pull["fragment"],
            ask,
            base,
            1,
            64,
            body_digest(body, self.world.codec_of(pull["fragment"])),
        )
        self.channel.send(encode(upload))
        await self.client.put(pull["path"], body.numpy().data)


class World:
    """A shard that hosts its coordinator, and its learners, in this process."""

    def __init__(self, folder: Path, learners: int, quorum: int) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(FRAGMENTS)))
        save_weights(folder / "initial.safetensors", dict(model.state_dict()))
        layout = layout_of(model)
        self.layout = json.dumps(layout.to_json())
        self.config = RunConfig(
            run={
                "name": "large",
                "folder": folder,
                "learners": learners,
                "max_steps": 10**6,
                "evaluator": False,
            },
            sync={**SYNC, "quorum": quorum, "initial_weights": folder / "initial.safetensors"},
            syncer={"shards": 1},
        )
        self.plan = plan_of(layout, self.config)
        self.folder = folder
        self.network = MemoryNetwork()
        self.learners = [Learner(self, number) for number in range(learners)]
        self.server: Any = None

    async def start(self) -> None:
        """Start the shard with an in-memory server."""
        header = {"machine": "shard", "shard": 0, "settings": self.config.public()}

        def server(on_channel: Callable[[Any], Awaitable[None]]) -> Any:
            self.server = MemoryServer(self.network, on_channel=on_channel)
            return self.server

        self.shard = Shard(
            self.config,
            0,
            addresses=("memory://127.0.0.1:1",),
            folder=self.folder,
            server=server,
            client=MemoryClient(self.network),
            tape=open_tape(self.folder, "shard-0", header),
            coordinator_tape=lambda header: open_tape(self.folder, "coordinator", header),
        )
        self.turns, self.handlers = Turns(), Handlers(self.shard)
        listens = asyncio.Event()
        self.running = asyncio.create_task(self.shard.run(listens.set))
        await listens.wait()

    async def stop(self) -> None:
        """End the shard, as SIGTERM would."""
        self.shard.stop()
        await self.running

    def body(self, fragment: int) -> torch.Tensor:
        """Return a payload with a contribution to a fragment."""
        codec = self.codec_of(fragment)
        return codec.encode(torch.full((self.plan.fragments[fragment].numel,), 1e-3))

    def codec_of(self, fragment: int) -> Codec:
        return self.plan.codec_of(fragment, self.plan.uplink)

    async def quiet(self, seconds: float = 0.3) -> None:
        """Wait until the shard has been idle for a moment."""
        busy = time.monotonic()
        while time.monotonic() < busy + seconds:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            if time.thread_time() - before > 1e-3:
                busy = time.monotonic()


@contextmanager
def turn(world: World, found: dict[str, list[Sample]], kind: str) -> Iterator[None]:
    """Record the longest turn of the loop in this block, without earlier work."""
    world.turns.reset()
    yield
    found[kind].append(world.turns.worst)


async def measure(folder: Path, learners: int, quorum: int, rounds: int) -> dict[str, Any]:
    """Run one incarnation of a shard: joins, rounds, disconnections, loss of half the learners."""
    world, found = World(folder, learners, quorum), defaultdict[str, list[Sample]](list)
    await world.start()
    before = _resident()
    joins = await _join(world, found)
    after = _resident()
    for number in range(rounds):
        await _round(world, found, whole=quorum > 1, number=number)
    peak = _resident()
    await _leave(world, found)
    await world.stop()
    return {
        "handlers": dict(world.handlers.samples),
        "effects": dict(world.handlers.effects),
        "turns": dict(found),
        "join_processor_seconds": joins,
        "bytes_per_learner_after_joining": (after - before) / learners,
        "bytes_per_learner_after_rounds": (peak - before) / learners,
    }


def live(learners: int, quorum: int, rounds: int) -> dict[str, Any]:
    """Run it in a separate process, whose memory nothing else has used."""
    torch.set_num_threads(1)
    Survivors().begin()  # like the process of a shard
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(measure(Path(name), learners, quorum, rounds))


async def _join(world: World, found: dict[str, list[Sample]]) -> dict[str, float]:
    """All learners join, one after the other; return the means of the first and last hundred."""
    took: list[float] = []
    for learner in world.learners:
        begun = time.thread_time()
        with turn(world, found, "a learner joins"):
            await learner.join()
        took.append(time.thread_time() - begun)
    edge = min(100, len(took))
    await world.quiet()
    return {"first": sum(took[:edge]) / edge, "last": sum(took[-edge:]) / edge}


async def _round(world: World, found: dict[str, list[Sample]], *, whole: bool, number: int) -> None:
    """All but one learner report a step, then the last one.

    With K = M the last report moves the clock. With K = 1 the first report moves it, and opens a
    round for all learners that have reported before.
    """
    first, rest = world.learners[0], world.learners[1:]
    ahead, behind = (rest, [first]) if whole else ([first], rest)
    for learners, what in (
        (ahead, "reports" if whole else "reports that open a round"),
        (behind, "reports that open a round" if whole else "reports"),
    ):
        for begin in range(0, len(learners), TOGETHER):
            for learner in learners[begin : begin + TOGETHER]:
                learner.report()
            with turn(world, found, what):
                # Two turns: the channels deliver in the first, and the shard handles the messages
                # in the second.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
    with turn(world, found, "after the reports"):
        await world.quiet()
    await _deliver(world, found)


async def _deliver(world: World, found: dict[str, list[Sample]]) -> None:
    pulls = [(each, m) for each in world.learners for m in each.received() if m["type"] == "Pull"]
    for begin in range(0, len(pulls) - 1, TOGETHER):
        some = pulls[begin : min(begin + TOGETHER, len(pulls) - 1)]
        await asyncio.gather(*(learner.answer(pull) for learner, pull in some))
    for learner, pull in pulls[-1:]:
        with turn(world, found, "the last payload and the merge"):
            await learner.answer(pull)
            await world.quiet()
    for learner in world.learners:
        learner.received()


async def _leave(world: World, found: dict[str, list[Sample]]) -> None:
    """One learner reconnects; then half of all disconnect, and their leases expire."""
    one = world.learners[0]
    one.channel.cut()
    await world.quiet()
    with turn(world, found, "one learner reconnects"):
        await one.greet()
    half = world.learners[len(world.learners) // 2 :]
    for learner in half:
        learner.channel.cut()
    with turn(world, found, "half of the learners disconnect at once"):
        await world.quiet()
    with turn(world, found, "leases of the disconnected learners expire"):
        await asyncio.sleep(AWAY_SECONDS)
        await world.quiet()
    assert len(world.shard.machine.state.members) == len(world.learners) - len(half)


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def milliseconds(samples: list[Sample]) -> dict[str, float]:
    """Return median and worst CPU time, and worst wall-clock time."""
    cpu = sorted(1e3 * each[0] for each in samples)
    wall = max(1e3 * each[1] for each in samples)
    return {"median": cpu[len(cpu) // 2], "worst": cpu[-1], "worst_wall": wall, "times": len(cpu)}


def in_milliseconds(life: dict[str, Any]) -> dict[str, Any]:
    parts = ("handlers", "turns")
    return life | {
        part: {kind: milliseconds(each) for kind, each in life[part].items()} for part in parts
    }


def summary(lives: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over repetitions, and the worst of each as median and extremes."""
    result: dict[str, Any] = {}
    for part in ("handlers", "turns"):
        for kind in sorted({kind for life in lives for kind in life[part]}):
            rows = [life[part][kind] for life in lives if kind in life[part]]
            result[f"{part}: {kind}"] = spreads(rows, ("median", "worst", "worst_wall"))
    result |= spreads(lives, ("bytes_per_learner_after_joining", "bytes_per_learner_after_rounds"))
    for name in ("first", "last"):
        times = (1e3 * life["join_processor_seconds"][name] for life in lives)
        result[f"join, {name} hundred"] = spread(times)
    return result


def main() -> None:
    arguments = options(learners=4000, rounds=3, repetitions=3, name="large")
    raw: dict[str, list[dict[str, Any]]] = {"K = 1": [], "K = M": []}
    for _ in range(arguments.repetitions):
        for case, quorum in zip(raw, (1, arguments.learners), strict=True):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                lived = process.submit(live, arguments.learners, quorum, arguments.rounds)
                raw[case].append(in_milliseconds(lived.result()))
    result = {case: summary(lives) for case, lives in raw.items()}
    keep(arguments.name, of="large", config=vars(arguments) | SYNC, raw=raw, result=result)
    for case, rows in result.items():
        for kind, row in rows.items():
            found = row.get("worst", row)
            print(
                f"{case}, {kind}: {found['median']:.4g} ({found['min']:.4g} to {found['max']:.4g})"
            )


if __name__ == "__main__":
    main()
