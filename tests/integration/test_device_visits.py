"""`Device`: visits, training alone, and what it keeps on its disk between visits (rule 23)."""

from __future__ import annotations

import dataclasses
import io
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

import decoupled_diloco as dd
from decoupled_diloco.config.parties import Parties
from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.device import PATIENCE
from decoupled_diloco.errors import AccessError
from decoupled_diloco.learner.learner_checkpoint import CheckpointFolder
from decoupled_diloco.protocol.messages import Apply, Fetch, Fold, PlaceGiven, Send
from decoupled_diloco.run_model import read_run
from decoupled_diloco.show.page.document import state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.status import WAIT_SECONDS, RunStatus, learners_in_words, status_of
from decoupled_diloco.show.tables import absences, learner_rows
from decoupled_diloco.show.terminal import render_status
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.transport.tokens import Tokens
from integration.real_system import TOKENS, Model, System, until

Make = Callable[..., System]

SYNC: dict[str, Any] = {
    "fragments": 2,
    "sync_every": 4,
    "overlap_steps": 0,
    "participation": "async",
    "grace_margin": 0.0,
    "apply": {"missed": "rebase"},
    "codec": {"uplink": "int4", "downlink": "int4"},
    "late": {"discount": "polynomial"},
}
LIMITS = dd.Timeouts(join=20.0, flush=20.0)


def run(
    make: Make,
    quorum: int = 1,
    sync: dict[str, Any] | None = None,
    privacy: dict[str, Any] | None = None,
    **devices: Any,
) -> System:
    settings = SYNC | {"quorum": quorum, "devices": devices} | (sync or {})
    own = {"data": {"elastic": False}, "privacy": privacy or {}}
    system = make(sync=settings, run={"max_steps": 10**6}, **own)
    system.start()
    return system


class Phone:
    """A device with a model that it trains by random steps."""

    def __init__(
        self, system: System, name: str, seed: int = 0, party: dd.PartyFiles | None = None
    ) -> None:
        self.model = Model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.folder = system.folder / "phones" / name
        self.rng = torch.Generator().manual_seed(seed)
        self.device = dd.Device(
            self.model,
            system.dialled,
            name=name,
            checkpoint=system.folder / "phones",
            optimizer=self.optimizer,
            timeouts=LIMITS,
            observability=dd.Observability(event_tape=system.folder / "tape" / f"{name}.jsonl"),
            party=party,
        )

    def step(self) -> torch.Tensor:
        loss = torch.zeros(())
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                loss = loss + (parameter * torch.randn(parameter.shape, generator=self.rng)).sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def visit(self, steps: int = 0) -> tuple[str, ...]:
        with self.device.visit() as learner:
            for _ in range(steps):
                learner.step(self.step(), tokens=TOKENS)
            return learner.versions

    def alone(self, steps: int = 3) -> None:
        self.device.train(self.step, steps, tokens=TOKENS)


def effects(system: System, process: str, kind: type) -> list[Any]:
    records = TapeReader(system.folder / "tape" / f"{process}.jsonl")
    return [r.value() for r in records if (r.kind, r.type) == ("effect", kind.__name__)]


def folds(system: System) -> list[Fold]:
    system.stop()
    return effects(system, "shard-0", Fold)


def test_what_a_device_trains_alone_is_merged_at_its_next_visit(make: Make) -> None:
    system = run(make)
    phone = Phone(system, "phone")
    phone.visit()
    phone.alone()
    before = {name: p.detach().clone() for name, p in phone.model.named_parameters()}
    assert phone.visit() == ("1.0", "1.0"), "it contributes, and does not wait for the merge"
    assert (phone.device.steps, phone.device.tokens) == (3, 3 * TOKENS)
    entries = system.shards[0].machine.state.fragments.values()
    until(lambda: {str(entry.version) for entry in entries} == {"1.1"}, "it is merged")
    phone.visit()
    assert any(not torch.equal(p, before[name]) for name, p in phone.model.named_parameters())
    assert sorted((f.fragment, f.steps, f.tokens) for f in folds(system)) == [
        (0, 3.0, 24.0),
        (1, 3.0, 24.0),
    ]


