"""Tokens of the `tandem` command: generated if missing, readable by this user only, sent to no other machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from cli.commands.serve import serve
from cli.credentials import check_token_stays, client_of, find_credentials, token_file, with_cluster_token
from core.config import MIN_TOKEN_CHARS, EngineConfig, SecurityConfig, TandemConfig
from core.errors import ConfigError
from runtime.rpc.security import OPEN

TOKEN = "0123456789abcdef-token"
ROUTER = "127.0.0.1:50051"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_with(**security: str) -> TandemConfig:
    return replace(TandemConfig(), security=SecurityConfig(**security))  # type: ignore[arg-type]


def test_a_fleet_without_a_token_gets_a_random_one() -> None:
    tokens = {with_cluster_token(TandemConfig()).security.cluster_token for _ in range(5)}
    assert len(tokens) == 5
    assert min(map(len, tokens)) > 2 * MIN_TOKEN_CHARS


def test_a_token_of_the_config_stays_and_a_token_in_a_file_is_read_into_the_config(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert with_cluster_token(config_with(cluster_token=TOKEN)).security.cluster_token == TOKEN
    secured = with_cluster_token(config_with(cluster_token_file=str(path))).security
    assert (secured.cluster_token, secured.cluster_token_file) == (TOKEN, "")


def test_the_token_file_is_found_under_every_local_address_and_no_other_and_read_by_this_user_alone(
    tmp_path: Path,
) -> None:
    with token_file(ROUTER, TOKEN):
        (path,) = (tmp_path / "cache" / "tandem" / "tokens").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for address in (ROUTER, "localhost:50051", "0.0.0.0:50051", "[::1]:50051"):
            assert find_credentials(None, address).token == TOKEN
        for address in ("127.0.0.1:50052", "10.0.0.7:50051", "elsewhere:50051"):
            assert find_credentials(None, address).token == "", "the token was sent to another router"
    assert find_credentials(None, ROUTER).token == "", "the token file outlives its fleet"


def test_an_old_token_file_is_replaced_and_no_link_is_followed(tmp_path: Path) -> None:
    tokens = tmp_path / "cache" / "tandem" / "tokens"
    tokens.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("keep me")
    (tokens / "local_50051").symlink_to(elsewhere)
    with token_file(ROUTER, TOKEN):
        assert find_credentials(None, ROUTER).token == TOKEN
    assert elsewhere.read_text() == "keep me"


HOLD_TOKEN_FILE = """
import sys
from cli.credentials import token_file
with token_file(sys.argv[1], "the-token-of-a-fleet"):
    print("written", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def fleet_at(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process with a token file; killed on exit."""
    command = [sys.executable, "-c", HOLD_TOKEN_FILE, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        yield process
        process.kill()


def test_the_next_start_removes_token_files_of_killed_fleets_and_keeps_those_of_running_ones(tmp_path: Path) -> None:
    tokens = tmp_path / "cache" / "tandem" / "tokens"

    def names() -> set[str]:
        return {path.name for path in tokens.iterdir()}

    with fleet_at("127.0.0.1:1001") as killed, fleet_at("127.0.0.1:1002") as alive, fleet_at("10.0.0.7:1003"):
        killed.kill()
        killed.wait()
        assert names() == {"local_1001", "local_1002", "10.0.0.7_1003"}, "the killed fleet removed its token file"
        with token_file("127.0.0.1:1004", TOKEN):
            assert names() == {"local_1002", "10.0.0.7_1003", "local_1004"}
            assert find_credentials(None, "127.0.0.1:1002").token == "the-token-of-a-fleet"
        alive.communicate()  # ends normally
        assert names() == {"10.0.0.7_1003"}


def test_a_cache_on_a_file_system_without_locks_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with token_file(ROUTER, TOKEN), token_file("127.0.0.1:50052", "the-token-of-another-fleet"):
        assert find_credentials(None, ROUTER).token == TOKEN


def test_the_error_for_an_unwritable_token_file_names_the_option_that_helps(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(ConfigError, match=r"cannot write .*cluster_token_file"), token_file(ROUTER, TOKEN):
        raise AssertionError("unreachable")
    cluster = Mock()
    with pytest.raises(ConfigError, match=r"cannot write .*cluster_token_file"):
        serve(replace(TandemConfig(), engine=EngineConfig(model="fake:tiny")), {}, cluster, Console())
    cluster.join.assert_not_called()


def test_the_config_file_overrides_the_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the-token-in-the-file")
    config = tmp_path / "tandem.toml"
    config.write_text(f'[security]\ncluster_token_file = "{tmp_path / "token"}"\n')
    with token_file(ROUTER, TOKEN):
        assert find_credentials(config, ROUTER).token == "the-token-in-the-file"


def test_the_api_key_of_a_command_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "tandem-key")
    assert client_of(ROUTER, OPEN)._credentials.headers(()) == [("authorization", "Bearer tandem-key")]
    monkeypatch.delenv("TANDEM_API_KEY")
    assert client_of(ROUTER, OPEN)._credentials.headers(()) == []


def test_a_file_for_a_running_fleet_has_its_token_or_none_and_another_one_is_refused(tmp_path: Path) -> None:
    credentials = replace(OPEN, token=TOKEN)
    path = tmp_path / "token"
    path.write_text(TOKEN)
    for same in ({}, {"cluster_token": TOKEN}, {"cluster_token_file": str(path)}):
        assert check_token_stays(config_with(**same).security, credentials) == ""
    path.write_text("another-token-of-a-fleet")
    for name, value in (("cluster_token", "another-token-of-a-fleet"), ("cluster_token_file", str(path))):
        with pytest.raises(
            ConfigError, match=rf"\[security\] {name}: the token of a running fleet never changes"
        ) as no:
            check_token_stays(config_with(**{name: value}).security, credentials)
        assert "another" not in str(no.value)
    path.unlink()
    note = check_token_stays(config_with(cluster_token_file=str(path)).security, credentials)
    assert note.endswith("No such file or directory. It was not compared: the fleet keeps its token")
