"""Whole runs with real shards and real learners."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco.config.method import plan_of, public_text, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.roles import run_learner
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.syncer.result import assemble, read_layout
from decoupled_diloco.tape import TapeReader
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


def test_two_learners_and_two_shards_agree_at_the_end(make: Make) -> None:
    system = make(syncer={"shards": 2})
    system.start()
    trainers = [Trainer(system, f"learner-{i}", Model(seed=i)) for i in range(2)]
    with training(*trainers):
        learners = [trainer.end() for trainer in trainers]
        system.wait_finished()
    assert all(learner.ended for learner in learners)
    assert all(learner.steps >= 30 for learner in learners)
    first, second = (parameters(trainer.model) for trainer in trainers)
    assert equal(first, second), "after the run all models have the global weights"
    plan = plan_of(read_layout(system.folder), read_public(public_text(system.config)))
    result = load_weights(assemble(system.folder, plan, 2))
    assert torch.equal(result.pop("seen"), trainers[0].model.seen), "it includes a buffer"
    assert equal(first, result), "the result equals the learners' models"
    assert not equal(first, parameters(Model(seed=0)))
    assert not equal(first, parameters(Model(seed=1)))


def test_fragments_are_snapshotted_sent_and_merged_as_scheduled(make: Make) -> None:
    """One learner adds 1 to all parameters in every step, and waits for its rounds."""
    system = make(
        run={"learners": 1, "max_steps": 12},
        sync={
            "fragments": 2,
            "partition": {"map": [["embedding"], ["hidden", "head", "seen"]], "phases": [3, 1]},
            "codec": {"uplink": "fp32", "downlink": "fp32"},
            "merge": {"rule": "mean"},
            "wait": "at_overlap",
            "apply": {"when": "at_overlap", "alignment": "carry"},
        },
        outer={"lr": 1.0, "momentum": 0.0, "by_fragment": [{"fragments": [0], "lr": 0.25}]},
    )
    system.start()
    model = Model()
    before = parameters(model)
    with system.learner(model, "learner-0") as learner:
        goes_on = True
        while goes_on:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0 if parameter.requires_grad else 0.0)
            goes_on = learner.step(tokens=TOKENS)
    system.wait_finished()
    plan = plan_of(read_layout(system.folder), read_public(public_text(system.config)))
    assert [len(fragment.pieces) for fragment in plan.fragments] == [1, 5]
    due = [
        (record.data["step"], record.data["fragment"])
        for record in TapeReader(system.folder / "tape" / "learner-0.jsonl")
        if record.type == "Snapshot" and "due" in record.data["why"]
    ]
    # A learner that receives the end late may train a step or two more.
    assert due[:6] == [(1, 1), (3, 0), (5, 1), (7, 0), (9, 1), (11, 0)]
    steps = learner.steps
    for name, after in parameters(model).items():
        expected = (0.25 if name.startswith("embedding") else 1.0) * steps
        torch.testing.assert_close(after - before[name], torch.full_like(after, expected))


def test_a_run_begins_from_the_weights_of_a_file(make: Make, tmp_path: Path) -> None:
    given = Model(seed=7)
    path = tmp_path / "given.safetensors"
    save_weights(path, {**parameters(given), "seen": given.seen + 3})
    system = make(run={"learners": 1}, sync={"initial_weights": path})
    system.start()
    model = Model(seed=1)
    with system.learner(model, "learner-0") as learner:
        assert equal(parameters(model), parameters(given))
        assert torch.equal(model.seen, given.seen + 3)
        assert set(learner.versions) == {"1.0"}


def test_an_observer_follows_and_does_not_count(make: Make) -> None:
    system = make(sync={"participation": "all", "quorum": 2}, run={"learners": 2})
    system.start()
    watched = Model(seed=5)
    trainers = [Trainer(system, f"learner-{i}", Model(seed=i)) for i in range(2)]
    with training(trainers[0]), system.observer(watched) as observer:
        frozen = watched.frozen.detach().clone()
        learner = trainers[0].learner
        assert learner is not None
        until(lambda: learner.steps > 8, "it trains alone")
        state = system.shards[0].machine.state
        assert state.clock == 0, "an observer and one learner are not a quorum of two"
        assert list(state.members) == ["learner-0"]
        assert state.observers == {"watcher"}
        before = parameters(watched)
        with training(trainers[1]):
            until(observer.pull, "a new version is published")
            assert not equal(before, parameters(watched))
            until(lambda: observer.done, "the run is over")
            observer.pull()
            trainers[0].end()
    final = parameters(trainers[0].model)
    assert equal(parameters(watched), final)
    assert torch.equal(watched.frozen, frozen), "frozen parameters are not synchronized"


def test_the_second_incarnation_of_a_learner_continues_to_count(make: Make) -> None:
    system = make(run={"max_steps": 1000})
    system.start()
    model = Model()
    with system.learner(model, "learner-0") as learner:
        for _ in range(5):
            learner.step(tokens=TOKENS)
        state = learner.state_dict()
        assert (learner.incarnation, learner.steps, learner.tokens) == (1, 5, 5 * TOKENS)
    with system.learner(model, "learner-0") as learner:
        assert learner.steps == 0
        learner.load_state_dict(state)
        learner.step(tokens=TOKENS)
        assert (learner.incarnation, learner.steps, learner.tokens) == (2, 6, 6 * TOKENS)
        with pytest.raises(
            ConfigError, match="the state belongs to learner 'other', and this is 'learner-0'"
        ):
            learner.load_state_dict({**state, "learner": "other"})


def test_a_callback_receives_the_names_of_the_updated_tensors(make: Make) -> None:
    system = make(run={"learners": 1, "max_steps": 24})
    system.start()
    updates: list[tuple[str, ...]] = []
    gate = threading.Event()
    model = Model()
    trainer = Trainer(system, "learner-0", model, gate=gate)
    with training(trainer):
        assert trainer.learner is not None
        trainer.learner.on_weights_updated(updates.append)
        names = tuple(parameters(model))
        assert updates == [(*names, "seen")], (
            "it is called at once, because the join has written all tensors"
        )
        gate.set()
        trainer.end()
    later = updates[1:]
    assert all(later), "it is called only when fragments were applied"
    assert {name for some in later for name in some} == {*names, "seen"}
    assert min(map(len, later)) < len(names), "it is not called for tensors of other fragments"


def test_all_callbacks_are_called_in_order(make: Make) -> None:
    system = make(run={"learners": 1, "max_steps": 24})
    system.start()
    calls: list[int] = []
    with system.learner(Model(), "learner-0") as learner:
        for number in range(3):
            learner.on_weights_updated(lambda names, number=number: calls.append(number))
        assert calls == [0, 1, 2]
        while learner.step(tokens=TOKENS):
            time.sleep(0.005)
    assert len(calls) > 3
    assert calls == [0, 1, 2] * (len(calls) // 3)


def test_an_optimizer_with_separate_copies_is_rejected(make: Make) -> None:
    system = make()
    system.start()
    model = Model()
    master = [p.detach().double().requires_grad_() for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(master, lr=0.1)
    refused = r"group 0 of SGD holds a tensor .* refresh it in a callback of learner\.on_weights"
    with system.learner(model, "learner-0", optimizer=optimizer) as learner:
        with pytest.raises(ConfigError, match=refused):
            learner.step(tokens=TOKENS)
        assert learner.steps == 0
        learner.on_weights_updated(lambda names: None)
        assert learner.step(tokens=TOKENS), "with a callback the optimizer is no longer checked"


def test_steps_without_tokens_count_and_the_run_ends(make: Make) -> None:
    """If all labels of all batches are masked, no contribution has weight."""
    system = make(run={"learners": 1, "max_steps": 12}, sync={"quorum": 1})
    system.start()
    with system.learner(Model(), "learner-0") as learner:
        while learner.step(tokens=torch.tensor(0)):
            time.sleep(0.005)
        assert learner.steps >= 12
        assert learner.tokens == 0
    system.wait_finished()


def test_occasional_steps_without_tokens_lose_nothing(make: Make) -> None:
    system = make(run={"learners": 1, "max_steps": 24}, sync={"quorum": 1})
    system.start()
    trained = 0
    with system.learner(Model(), "learner-0") as learner:
        goes_on = True
        while goes_on:
            tokens = 0 if learner.steps % 3 else 5
            trained += tokens
            goes_on = learner.step(torch.tensor(float("nan")), tokens=tokens)
            time.sleep(0.005)
        assert learner.tokens == trained
    system.wait_finished()


@pytest.mark.parametrize("tokens", [-1, float("nan"), "8", True])
def test_invalid_tokens_are_rejected_and_the_step_may_be_repeated(make: Make, tokens: Any) -> None:
    system = make()
    system.start()
    with system.learner(Model(), "learner-0") as learner:
        with pytest.raises(ConfigError, match=f"tokens={tokens!r} is not a valid number of tokens"):
            learner.step(tokens=tokens)
        assert learner.steps == 0


def test_bf16_frozen_and_tied_parameters(make: Make) -> None:
    class Tied(Model):
        def __init__(self, seed: int) -> None:
            super().__init__(seed, dtype=torch.bfloat16)
            self.head.weight = self.embedding.weight
            self.frozen = nn.Parameter(torch.full((3,), float(seed)), requires_grad=False)

    system = make()
    system.start()
    trainers = [Trainer(system, f"learner-{i}", Tied(seed=i)) for i in range(2)]
    with training(*trainers):
        for trainer in trainers:
            trainer.end()
        system.wait_finished()
    models = [trainer.model for trainer in trainers]
    assert equal(*(parameters(model) for model in models))
    assert all(p.dtype == torch.bfloat16 for p in parameters(models[0]).values())
    for seed, model in enumerate(models):
        assert model.head.weight is model.embedding.weight, "still tied"
        assert torch.equal(model.frozen, torch.full((3,), float(seed))), (
            "frozen parameters keep their values"
        )
    plan = plan_of(read_layout(system.folder), read_public(public_text(system.config)))
    result = load_weights(assemble(system.folder, plan, 1))
    assert torch.equal(result["head.weight"], result["embedding.weight"])
    assert "frozen" not in result


def test_an_exception_in_the_loop_leaves_the_run(make: Make) -> None:
    system = make(run={"max_steps": 1000})
    system.start()

    def fail() -> None:
        with system.learner(Model(), "learner-0") as learner:
            learner.step(tokens=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    members = system.shards[0].machine.state.members
    until(lambda: not members, "it has left before its lease expired", seconds=1.0)


@pytest.mark.parametrize("syncer", ["alive", "silent"])
def test_ctrl_c_leaves_soon(make: Make, syncer: str) -> None:
    system = make(run={"max_steps": 1000})
    system.start()
    before = {thread for thread in threading.enumerate() if thread.name == "ddiloco"}
    awake = threading.Event()
    started = 0.0

    def interrupt() -> None:
        nonlocal started
        with system.learner(Model(), "learner-0") as learner:
            learner.step(tokens=1)
            if syncer == "silent":
                system.loop.call_soon_threadsafe(awake.wait)
            started = time.monotonic()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    seconds = time.monotonic() - started
    awake.set()
    assert seconds < 20.0, "it neither flushes nor waits for an answer"
    after = {thread for thread in threading.enumerate() if thread.name == "ddiloco"}
    assert after <= before, "its thread is gone"


def test_closing_at_the_end_without_a_last_step_flushes_the_training(make: Make) -> None:
    sync = {
        "overlap_steps": 0,
        "codec": {"uplink": "fp32", "downlink": "fp32"},
        "merge": {"rule": "mean"},
        "apply": {"alignment": "carry"},  # overwriting would discard the training during a round
    }
    outer = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}
    system = make(run={"learners": 1, "max_steps": 8}, sync=sync, outer=outer)
    system.start()
    model = Model()
    learner = system.learner(model, "learner-0")
    rng = random.Random(1)
    while not learner.budget_reached:
        nudge(model, rng)
        learner.step(tokens=TOKENS)
        time.sleep(0.003)
    trained = parameters(model)
    started = time.monotonic()
    learner.close()
    assert time.monotonic() - started < 10.0, "the closing sweep does not wait for a step"
    system.wait_finished()
    # With one learner and an outer step of exactly its change, the global model equals its model.
    for name, result in parameters(model).items():
        torch.testing.assert_close(result, trained[name], rtol=1e-5, atol=1e-6)


def test_a_pool_smaller_than_any_payload_is_slow_but_not_stuck(make: Make) -> None:
    system = make(pool_bytes=16, run={"learners": 3}, sync={"participation": "all"})
    system.start()
    trainers = [Trainer(system, f"learner-{i}", Model(seed=i)) for i in range(3)]
    with training(*trainers):
        for trainer in trainers:
            trainer.end()
        system.wait_finished()
    merged = [
        r
        for r in TapeReader(system.folder / "tape" / "shard-0.jsonl")
        if r.type == "RoundFinished" and r.data["verdict"] == "merged"
    ]
    folded = [
        {p["learner"] for p in r.data["participants"] if p["state"] == "folded"} for r in merged
    ]
    assert max(map(len, folded)) == 3


def test_a_built_in_learner_with_another_configuration_is_rejected(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"layers": 1, "width": 8, "heads": 1, "context": 8, "corpus_bytes_max": 50_000}
    system = make(workload={"name": "gpt", "options": small})
    other = make(workload={"name": "gpt", "options": {**small, "batch_size": 3}}).config
    system.start()
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(ConfigError, match=r"options\.batch_size is 3 here and not set there"):
        run_learner(other, 0, syncer=system.addresses, folder=system.folder, token=None)


def test_nothing_grows_with_the_length_of_a_run(make: Make) -> None:
    system = make(run={"max_steps": 100_000})
    system.start()
    trainers = [Trainer(system, f"learner-{i}", Model(seed=i), pause=0.001) for i in range(2)]

    def sizes() -> dict[str, int]:
        shard = system.shards[0]
        parts = shard.parts.result()
        bodies = shard._server.bodies
        held: dict[str, Any] = {
            "expected": parts.uploads._expected,
            "offered": shard._downloads._urls,
            "offers": bodies._offers,
            "uploads": bodies._uploads,
            "greeting": shard._sessions.greeting,
            "sessions": shard._sessions.sessions,
            "tasks": shard.driver.tasks,
            "arrived": parts.worker.tensors._arrived,
            "accumulators": parts.worker.tensors._accumulators,
            "rounds": shard.machine.state.rounds,
            "identities": shard.machine.state.identities,
        }
        return {name: len(value) for name, value in held.items()}

    with training(*trainers):
        until(lambda: system.rounds() > 150, "many rounds")
        measured = system.call(sizes)
        learner = trainers[0].learner
        assert learner is not None
        shared = learner._party.membership.background.shared
        assert shared is not None
        tasks = len(shared.driver.tasks)
    fragments = system.config.sync.fragments
    assert measured["offered"] == measured["offers"] <= 3 * fragments
    assert all(size <= 4 * fragments for size in measured.values()), measured
    assert tasks <= 3 + 2 * fragments
