"""What clients hold in one room, by their address and by the keys of an address: bytes, or calls that wait."""

from __future__ import annotations

import ipaddress
from collections import Counter

IPV6_CLIENT_BITS = 64  # a client of IPv6 has as many addresses as it likes below these

# The address, and the key of a client there; empty for a client without a key. In a router with API keys, a tenant is
# in place of the address.
Owner = tuple[str, str]


def network_of(address: str) -> str:
    """The network that one client has: the /64 of an IPv6 address, else the address."""
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), IPV6_CLIENT_BITS), strict=False))


class OwnerLedger:
    """Has entries only for those who hold something, so its size is bounded by the room."""

    def __init__(self) -> None:
        self.total = 0
        self._by_owner: Counter[Owner] = Counter()
        self._by_host: Counter[str] = Counter()

    def add(self, owner: Owner, amount: int) -> None:
        """`amount` below 0: the owner gives it back."""
        self.total += amount
        self._by_owner[owner] += amount
        self._by_host[owner[0]] += amount
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        if not self._by_host[owner[0]]:
            del self._by_host[owner[0]]

    def has_room(self, owner: Owner, amount: int, limit: int) -> bool:
        """Whether `owner` may hold `amount` more in a room of `limit`.

        An address may hold half of the room if it is alone, and always as much as it leaves free. So may a key of the
        address in half of the room. So there is room left for a client that holds little.
        """
        of_host = self.of_host(owner)
        if amount > limit - self.total - of_host:
            return False
        return not owner[1] or amount <= (limit + 1) // 2 - of_host - self._by_owner[owner]

    def of_host(self, owner: Owner) -> int:
        """What all keys of this address hold."""
        return self._by_host[owner[0]]

    def largest(self) -> Owner:
        """Of the address that holds most, the key that holds most. The ledger must not be empty."""
        host = max(self._by_host, key=self._by_host.__getitem__)
        return max((owner for owner in self._by_owner if owner[0] == host), key=self._by_owner.__getitem__)

    def check(self) -> None:
        assert self.total == self._by_owner.total() == self._by_host.total()
        assert all(amount > 0 for amount in (*self._by_owner.values(), *self._by_host.values()))
        hosts: Counter[str] = Counter()
        for (host, _), amount in self._by_owner.items():
            hosts[host] += amount
        assert hosts == self._by_host
