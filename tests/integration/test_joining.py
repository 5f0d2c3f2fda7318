"""Admission to a run: accepted joins, and the errors of rejected ones."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import nn

from decoupled_diloco import Learner, Observability, Observer, PartyFiles, Timeouts
from decoupled_diloco.config import dump_config
from decoupled_diloco.config.addresses import from_elsewhere
from decoupled_diloco.config.parties import Parties
from decoupled_diloco.config.signing_keys import create_signing_key
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    ProtocolError,
    RunEndedError,
    StorageError,
    TransportError,
)
from decoupled_diloco.learner import connections, process
from decoupled_diloco.protocol import messages, rounds, syncer_machine
from decoupled_diloco.storage.shared_folder import recorded_end
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.interface import TransferStats
from decoupled_diloco.transport.tokens import Tokens
from free_ports import free_ports
from integration.real_system import (
    PATIENCE_SECONDS,
    TOKENS,
    Model,
    System,
    Trainer,
    patient,
    training,
    until,
)

Make = Callable[..., System]


def test_a_wrong_auth_token_is_rejected_at_once(make: Make) -> None:
    system = make(tokens=Tokens("right"))
    system.start()
    with pytest.raises(
        AccessError, match="the token does not belong to this run: a syncer that started"
    ):
        system.learner(Model(), "learner-0", auth_token="wrong")
    with pytest.raises(AccessError, match="the syncer requires the run's secret"):
        system.learner(Model(), "learner-0")
    with system.learner(Model(), "learner-0", auth_token="right") as learner:
        assert learner.incarnation == 1


def test_an_auth_token_may_have_the_newline_of_its_file(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("right\n")
    system = make(tokens=Tokens("right"))
    system.start()
    with system.learner(Model(), "learner-0", auth_token=file.read_text()) as learner:
        assert learner.incarnation == 1


@pytest.mark.parametrize("token", ["", " \n", "a\nb", "caf\u00e9", "nul\0", b"x", 7])
def test_an_invalid_auth_token_is_rejected_at_once(token: Any) -> None:
    with pytest.raises(ConfigError, match=r"token.*: pass the content of the run's") as raised:
        Learner(Model(), "http://127.0.0.1:9", auth_token=token)
    assert str(token) not in str(raised.value) or len(str(token)) < 3, "the secret is not repeated"


def test_a_learner_joins_for_a_party_that_both_sides_know(make: Make, tmp_path: Path) -> None:
    keys = {name: create_signing_key(tmp_path / f"{name}.key").public for name in ("a", "b")}
    members = [{"name": n, "learners": [f"{n}-*"], "key": str(key)} for n, key in keys.items()]
    agreed = Parties(parties=members)
    system = make(privacy={"members": agreed.parties})
    system.start()
    with pytest.raises(ConfigError, match="learner 'c-0' belongs to no party of this run: add"):
        system.learner(Model(), "c-0")
    other = Parties(parties=[{**members[0], "sees": "all"}, members[1]])
    with pytest.raises(ConfigError, match=r"the syncer has the digest .*, but this learner's"):
        system.learner(Model(), "a-0", party=PartyFiles(other))
    with pytest.raises(ConfigError, match="but party 'a' of learner 'a-0' has the key"):
        system.learner(Model(), "a-0", party=PartyFiles(agreed, tmp_path / "b.key"))
    with system.learner(Model(), "a-0", party=PartyFiles(agreed, tmp_path)) as learner:
        assert learner.incarnation == 2, "the attempt with other parties had been admitted"


def test_a_principal_can_join_only_under_its_name(make: Make) -> None:
    system = make(tokens=Tokens(principals={"learner-0": "zero", "learner-1": "one"}))
    system.start()
    with pytest.raises(AccessError, match="belongs to 'learner-1', not to 'learner-0'"):
        system.learner(Model(), "learner-0", auth_token="one")
    with system.learner(Model(), "learner-0", auth_token="zero") as learner:
        assert learner.incarnation == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_syncer_on_all_interfaces_is_reached_by_the_used_address(make: Make, first: int) -> None:
    tables = {"syncer": {"host": "0.0.0.0", "shards": 2}, "run": {"max_steps": 1000}}
    system = make(token="secret", **tables)
    assert system.addresses[1] == f"http://0.0.0.0:{system.ports[1]}"
    system.start()
    own = from_elsewhere(system.addresses[first])
    dialled = own if "127." not in own else f"http://127.0.0.2:{system.ports[first]}"
    with system.learner(Model(), "learner-0", syncer=dialled, auth_token="secret") as learner:
        for _ in range(12):
            assert learner.step(tokens=TOKENS)
        host = dialled.rpartition(":")[0]
        assert learner._party.membership.background.links.addresses == [
            f"{host}:{port}" for port in system.ports
        ]
        until(lambda: system.rounds() > 0, "rounds are opened")
        for shard in system.shards.values():
            assert "learner-0" in shard.machine.state.members


def test_a_name_belongs_to_one_learner_at_a_time(make: Make) -> None:
    system = make(run={"max_steps": 1000})
    system.start()
    first = system.learner(Model(), "learner-0")
    process.leave(first)  # so that it counts as a learner of another process
    with pytest.raises(
        TransportError,
        match=r"name='learner-0' is in use by a live process of this run: pass another name=, "
        "or stop the other process first",
    ):
        system.learner(Model(), "learner-0", timeouts=patient(join=1.0))
    assert first.step(tokens=TOKENS), "the first one continues"
    timer = threading.Timer(1.0, first.close)
    timer.start()
    with system.learner(Model(), "learner-0") as second:
        assert second.incarnation == 2, "it joins once the first one has left"
    timer.join()


def test_learners_keep_their_numbers(make: Make) -> None:
    """Numbers survive restarts of a learner and of the syncer, with more learners than expected."""
    system = make(run={"max_steps": 1000, "learners": 2})
    system.start()
    numbers = {}
    for name in ("b", "a", "b", "c"):
        with system.learner(Model(), name) as learner:
            numbers[name] = learner.index, learner.count
    assert numbers == {"b": (0, 2), "a": (1, 2), "c": (2, 3)}
    system.stop()
    system.start()
    with system.learner(Model(), "a") as learner:
        assert (learner.index, learner.count) == (1, 3)


def test_a_step_after_close_is_an_error(make: Make) -> None:
    system = make(run={"max_steps": 1000})
    system.start()
    learner = system.learner(Model(), "learner-0")
    assert learner.step(tokens=TOKENS)
    learner.close()
    learner.close()
    with pytest.raises(ConfigError, match=r"step\(\) called on closed learner 'learner-0': call"):
        learner.step(tokens=TOKENS)


def test_a_learner_may_return_before_its_old_connection_is_found_dead(make: Make) -> None:
    """Its machine lost power, so the old connection is open and silent."""
    system = make(run={"max_steps": 1000})
    system.start()
    host = system.shards[0].host
    assert host is not None

    class Silent:
        """A connection whose other end is gone."""

        last_received = 0.0

    dead = messages.Join("learner-0", "the nonce before", "learner", "")
    system.call(lambda: host._enter(99, Silent(), dead, None))
    timer = threading.Timer(0.5, lambda: system.call(lambda: host._leave(99)))
    timer.start()
    with system.learner(Model(), "learner-0") as learner:
        assert learner.incarnation == 1
        assert not timer.is_alive(), "the join waited for the timeout"


def test_the_process_of_an_old_incarnation_is_fenced(make: Make) -> None:
    system = make(run={"max_steps": 1000}, syncer={"shards": 2})
    system.start()
    first = system.learner(Model(), "learner-0")
    first.step(tokens=TOKENS)
    host = system.shards[0]._host
    assert host is not None

    def forget() -> None:
        """Act as if the coordinator's connection to the first process had broken."""
        learners = host.machine.state.learners
        learners["learner-0"] = dataclasses.replace(learners["learner-0"], present=False)
        for connection, (channel, join, layout) in host._joining.items():
            elsewhere = dataclasses.replace(join, learner="elsewhere")
            host._joining[connection] = (channel, elsewhere, layout)
        host._connections_of["elsewhere"] = host._connections_of.pop("learner-0")

    system.call(forget)
    process.leave(first)  # so that it counts as a learner of another process
    tape = system.folder / "tape" / "learner-0-again.jsonl"
    with system.learner(
        Model(), "learner-0", observability=Observability(event_tape=tape)
    ) as second:
        assert second.incarnation == 2

        until(
            lambda: first.step(tokens=TOKENS) and first.rejection_reason,
            "it is rejected and continues to step",
        )
        assert (
            "incarnation 1 is older than incarnation 2: another process" in first.rejection_reason
        )
        assert second.step(tokens=TOKENS)
        members = system.shards[1].machine.state.members
        assert {name: member.epoch for name, member in members.items()} == {"learner-0": 2}
    first.close()
    # The test has changed the coordinator's state without a record on its tape.
    (system.folder / "tape" / "coordinator.jsonl").unlink()


