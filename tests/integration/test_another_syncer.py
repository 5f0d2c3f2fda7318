"""Another or a faulty syncer at a learner's address does not stop the learner's loop."""

from __future__ import annotations

import random
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

import pytest

from decoupled_diloco.learner import connections
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import (
    Asking,
    Holding,
    Lease,
    RelayOpened,
    StateWanted,
    TransferReady,
    Version,
)
from decoupled_diloco.protocol.wire import encode
from integration.real_system import TOKENS, Model, System, Trainer, training, until

Make = Callable[..., System]
LONG = {"max_steps": 100_000}


def in_place_of(old: System, new: System) -> None:
    """Let the new system listen at the old one's addresses."""
    new.ports, new.addresses = old.ports, old.addresses


def steps_on(trainer: Trainer, steps: int = 20) -> None:
    """Wait until the loop has taken ``steps`` more steps."""
    assert trainer.learner is not None
    before = trainer.learner.steps
    until(lambda: trainer.error or trainer.learner.steps > before + steps, "it continues to step")
    assert trainer.error is None


@pytest.mark.parametrize(
    ("tokens", "shards"), [(("one", "another"), 1), ((None, None), 1), ((None, None), 2)]
)
def test_another_run_at_its_address_costs_no_step(
    make: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tokens: tuple[str | None, str | None],
    shards: int,
) -> None:
    """The syncer is killed and a new run starts at its address; then the first run returns."""
    monkeypatch.setattr(connections, "AGAIN_SECONDS", 1.0)
    tables = {"run": LONG, "syncer": {"shards": shards}}
    ours = make(token=tokens[0], **tables)
    theirs = make(token=tokens[1], **tables, sync={"fragments": 3})
    in_place_of(ours, theirs)
    ours.start()
    trainer = Trainer(ours, "learner-0", auth_token=tokens[0])
    with training(trainer):
        learner = trainer.learner
        assert learner is not None
        until(lambda: ours.rounds() > 4, "rounds")
        ours.stop()
        theirs.start()
        until(lambda: learner.rejection_reason, "it is rejected")
        reason = (
            "the token does not belong to this run"
            if tokens[0]
            else "this address now belongs to another run"
        )
        assert reason in learner.rejection_reason
        refused = f"the syncer rejects this learner ({learner.rejection_reason})"
        message = f"learner-0: {refused}: training continues"
        until(lambda: caplog.text.count(message) > 1, "it is logged repeatedly")
        steps_on(trainer)
        host = theirs.shards[0].host
        assert host is not None
        assert not host.machine.state.learners, "the other run has not admitted it"
        assert not any(shard.machine.state.members for shard in theirs.shards.values())
        theirs.stop()
        ours.start()
        until(lambda: ours.shards[0].machine.state.phase == "running", "restored")
        rounds = ours.rounds()
        until(lambda: ours.rounds() > rounds + 4, "rounds continue")
        assert learner.rejection_reason == ""
        assert "learner-0 is in the run again, after" in caplog.text
    trainer.end()


def test_a_learner_of_another_run_may_still_end(make: Make) -> None:
    ours, theirs = make(run=LONG), make(run=LONG)
    in_place_of(ours, theirs)
    ours.start()
    with ours.learner(Model(), "learner-0") as learner:
        until(lambda: learner.step(tokens=TOKENS) and ours.rounds() > 2, "rounds")
        ours.stop()
        theirs.start()
        until(lambda: learner.step(tokens=TOKENS) and learner.rejection_reason, "it is rejected")


ASK = Asking(1, 1)

NONSENSE: list[dict[str, Any]] = [
    {},
    {"type": "Nonsense"},
    {"type": "Shifted", "by": -1},
    encode(messages.Pull(999, ASK, Version(1, 0), 1, "bf16", "overwrite", "/x", False)),
    encode(messages.Pull(0, ASK, Version(1, 0), 1, "morse", "overwrite", "//[", False)),
    encode(messages.Pull(0, ASK, Version(1, 0), 1, "bf16", "overwrite", "/x", False, (999,))),
    encode(messages.Outcome(999, ASK, "refused", "", None)),
    encode(messages.CopyWanted(999, 1, None, "/x")),
    encode(messages.Published(999, Version(1, 9), None, "", "", "", 1)),
    encode(messages.Published(0, Version(9, 9), None, "", "http://[", "http://[", 1)),
    encode(messages.Refusal("the test rejects it", True)),
]


