"""The run continues when shards restart, and when peers break the protocol."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import pytest
import torch

from decoupled_diloco import Learner
from decoupled_diloco.config.method import plan_of, read_public
from decoupled_diloco.errors import AccessError, ProtocolError, TransportError
from decoupled_diloco.merge import Layout, digest, layout_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Version
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.status import advice_of
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.interface import TransferStats
from integration.real_system import (
    TOKENS,
    Model,
    System,
    Trainer,
    equal,
    nudge,
    parameters,
    training,
    until,
)

Make = Callable[..., System]
LONG = {"max_steps": 100_000}


@pytest.mark.parametrize("disk", ["kept", "gone", "none"])
def test_learners_continue_while_a_shard_is_down_and_restore_it(make: Make, disk: str) -> None:
    """It is restored from its disk, or without a disk from the learners' copies."""
    system = make(run=LONG, syncer={"shards": 2, "persist": disk != "none"})
    system.start()
    trainers = [Trainer(system, f"learner-{i}", Model(seed=i)) for i in range(2)]
    with training(*trainers):
        learners = [t.learner for t in trainers if t.learner is not None]
        until(lambda: system.rounds() > 8, "rounds")
        for shard in (1, 0):
            before = system.shards[shard].machine.state
            system.stop(shard)
            versions = {p: f.version for p, f in before.fragments.items()}
            steps = [learner.steps for learner in learners]
            until(
                lambda steps=steps: all(
                    learner.steps > n + 30 for learner, n in zip(learners, steps, strict=True)
                ),
                "they continue alone",
            )
            assert not system.errors
            if disk == "gone":
                shutil.rmtree(system.folder / "durable" / f"shard-{shard}")
            system.start(shard)
            until(lambda s=shard: system.shards[s].machine.state.phase == "running", "restored")
            after = system.shards[shard].machine.state
            assert after.clock >= before.clock, "the clock does not decrease"
            for p, version in versions.items():
                assert after.fragments[p].version > version, "versions only increase"
            rounds = after.rounds_opened
            until(lambda a=after, r=rounds: a.rounds_opened > r + 4, "its rounds continue")
        owned = [p for s in system.shards.values() for p in s.machine.state.fragments]
        assert sorted(owned) == [0, 1, 2, 3]
        assert (system.folder / "durable").exists() == (disk != "none")
    for trainer in trainers:
        trainer.end()
    assert [t.learner.incarnation for t in trainers] == [1, 1], "no learner had to join again"


class Mortal(Trainer):
    """A training loop that can be killed, so that it does not leave the run."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dies = threading.Event()

    def _step(self, learner: Learner, rng: random.Random) -> bool:
        if self.dies.is_set():
            raise InterruptedError
        return super()._step(learner, rng)


def momenta(system: System) -> dict[int, torch.Tensor]:
    """Return the outer optimizer's momentum of every fragment."""
    found = {}
    for shard in system.shards.values():
        for p, entry in shard.parts.result().worker.tensors.fragments.items():
            found[p] = entry.outer.state_dict()["momentum"].clone()
    return found


def test_no_version_is_lost_when_all_shards_and_learners_die(make: Make) -> None:
    """The shards' disks have every version that a learner received, and the momentum."""
    system = make(run=LONG, syncer={"shards": 2})
    system.start()
    first = [Mortal(system, f"learner-{i}", Model(seed=i)) for i in range(2)]
    with training(*first):
        until(lambda: system.rounds() > 16, "rounds")
        system.stop()
        for trainer in first:
            trainer.dies.set()
    entries = [e for s in system.shards.values() for e in s.machine.state.fragments.items()]
    before = {p: entry.version for p, entry in entries}
    momentum = momenta(system)
    system.start()
    second = [Trainer(system, f"learner-{i}", Model(seed=7 + i)) for i in range(2)]
    states = [shard.machine.state for shard in system.shards.values()]
    with training(*second):
        until(lambda: all(state.phase == "running" for state in states), "restored")
        rounds = system.rounds()
        until(lambda: system.rounds() > rounds + 8, "rounds continue")
    recovered = [
        r.value()
        for shard in range(2)
        for r in TapeReader(system.folder / "tape" / f"shard-{shard}.jsonl")
        if r.type == "DiskRead"
    ]
    copies = {copy.fragment: copy for event in recovered for copy in event.copies}
    for p, version in before.items():
        assert copies[p].version >= version, "the disk has the version"
    assert momentum.keys() == copies.keys()
    assert all(buffer.abs().sum() > 0 for buffer in momentum.values())


