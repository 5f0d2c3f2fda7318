"""Learners of unequal speed as real processes: none waits, and all are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from decoupled_diloco.config import load_config
from decoupled_diloco.protocol.messages import Participant
from decoupled_diloco.run_model import RunModel, read_run
from process.process_runs import STEP_SECONDS_MAX, local_run, wait
from replay_check import assert_replays

RECIPE = Path(__file__).parents[2] / "recipes" / "mixed-speeds.toml"
PACE = {"learner-0": 0.4, "learner-1": 0.4, "learner-2": 0.2, "learner-3": 0.1}


OWN_ROUNDS = (
    'sync.participation="async"',
    "sync.grace_margin=0.0",
    'sync.apply.missed="rebase"',
    'sync.apply.alignment="carry"',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe, shortened to 6 outer rounds of every fragment."""
    return run_of(tmp_path_factory.mktemp("speeds") / "run")


def run_of(folder: Path, *settings: str) -> Path:
    overrides = [
        *settings,
        f'run.folder="{folder}"',
        "run.max_steps=144",
        "run.evaluator=false",
        "workload.options.layers=1",
        "workload.options.width=32",
        "workload.options.context=16",
        "workload.options.corpus_bytes_max=200000",
    ]
    with local_run(load_config(RECIPE, overrides)) as run:
        run.start()
        outcome = wait(run)
    assert outcome.finished, outcome.reason
    return folder


@pytest.fixture(scope="module")
def history(folder: Path) -> RunModel:
    return read_run(folder)


def folded(history: RunModel) -> Iterator[tuple[int, Participant]]:
    """Return fragment and participant of every contribution that was merged."""
    for shard in history.shards.values():
        for round in shard.rounds:
            if round.merged:
                for participant in round.result.participants:
                    if participant.state == "folded":
                        yield round.result.fragment, participant


def test_no_learner_waits(history: RunModel) -> None:
    """Each learner keeps its own pace: a busy machine may delay a step, another learner may not."""
    assert not history.outages
    for name, pace in PACE.items():
        (life,) = history.learners[name].lives
        gaps = [b - a for a, b in pairwise(life.steps_at)]
        assert median(gaps) == pytest.approx(pace, rel=0.1)
        assert max(gaps) < pace + STEP_SECONDS_MAX
        assert len(gaps) > 0.9 * (life.steps_at[-1] - life.steps_at[0]) / pace


def test_every_fragment_receives_every_learner(history: RunModel) -> None:
    heard = defaultdict(set)
    for fragment, participant in folded(history):
        heard[fragment].add(participant.learner)
    assert set(heard) == set(range(24))
    assert all(learners == PACE.keys() for learners in heard.values()), heard


def test_weights_follow_the_tokens_of_each_learner(history: RunModel) -> None:
    """All train equal batches, so tokens per step are equal, and only tokens differ."""
    tokens, rates = defaultdict(list), set()
    for _, participant in folded(history):
        tokens[participant.learner].append(participant.tokens)
        rates.add(participant.tokens / participant.steps)
    assert rates == {4 * 16}
    fastest = median(tokens["learner-3"])
    assert fastest == pytest.approx(24 * 4 * 16, rel=0.1), "one period, minus the steps in flight"
    for name, pace in PACE.items():
        assert median(tokens[name]) == pytest.approx(fastest * 0.1 / pace, rel=0.5), name


def test_the_run_replays(folder: Path) -> None:
    assert assert_replays(folder) > 500


def test_each_is_merged_after_its_own_steps_where_learners_open_rounds(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", *OWN_ROUNDS)
    history, steps = read_run(folder), defaultdict(list)
    test_no_learner_waits(history)
    for _, participant in folded(history):
        steps[participant.learner].append(participant.steps)
    assert steps.keys() == PACE.keys()
    for name, each in steps.items():
        trained = sum(life.steps for life in history.learners[name].lives)
        rounds = (
            len(each) / 24
        )  # for each fragment: the first covers less, and the last one the rest
        assert rounds == pytest.approx(trained / 24 + 1, abs=0.6), "one per period of the learner"
        assert sum(each) == pytest.approx(24 * trained, rel=0.15), "each step is merged once"
    assert_replays(folder)