@pytest.mark.parametrize("tapes", ["all tapes", "the syncer's tapes"])
def test_being_away_is_no_failure(make: Make, tapes: str) -> None:
    system = run(make)
    phone, other = Phone(system, "phone"), Phone(system, "other", seed=1)
    for device in (phone, other, phone, other):
        device.visit(steps=4)
        device.alone()
    phone.visit(steps=4)
    members = system.shards[0].machine.state.members
    until(lambda: not members, "the shard has received that both have left")
    system.stop()
    if tapes != "all tapes":
        for name in ("phone", "other"):
            (system.folder / "tape" / f"{name}.jsonl").unlink()
    model = read_run(system.folder)
    status = status_of(model, model.latest)
    assert [learner.state for learner in status.learners] == ["away", "away"]
    assert learners_in_words(status) == "no learners, 2 away"
    assert re.search(r"^other +away ", shown(status), re.MULTILINE)
    assert state_of_page(model, status, PageHistory())["waits"] == []
    assert model.account.tokens.left_behind == 0, "it is on the device's disk"
    assert absences(model) == []
    assert model.account.time.down == 0
    header, *rows = learner_rows(model)
    visits = {row[0]: row[header.index("visits")] for row in rows}
    assert visits == {"other": "2", "phone": "3"}
    assert {name: one.steps for name, one in model.learners.items()} == {"other": 11, "phone": 18}
    assert not any(learner.steps_unrecorded for learner in model.learners.values())
    assert model.account.tokens.trained == 2 * TOKENS * (11 + 18)
    if tapes == "all tapes":
        ours, theirs = model.bytes_of(syncer=False), model.bytes_of(syncer=True)
        assert ours is not None
        assert theirs is not None
        assert ours.data_sent == theirs.data_sent > 0, "all visits are counted"


def shown(status: RunStatus) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render_status(status, width=80))
    return console.export_text()


def test_a_quorum_of_devices_that_is_not_met_is_reported(make: Make) -> None:
    """It counts different devices, whether they are present or not."""
    system = run(make, quorum=2)
    phone, other = Phone(system, "phone"), Phone(system, "other", seed=1)
    for _ in range(3):
        phone.visit(steps=4)
    until(lambda: len(effects(system, "shard-0", Fold)) >= 2, "the shard has flushed its tape")
    model = read_run(system.folder)
    assert model.rounds_merged == 0
    assert not any("quorum" in each for each in status_of(model, model.latest).problems)
    model.duration += 2 * WAIT_SECONDS  # its tape goes on
    (problem,) = status_of(model, model.latest).problems
    assert "1 device contributed, but quorum=2 in [sync] needs 2 different ones" in problem
    other.visit(steps=4)
    system.stop()
    assert read_run(system.folder).rounds_merged > 0


def test_a_device_can_continue_alone_while_the_syncer_is_unreachable(make: Make) -> None:
    assert PATIENCE.disconnect == 60.0, "much less than for a place"
    system = run(make)
    phone, new = Phone(system, "phone"), Phone(system, "new", seed=1)
    phone.visit(steps=4)
    system.stop()
    limits = dd.Timeouts(join=20.0, disconnect=0.5, flush=20.0)
    for device, advice in (
        (phone, "Device 'phone' can continue alone with Device.train() or step(), and visit later"),
        (new, "Device 'new' has no weights of the run yet: visit the run later"),
    ):
        device.device._options = dataclasses.replace(device.device._options, timeouts=limits)
        with pytest.raises(dd.TransportError) as caught, device.device.visit():
            pass
        assert str(caught.value).endswith(advice)
        assert "Timeouts(disconnect=0.5)" in str(caught.value)
    newest = CheckpointFolder(phone.folder).newest()
    assert newest is not None
    phone.alone()
    assert phone.device.steps == 7
    phone.device._begin_visit()
    later = CheckpointFolder(phone.folder).newest()
    assert later is not None
    assert later.with_residual == newest.with_residual == [0, 1], "nothing was exchanged"


def test_a_device_with_a_wrong_token_is_not_advised_to_visit_later(make: Make) -> None:
    settings = SYNC | {"devices": {}}
    tables = {"sync": settings, "data": {"elastic": False}, "run": {"max_steps": 10**6}}
    system = make(tokens=Tokens("right"), **tables)
    system.start()
    phone = Phone(system, "phone")
    options = phone.device._options
    phone.device._options = dataclasses.replace(options, auth_token="wrong")
    with pytest.raises(AccessError) as caught, phone.device.visit():
        pass
    assert "visit" not in str(caught.value)