def test_a_different_model_is_rejected_with_its_first_different_tensor(make: Make) -> None:
    system = make()
    system.start()
    with system.learner(Model(width=6), "learner-0"):
        with pytest.raises(
            ConfigError, match=r"^the model differs from the run's: .*'embedding.weight'"
        ):
            system.learner(Model(width=8), "learner-1")
        with pytest.raises(ConfigError, match=r"embedding\.weight"):
            system.observer(Model(width=8))
        other = Model()
        other.extra = nn.Parameter(torch.zeros(2))
        with pytest.raises(ConfigError, match="extra"):
            system.learner(other, "learner-1")
        with system.learner(Model(seed=9), "learner-1") as second:
            assert second.incarnation == 1


def test_too_many_fragments_are_a_clear_error(make: Make) -> None:
    system = make(sync={"fragments": 400, "sync_every": 400, "partition": {"scheme": "tensor"}})
    system.start()
    with pytest.raises(ConfigError, match="fragments=400"):
        system.learner(Model(), "learner-0")


def test_without_a_syncer_a_join_ends_after_its_timeout(make: Make) -> None:
    [port] = free_ports(1)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"could not be joined \(cannot reach .*start the sy"):
        Learner(Model(), f"http://127.0.0.1:{port}", timeouts=Timeouts(disconnect=0.3))
    assert 0.3 < time.monotonic() - started < 20.0
    with pytest.raises(TransportError, match="could not be joined"):
        Observer(Model(), f"http://127.0.0.1:{port}", timeouts=Timeouts(disconnect=0.1))


