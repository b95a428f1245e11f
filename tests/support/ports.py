"""TCP ports that the system gives to no other program while a test needs them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port(host: str) -> Iterator[int]:
    """A free port that stays reserved within this context.

    A bound socket that never listens reserves the port. A server may listen on it, because servers set SO_REUSEADDR.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for servers that share their port
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """A port that nobody uses now, for a server that starts several times on it."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