def test_a_later_visit_fetches_differences_and_no_whole_copy(make: Make) -> None:
    """Rule 23: its published copies are on its disk."""
    system = run(make, history=8)
    phone, other = Phone(system, "phone"), Phone(system, "other", seed=1)
    phone.visit()
    for _ in range(3):
        other.visit(steps=2)
    phone.device.close()
    again = Phone(system, "phone", seed=2)  # a new process, from the folder alone
    assert again.visit() == ("1.3", "1.3")
    system.stop()
    fetched = effects(system, "phone", Fetch)
    assert [order.whole for order in fetched] == [True] * 2 + [False] * 6


def test_an_older_base_counts_less_and_too_old_a_base_counts_nothing(make: Make) -> None:
    system = run(make, history=2)
    late, too_late, other = (Phone(system, name) for name in ("late", "too-late", "other"))
    for phone in (late, too_late):
        phone.visit()
        phone.alone()
    for number in range(3):
        other.visit(steps=2)
        if number == 1:
            late.visit()
    too_late.visit()
    found = [f.discount for f in folds(system) if f.learner == "late"]
    assert found == [pytest.approx(3**-0.5)] * 2
    assert not [f for f in effects(system, "shard-0", Fold) if f.learner == "too-late"]
    dropped = [order.discarded_tokens for order in effects(system, "too-late", Apply)]
    assert dropped[-2:] == [3 * TOKENS] * 2


def test_a_buffer_merges_the_contributions_of_devices_that_have_left(make: Make) -> None:
    """FedBuff: a fragment merges after K contributions, from any devices."""
    system = run(make, quorum=2, history=4)
    first, second = Phone(system, "first"), Phone(system, "second", seed=1)
    first.visit(steps=2)
    assert first.visit(steps=2) == ("1.0", "1.0"), "one learner is not a quorum"
    second.visit(steps=2)
    assert second.visit() == ("1.1", "1.1")
    assert len(folds(system)) == 6, "two fragments, three contributions"


def test_a_device_that_loses_power_after_its_upload_is_merged_once(make: Make) -> None:
    system = run(make, quorum=2, history=4)
    phone, other = Phone(system, "phone"), Phone(system, "other", seed=1)
    phone.visit()
    phone.alone()
    kept = {path: path.read_bytes() for path in phone.folder.iterdir()}
    phone.visit()
    for path in phone.folder.iterdir():
        path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)
    Phone(system, "phone").visit()
    other.visit(steps=2)
    Phone(system, "phone").visit()
    mine = [f for f in folds(system) if f.learner == "phone"]
    assert sorted(f.fragment for f in mine) == [0, 1]


def test_a_visit_that_broke_off_drops_its_residuals(make: Make) -> None:
    """A contribution of that visit may contain them."""
    system = run(make, history=4)
    phone = Phone(system, "phone")
    phone.visit(steps=2)
    newest = CheckpointFolder(phone.folder).newest()
    assert newest is not None
    assert newest.with_residual == [0, 1]
    (phone.folder / "visiting").write_bytes(b"")
    phone.device._begin_visit()
    newest = CheckpointFolder(phone.folder).newest()
    assert newest is not None
    assert newest.with_residual == []


def test_synchronous_rounds_wait_for_a_sampled_cohort(make: Make) -> None:
    """FedAvg with sampled clients: a visit ends when the round with its contribution has merged."""
    sync = SYNC | {"late": {"policy": "drop"}, "quorum": 2, "devices": {"cohort": 2}}
    sync["sync_every"] = 100  # only the end of a visit makes a fragment due, so each counts once
    system = make(sync=sync, data={"elastic": False}, run={"max_steps": 10**6, "learners": 3})
    system.start()
    phones = [Phone(system, f"phone-{number}", number) for number in range(3)]
    seen: list[tuple[str, ...]] = []

    def visits(phone: Phone) -> None:
        for _ in range(2):
            seen.append(phone.visit(steps=4))

    threads = [threading.Thread(target=visits, args=(phone,)) for phone in phones]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    found = folds(system)
    assert {f.discount for f in found} == {1.0}
    assert len(found) == 12
    assert system.shards[0].machine.state.fragments[0].version.counter == 3  # type: ignore[union-attr]
    places = [e for e in effects(system, "coordinator", Send) if isinstance(e.message, PlaceGiven)]
    assert len(places) == 6