def send(system: System, message: dict[str, Any]) -> None:
    """Send this message from the shard to the learner, if the learner is connected."""
    session = system.shards[0]._sessions.sessions.get("learner-0")
    if session is not None:
        session.channel.send({"checkpoint": 0, **message})


@pytest.mark.parametrize("message", NONSENSE, ids=range(len(NONSENSE)))
def test_invalid_messages_of_a_shard_cost_no_step(make: Make, message: dict[str, Any]) -> None:
    system = make(run=LONG)
    system.start()
    trainer = Trainer(system, "learner-0")
    with training(trainer):
        until(lambda: system.rounds() > 2, "rounds")
        system.call(lambda: send(system, message))
        steps_on(trainer, 50)
    trainer.end()


COORDINATORS_NONSENSE = [
    {"type": "Nonsense"},
    encode(StateWanted("learner-1", 1, (Holding(999, Version(1, 0)),))),
    encode(messages.LeasesGiven((Lease(1, 0, 1 << 40, 0),), ())),
    encode(TransferReady("learner-1", 1, 1 << 40, 1 << 50, "")),
    encode(RelayOpened("learner-1", 1, "//[")),
]


@pytest.mark.parametrize("message", COORDINATORS_NONSENSE, ids=range(5))
def test_invalid_messages_of_a_coordinator_cost_no_step(
    make: Make, message: dict[str, Any]
) -> None:
    system = make(run=LONG)
    system.start()
    trainer = Trainer(system, "learner-0")
    with training(trainer):
        until(lambda: system.rounds() > 2, "rounds")
        host = system.shards[0].host
        assert host is not None
        system.call(lambda: [channel.send(message) for channel, _, _ in host._joining.values()])
        steps_on(trainer, 50)
        until(lambda: host._joining, "it has joined again")
    trainer.end()


def anything(rng: random.Random, hint: Any) -> Any:
    """Return any value that the wire accepts for this type."""
    if get_origin(hint) is Literal:
        return rng.choice(get_args(hint))
    if get_origin(hint) is tuple:
        return [anything(rng, get_args(hint)[0]) for _ in range(rng.randrange(3))]
    if get_args(hint):
        return anything(rng, rng.choice(get_args(hint)))
    if is_dataclass(hint):
        return message_of(rng, hint)
    made = {
        int: lambda: rng.choice([0, 1, 2, 3, 4, 7, 1 << 40]),
        float: lambda: rng.choice([0.0, 0.5, 1e300]),
        str: lambda: rng.choice(["", "/x", "http://[", "learner-0", "bf16"]),
        bool: lambda: rng.random() < 0.5,
        type(None): lambda: None,
    }
    return made[hint]()


def message_of(rng: random.Random, kind: Any) -> dict[str, Any]:
    """Return a message of this kind with random fields."""
    hints = typing.get_type_hints(kind)
    rest = {field.name: anything(rng, hints[field.name]) for field in fields(kind)}
    return {"type": kind.__name__, **rest}


@pytest.mark.parametrize("seed", range(3))
def test_the_loop_continues_after_any_message_of_a_shard(make: Make, seed: int) -> None:
    """The end of the run is excluded, because a shard may send it."""
    rng = random.Random(seed)
    kinds = [
        kind
        for kind in get_args(messages.ToLearner)
        if kind not in (messages.Ending, messages.Finished)
    ]
    system = make(run=LONG)
    system.start()
    trainer = Trainer(system, "learner-0")
    with training(trainer):
        until(lambda: system.rounds() > 2, "rounds")
        for _ in range(30):
            message = message_of(rng, rng.choice(kinds))
            system.call(lambda message=message: send(system, message))
            steps_on(trainer, 2)
    trainer.end()
