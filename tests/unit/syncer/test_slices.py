"""Thousands of small things leave the event loop room for others, and keep their order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from decoupled_diloco.syncer.slices import SLICE, Slices


def failed(error: BaseException) -> None:
    raise error


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_turn_of_the_loop_does_one_slice_in_order() -> None:
    done: list[int] = []
    slices: Slices[int] = Slices(done.append, failed)
    for number in range(2 * SLICE + 10):
        slices.put(number)
    slices.go_on()
    counts = [len(done)]
    for _ in range(3):
        await turns(1)
        counts.append(len(done))
    assert counts == [SLICE, 2 * SLICE, 2 * SLICE + 10, 2 * SLICE + 10]
    assert done == list(range(2 * SLICE + 10))


async def test_what_is_put_in_at_different_times_shares_the_slice_of_a_turn() -> None:
    done: list[int] = []
    slices: Slices[int] = Slices(done.append, failed)
    for number in range(SLICE + 1):
        slices.put(number)
        slices.go_on()
    assert len(done) == SLICE
    await turns(1)
    assert len(done) == SLICE + 1


async def test_a_thing_of_many_steps_is_done_before_what_comes_after_it() -> None:
    done: list[str] = []

    def do(name: str) -> Iterator[None] | None:
        def many() -> Iterator[None]:
            for step in range(SLICE):
                done.append(f"{name} {step}")
                yield

        if name == "many":
            return many()
        done.append(name)
        return None

    slices = Slices(do, failed)
    for name in ("first", "many", "last"):
        slices.put(name)
    slices.go_on()
    assert len(done) < SLICE, "the steps of a long thing count"
    await turns(2)
    assert done == ["first", *(f"many {step}" for step in range(SLICE)), "last"]


async def test_what_a_thing_leads_to_comes_after_what_waits() -> None:
    done: list[str] = []
    slices: Slices[str]

    def do(name: str) -> None:
        done.append(name)
        if name == "first":
            slices.put("led to")
            slices.go_on()
            done.append("end of first")

    slices = Slices(do, failed)
    slices.put("first")
    slices.put("second")
    slices.go_on()
    assert done == ["first", "end of first", "second", "led to"]


async def test_after_an_error_nothing_more_is_done_and_it_is_told() -> None:
    done: list[int] = []
    told: list[BaseException] = []

    def do(number: int) -> None:
        if number == 1:
            raise ValueError(number)
        done.append(number)

    slices = Slices(do, told.append)
    for number in range(3):
        slices.put(number)
    slices.go_on()
    await turns(2)
    assert done == [0]
    assert len(told) == 1