class Sick(Trainer):
    """A learner that diverges from some step on, in every step or in one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.once = options.pop("once", False)
        super().__init__(*args, **options)
        self.falls_ill = threading.Event()

    def _step(self, learner: Learner, rng: random.Random) -> bool:
        if self.falls_ill.is_set():
            with torch.no_grad():
                self.model.hidden.weight.fill_(math.nan)
            if self.once:
                self.falls_ill.clear()
        return super()._step(learner, rng)


def test_a_contribution_that_is_not_finite_is_rejected_and_the_run_continues(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The learner's log has a warning."""
    system = make(run={"max_steps": 60})
    system.start()
    sick, well = Sick(system, "learner-0", Model(seed=0)), Trainer(system, "learner-1")
    with training(sick, well):
        until(lambda: system.rounds() > 2, "rounds")
        sick.falls_ill.set()
        for trainer in (sick, well):
            trainer.end()
        system.wait_finished()
    refused = [
        p
        for r in TapeReader(system.folder / "tape" / "shard-0.jsonl")
        if r.type == "RoundFinished"
        for p in r.data["participants"]
        if p["state"] == "refused" and "not finite" in p["reason"]
    ]
    assert {p["learner"] for p in refused} == {"learner-0"}
    logged = [
        r.getMessage() for r in caplog.records if r.name.startswith("decoupled_diloco.learner")
    ]
    warnings = [text for text in logged if "is not merged" in text]
    assert warnings[0].startswith("learner-0: it sent a contribution to fragment ")
    assert "is not merged (1 so far)" in warnings[0]
    assert "not finite" in warnings[0]
    assert "look for NaN" in warnings[0]
    assert len(warnings) <= 2, "it is logged at first, and rarely afterwards"
    assert equal(parameters(sick.model), parameters(well.model))
    assert all(torch.isfinite(p).all() for p in parameters(well.model).values())


