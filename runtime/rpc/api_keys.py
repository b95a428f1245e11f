"""API keys: which of the configured keys a call carries, and which methods it opens.

The config has the SHA-256 of each key, never the key. A key has 256 random bits, so a plain hash of it cannot be
searched. The hash of a presented key is compared with every configured hash, each in constant time: the duration tells
neither how much of a hash agrees, nor which key it was.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from core.config import ApiKeyConfig
from core.errors import PermissionDenied, Unauthenticated
from runtime.rpc.security import CONTROL_METHODS, OPEN_METHODS, OPERATOR_METHODS, Metadata, has_token, without_token

KEY_BYTES = 32
KEY_PREFIX = "tandem-"  # lets scanners of code find a key that was committed by mistake
AUTHORIZATION = "authorization"
SCHEME = "bearer "
CLIENT = "tandem-client"  # metadata: the network of the client of an HTTP server, which calls for it
FOLLOWING = "tandem-following-calls"  # metadata: the number of calls that the same HTTP request makes after this one


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def presented_key(metadata: Metadata) -> str | None:
    """The key that a call presents, however the scheme and the spaces around the key are spelled. None without exactly
    one."""
    values = [_as_text(value) for name, value in metadata if name == AUTHORIZATION]
    if len(values) != 1 or not values[0].lower().startswith(SCHEME):
        return None
    return values[0][len(SCHEME) :].strip()


class ApiKeys:
    """The keys of a server. Without any, every call may be made, and `find` returns None."""

    def __init__(self, keys: tuple[ApiKeyConfig, ...], cluster_token: str = "") -> None:
        """`cluster_token`: also opens the methods of operators; empty = no token does."""
        self._keys = keys
        self._token = cluster_token

    def find(self, metadata: Metadata) -> ApiKeyConfig | None:
        """The key of a call. Raises `Unauthenticated`."""
        if not self._keys:
            return None
        presented = presented_key(metadata)
        if presented is None:
            raise Unauthenticated(f"this call needs an API key: send `{AUTHORIZATION}: Bearer KEY`")
        digest = hash_of(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found

    def check(self, method: str, metadata: Metadata) -> None:
        """Raises `Unauthenticated` or `PermissionDenied`. `method`: full name, e.g. "/tandem.v1.Inference/Generate"."""
        if not self._keys or method.startswith(OPEN_METHODS):
            return
        operates = method.startswith(OPERATOR_METHODS)
        if operates and has_token(metadata, self._token):
            return
        if self._token and method in CONTROL_METHODS:
            raise without_token(metadata)
        if operates and presented_key(metadata) is None:
            raise without_token(metadata, "an API key of an operator, or the cluster's token")
        key = self.find(metadata)
        if operates and key is not None and not key.operator:
            raise PermissionDenied(f"the API key {key.name!r} is not the key of an operator")


def _as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", errors="replace")
