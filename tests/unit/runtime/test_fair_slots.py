"""Tenants take slots in turns, and no slot is lost or given twice, whoever is cancelled when."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from runtime.fair_slots import FairSlots


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_tenant_with_many_calls_delays_another_by_one() -> None:
    slots, order = FairSlots(1), list[str]()

    async def call(tenant: str) -> None:
        await slots.acquire(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        slots.release()

    await slots.acquire("hostile")
    calls = [asyncio.create_task(call(tenant)) for tenant in ("hostile",) * 5 + ("honest",) * 2 + ("other",)]
    await turns()
    slots.release()
    await asyncio.gather(*calls)
    assert order == ["hostile", "honest", "other", "hostile", "honest", "hostile", "hostile", "hostile"]


STEPS = st.tuples(st.sampled_from(["call", "end", "cancel", "end and cancel", "turn"]), st.integers(0, 7))


@given(num_slots=st.integers(1, 3), steps=st.lists(STEPS, max_size=40))
async def test_the_law_of_the_slots(num_slots: int, steps: list[tuple[str, int]]) -> None:
    slots, tasks, held = FairSlots(num_slots), list[asyncio.Task[None]](), list[asyncio.Event]()

    async def call(tenant: int) -> None:
        await slots.acquire(tenant)
        end = asyncio.Event()
        held.append(end)
        try:
            await end.wait()
        finally:
            held.remove(end)
            slots.release()

    for step, number in steps:
        match step:
            case "call":
                tasks.append(asyncio.create_task(call(number % 3)))
            case "turn":
                await turns()
        if "end" in step and held:
            held[number % len(held)].set()
        if "cancel" in step and tasks:
            tasks[number % len(tasks)].cancel()
        assert len(held) <= num_slots
    await turns()
    waiting = [task for task in tasks if not task.done()]
    assert len(held) == min(num_slots, len(waiting)), "nobody waits while a slot is free"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (slots._num_free, slots._waiting) == (num_slots, {})