def test_learners_with_the_same_seed_and_pace_are_reported(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Their nearly equal contributions are enough, whatever their generators do."""
    system = make(run={"max_steps": 100_000}, sync={"quorum": 2, "fragments": 2})
    system.start()
    learners = {name: system.learner(Model(), name) for name in "ab"}
    models = {name: learner._trained.given for name, learner in learners.items()}
    rngs = {name: random.Random(1) for name in learners}
    warning = ": a and b seem to train on the same data ("

    def step() -> bool:
        for name, learner in learners.items():
            nudge(models[name], rngs[name])
            learner.step(tokens=TOKENS)
        texts = [record.getMessage() for record in caplog.records]
        return all(any(text.startswith(name + warning) for text in texts) for name in learners)

    until(step, "both report it")
    for learner in learners.values():
        learner.close()
    syncer = [r for r in caplog.records if r.name == "decoupled_diloco.syncer.shard"]
    assert sum(warning[2:] in record.getMessage() for record in syncer) == 1
    assert any("a and b seem" in each for each in advice_of(read_run(system.folder)))


def test_values_that_are_not_finite_do_not_survive_an_apply(make: Make) -> None:
    system = make(run=LONG, sync={"apply": {"alignment": "carry", "missed": "rebase"}})
    system.start()
    sick, well = Sick(system, "learner-0", Model(seed=0), once=True), Trainer(system, "learner-1")
    with training(sick, well):
        until(lambda: system.rounds() > 2, "rounds")
        sick.falls_ill.set()
        until(lambda: not sick.falls_ill.is_set(), "it diverges")
        until(lambda: sick.model.hidden.weight.isfinite().all(), "a merged copy repairs it")


def test_joins_wait_for_a_writable_disk_and_rounds_do_not(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(run=LONG)
    system.start()
    with training(Trainer(system, "learner-0")):
        # A file instead of the folder: writing fails as on a full disk.
        states, away = system.folder / "coordinator", system.folder / "away"
        states.rename(away)
        states.touch()
        late = Trainer(system, "learner-1", steps_max=2)
        late.start()
        message = "joins, leases and the end of the run wait"
        until(lambda: message in caplog.text, "it is logged")
        rounds = system.rounds()
        until(lambda: system.rounds() > rounds + 4, "rounds continue")
        assert not late.joined.is_set()
        states.unlink()
        away.rename(states)
        assert late.end().steps == 2


def test_first_versions_are_announced_only_when_they_are_on_the_disk(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(run=LONG)
    blocked = system.folder / "durable"
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("fails like a full disk")
    system.start()
    first = Trainer(system, "learner-0", steps_max=2)
    first.start()
    until(lambda: "merges wait until it can be written" in caplog.text, "it is logged")
    time.sleep(1.0)
    assert not first.joined.is_set()
    blocked.unlink()
    assert first.end().steps == 2
    assert list((system.folder / "durable" / "shard-0").glob("*.safetensors"))


class Held(HttpClient):
    """A client that delays the fetch of the first difference."""

    gate = threading.Event()
    holds = True

    async def get(self, url: str, out: memoryview, *, base: str = "") -> TransferStats:
        if "/difference/" in url and self.holds:
            self.holds = False
            await asyncio.to_thread(self.gate.wait, 20.0)
        return await super().get(url, out, base=base)


def test_a_copy_that_is_no_longer_offered_is_fetched_whole(make: Make) -> None:
    system = make(run=LONG)
    system.start()
    Held.gate.clear()
    slow = Trainer(system, "learner-1", Model(seed=2), syncer=system.by(Held))
    with training(Trainer(system, "learner-0", Model(seed=1)), slow):
        assert slow.learner is not None
        views = slow.learner._party.membership.shared.machine.state.fragments
        until(lambda: any(v.fetching and v.latest.base != v.newest for v in views), "a difference")
        [late] = [v for v in views if v.fetching and v.latest.base != v.newest]
        awaited = late.fetching
        until(
            lambda: late.latest.version.counter > awaited.counter + 1, "the difference is withdrawn"
        )
        Held.gate.set()
        until(lambda: late.held is not None and late.held > awaited, "it has caught up")
    own = list(TapeReader(system.folder / "tape" / "learner-1.jsonl"))
    failed = [r for r in own if r.type == "Failed" and r.data["order"]["type"] == "Fetch"]
    assert "410" in failed[0].data["reason"]
    index = own.index(failed[0])
    again = [r.data for r in own[index:] if r.type == "Fetch"]
    following = next(x for x in again if x["fragment"] == failed[0].data["order"]["fragment"])
    assert following["whole"]


class Rogue:
    """A peer under the name learner-1 that sends hand-made messages to break the protocol."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.client = HttpClient()
        self.name = "learner-1"
        self.nonce = "rogue"
        self.step = 0
        self.plan: Any = None
        self.admitted: Any = None
        self.channel: Any = None

    async def __aenter__(self) -> Rogue:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self.channel is not None:
            self.channel.send(encode(messages.Leave("the test is over")))
        await self.client.close()

    async def join(self) -> None:
        """Join the run and greet the shard, as the protocol requires."""
        link = await self.client.connect(self.system.addresses[0], "learner", self.name)
        layout = json.dumps(layout_of(Model()).to_json())
        link.send(encode(messages.Join(self.name, self.nonce, "learner", layout)))
        self.admitted = decode(await link.receive(), (messages.Admitted,))
        layout = Layout.from_json(json.loads(self.admitted.layout))
        self.plan = plan_of(layout, read_public(self.admitted.settings))
        await self.greet(self.admitted.epoch)

    async def greet(self, epoch: int) -> Any:
        """Greet the shard and return its answer."""
        self.channel = await self.client.connect(self.system.addresses[0], "learner", self.name)
        hello = messages.Hello(self.name, epoch, self.nonce, "learner", self.step, 0, None, ())
        self.channel.send(encode(hello))
        return decode(await self.channel.receive(), (messages.Welcome, messages.Refusal))

    async def receive(self, kind: type[Any]) -> Any:
        """Report steps until a message of this kind arrives."""
        receiving = asyncio.ensure_future(self.channel.receive())
        async with asyncio.timeout(20):
            while True:
                done, _ = await asyncio.wait({receiving}, timeout=0.02)
                self.step += 1
                self.channel.send(encode(messages.StepReport(self.step, 8 * self.step, 0.02)))
                if done:
                    message = decode(receiving.result(), get_args(messages.ToLearner))
                    if isinstance(message, kind):
                        return message
                    receiving = asyncio.ensure_future(self.channel.receive())

    def body(self, pull: messages.Pull, value: float = 0.01) -> torch.Tensor:
        """Return an encoded contribution of the right size."""
        numel = self.plan.fragments[pull.fragment].numel
        uplink = self.plan.codec_of(pull.fragment, self.plan.uplink)
        return uplink.encode(torch.full((numel,), value))

    async def upload(self, pull: messages.Pull, body: torch.Tensor, **changes: Any) -> None:
        """Announce and send a payload; ``changes`` falsify the announcement."""
        fields = {"base": pull.base, "steps": 1, "tokens": 8, "digest": digest(body), **changes}
        self.channel.send(encode(messages.Upload(pull.fragment, pull.ask, **fields)))
        await self.client.put(pull.path, body.numpy().data, base=self.system.addresses[0])


@pytest.fixture
async def rogue(make: Make) -> Any:
    """Yield a rogue in a run with an honest learner."""
    system = make(run=LONG)
    system.start()
    with training(Trainer(system, "learner-0", pause=0.02)):
        async with Rogue(system) as rogue:
            await rogue.join()
            yield rogue
        assert not system.errors
        rounds = system.rounds()
        until(lambda: system.rounds() > rounds + 2, "the run continues")


async def test_an_honest_upload_by_hand_is_accepted(rogue: Rogue) -> None:
    pull = await rogue.receive(messages.Pull)
    await rogue.upload(pull, rogue.body(pull))
    outcome = await rogue.receive(messages.Outcome)
    assert (outcome.ask, outcome.verdict) == (pull.ask, "accepted")


@pytest.mark.parametrize(
    ("value", "lies", "verdict", "reason"),
    [
        (math.nan, {}, "unfit", "not finite"),
        (math.inf, {}, "unfit", "not finite"),
        (0.1, {"digest": "0" * 32}, "refused", "digest="),
        (0.1, {"base": Version(1, 999)}, "behind", "its base 1.999 is not"),
        (0.1, {"base": Version(0, 0)}, "behind", "its base 0.0 is not"),
        (0.1, {"steps": 0}, "refused", "8 tokens in 0 steps"),
        (0.1, {"tokens": 0}, "refused", "0 tokens in 1 steps"),
    ],
)
async def test_a_payload_with_a_false_announcement_is_rejected(
    rogue: Rogue, value: float, lies: dict[str, Any], verdict: str, reason: str
) -> None:
    pull = await rogue.receive(messages.Pull)
    await rogue.upload(pull, rogue.body(pull, value), **lies)
    outcome = await rogue.receive(messages.Outcome)
    assert (outcome.ask, outcome.verdict) == (pull.ask, verdict)
    assert reason in outcome.reason


@pytest.mark.parametrize("change", [-1, +1])
async def test_a_payload_of_another_size_is_rejected(rogue: Rogue, change: int) -> None:
    pull = await rogue.receive(messages.Pull)
    sizes = rogue.plan.uplink_sizes(pull.fragment)  # several sizes if it has buffers
    other = torch.zeros((sizes[0] if change < 0 else sizes[-1]) + change, dtype=torch.uint8)
    sizes_named = f"exactly {sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    with pytest.raises(ProtocolError, match=f"{sizes_named} bytes, not {len(other)}"):
        await rogue.upload(pull, other)
    rogue.channel.send(
        encode(messages.Decline(pull.fragment, pull.ask, False, "the test declines it"))
    )


async def test_a_replayed_payload_is_rejected(rogue: Rogue) -> None:
    pull = await rogue.receive(messages.Pull)
    await rogue.upload(pull, rogue.body(pull))
    with pytest.raises(ProtocolError, match=r"has arrived already|was cancelled"):
        await rogue.upload(pull, rogue.body(pull))
    assert (await rogue.receive(messages.Outcome)).verdict == "accepted"
    with pytest.raises(ProtocolError, match=r"\(410\)"):
        await rogue.upload(pull, rogue.body(pull))


async def test_a_principal_can_write_only_for_itself(rogue: Rogue) -> None:
    pull = await rogue.receive(messages.Pull)
    thief = HttpClient()
    try:
        await thief.connect(rogue.system.addresses[0], "learner", "learner-2")
        body = rogue.body(pull)
        with pytest.raises(AccessError, match="'learner-2' may not write to"):
            await thief.put(pull.path, body.numpy().data, base=rogue.system.addresses[0])
    finally:
        await thief.close()


async def test_an_old_incarnation_and_a_duplicate_are_fenced(rogue: Rogue) -> None:
    answer = await rogue.greet(rogue.admitted.epoch - 1)
    assert isinstance(answer, messages.Refusal)
    assert answer.final
    assert "incarnation 0 is older than incarnation 1" in answer.reason
    rogue.nonce = "another process"
    answer = await rogue.greet(rogue.admitted.epoch)
    assert isinstance(answer, messages.Refusal)
    assert "two processes claim incarnation 1" in answer.reason


@pytest.mark.parametrize(
    "message",
    [
        {"type": "StepReport", "step": -1, "tokens": 0, "seconds": 0.1},
        {"type": "StepReport", "step": 1},
        {"type": "Nonsense"},
        {"type": "Welcome", "shard": 0, "term": 1, "clock": 0, "run_step": 0},
        {},
    ],
)
async def test_a_protocol_error_closes_the_connection(
    rogue: Rogue, message: dict[str, Any]
) -> None:
    rogue.channel.send(message)

    async def listen() -> None:
        while True:
            await rogue.channel.receive()

    with pytest.raises(TransportError, match="closed by"):
        await asyncio.wait_for(listen(), 5)


MALFORMED = [
    messages.Join("learner-1", "n", "learner", "[" * 100_000),
    messages.Join("learner-1", "n", "learner", '{"tensors": 1}'),
    messages.Join("learner-1", "n", "learner", "\ud800"),
    messages.Join("learner-1", "\ud800", "learner", json.dumps(layout_of(Model()).to_json())),
    messages.ShardHello(1, "n", "[" * 100_000),
    messages.ShardHello(1, "n", "{}"),
    messages.ShardHello(1, "n", '{"sync": {"of_a_later_version": 1}}'),
    messages.ShardHello(1, "n", '{"sync": {}, "run": {}, "shards": 1e999, "outer": {}}'),
    messages.ShardHello(7, "n", "{}"),
]


@pytest.mark.parametrize("message", MALFORMED, ids=range(len(MALFORMED)))
async def test_an_unreadable_first_message_closes_only_its_connection(
    make: Make, message: Any
) -> None:
    system = make(run=LONG, syncer={"shards": 2})
    system.start()
    name = getattr(message, "learner", None) or f"shard-{message.shard}"
    role = "learner" if isinstance(message, messages.Join) else "shard"
    client = HttpClient()
    with training(Trainer(system, "learner-0", pause=0.02)):
        channel = await client.connect(system.addresses[0], role, name)
        channel.send(encode(message))
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(1):
                while True:
                    await channel.receive()
        await client.close()
        rounds = system.rounds()
        until(lambda: system.rounds() > rounds + 2, "the run continues")
        assert not system.errors
