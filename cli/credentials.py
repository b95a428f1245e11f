"""Credentials of the `tandem` command. A user types no token, and no argument of a process contains one.

If the config has no token, `serve` makes a random one and writes it into a token file for other commands of the same
user. Only this user can read the file. Its name is the address of the router; it exists as long as the fleet runs.
`serve` locks the file, and the lock ends with the process, also after `kill -9`. So the next `serve` recognizes and
removes token files of killed fleets. Every other user gives a config file (`--config`) with a [security] table.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cli.config_file import load_config
from core.config import TOKEN_STAYS, SecurityConfig, TandemConfig
from core.errors import ConfigError
from model_files.catalogue import default_cache_dir
from runtime.rpc.security import Credentials, load_credentials, read_token
from tandem_client import NO_RETRY, AsyncClient
from tandem_client import Credentials as ClientCredentials

TOKEN_BYTES = 32
API_KEY_VARIABLE = "TANDEM_API_KEY"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::]", "")


def with_cluster_token(config: TandemConfig) -> TandemConfig:
    """`config` with the token in it: the configured token, or a new random one. Raises `ConfigError`."""
    token = read_token(config.security) or secrets.token_urlsafe(TOKEN_BYTES)
    return replace(config, security=replace(config.security, cluster_token=token, cluster_token_file=""))


def find_credentials(config: Path | None, address: str) -> Credentials:
    """Credentials for the router at `address`: from the config file, else the token from the token file."""
    return credentials_of(load_config(config, {}).security, address)


def credentials_of(config: SecurityConfig, address: str) -> Credentials:
    found = load_credentials(config)
    if found.token:
        return found
    try:
        return replace(found, token=_token_path(address).read_text(encoding="ascii"))
    except (OSError, ConfigError):  # there is none, or no home for it
        return found


def check_token_stays(given: SecurityConfig, credentials: Credentials) -> str:
    """A note for the operator if the token of a config for a running fleet cannot be read here; else an empty text.

    Raises `ConfigError` if it is another one than that of the fleet.
    """
    try:
        token = read_token(given)
    except ConfigError as error:
        return f"{error}. It was not compared: the fleet keeps its token"
    if token and token != credentials.token:
        name = "cluster_token_file" if given.cluster_token_file else "cluster_token"
        raise ConfigError(f"[security] {name}: {TOKEN_STAYS}")
    return ""


def client_of(address: str, credentials: Credentials) -> AsyncClient:
    """The client of a command. Its API key comes from the environment, which other users of the machine cannot read."""
    return AsyncClient(
        address,
        ClientCredentials(
            credentials.token, credentials.cert, credentials.key, credentials.ca, credentials.server_name,
            os.environ.get(API_KEY_VARIABLE, ""),
        ),
        NO_RETRY,
    )  # fmt: skip


def check_token_files() -> None:
    """Raises `ConfigError` if `token_file` could write none, before a fleet starts."""
    directory = _token_path("").parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise _unwritten(directory, error) from error


def _unwritten(path: Path, error: OSError) -> ConfigError:
    why = f"cannot write {path} ({error.strerror})"
    return ConfigError(f"{why}; `tandem scale` needs it: set [security] cluster_token_file")


@contextlib.contextmanager
def token_file(address: str, token: str) -> Iterator[None]:
    """Within this context, `find_credentials` finds the token. Raises `ConfigError` if the file cannot be written.

    An empty token writes no file: the token of a config file is never copied.
    """
    if not token:
        yield
        return
    path = _token_path(address)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(path.parent) as directory:
            _lock(directory, fcntl.LOCK_EX)  # no other `serve` sees a token file before it is locked
            _remove_stale_tokens(path.parent)
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            _lock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, token.encode("ascii"))
    except OSError as error:
        raise _unwritten(path, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_stale_tokens(directory: Path) -> None:
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
    """False if another process has the lock, or if the file system has no locks; then no token file is removed."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _token_path(address: str) -> Path:
    """One file per router. All local names share one file, so a local token is never sent to another machine."""
    host, _, port = address.rpartition(":")
    name = "local" if host in LOCAL_HOSTS else host.replace("/", "_")
    return default_cache_dir() / "tokens" / f"{name}_{port.replace('/', '_')}"
