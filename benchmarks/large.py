"""A shard with thousands of learners: what each event costs it, how long its loop is ever busy.

A real shard, its coordinator, tape, disk and merge worker are in this process; the learners are
scripts at the other ends of channels in memory, and send what real ones would. Each kind of event
is timed twice: the state machine's handler alone, and the longest turn of the event loop that it
leads to, since a ping that arrives meanwhile waits so long. Times are those of the loop's thread,
so that other work on the machine counts little; wall-clock times are beside them.

    python benchmarks/large.py
    python benchmarks/large.py --learners 1000 --repetitions 1 --name large_small
"""

from __future__ import annotations

import argparse
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
from evidence import keep, spread

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.collecting import Survivors
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.merge import digest, layout_of
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.versions import Asking, Version
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.storage.weights import save_weights
from decoupled_diloco.syncer.shard import Shard
from memory_transport import MemoryClient, MemoryNetwork, MemoryServer

ESTIMATE = (
    "a handler of one learner's message: 20 to 50 microseconds, whatever M. One of all: some 8 "
    "microseconds a learner in the machine, 30 to 40 ms with 4,000; carried out in one go, 25 a "
    "message and 10 a record of the tape: a round that opens 250 to 400 ms of one turn of the "
    "loop, a merge of K = M the same, a broadcast of one text 15 ms. In slices no turn above 20 "
    "ms. A learner costs the shard 10 to 20 kB, most of it its connection"
)
FRAGMENTS = PERIOD = 24
TOGETHER = 50
"""So many learners say something in the same turn of the loop."""

AWAY_SECONDS = 3.5
"""After that the leases of those whose connections broke have run out."""

Sample = tuple[float, float]
"""Seconds of the processor, and of the wall clock."""


class Turns:
    """Times the turns of the running event loop, from one look at its sockets to the next."""

    def __init__(self) -> None:
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        self.worst: Sample = (0.0, 0.0)
        self._begun = self._now()
        self._select = selector.select
        selector.select = self._timed

    def reset(self) -> None:
        """Forgets the turns before this one, and what this one has done so far."""
        self.worst, self._begun = (0.0, 0.0), self._now()

    def _timed(self, timeout: float | None) -> Any:
        cpu, wall = self._now()
        turn = (cpu - self._begun[0], wall - self._begun[1])
        self.worst = max(self.worst, turn)
        try:
            return self._select(timeout)
        finally:
            self._begun = self._now()

    @staticmethod
    def _now() -> Sample:
        return time.thread_time(), time.perf_counter()


class Handlers:
    """Times the shard's state machine, by kind of event."""

    def __init__(self, shard: Shard) -> None:
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.effects: dict[str, int] = defaultdict(int)
        self._handle = shard.machine.handle
        shard.machine.handle = self._timed  # type: ignore[method-assign]

    def _timed(self, now: float, event: Any) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        effects = self._handle(now, event)
        sample = (time.thread_time() - cpu, time.perf_counter() - wall)
        kind = self._kind(event, effects)
        self.samples[kind].append(sample)
        self.effects[kind] = max(self.effects[kind], len(effects))
        return effects

    @staticmethod
    def _kind(event: Any, effects: list[Any]) -> str:
        name = type(event.message).__name__ if isinstance(event, fact.Received) else ""
        name = name or type(event).__name__
        if any(isinstance(effect, do.RoundOpened) for effect in effects):
            return f"{name} that opens a round"
        if any(isinstance(effect, do.Evict) for effect in effects):
            return f"{name} that evicts"
        return name


