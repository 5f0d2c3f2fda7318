"""How a learner comes back: from its own checkpoint, from a healthy learner, from what is there."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import encrypted
from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.learner.checkpoint import CheckpointFolder
from decoupled_diloco.observe.explain_learner import explain_learner
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard
from integration.system import (
    Model,
    System,
    Trainer,
    equal,
    free_ports,
    parameters,
    training,
    until,
)
from replay import assert_replays

Make = Callable[..., System]
ALONE = {"sync": {"quorum": 2}, "run": {"budget_steps": 1000}}
"""Nothing is ever merged, since the second learner does not come."""


class Thread(threading.Thread):
    """A function in a thread; its result or error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work, self.found, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.work()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.join(60)
        if self.error is not None:
            raise self.error
        return self.found


@contextmanager
def stepping(loop: Loop) -> Iterator[None]:
    """The loop goes on in a thread of its own meanwhile."""
    stop = threading.Event()

    def go_on() -> None:
        while not (stop.is_set() or loop.dead):
            try:
                loop.steps(1)
            except ConfigError:
                assert loop.dead, "it was closed between two steps"
            time.sleep(0.01)

    thread = Thread(go_on)
    try:
        yield
    finally:
        stop.set()
        thread.result()


class Position:
    """A data loader's, for tests."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


class Loop:
    """One life of a learner that keeps itself: real steps of AdamW, a position in the data."""

    def __init__(
        self, system: System, folder: Path, seed: int = 0, width: int = 6, **options: Any
    ) -> None:
        self.dead = False
        self.model = Model(seed, width)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=0.01)
        self.position = Position()
        name = options.pop("name", "learner-0")
        self.learner: Learner = system.learner(
            self.model,
            name,
            optimizer=self.optimizer,
            stateful={"data": self.position},
            checkpoint=folder,
            **options,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.position.batches)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimizer.step()
            self.model.seen += 1
            self.position.batches += 1
            assert self.learner.step(tokens=8)

    def keep(self) -> None:
        future = self.learner.checkpoint()
        assert future is not None
        future.result(10)

    def die(self) -> None:
        """As SIGKILL would, except that the tape is whole."""
        self.learner._leave("", abrupt=True)


def recovered(system: System, name: str = "learner-0") -> list[dict[str, Any]]:
    """How the lives of a learner began, by its tape."""
    records = TapeReader(system.folder / "tape" / f"{name}.jsonl")
    return [record.data for record in records if record.type == "Recovered"]


def test_a_learner_goes_on_from_its_own_checkpoint_as_if_nothing_had_been(
    make: Make, tmp_path: Path
) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path / "kept")
    first.steps(5)
    first.keep()
    at_checkpoint = parameters(first.model)
    first.steps(3)
    expected = parameters(first.model)
    first.die()
    second = Loop(system, tmp_path / "kept", seed=1)
    assert second.learner.epoch == 2
    assert second.position.batches == 5
    assert second.learner.steps == 5
    assert second.learner.tokens == 40
    assert second.model.seen.tolist() == [5, 5]
    assert equal(parameters(second.model), at_checkpoint)
    steps = [view.steps_before for view in second.learner._shared.machine.state.fragments]
    assert steps == [-5] * 4, "its unmerged steps still count"
    second.steps(3)
    assert equal(parameters(second.model), expected), "parameters and optimizer are the same bits"
    second.learner.close()
    ways = [(each["way"], each["kept"], each["overwritten"]) for each in recovered(system)]
    assert ways == [("published", 0, 4), ("checkpoint", 4, 0)]
    assert "of step 5, epoch 1" in recovered(system)[1]["why"]
    system.stop()
    assert_replays(system.folder)


def test_a_learner_goes_on_from_the_rest_of_its_checkpoint_and_the_runs_weights(
    make: Make, tmp_path: Path
) -> None:
    """What the weights of a run that is over have, its learners' checkpoints need not."""
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path / "kept")
    begun = parameters(first.model)
    first.steps(5)
    first.keep()
    moments = copy.deepcopy(first.optimizer.state_dict())
    first.die()
    folder = CheckpointFolder(tmp_path / "kept" / "learner-0", keep=1)
    whole = folder.newest()
    assert whole is not None
    folder.save(whole.rest([*begun, "seen"]))
    second = Loop(system, tmp_path / "kept", seed=1)
    assert (second.position.batches, second.learner.steps, second.learner.tokens) == (5, 5, 40)
    assert equal(parameters(second.model), begun), "nothing was ever merged"
    assert torch.equal(second.model.frozen, first.model.frozen), "no weights of a run have it"
    found = second.optimizer.state_dict()["state"]
    assert found.keys() == moments["state"].keys()
    assert all(
        torch.equal(tensor, moments["state"][index][name])
        for index, state in found.items()
        for name, tensor in state.items()
    )
    second.steps(1)
    second.learner.close()
    [_, again] = recovered(system)
    assert (again["way"], again["kept"], again["overwritten"]) == ("published", 0, 4)
    assert "its own checkpoint of step 5" in again["why"]
    system.stop()
    assert_replays(system.folder)


