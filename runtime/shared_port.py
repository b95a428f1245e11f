"""One port for all routers of a machine, and for no other program.

With SO_REUSEPORT, several processes listen on one port, and the kernel spreads new connections among them. But each
process that asks for SO_REUSEPORT may join, also one of another fleet. So the supervisor claims the port before any
router starts, and keeps the claim until the fleet ends:

    bind + listen without SO_REUSEPORT     fails if any other program has the port, with SO_REUSEPORT or without
    clear SO_REUSEADDR                     from here on, nobody else can bind the port
    shutdown                               no longer listens: the kernel gives the claim no connection
    set SO_REUSEPORT                       from here on, routers of the same user can listen on the port

A second fleet on the port fails at the first step. SO_REUSEADDR is set for that step only, because connections of an
earlier fleet may still be in TIME_WAIT. The kernel cannot keep out a program of the same user that listens with
SO_REUSEPORT and claims nothing.

Routers of this fleet may listen already: an earlier supervisor has started them. A claim that joins them sets
SO_REUSEPORT and binds.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from core.service import join_address

# An address that the name resolves to and that this machine lacks, such as ::1 without IPv6.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

Bind = Callable[[socket.socket, tuple[Any, ...]], None]


class PortClaim:
    """Claims `port` on every address of `host`; 0 = any free port. `joins` routers that listen there already.

    Raises `OSError` if the port is taken.
    """

    def __init__(self, host: str, port: int, *, joins: bool = False) -> None:
        self._host = host
        self._sockets = open_everywhere(host, port, _join if joins else _claim)
        self.port: int = self._sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """host:port."""
        return join_address(self._host, self.port)

    def close(self) -> None:
        """End the claim. Listening routers keep the port."""
        for claimed in self._sockets:
            claimed.close()


def open_everywhere(host: str, port: int, bind: Bind) -> list[socket.socket]:
    """A socket for every address of `host` that this machine has, all on one port. Raises `OSError`."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, _, _, _, (name, _, *scope) in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                opened = _opened(family, (name, port, *scope), bind)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
                continue
            sockets.append(opened)
            port = opened.getsockname()[1]
        if missing is not None and not sockets:
            raise missing
    except OSError:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def _opened(family: int, address: tuple[Any, ...], bind: Bind) -> socket.socket:
    opened = socket.socket(family)
    try:
        bind(opened, address)
    except OSError:
        opened.close()
        raise
    return opened


def _claim(claimed: socket.socket, address: tuple[Any, ...]) -> None:
    if address[1] == 0:  # the kernel chooses a port that no program has; the shutdown below would free the port
        claimed.bind(address)
    else:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(address)
        claimed.listen()
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        claimed.shutdown(socket.SHUT_RDWR)
    claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _join(claimed: socket.socket, address: tuple[Any, ...]) -> None:
    claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    claimed.bind(address)