def test_a_failed_first_join_reports_how_to_continue(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AGAIN_SECONDS", 0.5)
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    with pytest.raises(TransportError) as caught:
        Learner(Model(), address, name="a", timeouts=Timeouts(join=1.5))
    assert f"(cannot reach {address}: Connection refused) in " in str(caught.value)
    assert " s, Timeouts(join=1.5): " in str(caught.value)
    assert f"start the syncer, correct its address ({address}), or raise" in str(caught.value)
    message = f"a is not in the run yet: cannot reach {address}: Connection refused: retrying"
    assert caplog.text.count(message) > 1, "it is logged again"


def test_a_shard_with_an_unreachable_address_is_named(make: Make) -> None:
    """The run admits the learner, but a shard's address works only on the syncer's machine."""
    system = make(syncer={"shards": 2})
    [port] = free_ports(1)
    system.start()
    wrong = f"http://127.0.0.1:{port}"
    host = system.shards[0].host
    assert host is not None
    host._addresses = (system.addresses[0], wrong)
    with pytest.raises(TransportError, match=rf"^{wrong}: no answer within Timeouts\(join=3\) s"):
        system.learner(Model(), "learner-0", timeouts=patient(join=3.0))


async def test_a_server_that_is_not_a_syncer_is_reported() -> None:
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        with pytest.raises(ProtocolError, match=r"404.*: is this the syncer's address?"):
            await asyncio.to_thread(Learner, Model(), f"http://{host}:{port}")
    finally:
        await runner.cleanup()


class Stuck(HttpClient):
    """A client that never receives a payload."""

    async def get(self, url: str, out: memoryview, *, base: str = "") -> TransferStats:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_join_during_the_end_of_the_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    for module, name in (
        (syncer_machine, "LINGER_SECONDS"),
        (rounds, "CLOSING_SECONDS"),
        (rounds, "COPY_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.5)
    system = make()
    system.start()
    with training(Trainer(system, "learner-0")), pytest.raises(TransportError) as caught:
        system.learner(Model(), "learner-1", syncer=system.by(Stuck), timeouts=patient(join=10.0))
    assert str(caught.value).startswith("the run is over: it ended while learner-1 was joining")


def test_a_learner_started_after_the_end_reads_it_in_the_run_folder(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in seconds, unless the budget was raised: then the syncer may start again."""
    system = make(run={"learners": 1, "max_steps": 8})
    (system.folder / "run.toml").write_text(dump_config(system.config))
    system.start()
    with training(trainer := Trainer(system, "a")):
        trainer.end()
    system.wait_finished()
    monkeypatch.setattr(connections, "ENDED_SECONDS", 0.1)
    late = system.by(lambda: HttpClient(ended=lambda: recorded_end(system.folder)))
    with pytest.raises(RunEndedError, match=r"has ended, and its weights.*cannot reach"):
        system.learner(Model(), "b", syncer=late, timeouts=patient(join=PATIENCE_SECONDS))
    raised = system.config.run.model_copy(update={"max_steps": 16})
    more = system.config.model_copy(update={"run": raised})
    (system.folder / "run.toml").write_text(dump_config(more))
    with pytest.raises(TransportError, match=r"Timeouts\(join=0\.5\)"):
        system.learner(Model(), "b", syncer=late, timeouts=patient(join=0.5))


def test_a_raised_budget_reaches_learners_that_are_connected(make: Make) -> None:
    system = make(run={"max_steps": 10**6})
    system.start()
    with system.learner(Model(), "learner-0") as learner:
        system.stop()
        budget = {"max_steps": 2 * 10**6}
        more = system.config.model_copy(update={"run": system.config.run.model_copy(update=budget)})
        system.start(config=more)
        until(
            lambda: learner.run_config["run"]["max_steps"] == 2 * 10**6,
            "it receives the new budget",
        )


def test_a_learner_waits_for_a_syncer_that_is_started_later(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    system = make()
    trainer = Trainer(system, "learner-0", steps_max=3)
    trainer.start()
    until(lambda: "is not in the run yet: cannot reach" in caplog.text, "it is logged")
    system.start()
    assert trainer.end().steps == 3


def test_the_constructor_can_be_interrupted() -> None:
    [port] = free_ports(1)
    before = set(threading.enumerate())
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Learner(Model(), f"http://127.0.0.1:{port}")
    assert time.monotonic() - started < 20.0
    until(lambda: not set(threading.enumerate()) - before, "its threads are gone")


@pytest.mark.parametrize("name", ["", "-x", "a b", "ä", "x" * 65])
def test_an_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid learner name: use 1 to 64 letters"):
        Observer(Model(), "http://127.0.0.1:9", name=name or " ")


def test_an_invalid_address_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is not a URL: write it as 'http://host:port'"):
        Learner(Model(), "127.0.0.1:7070")


def test_a_shard_with_another_configuration_is_rejected(make: Make) -> None:
    system = make(syncer={"shards": 2})
    other = make(syncer={"shards": 2}, sync={"sync_every": 8}).config
    system.start(0)
    system.start(1, config=other)
    until(lambda: 1 in system.errors, "shard 1 ends")
    error = system.errors.pop(1)
    assert isinstance(error, ConfigError)
    assert (
        "other settings than shard 0: sync.sync_every is 4 here and 8 there: start all sh"
        in str(error)
    )


def test_the_state_of_a_run_with_other_settings_is_rejected(make: Make) -> None:
    system = make()
    system.start()
    with system.learner(Model(), "learner-0"):
        pass
    system.stop()
    other = make(sync={"sync_every": 8}).config
    system.start(0, config=other)
    error = system.errors.pop(0)
    assert isinstance(error, ConfigError)
    assert "belongs to a run with other settings: sync.sync_every is 8 here and 4 there" in str(
        error
    )


def test_a_torn_state_of_the_coordinator_is_a_clear_error(make: Make) -> None:
    system = make()
    (system.folder / "coordinator").mkdir()
    (system.folder / "coordinator" / "00000001.json").write_text('{"state": {"phase": "runn')
    system.start()
    error = system.errors.pop(0)
    assert isinstance(error, StorageError)
    assert "00000001.json cannot be read" in str(error)
    assert "move the run folder away to start a new run" in str(error)


def test_of_two_joins_at_once_one_has_another_layout(make: Make) -> None:
    """The first join sets the layout, although its answer waits for the disk."""
    system = make()
    system.start()
    trainers = [
        Trainer(system, f"learner-{i}", Model(width=6 + 2 * i), steps_max=1) for i in (0, 1)
    ]
    with training(*trainers):
        pass
    errors = [trainer.error for trainer in trainers if trainer.error is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], ConfigError)
