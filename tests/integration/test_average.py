"""The shards keep an average of the weights, which observers fetch and learners do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from decoupled_diloco import Observer
from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import open_tape, relay_process
from decoupled_diloco.relay.relay_process import RelayProcess
from decoupled_diloco.syncer.result import by_name
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco_lab.simulate.training import train_virtually
from integration.real_system import (
    PATIENCE_SECONDS,
    Model,
    System,
    Trainer,
    equal,
    parameters,
    patient,
    training,
    until,
)

Make = Callable[..., System]


def averages_of(system: System) -> dict[str, Tensor]:
    """Return the shards' averages, by the model's names."""
    shards = [each.parts.result().worker.tensors for each in system.shards.values()]
    values = {p: each.whole(p, average=True) for each in shards for p in each.fragments}
    return by_name(shards[0].plan, values)


def test_an_observer_has_the_average_in_a_block(make: Make) -> None:
    system = make(outer={"average": 0.5}, syncer={"shards": 2})
    system.start()
    watched = Model(seed=5)
    trainers = [Trainer(system, f"learner-{i}") for i in range(2)]
    with training(*trainers), system.observer(watched) as observer:
        frozen = watched.frozen.detach().clone()
        until(lambda: observer.done, "the run is over")
        observer.pull()
        final, expected = parameters(watched), averages_of(system)
        for _ in range(20):  # more often than a shard allows a download of the same bytes
            with observer.averaged():
                assert equal(parameters(watched), {n: expected[n] for n in final})
            assert equal(parameters(watched), final)
        assert not equal(final, {n: expected[n] for n in final})
        assert torch.equal(watched.frozen, frozen)
        for shard in system.shards.values():
            offers = shard._server.bodies._offers
            for p in shard.machine.owned:
                assert offers[f"average/{p}"].taken.keys() == {"watcher"}, "no learner fetches it"


@contextlib.contextmanager
def relay_of(system: System) -> Iterator[RelayProcess]:
    """A relay in the loop of the shards."""

    header = {"machine": "relay", "relay": "site-a", "settings": system.config.public()}

    tape = open_tape(system.folder, relay_process("site-a"), header)

    def made() -> RelayProcess:
        return RelayProcess(
            "site-a",
            system.dialled,
            server=lambda on_channel: HttpServer(on_channel=on_channel, pool_bytes=1 << 20),
            client=lambda principal: HttpClient(),
            run=system.config.run.name,
            tape=tape,
            folder=system.folder / "relays",
            cache_bytes=1 << 20,
        )

    relay = system.call(made)
    running = asyncio.run_coroutine_threadsafe(relay.run(), system.loop)
    try:
        until(lambda: relay.health()["shards"] == [0, 1], "it is connected")
        yield relay
    finally:
        system.loop.call_soon_threadsafe(relay.stop)
        running.result(PATIENCE_SECONDS)
        tape.close()


def test_observers_behind_a_relay_have_the_newest_average(make: Make) -> None:
    """The relay fetches the average of a version once, and that of a later version again."""
    system = make(outer={"average": 0.5}, syncer={"shards": 2}, run={"max_steps": 10_000})
    system.start()
    with training(Trainer(system, "learner-0")):
        pass  # the run has a model
    with relay_of(system) as relay, contextlib.ExitStack() as observers:
        watched = [Model(seed=5), Model(seed=6)]
        for number, model in enumerate(watched):
            name = f"watcher-{number}"
            observer = Observer(model, relay.address, name=name, timeouts=patient())
            observers.enter_context(observer)

            def has_average(observer: Observer = observer, model: Model = model) -> bool:
                observer.pull()
                expected = averages_of(system)
                with observer.averaged():
                    return equal(parameters(model), {n: expected[n] for n in parameters(model)})

            for _ in range(2):
                rounds = system.rounds() + 12
                with training(*(Trainer(system, f"learner-{i}") for i in range(2))):
                    until(lambda least=rounds: system.rounds() > least, "rounds")
                until(has_average, "the newest average", 10.0)
        for shard in system.shards.values():
            offers = shard._server.bodies._offers
            for p in shard.machine.owned:
                assert offers[f"average/{p}"].taken.keys() == {"site-a"}


def test_a_shard_continues_its_average_after_a_restart(make: Make) -> None:
    system = make(outer={"average": 0.8}, run={"max_steps": 10_000})
    system.start()
    with training(*(Trainer(system, f"learner-{i}") for i in range(2))):
        until(lambda: system.rounds() > 12, "rounds")
    system.stop()
    before = averages_of(system)
    system.start()
    until(lambda: system.shards[0].machine.state.phase == "restoring", "its disk is read")
    assert equal(averages_of(system), before)


def test_a_run_without_an_average_is_named_in_the_error(make: Make) -> None:
    system = make()
    system.start()
    with (
        system.learner(Model(), "learner-0"),
        system.observer(Model()) as observer,
        pytest.raises(ConfigError, match=r"outer.average is not set, .* such as 0.5"),
    ):
        observer.averaged().__enter__()


def test_a_run_in_virtual_time_evaluates_its_average() -> None:
    size = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2, "eval_batches": 1}
    config = RunConfig(
        run={"learners": 2, "max_steps": 16, "evaluator": False},
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1},
        outer={"average": 0.5},
        data={"elastic": False},
        workload={"name": "gpt", "options": size},
    )
    run = train_virtually(config)
    (shard,) = run.system.shards
    entry = shard.tensors.fragments[0].outer.state_dict()
    piece = run.plan.fragments[0].pieces[0]
    averaged = run.weights(average=True)[piece.tensor].view(-1)[piece.start : piece.stop]
    assert torch.equal(averaged, entry["average.values"][: piece.numel])
    assert run.evaluate(average=True)["loss"] != run.evaluate()["loss"]
