"""Addresses and their keys take slots in turns, and no slot is lost or given twice, whoever is cancelled when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.fair_slots import FairSlots
from runtime.owner_ledger import Owner, OwnerLedger, network_of


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


STEPS = st.tuples(st.sampled_from(["call", "end", "cancel", "end and cancel", "turn"]), st.integers(0, 7))


OWNERS = [("here", ""), ("here", "key"), ("here", "other"), ("there", ""), ("there", "key")]


@given(owners=st.lists(st.sampled_from(OWNERS), max_size=12))
async def test_a_host_waits_for_one_call_of_each_other_host_and_a_key_for_one_of_each_other_key(
    owners: list[Owner],
) -> None:
    slots, order = FairSlots(1), list[Owner]()
    await slots.acquire(("first", ""))

    async def call(owner: Owner) -> None:
        await slots.acquire(owner)
        order.append(owner)
        slots.release()

    calls = [asyncio.create_task(call(owner)) for owner in owners]
    await turns()
    slots.release()
    await asyncio.gather(*calls)
    assert sorted(order) == sorted(owners)
    assert _in_turns([host for host, _ in order])
    for each in ("here", "there"):
        assert _in_turns([key for host, key in order if host == each])


def _in_turns(order: list[str]) -> bool:
    """Between two turns of one, each other that still waits has one."""
    rests = [(name, order[place + 1 :]) for place, name in enumerate(order)]
    return all(sorted(rest[: rest.index(name)]) == sorted({*rest} - {name}) for name, rest in rests if name in rest)


@given(num_slots=st.integers(1, 3), steps=st.lists(STEPS, max_size=40))
async def test_the_law_of_the_slots(num_slots: int, steps: list[tuple[str, int]]) -> None:
    slots, tasks, held = FairSlots(num_slots), list[asyncio.Task[None]](), list[asyncio.Event]()

    async def call(owner: Owner) -> None:
        await slots.acquire(owner)
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
                tasks.append(asyncio.create_task(call(OWNERS[number % len(OWNERS)])))
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


# ---- What clients hold is counted by address and by key, and a client that holds much leaves room for others.

LIMIT = 64
ANY_OWNERS = st.tuples(st.sampled_from(["here", "there", "elsewhere"]), st.sampled_from(["", "a", "b"]))


@given(st.lists(st.tuples(ANY_OWNERS, st.integers(1, 40), st.booleans()), max_size=40))
def test_an_address_holds_at_most_half_of_the_room_and_a_key_a_quarter_beside_the_last_that_it_took(
    steps: list[tuple[Owner, int, bool]],
) -> None:
    ledger, held = OwnerLedger(), list[tuple[Owner, int]]()
    for owner, amount, ends_one in steps:
        if ends_one and held:
            ended, size = held.pop(amount % len(held))
            ledger.add(ended, -size)
        if ledger.has_room(owner, amount, LIMIT):
            ledger.add(owner, amount)
            held.append((owner, amount))
            of_key = sum(size for each, size in held if each == owner)
            assert ledger.of_host(owner) <= LIMIT - ledger.total + amount, "never more than was free"
            assert 2 * ledger.of_host(owner) <= LIMIT + amount
            assert not owner[1] or 2 * of_key <= LIMIT // 2 + amount
        ledger.check()
        assert ledger.total == sum(size for _, size in held) <= LIMIT
    for owner, amount in held:
        ledger.add(owner, -amount)
    ledger.check()
    assert ledger.total == 0


def test_the_largest_owner_is_a_key_of_the_largest_address() -> None:
    ledger = OwnerLedger()
    for owner, amount in ((("here", ""), 5), (("there", "a"), 3), (("there", "b"), 4)):
        ledger.add(owner, amount)
    assert ledger.largest() == ("there", "b")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_a_client_of_ipv6_is_its_64_bit_network(address: str, network: str) -> None:
    assert network_of(address) == network
