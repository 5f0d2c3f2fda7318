"""Phrases and number formats that all outputs share, and text wrapping."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from decoupled_diloco.errors import PREEMPTED_EXIT_CODES
from decoupled_diloco.protocol.leaving import ASKED_TO_STOP
from decoupled_diloco.units import format_duration

BULLET = "- "

Departure = Literal["failed", "preempted"]

PREEMPTED = "preempted"
"""How a process ended that was asked to stop, but not by the launcher."""

RAN_OUT = "its lease ran out"
"""End of a shard's reason for the eviction of a learner whose lease expired."""

IN_THE_LOOP = "in the training loop"
"""End of a learner's reason to leave after an exception."""

ABSENT = "–"
"""Placeholder for a missing number."""

_NOTE_BEGINS = re.compile(r"([A-Za-z0-9._-]+),? ")
_NOTE_SOURCE = re.compile(r" from ([A-Za-z0-9._-]+) failed$")


def wrapped(lines: Iterable[str], width: int) -> str:
    """Wrap paragraphs and bullets at ``width`` columns, at least 30; long words stay whole."""
    out = []
    for line in lines:
        indent = "  " if line.startswith(BULLET) else ""
        out.append(
            textwrap.fill(
                line,
                width=max(30, width),
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(out)


def listing(items: Sequence[str]) -> str:
    """Join items as in a sentence.

    >>> listing(["a", "b", "c"]), listing(["a"]), listing([])
    ('a, b and c', 'a', 'none')
    """
    if not items:
        return "none"
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def numbers(found: Iterable[int]) -> str:
    """Return numbers as text with ranges; at most eight ranges are listed.

    >>> numbers([1, 2, 3, 7]), numbers([])
    ('1 to 3, 7', 'none')
    """
    ranges: list[list[int]] = []
    for number in sorted(set(found)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    listed = [str(a) if a == b else f"{a} to {b}" for a, b in ranges[:8]]
    more = [f"and {len(ranges) - 8} more ranges"] if len(ranges) > 8 else []
    return ", ".join([*listed, *more]) or "none"


def many(count: int, one: str, more: str = "") -> str:
    """Return a count with its noun; ``more`` is an irregular plural.

    >>> many(1, "step"), many(2, "step")
    ('1 step', '2 steps')
    """
    return f"{count} {one if count == 1 else more or one + 's'}"


def ordinal(number: int) -> str:
    """Return an ordinal number.

    >>> ordinal(2), ordinal(13), ordinal(21)
    ('2nd', '13th', '21st')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def after(seconds: float) -> str:
    """Return a duration after an instant, as text.

    >>> after(0.0), after(0.012)
    ('at once', 'after 12 ms')
    """
    return "at once" if seconds < 5e-4 else f"after {format_duration(seconds)}"


def when(at: float) -> str:
    """Return an instant of the run, in seconds since its first record, as text."""
    return f"{at:.2f} s"


def percent(share: float | None) -> str:
    """Return a share in percent; it is rounded neither up to 100 % nor down to 0 %.

    >>> percent(0.25), percent(0.999), percent(0.004), percent(0.0001), percent(None)
    ('25 %', '99.9 %', '0.4 %', '<0.1 %', '–')
    """
    if share is None:
        return ABSENT
    if 0 < share < 0.0095:
        return "<0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"
    return f"{100 * share:.0f} %" if share == 1 or share < 0.99 else f"{int(1000 * share) / 10} %"


def natural(name: str) -> tuple[str, int]:
    """Return a sort key that puts ``learner-10`` after ``learner-9``.

    >>> sorted(["learner-10", "learner-9"], key=natural)
    ['learner-9', 'learner-10']
    """
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() and len(number) < 19 else (name, -1)


def clock_face(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours if necessary.

    >>> clock_face(75.4), clock_face(3675)
    ('01:15', '1:01:15')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def named(process: str, note: str) -> str:
    """Return a remark of the protocol with "it" replaced by the name of the process that made it.

    >>> named("learner-1", "it starts with a fresh optimizer")
    'learner-1 starts with a fresh optimizer'
    >>> named("coordinator", "checkpoint 3 is abandoned, missing parts: learner-0")
    'checkpoint 3 is abandoned, missing parts: learner-0'
    """
    return f"{process}{note.removeprefix('it')}" if note.startswith("it ") else note


def note_in_words(process: str, note: str, why: str) -> str:
    """Return a remark of the protocol for a user; empty if it reports nothing of interest.

    >>> note_in_words("shard-0", "learner-2 (incarnation 1) is no longer live", "left: goodbye")
    'learner-2 left: goodbye'
    """
    learner, _, left = note.partition(" (incarnation ")
    if left.endswith("is no longer live") and why.startswith("left: "):
        reason = why.removeprefix("left: ")
        return f"{learner} is done" if reason == "the run is over" else f"{learner} left: {reason}"
    if note.endswith("could not be fetched"):
        # Either a newer copy replaced it before the fetch, or the learner fetches it again.
        return f"{process} fetches a corrupted copy again: {why}" if "digest" in why else ""
    return "" if why == "the run has only begun" else f"{named(process, note)}: {why}"


def is_preempted(code: int | None, signal_number: int | None) -> bool:
    """Whether a process ended because it was asked to stop, unlike one that failed.

    >>> is_preempted(130, None), is_preempted(None, 15), is_preempted(None, 9)
    (True, True, False)
    """
    return (code if signal_number is None else -signal_number) in PREEMPTED_EXIT_CODES


def departure_of(reason: str) -> Departure | None:
    """Return the kind of a learner's departure, by a shard's reason; ``None``: neither.

    >>> departure_of("left: it was asked to stop"), departure_of("left: its loop has ended")
    ('preempted', None)
    >>> departure_of("nothing arrived for 10 s, and its lease ran out")
    'failed'
    """
    if reason == f"left: {ASKED_TO_STOP}":
        return "preempted"
    return "failed" if reason.endswith((RAN_OUT, IN_THE_LOOP)) else None


def ending_in_words(code: int | None, signal_number: int | None) -> str:
    """Return as text how a process ended.

    >>> ending_in_words(None, 9), ending_in_words(4, None), ending_in_words(130, None)
    ('killed (SIGKILL)', 'ended with exit code 4', 'preempted')
    """
    if signal_number is None and is_preempted(code, signal_number):
        return PREEMPTED
    if signal_number is not None:
        try:
            return f"killed ({signal.Signals(signal_number).name})"
        except ValueError:
            return f"killed (signal {signal_number})"
    return f"ended with exit code {code}"


def was_ended(how: str) -> str:
    """Return how a process ended, as the predicate of a sentence.

    >>> was_ended("killed (SIGKILL)"), was_ended("ended with exit code 4")
    ('was killed (SIGKILL)', 'ended with exit code 4')
    """
    return f"was {how}" if how.startswith(("killed", PREEMPTED)) else how


def subjects_of(note: str) -> list[str]:
    """Return the processes that a remark may be about: its first word, or a source at its end.

    >>> subjects_of("learner-1 (incarnation 2) is no longer live")
    ['learner-1']
    """
    first, source = _NOTE_BEGINS.match(note), _NOTE_SOURCE.search(note)
    return [found[1] for found in (first, source) if found is not None]
