"""The callers of a router: each request belongs to the tenant of its API key, and stays inside the limits of the key.

A fleet without keys takes every request as it is. With keys, a request cannot name another tenant, finds cached
prefixes of its own tenant only, and goes before no request of the priority that its key allows.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import unquote

from core.config import MAX_PRIORITY, ApiKeyConfig
from core.request import MAX_CACHE_SALT_CHARS
from router.serving.key_limits import KeyLimits
from runtime.owner_ledger import Owner, network_of
from runtime.rpc.api_keys import AUTHORIZATION, CLIENT, FOLLOWING, ApiKeys
from tandem_client.stubs import inference_pb2


class Caller(Protocol):
    """The part of a call's context that names who calls."""

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


class TenantAdmission:
    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._limits = KeyLimits()

    def claim(self, request: inference_pb2.GenerateRequest, context: Caller) -> Owner:
        """Give `request` to the tenant of its key, in place. Raises `Unauthenticated`.

        A call that the token of the cluster has opened has no key, and may name any tenant.
        """
        metadata = context.invocation_metadata() or ()
        has_key = any(name == AUTHORIZATION for name, _ in metadata)
        key = self._keys.find(metadata) if has_key else None
        if key is not None:
            _give(request, key)
        return _owner(key, context)

    def owner_of(self, context: Caller) -> Owner:
        """Raises `Unauthenticated`."""
        return _owner(self._keys.find(context.invocation_metadata() or ()), context)

    @contextlib.contextmanager
    def admit(self, request: inference_pb2.GenerateRequest, context: Caller, now: float) -> Iterator[Owner]:
        """`claim`, and count the request as open inside this context.

        Raises `KeyLimitReached`, too, and `InvalidRequest` for calls that can never be open together.
        """
        key = self._keys.find(context.invocation_metadata() or ())
        if key is None:
            yield _owner(None, context)
            return
        self._limits.admit(key, now, 1 + num_following_calls(context))
        try:
            _give(request, key)
            yield _owner(key, context)
        finally:
            self._limits.release(key)


def _owner(key: ApiKeyConfig | None, context: Caller) -> Owner:
    """The tenant. Without keys a client can name any, so there the owner is the network of the peer, and in it the
    client that an HTTP server names. An HTTP server in this process has no peer: its clients stand beside the peers."""
    if key is not None:
        return key.effective_tenant, ""
    named = (str(value) for name, value in context.invocation_metadata() or () if name == CLIENT)
    client, peer = next(named, ""), network_of_peer(context.peer())
    return (peer, client) if peer else (client, "")


def network_of_peer(peer: str) -> str:
    """`peer`: as gRPC names it, such as ipv4:127.0.0.1:50051 or ipv6:%5B::1%5D:50051; empty for a call of this
    process."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return network_of(unquote(address).rpartition(":")[0].strip("[]"))


def num_following_calls(context: Caller) -> int:
    """Calls that the HTTP request of this one makes after it, and that are of use only together with it."""
    value = next((str(value) for name, value in context.invocation_metadata() or () if name == FOLLOWING), "0")
    return int(value) if re.fullmatch("[0-9]{1,4}", value) else 0


def _give(request: inference_pb2.GenerateRequest, key: ApiKeyConfig) -> None:
    """A value out of its limits stays, so that validation refuses the request with the value that the client sent."""
    request.user = key.effective_tenant
    if len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        request.cache_salt = tenant_salt(key.effective_tenant, request.cache_salt)
    if request.priority >= -MAX_PRIORITY:  # else one tenant would go before all others, in queues and on workers
        request.priority = max(request.priority, key.min_priority)


def tenant_salt(tenant: str, salt: str) -> str:
    """A cache salt that no other tenant has. A tenant's name is printable, so the separator ends it."""
    return hashlib.sha256(f"{tenant}\x1f{salt}".encode()).hexdigest()
