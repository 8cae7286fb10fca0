"""A line in which tenants take turns: one at a time, by shares, whatever its waiters do."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lamina.server.fair_line import FairLine

ITEMS = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 9)), min_size=1, max_size=30)


async def order_of(items: list[tuple[bytes, int]], cancelled: set[int]) -> list[int]:
    """The order in which work that arrives at once as other work runs gets its turn."""
    line, order, held = FairLine(), list[int](), 0

    async def one(number: int, tenant: bytes, size: int) -> None:
        nonlocal held
        async with line.turn(tenant, size):
            held += 1
            assert held == 1
            await asyncio.sleep(0)
            order.append(number)
            held -= 1

    async with line.turn(b"first", 1):
        tasks = [asyncio.create_task(one(n, *item)) for n, item in enumerate(items)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(5), line.turn(b"last", 1):
        pass
    return order


@given(ITEMS, st.data())
def test_every_waiter_gets_its_turn_but_those_that_leave(items: list[tuple[bytes, int]], data: st.DataObject) -> None:
    cancelled = data.draw(st.sets(st.integers(0, len(items) - 1)))
    order = asyncio.run(order_of(items, cancelled))
    assert sorted(order) == [n for n in range(len(items)) if n not in cancelled]


@given(ITEMS)
def test_one_tenant_is_served_in_order_and_no_tenant_gets_much_more_than_another(
    items: list[tuple[bytes, int]],
) -> None:
    order = asyncio.run(order_of(items, set()))
    left, served = Counter(tenant for tenant, _ in items), Counter[bytes]()
    largest = max(size for _, size in items)
    for tenant in left:
        own = [n for n in order if items[n][0] == tenant]
        assert own == sorted(own)
    for number in order:
        tenant, size = items[number]
        served[tenant] += size
        left[tenant] -= 1
        waiting = [served[t] for t in left if left[t]]
        assert not waiting or max(waiting) - min(waiting) <= 2 * largest, "the bound of start-time fair queueing"


def test_work_that_comes_later_does_not_wait_for_all_of_anothers() -> None:
    items = [(b"a", 5)] * 20 + [(b"b", 5)]
    assert asyncio.run(order_of(items, set())).index(20) <= 1


def test_a_waiter_that_leaves_as_it_gets_its_turn_passes_it_on() -> None:
    async def work() -> None:
        line = FairLine()

        async def wait() -> None:
            async with line.turn(b"a", 1):
                raise AssertionError("it was cancelled")

        async with line.turn(b"a", 1):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
        waiting.cancel()  # it has the line, and has not run yet
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        async with asyncio.timeout(5), line.turn(b"a", 1):
            pass

    asyncio.run(work())
