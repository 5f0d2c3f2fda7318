"""Learners of different speeds in virtual time: waits, participation and discarded tokens.

Steps take 4, 4, 2 and 1 seconds, with P = H = 24, τ = 2, K = 1 and a budget of 32 outer rounds.
Virtual time is exact, so the assertions are, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any, Literal

import pytest

from cases import long_after
from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol.messages import Apply, Fold, RoundFinished, StepFinished
from decoupled_diloco_lab.simulate import Choices, LearnerSpec
from decoupled_diloco_lab.simulate.crowd import Crowd

pytestmark = pytest.mark.xdist_group("simulation/test_speeds")  # they share the runs

SPEEDS = {"learner-0": 4.0, "learner-1": 4.0, "learner-2": 2.0, "learner-3": 1.0}
FRAGMENTS = 24
TOKENS_PER_STEP = 8
BUDGET = TOKENS_PER_STEP * 2 * 32 * 24

Participants = Literal["reported", "all"]
Missed = Literal["overwrite", "rebase"]
Alignment = Literal["overwrite", "carry"]

PARTICIPANTS: tuple[Participants, ...] = ("reported", "all")
MISSED: tuple[Missed, ...] = ("overwrite", "rebase")
ALIGNMENTS: tuple[Alignment, ...] = ("overwrite", "carry")
CELLS = [*product(PARTICIPANTS, MISSED, ALIGNMENTS)]

IN_FLIGHT = "its contribution is in this version"
MISSED_ROUND = "it took no part in this version"


class Books:
    """Trained, merged and discarded tokens of each learner and fragment, with the reasons."""

    def __init__(self) -> None:
        self.steps_at: defaultdict[str, list[float]] = defaultdict(list)
        self.trained: Counter[str] = Counter()
        self.merged: Counter[tuple[str, int]] = Counter()
        self.discarded: Counter[tuple[str, int]] = Counter()
        self.discarded_why: Counter[tuple[str, str]] = Counter()
        self.rounds = 0
        self.parts: Counter[str] = Counter()

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Count one event."""
        if isinstance(event, StepFinished):
            self.steps_at[process].append(now)
            self.trained[process] += event.tokens
        for effect in effects:
            if isinstance(effect, Apply):
                self.discarded[process, effect.fragment] += effect.discarded_tokens
                self.discarded_why[process, effect.why] += effect.discarded_tokens
            elif isinstance(effect, RoundFinished) and effect.verdict == "merged":
                self._merged(effect)

    def _merged(self, round: RoundFinished) -> None:
        self.rounds += 1
        for part in round.participants:
            if part.state == "folded":
                self.merged[part.learner, round.fragment] += part.tokens
                self.parts[part.learner] += 1

    def discarded_share(self, learner: str, why: str | None = None) -> float:
        """Return the discarded share of a learner's tokens. One fragment counts as 1/P."""
        tokens = sum(
            count
            for (process, reason), count in self.discarded_why.items()
            if process == learner and why in (None, reason)
        )
        return tokens / FRAGMENTS / self.trained[learner]


@cache
def books(participants: Participants, missed: Missed, alignment: Alignment) -> Books:
    """Simulate one whole run with its closing sweep. Learners start at random phases."""
    phases, seen = Choices("phases"), Books()
    specs = [
        LearnerSpec(
            name,
            step_seconds=seconds,
            latency=0.002,
            joins_at=phases.uniform(0.0, 4.0),
            tokens_per_step=TOKENS_PER_STEP,
        )
        for name, seconds in SPEEDS.items()
    ]
    options = Options(
        participants=participants, missed=missed, alignment=alignment, max_tokens=BUDGET
    )
    crowd = Crowd(options, specs, seed=1, recorders=[seen])
    assert crowd.run(stop=lambda: crowd.finished) == "stop"
    return seen


