"""What clients hold is counted by address and by key, and a client that holds much leaves room for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.owner_ledger import Owner, OwnerLedger, network_of

LIMIT = 64
OWNERS = st.tuples(st.sampled_from(["here", "there", "elsewhere"]), st.sampled_from(["", "a", "b"]))


@given(st.lists(st.tuples(OWNERS, st.integers(1, 40), st.booleans()), max_size=40))
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
