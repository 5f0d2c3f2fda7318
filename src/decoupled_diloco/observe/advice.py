"""What people should act on: warnings of the run's processes, and settings that do not fit.

A pure function of a `RunModel`; status, report and doctor show the same sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog
from decoupled_diloco.observe.words import percent
from decoupled_diloco.units import format_duration

DISCARDED_MAX = 0.05
"""Above this share of discarded tokens an overlap that is too small is worth a sentence."""

ROUNDS_MIN = 10
"""Merged rounds before anything is said: the first ones are slow."""

ROUNDS_LOOKED_AT = 50
"""The newest rounds of each shard that the measured times are taken from."""


def advice_of(run: RunModel) -> list[str]:
    """What people should act on, one sentence each."""
    return [*map(_sentence, run.warnings.values()), *_overlap(run)]


def _sentence(words: str) -> str:
    return words if words.endswith((".", "!")) else f"{words}."


def _overlap(run: RunModel) -> Iterator[str]:
    """Tokens are discarded because merged fragments come back later than the overlap."""
    share, overlap = discarded_share(run), run.settings_of("sync").get("overlap")
    measured = [found for shard in run.shards.values() if (found := _round_trip(shard.rounds))]
    if share <= DISCARDED_MAX or not isinstance(overlap, int) or not measured:
        return
    seconds, step_seconds = max(measured, key=lambda found: found[0] / found[1])
    fits = math.ceil(seconds / step_seconds)
    if run.rounds_merged < ROUNDS_MIN or fits <= overlap:
        return
    takes, step = format_duration(seconds), format_duration(step_seconds)
    yield (
        f"{percent(share)} of the tokens are discarded: overlap={overlap} is too small, because a "
        f"round takes {takes} and {overlap} steps of {step} are shorter: set sync.overlap to "
        f'{fits}, and raise sync.period to discard fewer, or set sync.alignment="carry" and '
        'sync.missed="rebase" to discard none.'
    )


def discarded_share(run: RunModel) -> float:
    """The share of all tokens that merged fragments have overwritten, as learners tell."""
    fragment_tokens = sum(each.discarded_fragment_tokens for each in run.learners.values())
    return fragment_tokens / (run.fragments or 1) / run.tokens if run.tokens else 0.0


def _round_trip(rounds: Sequence[RoundLog]) -> tuple[float, float] | None:
    """ξ_quorum + ξ_sync and ξ_step of a shard's newest rounds; ``None``: not measured."""
    newest = [round.result for round in rounds[-ROUNDS_LOOKED_AT:] if round.merged]
    known = [told for told in newest if told is not None and told.step_seconds > 0]
    if not known:
        return None
    took = [
        (told.quorum_average_seconds or 0.0)
        + (told.merge_average_seconds or 0.0)
        + (told.broadcast_average_seconds or 0.0)
        for told in known
    ]
    return median(took), median(told.step_seconds for told in known)
