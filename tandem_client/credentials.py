"""A client's token and certificates, and the channel options that make a vanished router a prompt error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import grpc

Metadata = Sequence[tuple[str, str]]
AUTHORIZATION = "authorization"

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
LOOKAHEAD_BYTES = 64 * 1024  # of a call, ahead of its reader; beyond: the tokens stay in the router

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),  # a router that vanishes without a word ends its streams within 15 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of gRPC's other pings: while one waits, by default 60 s, none is sent
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # By default, a router may send megabytes of each call ahead of its reader.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a restarted router never inherits a broken connection
    # After a failed connection, calls fail until the next one: by default for 1 s, longer than they are retried.
    ("grpc.min_reconnect_backoff_ms", 5_000),  # a stopped router accepts, and says nothing: by default, 20 s
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Every field may be empty. With `cert` or `ca` the channel is TLS.

    Every call sends `api_key`, unless the metadata of the call has an `authorization` of its own. Calls of operators
    (`fleet`, `scale`, ...) send `token`, too.
    """

    token: str = field(default="", repr=False)  # of the cluster
    cert: bytes = field(default=b"", repr=False)  # PEM, as the next two
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    server_name: str = ""  # in the router's certificate, where its address is not
    api_key: str = field(default="", repr=False)  # one of [[api_keys]] of the fleet
    through_proxy: bool = False  # use the proxy of http_proxy, https_proxy and no_proxy, which gRPC reads

    def headers(self, given: Metadata, operator: bool = False) -> list[tuple[str, str]]:
        """The metadata of a call: `given`, and these credentials."""
        own = [("tandem-cluster-token", self.token)] if operator and self.token else []
        if self.api_key and all(name != AUTHORIZATION for name, _ in given):
            own.append((AUTHORIZATION, f"Bearer {self.api_key}"))
        return [*given, *own]

    def open_channel(self, library: ModuleType, address: str) -> Any:
        """A channel of `library`, which is `grpc` or `grpc.aio`. With no certificate it has no TLS."""
        options: list[tuple[str, int | str]] = [
            *CHANNEL_OPTIONS,
            ("grpc.enable_http_proxy", int(self.through_proxy)),  # by default, gRPC uses one even for 127.0.0.1
        ]
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        if not self.cert and not self.ca:
            return library.insecure_channel(address, options=options)
        tls = grpc.ssl_channel_credentials(self.ca or None, self.key or None, self.cert or None)
        return library.secure_channel(address, tls, options=options)


OPEN = Credentials()