class Learner:
    """The other end of a shard's channels: says what it is told to, and answers pulls."""

    def __init__(self, world: World, number: int) -> None:
        self.name = f"learner-{number}"
        self.world = world
        self.client = MemoryClient(world.network)
        self.channel: Any = None
        self.step = 0

    async def join(self) -> None:
        """Joins at the coordinator, then greets the shard."""
        self.member = await self._dial(
            say.Join(self.name, f"nonce of {self.name}", "learner", self.world.layout)
        )
        admitted = await self.member.receive()
        assert admitted["type"] == "Admitted", admitted
        await self.greet(admitted["epoch"])

    async def greet(self, epoch: int = 1) -> None:
        """Greets the shard on a new connection."""
        self.channel = await self._dial(
            say.Hello(self.name, epoch, f"nonce of {self.name}", "learner", self.step, 0, None, ())
        )
        while (await self.channel.receive())["type"] != "Welcome":
            pass

    async def _dial(self, first: say.Join | say.Hello) -> Any:
        channel = await self.client.connect(self.world.server.address, "learner", self.name)
        channel.send(encode(first))
        return channel

    def report(self) -> None:
        """Reports one more step."""
        self.step += 1
        self.channel.send(encode(say.StepReport(self.step, 64 * self.step, 1.0)))

    def said(self) -> list[dict[str, Any]]:
        """What the shard has said since the last look."""
        inbox = self.channel._inbox
        return [json.loads(inbox.pop()) for _ in range(len(inbox))]

    async def answer(self, pull: dict[str, Any]) -> None:
        """Delivers the contribution that a pull asks for."""
        body = self.world.body(pull["fragment"])
        base, ask = Version(**_bare(pull["base"])), Asking(**_bare(pull["ask"]))
        upload = say.Upload(pull["fragment"], ask, base, 1, 64, digest(body))
        self.channel.send(encode(upload))
        await self.client.put(pull["path"], body.numpy().data)


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "type"}


class World:
    """A shard that hosts its coordinator, and its learners, in this process."""

    def __init__(self, folder: Path, learners: int, quorum: int) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(FRAGMENTS)))
        save_weights(folder / "initial.safetensors", dict(model.state_dict()))
        self.layout = json.dumps(layout_of(model).to_json())
        self.config = RunConfig(
            run={
                "name": "large",
                "folder": folder,
                "learners": learners,
                "budget_steps": 10**6,
                "evaluator": False,
            },
            sync={
                "fragments": FRAGMENTS,
                "period": PERIOD,
                "overlap": 2,
                "quorum": quorum,
                "initial_weights": folder / "initial.safetensors",
            },
            syncer={"shards": 1},
        )
        self.folder = folder
        self.network = MemoryNetwork()
        self.learners = [Learner(self, number) for number in range(learners)]
        self.server: Any = None

    async def start(self) -> None:
        """Starts the shard; its server is in memory too."""
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
        """Ends the shard as SIGTERM would."""
        self.shard.stop()
        await self.running

    def body(self, fragment: int) -> torch.Tensor:
        """Some contribution to a fragment."""
        tensors = self.shard._tensors
        assert tensors is not None
        values = torch.full((tensors.plan.fragments[fragment].numel,), 1e-3)
        return tensors.plan.codec_of(fragment, tensors.plan.uplink).encode(values)

    async def quiet(self, seconds: float = 0.3) -> None:
        """Waits until the shard has had nothing to do for a moment."""
        busy = time.monotonic()
        while time.monotonic() < busy + seconds:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            if time.thread_time() - before > 1e-3:
                busy = time.monotonic()


@contextmanager
def turn(world: World, found: dict[str, list[Sample]], kind: str) -> Iterator[None]:
    """Notes the longest turn of the loop meanwhile, without what was done before it."""
    world.turns.reset()
    yield
    found[kind].append(world.turns.worst)


async def measure(folder: Path, learners: int, quorum: int, rounds: int) -> dict[str, Any]:
    """One life of a shard: joins, rounds, disconnections, half of all going at once."""
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
        "bytes_a_learner_joined": (after - before) / learners,
        "bytes_a_learner_after_rounds": (peak - before) / learners,
    }


def live(learners: int, quorum: int, rounds: int) -> dict[str, Any]:
    """One life in a process of its own, whose memory nothing else has used."""
    torch.set_num_threads(1)
    Survivors().begin()  # as the process of a shard does
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(measure(Path(name), learners, quorum, rounds))


