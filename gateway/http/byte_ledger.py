"""The bytes that clients hold in one room, by their address and by the keys of an address."""

from __future__ import annotations

from collections import Counter

from starlette.types import Scope

Owner = tuple[str, bytes]  # the address and the key of a client


def owner_of(scope: Scope) -> Owner:
    keys = (value for name, value in scope["headers"] if name == b"authorization")
    return (scope.get("client") or ("", 0))[0], next(keys, b"")


class ByteLedger:
    """Has entries only for those who hold bytes, so its size is bounded by the room."""

    def __init__(self) -> None:
        self.total = 0
        self._by_owner: Counter[Owner] = Counter()
        self._by_host: Counter[str] = Counter()

    def add(self, owner: Owner, num_bytes: int) -> None:
        """`num_bytes` below 0: the owner gives them back."""
        self.total += num_bytes
        self._by_owner[owner] += num_bytes
        self._by_host[owner[0]] += num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        if not self._by_host[owner[0]]:
            del self._by_host[owner[0]]

    def of_owner(self, owner: Owner) -> int:
        return self._by_owner[owner]

    def of_host(self, owner: Owner) -> int:
        """What all keys of this address hold."""
        return self._by_host[owner[0]]

    def largest(self) -> Owner:
        """Of the address that holds most, the key that holds most. The ledger must not be empty."""
        host = max(self._by_host, key=self._by_host.__getitem__)
        return max((owner for owner in self._by_owner if owner[0] == host), key=self._by_owner.__getitem__)

    def check(self) -> None:
        assert self.total == self._by_owner.total() == self._by_host.total()
        assert all(num_bytes > 0 for num_bytes in self._by_owner.values())
        hosts: Counter[str] = Counter()
        for (host, _), num_bytes in self._by_owner.items():
            hosts[host] += num_bytes
        assert hosts == self._by_host
