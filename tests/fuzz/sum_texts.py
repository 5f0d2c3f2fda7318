"""Targets: the texts of secure sums, as a hostile shard sends them to a member, and the reverse."""

from __future__ import annotations

from decoupled_diloco.merge.plan import token_weight
from decoupled_diloco.privacy.secure_sum import (
    claim_text,
    names_text,
    read_claim,
    read_cohort,
    read_names,
    read_shares,
    shares_text,
)
from fuzz.harness import Target
from fuzz.mutations import any_json
from unit.privacy.sums import STEPS_MAX, SecureSum

VICTIM = "learner-000"


def of_sums() -> list[Target]:
    """Return a target for each text that a member or a shard reads."""
    honest = _opened()
    texts = {
        "sum-claim": claim_text(honest.view.claims[0]),
        "sum-cohort": honest.cohort.to_text(),
        "sum-shares": shares_text(honest.for_member(VICTIM)),
        "sum-survivors": names_text(honest.survivors),
        "sum-opening": shares_text(honest.view.answers[VICTIM]),
    }
    reads = {
        "sum-claim": lambda text: read_claim(VICTIM, 4, 8, text),
        "sum-cohort": _cohort,
        "sum-shares": _shares,
        "sum-survivors": _survivors,
        "sum-opening": _opening,
    }
    return [
        Target(
            name,
            lambda data, read=read: read(data.decode("utf-8", "replace")),  # type: ignore[misc]
            [texts[name].encode()],
            mutate=any_json,
            share=0.3,
        )
        for name, read in reads.items()
    ]


def _opened() -> SecureSum:
    sums = _masked()
    sums.open()
    return sums


def _masked() -> SecureSum:
    sums = _shared()
    sums.mask()
    return sums


def _shared() -> SecureSum:
    sums = SecureSum(3)
    sums.claim()
    sums.share()
    return sums


def _cohort(text: str) -> None:
    sums = SecureSum(3)
    sums.claim()
    cohort = read_cohort(text)
    sums.members[VICTIM].share(cohort)
    cohort.weights(token_weight, STEPS_MAX)


def _shares(text: str) -> None:
    sums = _shared()
    sums.members[VICTIM].mask(read_shares(text), sums.integers(VICTIM))


def _survivors(text: str) -> None:
    _masked().members[VICTIM].open(read_names(text))


def _opening(text: str) -> None:
    sums = _masked()
    opening = sums.open()
    sums.view.answers[VICTIM] = read_shares(text)
    opening.unmask(sums.total)
