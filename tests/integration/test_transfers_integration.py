"""A new learner receives the optimizer's state from a healthy one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import encrypted
from decoupled_diloco import Learner, StateSharing
from decoupled_diloco.errors import ConfigError
from integration.loops_that_keep import Loop, Make, Thread, recovered, stepping
from integration.real_system import (
    Model,
    Trainer,
    training,
    until,
)
from replay_check import assert_replays


@pytest.mark.parametrize("secure", [False, True])
def test_a_new_learner_receives_the_optimizer_of_a_healthy_one(
    make: Make, tmp_path: Path, secure: bool
) -> None:
    folder = encrypted.folder()
    tls = encrypted.tables(folder) if secure else {}
    system = make(run={"max_steps": 100_000}, token="secret", tls=tls)
    system.start()
    options: dict[str, Any] = {
        "state_sharing": StateSharing(("optimizer", "data")),
        "auth_token": "secret",
    }
    shown = [encrypted.dialled(folder, f"learner-{n}") if secure else None for n in range(2)]
    provider = Loop(system, tmp_path / "provider", tls=shown[0], **options)
    provider.steps(5)
    with stepping(provider):
        joiner = Loop(
            system, tmp_path / "joiner", seed=1, name="learner-1", tls=shown[1], **options
        )
        moments = joiner.optimizer.state_dict()["state"]
        assert moments, "it has the state provider's moments"
        assert joiner.position.batches >= 5
        assert all(float(each["step"]) == joiner.position.batches for each in moments.values())
        joiner.steps(2)
        joiner.learner.close()
    transfers = provider.learner._party.membership.background._transfers
    until(lambda: not transfers._blobs, "the provider deletes its copy")
    provider.learner.close()
    (how,) = recovered(system, "learner-1")
    assert (how["way"], how["donor"]) == ("donor", "learner-0")
    assert how["why"] == "by a relay"
    assert how["nbytes"] > 0
    system.stop()
    assert_replays(system.folder)


def test_certificates_for_an_address_without_encryption_are_rejected() -> None:
    trusting = encrypted.dialled(encrypted.folder())
    with pytest.raises(ConfigError, match="certificates would be ignored for http://127"):
        Learner(Model(), "http://127.0.0.1:1", tls=trusting)


def test_a_state_provider_that_dies_is_replaced(make: Make, tmp_path: Path) -> None:
    system = make(run={"max_steps": 100_000})
    system.start()
    first, second = Loop(system, tmp_path), Loop(system, tmp_path, name="learner-1")
    first.learner._party.membership.background._transfers._deliver = _never  # type: ignore[method-assign]
    first.steps(3)
    second.steps(3)
    with stepping(first), stepping(second):
        joining = Thread(lambda: Loop(system, tmp_path, name="learner-2"))
        until(
            lambda: first.learner._party.membership.background._transfers._blobs,
            "the first one receives the request",
        )
        first.dead = True
        first.die()
        joiner = joining.result()
        joiner.learner.close()
    second.learner.close()
    (how,) = recovered(system, "learner-2")
    assert (how["way"], how["donor"]) == ("donor", "learner-1")


async def _never(order: object) -> None:
    await asyncio.sleep(3600)


def test_without_a_state_provider_a_learner_starts_with_a_fresh_optimizer(
    make: Make, tmp_path: Path
) -> None:
    system = make(run={"max_steps": 100_000})
    system.start()
    with training(Trainer(system, "learner-0")):
        until(lambda: system.rounds() > 3, "the run has started")
        joiner = Loop(system, tmp_path, name="learner-1")
        assert not joiner.optimizer.state_dict()["state"]
        joiner.learner.close()
    (how,) = recovered(system, "learner-1")
    assert how["way"] == "published"
