"""Random options, links and mishaps: nothing twice, nothing undone, nothing lost, and an end.

`python -m outside.test_random_worlds FIRST END` (in `tests`) tries more seeds and names the bad.
"""

from __future__ import annotations

import sys

import pytest

from outside.mishaps import Storm

CHUNK = 10


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_random_worlds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        found = wrong(seed)
        assert not found, f"seed {seed}: {found}"


def wrong(seed: int) -> str:
    try:
        Storm(seed).run()
    except AssertionError as error:
        return str(error)[:500] or "a machine's own check"
    return ""


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if found := wrong(number):
            print(f"seed {number}: {found}", flush=True)
