"""The owner of a request, for the rooms and threads that clients share."""

from __future__ import annotations

from starlette.types import Scope

from runtime.owner_ledger import Owner, network_of
from runtime.rpc.api_keys import AUTHORIZATION, hash_of, presented_key


def network_of_client(scope: Scope) -> str:
    return network_of((scope.get("client") or ("", 0))[0])


def owner_of(scope: Scope) -> Owner:
    """The network of the client, and the hash of its key: a key is one owner, however the header spells it."""
    key = presented_key([(AUTHORIZATION, value) for name, value in scope["headers"] if name == AUTHORIZATION.encode()])
    return network_of_client(scope), "" if key is None else hash_of(key)