def test_a_device_must_visit_before_it_can_train_alone(make: Make) -> None:
    system = run(make)
    phone = Phone(system, "phone")
    with pytest.raises(dd.ConfigError, match="has no weights of the run yet: visit the run first"):
        phone.alone()
    with phone.device.visit():
        with pytest.raises(dd.ConfigError, match=r"call step\(\) of the learner"):
            phone.device.step(tokens=1)
        with (
            pytest.raises(dd.ConfigError, match="is on a visit: end it before the next one"),
            phone.device.visit(),
        ):
            pass
    with pytest.raises(dd.ConfigError, match=r"train\(steps=0\) is out of range"):
        phone.alone(0)


def test_a_run_without_devices_is_rejected(make: Make) -> None:
    system = make()
    system.start()
    phone = Phone(system, "phone")
    with pytest.raises(dd.ConfigError, match=r"the run has no \[sync.devices\]"):
        phone.visit()


@pytest.mark.parametrize("missing", ["name", "checkpoint"])
def test_a_device_needs_a_name_and_a_folder(missing: str, tmp_path: Any) -> None:
    given = {"name": "phone", "checkpoint": tmp_path}
    del given[missing]
    with pytest.raises(dd.ConfigError, match=f"Device\\(\\) has no {missing}: pass name="):
        dd.Device(Model(), "http://127.0.0.1:1", **given)


def test_the_checkpoint_of_a_device_is_a_folder() -> None:
    """It keeps the training while there is no connection, so a store would not do."""
    with pytest.raises(dd.ConfigError, match="checkpoint='s3://bucket/x' is not a folder"):
        dd.Device(torch.nn.Linear(2, 1), "127.0.0.1:1", name="a", checkpoint="s3://bucket/x")


def test_the_proximal_term_is_the_distance_to_the_published_copies(make: Make) -> None:
    """FedProx: μ/2 ‖θ − Θ̂‖², which is 0 right after a copy has been applied."""
    system = run(make)
    phone = Phone(system, "phone")
    with phone.device.visit() as learner:
        proximal = dd.ProximalTerm(learner, mu=0.5)
        before = [p.detach().clone() for p in phone.model.parameters() if p.requires_grad]
        assert proximal().item() == 0.0
        learner.step(phone.step(), tokens=TOKENS)
        trained = [p for p in phone.model.parameters() if p.requires_grad]
        wanted = sum(((p - b) ** 2).sum().item() for p, b in zip(trained, before, strict=True)) / 4
        term = proximal()
        assert term.item() == pytest.approx(wanted)
        term.backward()
        for parameter, start in zip(trained, before, strict=True):
            assert torch.allclose(parameter.grad, (parameter - start).detach() / 2)
        phone.optimizer.zero_grad()
        with pytest.raises(dd.ConfigError, match=r"ProximalTerm\(mu=0\) is out of range"):
            dd.ProximalTerm(learner, mu=0)


def test_a_device_that_gets_no_place_in_time_raises_an_error(make: Make) -> None:
    system = run(make, cohort=1)
    first, second = Phone(system, "first"), Phone(system, "second", seed=1)
    second.device._options = dataclasses.replace(
        second.device._options, timeouts=dd.Timeouts(join=1.0, flush=20.0)
    )
    with first.device.visit() as learner:
        with (
            pytest.raises(dd.TransportError, match=r"second got no place to train within Timeouts"),
            second.device.visit(),
        ):
            pass
        learner.step(first.step(), tokens=TOKENS)
    second.visit(steps=2)


def test_a_device_visits_only_a_syncer_with_its_own_parties(make: Make) -> None:
    members = [{"name": "a", "learners": ["a-*"], "key": str(PublicKey(b"a" * 32))}]
    system = run(make, privacy={"members": members})
    agreed = Parties(parties=members)
    Phone(system, "a-0", party=dd.PartyFiles(agreed)).visit()
    other = Phone(
        system, "a-1", party=dd.PartyFiles(Parties(parties=[{**members[0], "sees": "all"}]))
    )
    with pytest.raises(dd.ConfigError, match="the syncer has the digest"):
        other.visit()
