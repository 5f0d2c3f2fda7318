"""Deliberate breaks and the marks in the source belong together; a world or a test notices each."""

from __future__ import annotations

from collections import Counter

import pytest

from deliberate_breaks import ROOT, Break, marks
from simulation.apart_breaks import APART
from simulation.breaks import (
    CLAIMS,
    CORE,
    DATA_LEASES,
    DURABLE_TOO_EARLY,
    LATE_ANSWER,
    STORAGE,
)
from simulation.own_breaks import FORGOTTEN_TURNS, OWN_STEPS
from simulation.relay_breaks import RELAY_TRIAL, RELAYS
from simulation.residual_breaks import RESIDUALS
from simulation.revision_breaks import REVISIONS
from simulation.secure_breaks import SECURE_TRIAL
from simulation.shell_breaks import SHELLS
from simulation.trial_breaks import TRIAL

BREAKS = (
    *(*CORE, *CLAIMS, *STORAGE, *DATA_LEASES, DURABLE_TOO_EARLY, LATE_ANSWER),
    *(*APART, *OWN_STEPS, *FORGOTTEN_TURNS, *RESIDUALS, *REVISIONS, *SHELLS, *TRIAL),
    *(*RELAYS, *RELAY_TRIAL, *SECURE_TRIAL),
)


def test_each_mark_has_a_break_and_each_break_a_mark() -> None:
    assert {each.mark for each in BREAKS} == marks().keys()


def test_a_name_marks_one_line_and_has_one_break() -> None:
    assert all(len(places) == 1 for places in marks().values())
    names = Counter(each.mark for each in {id(each): each for each in BREAKS}.values())
    assert set(names.values()) == {1}


@pytest.mark.parametrize("each", BREAKS, ids=[each.mark for each in BREAKS])
def test_a_changed_line_compiles_and_uses_names_that_exist(each: Break) -> None:
    assert not each.unknown_names()


TRIED = (*TRIAL, *RELAY_TRIAL, *SECURE_TRIAL)


@pytest.mark.parametrize("each", TRIED, ids=[each.mark for each in TRIED])
def test_the_test_that_notices_a_break_is_there(each: Break) -> None:
    file, *_, name = each.test.split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()
