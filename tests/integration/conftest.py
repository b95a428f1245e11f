"""What integration tests share."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """A TCP port which the system gives to nobody else during the test.

    A port that was probed and closed may be anybody's a moment later: a fleet opens dozens. Here a bound socket that
    never listens keeps it, and Prometheus's server, which sets SO_REUSEADDR, may listen on it meanwhile.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0", 0))
        yield int(holder.getsockname()[1])
