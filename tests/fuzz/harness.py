"""Run hostile inputs with limits on exceptions, time and memory.

An input is a `Fault` if it raises an exception that its target does not allow, takes longer than
`SECONDS_MAX`, or needs too much memory. `input_of(target, seed, number)` creates it again.
"""

from __future__ import annotations

import collections
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import DilocoError
from fuzz.mutations import Mutate, any_bytes

SECONDS_MAX = 15.0
"""Time limit per input. Inputs take milliseconds, and the slowest one second. The rest is reserve
for a busy machine."""

MEMORY_BYTES_MAX = 96 << 20
"""How much one input may add to the process's peak memory since its target's first input. A line or
an answer may have 64 MiB. The rest is for the allocator."""


@dataclass(frozen=True)
class Target:
    """A reader of untrusted data.

    Args:
        name: Its name.
        read: Reads one input. Its result is ignored.
        samples: Valid inputs.
        allowed: Exceptions that it may raise.
        mutate: Creates a hostile input from the samples.
        strict: Whether `read` must accept the samples.
        share: Share of the inputs that this target gets; less for a slow one.
        bytes_max: Largest size of an input.
    """

    name: str
    read: Callable[[bytes], object]
    samples: Sequence[bytes]
    allowed: tuple[type[BaseException], ...] = (DilocoError,)
    mutate: Mutate = any_bytes
    strict: bool = True
    share: float = 1.0
    bytes_max: int = 1 << 20


@dataclass(frozen=True)
class Fault:
    """An input that exceeds a limit."""

    target: str
    seed: int
    number: int
    what: str
    data: bytes

    def __str__(self) -> str:
        repeat = f"python benchmarks/fuzzing.py --only {self.target} --seed {self.seed}"
        return f"{self.target}: {self.what}\n{repeat} --number {self.number}\n{self.data[:300]!r}"


@dataclass
class Tally:
    """The results of a target's inputs."""

    inputs: int = 0
    seconds: float = 0.0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_seconds: float = 0.0
    grown_bytes: int = 0
    peak_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)


class TooSlow(BaseException):
    """The time limit. A `BaseException`, so that `except Exception` does not catch it."""


def input_of(target: Target, seed: int, number: int) -> bytes:
    """Create an input by its number. The first numbers are the samples themselves."""
    if number < len(target.samples):
        return target.samples[number]
    rng = random.Random(f"{seed} {target.name} {number}")
    return target.mutate(rng, target.samples)[: target.bytes_max]


def run(target: Target, inputs: int, seed: int, faults_max: int = 5) -> Tally:
    """Run a number of inputs on a target, and stop early after `faults_max` kinds of faults."""
    tally, began, kinds = Tally(), time.monotonic(), set[str]()
    forget_peak()
    at_first = peak = peak_bytes()
    with _interrupting():
        for number in range(inputs):
            data = input_of(target, seed, number)
            what, outcome = one(target, data, tally)
            if number < len(target.samples) and target.strict and outcome != "taken":
                what = what or f"a valid sample is rejected: {outcome}"
            grown, peak = peak_bytes() - peak, peak_bytes()
            if grown > MEMORY_BYTES_MAX:
                what = what or f"{grown >> 20} MiB more for an input of {len(data)} bytes"
            tally.outcomes[outcome] += 1
            tally.inputs += 1
            if tally.outcomes["too slow"] > faults_max:
                break  # each takes seconds, and this timer replaces the test's own time limit
            if what and (kind := what.splitlines()[-1][:200]) not in kinds:
                kinds.add(kind)
                tally.faults.append(Fault(target.name, seed, number, what, data))
                if len(kinds) >= faults_max:
                    break
    tally.seconds, tally.grown_bytes = time.monotonic() - began, peak - at_first
    tally.peak_bytes = peak
    return tally


def one(target: Target, data: bytes, tally: Tally) -> tuple[str, str]:
    """Run one input; return a description of its fault, or "", and its outcome."""
    began = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
    try:
        target.read(data)
        return "", "taken"
    except target.allowed as error:
        return "", type(error).__name__
    except TooSlow:
        return f"more than {SECONDS_MAX:g} s\n{_place()}", "too slow"
    except Exception as error:
        return "".join(traceback.format_exception(error, limit=-6)), type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        tally.slowest_seconds = max(tally.slowest_seconds, time.monotonic() - began)


def _place() -> str:
    return "".join(traceback.format_exc(limit=-6))


@contextmanager
def _interrupting() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def peak_bytes() -> int:
    """Return this process's peak memory since `forget_peak`, including PyTorch."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Reset the peak to the process's present memory.

    Otherwise an earlier test's peak of 2 GB would hide a reader that takes 1 GB.
    """
    Path("/proc/self/clear_refs").write_text("5")


def scratch(folder: Path, name: str) -> Path:
    """Return a path in a folder, and create the folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