@pytest.mark.parametrize("missed", ["overwrite", "rebase"])
def test_what_the_run_has_moved_on_from_is_overwritten(
    make: Make, tmp_path: Path, missed: str
) -> None:
    system = make(run={"budget_steps": 100_000}, sync={"missed": missed})
    system.start()
    first = Loop(system, tmp_path / "kept")
    with training(Trainer(system, "learner-1")):
        first.steps(4)
        first.keep()
        first.die()
        before = system.rounds()
        until(lambda: system.rounds() > before + 8, "the run goes on without it")
        second = Loop(system, tmp_path / "kept", seed=1)
        assert second.position.batches == 4
        second.learner.close()
    assert recovered(system)[1]["way"] == "checkpoint"
    assert recovered(system)[1]["overwritten"] == 4
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    modes = [r.data["mode"] for r in tape if r.life == 1 and r.type == "Apply"]
    assert modes[:4] == ["overwrite"] * 4, "never rebased: its first life's part may be in it"
    system.stop()
    assert_replays(system.folder)


def test_checkpoints_are_taken_now_and_then_and_at_the_end(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()
    loop = Loop(system, tmp_path, checkpoint_every_seconds=1e-9)
    loop.steps(1)
    folder = CheckpointFolder(tmp_path / "learner-0")
    until(lambda: folder.newest() is not None, "the first is written")
    loop.steps(2)
    loop.learner.close()
    newest = folder.newest()
    assert newest is not None
    assert newest.steps == 3
    assert newest.state["data"] == {"batches": 3}
    assert folder.problems == []
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    written = [r.data for r in tape if r.type == "CheckpointWritten"]
    assert [written[0]["step"], written[-1]["step"]] == [1, 3]
    assert all(w["problem"] == "" and w["nbytes"] > 0 for w in written)


@pytest.mark.parametrize("inside", ["the batch", "the optimizer"])
def test_who_interrupts_the_loop_loses_no_step(make: Make, tmp_path: Path, inside: str) -> None:
    """Ctrl-C strikes anywhere; only parameters that just change are not worth keeping."""
    system = make(**ALONE)
    system.start()
    loop = Loop(system, tmp_path, checkpoint_every_seconds=0.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def train() -> None:
        with loop.learner:
            loop.steps(3)
            if inside == "the optimizer":
                loop.optimizer.register_step_pre_hook(interrupt)
                loop.steps(1)
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        train()
    newest = CheckpointFolder(tmp_path / "learner-0").newest()
    assert (newest is None) == (inside == "the optimizer")
    assert newest is None or newest.steps == 3


def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_used(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path)
    for _ in range(2):
        first.steps(2)
        first.keep()
    first.die()
    newest = max((tmp_path / "learner-0").iterdir())
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    second = Loop(system, tmp_path, seed=1)
    assert second.position.batches == 2
    second.learner.close()
    assert f"{newest} is corrupt" in caplog.text


def test_a_checkpoint_of_another_run_is_not_used(make: Make, tmp_path: Path) -> None:
    first_system = make(**ALONE)
    first_system.start()
    first = Loop(first_system, tmp_path / "kept")
    first.steps(3)
    first.learner.close()
    first_system.stop()
    other = System(tmp_path / "other run", **ALONE)
    try:
        other.start()
        second = Loop(other, tmp_path / "kept", seed=1)
        assert second.position.batches == 0
        assert second.learner.steps == 0
        second.learner.close()
        (how,) = recovered(other)
        assert how["way"] == "published"
        assert how["why"] == "its checkpoint is of another run: the run has only begun"
    finally:
        other.close()


def test_a_disk_that_is_full_costs_the_checkpoint_and_nothing_else(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = make(**ALONE)
    system.start()
    loop = Loop(system, tmp_path / "kept", checkpoint_every_seconds=1e-9)
    (tmp_path / "kept" / "learner-0").rmdir()
    (tmp_path / "kept" / "learner-0").write_text("in the way, as a full disk would be")
    loop.steps(5)
    loop.learner.close()
    assert "no checkpoint of learner-0 this time" in caplog.text
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    problems = [r.data["problem"] for r in tape if r.type == "CheckpointWritten"]
    assert problems
    assert all("learner-0" in problem for problem in problems)


def test_what_cannot_be_kept_is_refused_at_once(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()

    class Odd(Position):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    def join(**options: Any) -> Learner:
        return system.learner(nn.Linear(2, 2), "learner-0", **options)

    with pytest.raises(ConfigError, match=r"stateful\['data'\]: state\['seen'\] is a set"):
        join(stateful={"data": Odd()})
    with pytest.raises(ConfigError, match=r"stateful\['data'\] is a int without state_dict"):
        join(stateful={"data": 3})
    with pytest.raises(ConfigError, match="give the inner optimizer as optimizer="):
        join(stateful={"optimizer": Position()})
    with pytest.raises(ConfigError, match="checkpoint_every_seconds=-1"):
        join(checkpoint=tmp_path, checkpoint_every_seconds=-1)
    with pytest.raises(ConfigError, match="hand_in_seconds=-2"):
        join(hand_in_seconds=-2)
    with pytest.raises(ConfigError, match="stateful is a list without names"):
        join(stateful=[Position()])
    with pytest.raises(ConfigError, match="optimizer is a int without param_groups"):
        join(optimizer=3)
    with pytest.raises(ConfigError, match=r"donate='optimizer' is a text: .* \('optimizer',\)"):
        join(donate="optimizer")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be made .* or leave it out"):
        join(checkpoint=tmp_path / "file")
    with pytest.raises(ConfigError, match="checkpoint= without learner_id="):
        Learner(nn.Linear(2, 2), system.addresses[0], checkpoint=tmp_path)


def test_a_checkpoint_that_does_not_fit_the_objects_is_refused(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path)
    first.steps(1)
    first.learner.close()
    with pytest.raises(
        ConfigError, match=r"has the state of \['data', 'optimizer'\], this learner"
    ):
        system.learner(Model(), "learner-0", checkpoint=tmp_path)


def test_who_goes_hands_in_what_it_has_and_the_others_take_part(make: Make, tmp_path: Path) -> None:
    # An overlap of many short steps: every round gives everybody time to deliver.
    sync = {"period": 50_000, "overlap": 5_000}
    system = make(run={"budget_steps": 100_000}, sync=sync, syncer={"shards": 2})
    system.start()
    leaver = Loop(system, tmp_path / "kept")
    with training(Trainer(system, "learner-1")):
        leaver.steps(6)
        until(lambda: _stepping(system) == 2, "both have reported")
        assert leaver.learner.hand_in(20.0)
        leaver.learner.close()
        until(lambda: len(_merged(system)) == 4, "the rounds are over")
    system.stop()
    rounds = _merged(system)
    assert {each["fragment"] for each in rounds} == {0, 1, 2, 3}
    for each in rounds:
        folded = {p["learner"]: p["tokens"] for p in each["participants"] if p["state"] == "folded"}
        assert folded.keys() == {"learner-0", "learner-1"}, "nobody is overwritten for nothing"
        assert folded["learner-0"] == 48, "all that it has trained is in"
    newest = CheckpointFolder(tmp_path / "kept" / "learner-0").newest()
    assert newest is not None
    assert newest.steps == 6


def _merged(system: System) -> list[dict[str, Any]]:
    tapes = [TapeReader(system.folder / "tape" / f"shard-{shard}.jsonl") for shard in range(2)]
    found = [r.data for tape in tapes for r in tape if r.type == "RoundFinished"]
    return [each for each in found if each["verdict"] == "merged"]


def _stepping(system: System) -> int:
    return min(shard.machine.state.members_stepping for shard in system.shards.values())


def test_who_goes_is_dismissed_at_once_where_nothing_can_be_merged(make: Make) -> None:
    system = make(**ALONE)
    system.start()
    learner = system.learner(Model(), "learner-0")
    learner.step(tokens=8)
    until(lambda: system.shards[0].machine.state.members_stepping == 1, "the step is reported")
    assert not learner.hand_in(600.0), "it does not wait for a second learner"
    assert not learner.step(tokens=8), "who has handed in is done"
    learner.close()


def test_who_hands_in_takes_part_in_a_cut(make: Make) -> None:
    """Else everybody would wait for its part until it is gone."""
    system = make(**ALONE)
    system.start()
    learner = system.learner(Model(), "learner-0")
    learner.step(tokens=8)
    until(lambda: system.shards[0].machine.state.members_stepping == 1, "the step is reported")
    learner._background.tell(CheckpointHeard(1))
    learner.hand_in(600.0)
    learner.close()
    tape = TapeReader(system.folder / "tape" / "learner-0.jsonl")
    (part,) = [r.data for r in tape if r.type == "PartWritten"]
    assert (part["number"], part["problem"]) == (1, "it keeps no checkpoints")


@pytest.mark.parametrize(
    ("listen", "secure"), [(None, False), ("127.0.0.1:0", False), ("127.0.0.1:0", True)]
)
def test_who_begins_with_nothing_takes_the_optimizer_of_a_healthy_learner(
    make: Make, tmp_path: Path, listen: str | None, secure: bool
) -> None:
    folder = encrypted.folder()
    tls = encrypted.tables(folder) if secure else {}
    system = make(run={"budget_steps": 100_000}, token="secret", tls=tls)
    system.start()
    options: dict[str, Any] = {"donate": ("optimizer", "data"), "listen": listen}
    options["token"] = "secret"
    shown = [encrypted.dialled(folder, f"learner-{n}") if secure else None for n in range(2)]
    donor = Loop(system, tmp_path / "donor", tls=shown[0], **options)
    donor.steps(5)
    with stepping(donor):
        joiner = Loop(
            system, tmp_path / "joiner", seed=1, name="learner-1", tls=shown[1], **options
        )
        moments = joiner.optimizer.state_dict()["state"]
        assert moments, "it has the donor's moments"
        assert joiner.position.batches >= 5
        assert all(float(each["step"]) == joiner.position.batches for each in moments.values())
        joiner.steps(2)
        joiner.learner.close()
    assert not donor.learner._background._transfers._blobs, "the copy is not kept"
    donor.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["donor"]) == ("donor", "learner-0")
    assert how["why"] == ("by a relay" if listen is None else "from itself")
    assert how["nbytes"] > 0
    system.stop()
    assert_replays(system.folder)


def test_a_state_is_not_given_in_plain_text_in_an_encrypted_run(tmp_path: Path) -> None:
    trusting = encrypted.dialled(encrypted.folder())
    for tls in (None, trusting):
        with pytest.raises(ConfigError, match=r"would give .* leave listen out"):
            Learner(Model(), "https://127.0.0.1:1", listen="127.0.0.1:0", tls=tls)
    with pytest.raises(ConfigError, match="certificates would be ignored for http://127"):
        Learner(Model(), "http://127.0.0.1:1", tls=trusting)


def test_a_donor_that_is_out_of_reach_is_relayed(make: Make, tmp_path: Path) -> None:
    system = make(run={"budget_steps": 100_000})
    system.start()
    donor = Loop(system, tmp_path, listen="127.0.0.1:0")
    donor.learner._background._transfers._listen = _nowhere  # type: ignore[method-assign]
    donor.steps(3)
    with stepping(donor):
        joiner = Loop(system, tmp_path, name="learner-1")
        joiner.learner.close()
    donor.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["why"]) == ("donor", "by a relay")


async def _nowhere() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


class Cutting:
    """Passes bytes on to an address, and cuts the first connections after so many of them."""

    def __init__(self, address: str, cuts: int, after_bytes: int) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self.target, self.after_bytes = (host, int(port)), after_bytes
        self.cuts_left, self.passed = cuts, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ends = [self.listener]
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
                self.ends += (near, far)
                for ends in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        here = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                here += len(data)
                self.passed += len(data) if down else 0
                if down and self.cuts_left > 0 and here > self.after_bytes:
                    self.cuts_left -= 1
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_link_that_is_cut_while_a_donor_gives_costs_no_chunk_that_is_here(
    make: Make, tmp_path: Path
) -> None:
    system = make(run={"budget_steps": 100_000}, pool_bytes=1 << 26)
    system.start()
    donor = Loop(system, tmp_path, listen="127.0.0.1:0", width=1600)
    transfers = donor.learner._background._transfers
    listen, cutting = transfers._listen, list[Cutting]()

    async def by_a_bad_link() -> str:
        cutting.append(Cutting(await listen(), cuts=3, after_bytes=3 << 20))
        return cutting[0].address

    transfers._listen = by_a_bad_link  # type: ignore[method-assign]
    donor.steps(2)
    with stepping(donor):
        joiner = Loop(system, tmp_path, name="learner-1", width=1600)
        joiner.learner.close()
    donor.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["donor"], how["why"]) == ("donor", "learner-0", "from itself")
    assert cutting[0].cuts_left == 0, "the link was cut"
    cutting[0].close()
    tape = TapeReader(system.folder / "tape" / "learner-1.jsonl")
    chunks = [r.data["chunk"] for r in tape if r.type == "ChunkArrived"]
    assert chunks == list(range(len(chunks))), "none is fetched that was here"
    assert len(chunks) > 4
    assert how["nbytes"] <= cutting[0].passed < 2 * how["nbytes"]


def test_a_donor_that_dies_while_it_gives_is_replaced(make: Make, tmp_path: Path) -> None:
    system = make(run={"budget_steps": 100_000})
    system.start()
    first, second = Loop(system, tmp_path), Loop(system, tmp_path, name="learner-1")
    first.learner._background._transfers._deliver = _never  # type: ignore[method-assign]
    first.steps(3)
    second.steps(3)
    with stepping(first), stepping(second):
        joining = Thread(lambda: Loop(system, tmp_path, name="learner-2"))
        until(lambda: first.learner._background._transfers._blobs, "the first is asked")
        first.dead = True
        first.die()
        joiner = joining.result()
        joiner.learner.close()
    second.learner.close()
    (how,) = recovered(system, "learner-2")
    assert (how["way"], how["donor"]) == ("donor", "learner-1")


async def _never(order: object) -> None:
    await asyncio.sleep(3600)


def test_who_finds_no_donor_begins_afresh(make: Make, tmp_path: Path) -> None:
    system = make(run={"budget_steps": 100_000})
    system.start()
    with training(Trainer(system, "learner-0")):
        until(lambda: system.rounds() > 3, "the run is under way")
        joiner = Loop(system, tmp_path, name="learner-1")
        assert not joiner.optimizer.state_dict()["state"]
        joiner.learner.close()
    (how,) = recovered(system, "learner-1")
    assert how["way"] == "published"


def test_how_a_learner_came_back_is_explained(make: Make, tmp_path: Path) -> None:
    system = make(**ALONE)
    system.start()
    first = Loop(system, tmp_path)
    first.steps(2)
    first.keep()
    first.die()
    Loop(system, tmp_path, seed=1).learner.close()
    system.stop()
    text = "\n".join(explain_learner(read_run(system.folder, "details"), "learner-0"))
    assert "with the published copies and a fresh optimizer (it has no checkpoint of its" in text
    assert "from its own checkpoint of step 2, epoch 1: its progress went on in 4, and 0" in text