async def _join(world: World, found: dict[str, list[Sample]]) -> dict[str, float]:
    """Everybody joins, one after the other; the mean of the first and of the last hundred."""
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
    """All but one report a step, then the last one; its report moves a clock of K = M.

    With K = 1 the first report moves it, and opens a round for all that have reported before.
    """
    first, rest = world.learners[0], world.learners[1:]
    ahead, behind = (rest, [first]) if whole else ([first], rest)
    for learners, what in (
        (ahead, "reports" if whole else "reports, and a round opens"),
        (behind, "reports, and a round opens" if whole else "reports"),
    ):
        for begin in range(0, len(learners), TOGETHER):
            for learner in learners[begin : begin + TOGETHER]:
                learner.report()
            with turn(world, found, what):
                await asyncio.sleep(0)
                await asyncio.sleep(0)
    with turn(world, found, "after the reports"):
        await world.quiet()
    await _deliver(world, found)


async def _deliver(world: World, found: dict[str, list[Sample]]) -> None:
    pulls = [(each, m) for each in world.learners for m in each.said() if m["type"] == "Pull"]
    for begin in range(0, len(pulls) - 1, TOGETHER):
        some = pulls[begin : min(begin + TOGETHER, len(pulls) - 1)]
        await asyncio.gather(*(learner.answer(pull) for learner, pull in some))
    for learner, pull in pulls[-1:]:
        with turn(world, found, "the last body, and the merge"):
            await learner.answer(pull)
            await world.quiet()
    for learner in world.learners:
        learner.said()


async def _leave(world: World, found: dict[str, list[Sample]]) -> None:
    """One breaks off and greets again; then half of all break off, and their leases run out."""
    one = world.learners[0]
    one.channel.cut()
    await world.quiet()
    with turn(world, found, "one greets again"):
        await one.greet()
    half = world.learners[len(world.learners) // 2 :]
    for learner in half:
        learner.channel.cut()
    with turn(world, found, "half break off at once"):
        await world.quiet()
    with turn(world, found, "their leases run out"):
        await asyncio.sleep(AWAY_SECONDS)
        await world.quiet()
    assert len(world.shard.machine.state.members) == len(world.learners) - len(half)


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def milliseconds(samples: list[Sample]) -> dict[str, float]:
    """Median and worst of processor time, and worst of wall-clock time."""
    cpu = sorted(1e3 * each[0] for each in samples)
    wall = max(1e3 * each[1] for each in samples)
    return {"median": cpu[len(cpu) // 2], "worst": cpu[-1], "worst_wall": wall, "times": len(cpu)}


def summary(lives: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the repetitions: median of medians, and each one's worst as median and extremes."""
    result: dict[str, Any] = {}
    for part in ("handlers", "turns"):
        for kind in sorted({kind for life in lives for kind in life[part]}):
            rows = [milliseconds(life[part][kind]) for life in lives if kind in life[part]]
            result[f"{part}: {kind}"] = {
                key: spread([row[key] for row in rows]) for key in ("median", "worst", "worst_wall")
            }
    for name in ("bytes_a_learner_joined", "bytes_a_learner_after_rounds"):
        result[name] = spread([life[name] for life in lives])
    for name in ("first", "last"):
        times = [1e3 * life["join_processor_seconds"][name] for life in lives]
        result[f"join, {name} hundred"] = spread(times)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3, help="of each life")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--name", default="large")
    arguments = parser.parse_args()
    lives: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.repetitions):
        for case, quorum in (("K = 1", 1), ("K = M", arguments.learners)):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                lived = process.submit(live, arguments.learners, quorum, arguments.rounds)
                lives.setdefault(case, []).append(lived.result())
    result = {case: summary(some) for case, some in lives.items()}
    raw = {
        case: [
            {
                **life,
                **{
                    part: {kind: milliseconds(samples) for kind, samples in life[part].items()}
                    for part in ("handlers", "turns")
                },
            }
            for life in some
        ]
        for case, some in lives.items()
    }
    keep(
        arguments.name,
        estimate=ESTIMATE,
        config=vars(arguments) | {"fragments": FRAGMENTS, "period": PERIOD, "overlap": 2},
        raw=raw,
        result=result,
        not_measured="sockets: each message costs the kernel's and aiohttp's part more; large "
        "models, whose bodies cost the worker; learners in processes and on machines of their own. "
        "The memory of a learner includes its own end of the channels",
    )
    for case, rows in result.items():
        for kind, row in rows.items():
            found = row.get("worst", row)
            print(
                f"{case}, {kind}: {found['median']:.4g} ({found['min']:.4g} to {found['max']:.4g})"
            )


if __name__ == "__main__":
    main()
