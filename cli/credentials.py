"""The cluster's credentials on the command line: nobody types a token, and none ever stands in an argument.

`serve` makes a random token where the config has none, and leaves it for this user's other commands in a file that
only this user can read, named after the router's address, for as long as the fleet runs. It is locked meanwhile, and
the lock ends with the process however that ends: so the next `serve` knows what a killed one left, and removes it.
Everybody else names a config file (`--config`) whose [security] table says where token and certificates are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cli.config_file import load_config
from core.config import TandemConfig
from core.errors import ConfigError
from model_files.catalogue import default_cache_dir
from runtime.security import Credentials, load_credentials, read_token
from tandem_client import AsyncClient
from tandem_client import Credentials as ClientCredentials

TOKEN_BYTES = 32
THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::]", "")


def with_cluster_token(config: TandemConfig) -> TandemConfig:
    """`config` with the token itself in it: read from its file on this machine, or made here. Raises `ConfigError`."""
    token = read_token(config.security) or secrets.token_urlsafe(TOKEN_BYTES)
    return replace(config, security=replace(config.security, cluster_token=token, cluster_token_file=""))


def find_credentials(config: Path | None, address: str) -> Credentials:
    """For the router at `address`: those of the config file, completed with the token left on this machine."""
    found = load_credentials(load_config(config, {}).security)
    if found.token:
        return found
    try:
        return replace(found, token=_token_path(address).read_text(encoding="ascii"))
    except OSError:
        return found


def client_of(address: str, credentials: Credentials) -> AsyncClient:
    return AsyncClient(
        address,
        ClientCredentials(
            credentials.token, credentials.cert, credentials.key, credentials.ca, credentials.server_name
        ),
    )


@contextlib.contextmanager
def left_for_this_user(address: str, token: str) -> Iterator[None]:
    """While this lasts, `find_credentials` finds the token. Raises `ConfigError` where it cannot be written.

    For a token made here, which ends with its fleet; empty = the config names a lasting one, and no copy is left.
    """
    if not token:
        yield
        return
    path = _token_path(address)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(path.parent) as directory:
            _lock(directory, fcntl.LOCK_EX)  # who sweeps meets no file that was made and is not locked yet
            _remove_what_dead_fleets_left(path.parent)
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            _lock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, token.encode("ascii"))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}), which `tandem scale` needs: set [security] cluster_token_file"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_what_dead_fleets_left(directory: Path) -> None:
    for path in directory.iterdir():
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                path.unlink()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """False where another process has it, and where this file system has no locks: then nothing is ever removed."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _token_path(address: str) -> Path:
    """One file per router; the loopback names are one machine, and no other machine is ever sent its token."""
    host, _, port = address.rpartition(":")
    name = "local" if host in THIS_MACHINE else host.replace("/", "_")
    return default_cache_dir() / "tokens" / f"{name}_{port.replace('/', '_')}"
