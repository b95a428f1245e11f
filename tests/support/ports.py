"""TCP ports that stay a test's own. One that was probed and closed may be anybody's a moment later."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port(host: str) -> Iterator[int]:
    """A free port that the system gives to nobody else meanwhile.

    A bound socket that never listens keeps it; a server that sets SO_REUSEADDR, as they all do, may listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def kept_for_its_successor(host: str, port: int) -> Iterator[None]:
    """A port on which a server listens stays free for whoever is to listen there after it; both with SO_REUSEPORT."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
        yield
