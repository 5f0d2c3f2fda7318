"""A tape of the first schema is still read, replayed and folded.

The run: two learners, two shards with standbys, leased data, run checkpoints. ``learner-1`` is
killed and comes back with the other one's optimizer state, which a shard relays.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from decoupled_diloco.observe.data_ledger import read_data
from decoupled_diloco.observe.explain import explain_round
from decoupled_diloco.observe.run_model import RunModel, read_run
from decoupled_diloco.observe.tape import TapeReader

KEPT = Path(__file__).parent / "kept" / "first-schema.tar.gz"


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(KEPT) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def old_model(old_run: Path) -> RunModel:
    return read_run(old_run, keep="details")


def test_every_record_of_an_old_tape_is_read(old_run: Path) -> None:
    reader = TapeReader(old_run)
    values = [record.value() for record in reader if record.kind != "start"]
    assert len(values) == 2577
    assert not reader.problems


def test_the_model_of_an_old_run_is_what_it_was(old_model: RunModel) -> None:
    assert not old_model.problems
    assert (old_model.step, old_model.tokens) == (60, 419840)
    assert {name: shard.merged for name, shard in old_model.shards.items()} == {
        "shard-0": 16,
        "shard-1": 16,
    }
    assert {name: len(learner.lives) for name, learner in old_model.learners.items()} == {
        "learner-0": 1,
        "learner-1": 2,
    }
    assert all(learner.process == "finished" for learner in old_model.learners.values())


def test_rounds_of_an_old_run_are_explained(old_model: RunModel) -> None:
    text = explain_round(old_model, 3, shard=1)
    assert text[0] == "Round 3 of shard-1: fragment 1, step 10, merged after 63.5 ms"
    assert text[6] == (
        "- learner-1: asked at once (its step 10 has reached the round's tick 10), delivered after "
        "39.9 ms: 3 steps, 15.4k tokens, weight 60 %."
    )
    assert text[-1] == "Merged: fragment 1 went from 1.2 to version 1.3."


def test_the_data_ledger_is_read_from_an_old_tape(old_run: Path) -> None:
    account = read_data(old_run)
    assert account.parts == 8
    assert {span.lease for part in account.turns[0].values() for span in part.spans} == set(
        range(1, 10)
    )
    assert [(each.learner, each.first, each.end) for each in account.repeats] == [
        ("learner-1", 10, 13)
    ]
