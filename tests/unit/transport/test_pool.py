from __future__ import annotations

import asyncio

import pytest

from decoupled_diloco.transport.pool import PoolBody, ReceivePool


async def test_requests_wait_in_order_and_never_exceed_the_bound() -> None:
    pool = ReceivePool(10)
    first = await pool.acquire(6)
    order: list[str] = []

    async def want(name: str, nbytes: int) -> PoolBody:
        body = await pool.acquire(nbytes)
        order.append(name)
        return body

    large = asyncio.create_task(want("large", 8))
    small = asyncio.create_task(
        want("small", 1)
    )  # Would fit now, but must not starve the large one.
    await asyncio.sleep(0)
    assert (order, pool.waiting, pool.in_use) == ([], 2, 6)
    first.release()
    bodies = [await large, await small]
    assert (order, pool.in_use) == (["large", "small"], 9)
    for body in bodies:
        body.release()
    assert pool.in_use == 0


async def test_a_request_larger_than_the_pool_is_admitted_alone() -> None:
    pool = ReceivePool(10)
    first = await pool.acquire(1)
    huge = asyncio.create_task(pool.acquire(100))
    await asyncio.sleep(0)
    assert not huge.done()
    first.release()
    body = await huge
    assert len(body.buffer) == 100
    next_one = asyncio.create_task(pool.acquire(1))
    await asyncio.sleep(0)
    assert not next_one.done()
    body.release()
    (await next_one).release()


async def test_memory_is_reused_for_the_same_size() -> None:
    pool = ReceivePool(100)
    body = await pool.acquire(40)
    storage = body._storage
    body.release()
    body.release()  # May be called twice.
    again = await pool.acquire(40)
    assert again._storage is storage
    again.release()
    other = await pool.acquire(90)  # The idle buffer must be dropped.
    assert pool._idle_bytes == 0
    other.release()


async def test_memory_with_an_exported_view_is_not_reused() -> None:
    pool = ReceivePool(100)
    body = await pool.acquire(40)
    storage, look = body._storage, memoryview(body.buffer)
    kept = body.buffer[:4].tobytes()
    body.release()
    assert pool.in_use == 0
    again = await pool.acquire(40)
    assert again._storage is not storage
    assert look[:4] == kept
    again.release()


async def test_released_buffers_cannot_be_touched() -> None:
    pool = ReceivePool(100)
    body = await pool.acquire(40)
    buffer = body.buffer
    body.release()
    with pytest.raises(ValueError, match="released"):
        buffer[0]


async def test_cancelled_waiters_leave_no_trace() -> None:
    pool = ReceivePool(10)
    first = await pool.acquire(10)
    waiting = [asyncio.create_task(pool.acquire(10)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert pool.waiting == 2
    first.release()  # Assigns the buffer to the second at once ...
    waiting[1].cancel()  # ... which is cancelled before it runs: its buffer must go to the next.
    body = await waiting[2]
    body.release()
    assert (pool.in_use, pool.waiting) == (0, 0)
    await asyncio.gather(*waiting, return_exceptions=True)
