"""Runs hostile inputs: which exceptions are allowed, how long one may take, how much memory.

An input that raises what its target does not name, that takes longer than `SECONDS_MAX`, or after
which the process needs more memory than the target allows, is a `Fault`. It is made again by
`input_of(target, seed, number)`.
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

from decoupled_diloco.errors import Error
from fuzz.mutations import Mutate, any_bytes

SECONDS_MAX = 15.0
"""For one input; they take milliseconds, the slowest a second. A busy machine needs the rest."""

MEMORY_BYTES_MAX = 96 << 20
"""What one input may add to the most that the process has had so far: 64 MiB is what a line or an
answer may be at most, and the rest is what the allocator keeps."""


@dataclass(frozen=True)
class Target:
    """Something that reads what others have written.

    Args:
        read: Reads one input; what it returns is of no matter.
        samples: Valid inputs.
        allowed: What it may raise, beside nothing.
    """

    name: str
    read: Callable[[bytes], object]
    samples: Sequence[bytes]
    allowed: tuple[type[BaseException], ...] = (Error,)
    mutate: Mutate = any_bytes
    strict: bool = True  # whether `read` must take the samples
    share: float = 1.0  # of the inputs that a target gets; less for a slow one
    bytes_max: int = 1 << 20


@dataclass(frozen=True)
class Fault:
    """An input that does harm."""

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
    """What came of a target's inputs."""

    inputs: int = 0
    seconds: float = 0.0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    slowest_seconds: float = 0.0
    grown_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)


class TooSlow(BaseException):
    """No `except Exception` takes it for something else."""


def input_of(target: Target, seed: int, number: int) -> bytes:
    """The input of this number; 0 and those after it are the samples themselves."""
    if number < len(target.samples):
        return target.samples[number]
    rng = random.Random(f"{seed} {target.name} {number}")
    return target.mutate(rng, target.samples)[: target.bytes_max]


def run(target: Target, inputs: int, seed: int, faults_max: int = 5) -> Tally:
    """Gives a target so many inputs, or fewer if it has as many faults."""
    tally, began, kinds = Tally(), time.monotonic(), set[str]()
    at_first = peak = peak_bytes()
    with _interrupting():
        for number in range(inputs):
            data = input_of(target, seed, number)
            what, outcome = one(target, data, tally)
            if number < len(target.samples) and target.strict and outcome != "taken":
                what = what or f"a valid sample is not taken: {outcome}"
            grown, peak = peak_bytes() - peak, peak_bytes()
            if grown > MEMORY_BYTES_MAX:
                what = what or f"{grown >> 20} MiB more for an input of {len(data)} bytes"
            tally.outcomes[outcome] += 1
            tally.inputs += 1
            if tally.outcomes["too slow"] > faults_max:
                break  # each takes seconds, and this timer replaces that of the test
            if what and (kind := what.splitlines()[-1][:200]) not in kinds:
                kinds.add(kind)
                tally.faults.append(Fault(target.name, seed, number, what, data))
                if len(kinds) >= faults_max:
                    break
    tally.seconds, tally.grown_bytes = time.monotonic() - began, peak - at_first
    return tally


def one(target: Target, data: bytes, tally: Tally) -> tuple[str, str]:
    """What is wrong with how an input is read, if anything is, and what came of it."""
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
    """The most memory that this process has had, PyTorch's included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scratch(folder: Path, name: str) -> Path:
    """A path in a folder of its own."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
