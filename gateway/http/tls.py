"""TLS of the HTTP server, in the place of the loop's own: there, a connection is unknown until its handshake has ended.

Here it counts, and has the deadline of a head, from its first byte on. No timer of TLS itself ends a connection.
"""

from __future__ import annotations

import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

from gateway.http.http_protocol import BoundedHttpProtocol


class TlsProtocol(SSLProtocol):
    """One connection, on any event loop."""

    def __init__(self, context: ssl.SSLContext, http: BoundedHttpProtocol) -> None:
        options: dict[str, Any] = dict.fromkeys(("ssl_handshake_timeout", "ssl_shutdown_timeout"), float("inf"))
        super().__init__(http.loop, http, context, waiter=None, server_side=True, **options)  # type: ignore[arg-type]
        self._http = http
        http.tls = self

    def connection_made(self, transport: Any) -> None:
        self._http.accepted(transport)
        if self._http.are_too_many:
            transport.abort()
        else:
            super().connection_made(transport)

    def connection_lost(self, exc: Any) -> None:
        super().connection_lost(exc)
        if not self._http.is_made:  # asyncio tells it nothing before the end of the handshake
            self._http.connection_lost(exc)

    @property
    def num_unsent(self) -> int:
        """Bytes that are not with the transport of the socket yet."""
        size: int = self._get_write_buffer_size()  # type: ignore[attr-defined]  # typeshed lacks it
        return size