@pytest.mark.parametrize(("participants", "missed", "alignment"), long_after(3, CELLS))
class TestEveryCell:
    """Properties that hold for all settings of steps in flight and of missed rounds."""

    def test_no_learner_waits(
        self, participants: Participants, missed: Missed, alignment: Alignment
    ) -> None:
        seen = books(participants, missed, alignment)
        for name, seconds in SPEEDS.items():
            gaps = [b - a for a, b in pairwise(seen.steps_at[name])]
            assert max(gaps) == pytest.approx(seconds, abs=1e-9)

    def test_every_fragment_merges_every_learner(
        self, participants: Participants, missed: Missed, alignment: Alignment
    ) -> None:
        seen = books(participants, missed, alignment)
        assert seen.merged.keys() == {*product(SPEEDS, range(FRAGMENTS))}
        assert min(seen.merged.values()) > 0

    def test_every_token_is_merged_once_or_discarded(
        self, participants: Participants, missed: Missed, alignment: Alignment
    ) -> None:
        seen = books(participants, missed, alignment)
        for learner, fragment in product(SPEEDS, range(FRAGMENTS)):
            merged, discarded = (x[learner, fragment] for x in (seen.merged, seen.discarded))
            assert merged + discarded == seen.trained[learner], (learner, fragment)


@pytest.mark.parametrize("participants", PARTICIPANTS)
def test_rebase_with_carry_discards_nothing(participants: Participants) -> None:
    """All trained tokens are merged, so weights by tokens are proportional to the speeds."""
    seen = books(participants, "rebase", "carry")
    assert not any(seen.discarded.values())
    for name, seconds in SPEEDS.items():
        assert seen.trained[name] == pytest.approx(seen.trained["learner-3"] / seconds, rel=0.01)


@pytest.mark.parametrize("participants", PARTICIPANTS)
def test_overwrite_discards_the_steps_in_flight(participants: Participants) -> None:
    """On a short link, each round discards about one step: 1 of H for the fastest learner."""
    seen = books(participants, "rebase", "overwrite")
    for name in SPEEDS:
        assert seen.discarded_share(name) == seen.discarded_share(name, IN_FLIGHT)
        one_step_each = seen.parts[name] * TOKENS_PER_STEP / FRAGMENTS / seen.trained[name]
        assert seen.discarded_share(name) == pytest.approx(one_step_each, rel=0.2)
    assert seen.discarded_share("learner-3") == pytest.approx(1 / 24, rel=0.02)


def test_missed_rounds_discard_the_steps_of_slow_learners() -> None:
    """With "reported", a third to a half besides the steps in flight. The fastest misses none."""
    for alignment in ALIGNMENTS:
        seen = books("reported", "overwrite", alignment)
        assert seen.discarded_share("learner-3", MISSED_ROUND) == 0
        assert 0.2 < seen.discarded_share("learner-2", MISSED_ROUND) < 0.3
        for name in ("learner-0", "learner-1"):
            assert 0.3 < seen.discarded_share(name, MISSED_ROUND) < 0.5


@pytest.mark.parametrize("alignment", long_after(1, ALIGNMENTS))
def test_requesting_from_all_learners_misses_almost_no_round(alignment: Alignment) -> None:
    seen = books("all", "overwrite", alignment)
    assert max(seen.discarded_share(name, MISSED_ROUND) for name in SPEEDS) < 0.002
    assert min(seen.parts[name] for name in SPEEDS) > 0.98 * seen.rounds
    reported = books("reported", "overwrite", alignment)
    assert reported.parts["learner-0"] < 0.75 * reported.rounds


def test_carry_discards_no_step_in_flight() -> None:
    for participants, missed in product(PARTICIPANTS, MISSED):
        seen = books(participants, missed, "carry")
        assert all(seen.discarded_share(name, IN_FLIGHT) == 0 for name in SPEEDS)


def test_a_learner_takes_as_many_steps_between_syncs_as_its_speed_allows() -> None:
    """Dynamic local updates (DyLU, Async Local-SGD): H times its speed relative to the fastest."""
    options = Options(
        fragments=FRAGMENTS, period=24, overlap=2, participants="all", alignment="carry"
    )
    specs = [LearnerSpec(name, seconds) for name, seconds in SPEEDS.items()]
    steps: defaultdict[str, list[float]] = defaultdict(list)

    def on_event(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        for fold in effects:
            if isinstance(fold, Fold) and now > 100:
                steps[fold.learner].append(fold.steps)

    Crowd(options, specs, seed=1, recorders=[on_event]).run(until=1000)
    for name, seconds in SPEEDS.items():
        mean = sum(steps[name]) / len(steps[name])
        assert mean == pytest.approx(24 / seconds, rel=0.06), name
        assert len(steps[name]) == pytest.approx(900, rel=0.06), "it sends as often as the others"
