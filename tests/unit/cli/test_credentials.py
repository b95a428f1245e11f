"""Tokens on the command line: made where there is none, left for this user alone, never taken to another machine."""

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

import pytest

from cli.config_file import load_config
from cli.credentials import find_credentials, left_for_this_user, with_cluster_token
from core.config import MIN_TOKEN_CHARS, SecurityConfig, TandemConfig
from core.errors import ConfigError

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


def test_a_token_of_the_config_stays_and_one_in_a_file_travels_in_the_config(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert with_cluster_token(config_with(cluster_token=TOKEN)).security.cluster_token == TOKEN
    secured = with_cluster_token(config_with(cluster_token_file=str(path))).security
    assert (secured.cluster_token, secured.cluster_token_file) == (TOKEN, "")


def test_what_serve_leaves_is_found_by_this_user_under_every_name_of_this_machine() -> None:
    with left_for_this_user(ROUTER, TOKEN):
        for address in (ROUTER, "localhost:50051", "0.0.0.0:50051", "[::1]:50051"):
            assert find_credentials(None, address).token == TOKEN
        for address in ("127.0.0.1:50052", "10.0.0.7:50051", "elsewhere:50051"):
            assert find_credentials(None, address).token == "", "another router was sent our token"
    assert find_credentials(None, ROUTER).token == "", "it ends with its fleet"


def test_only_this_user_can_read_it(tmp_path: Path) -> None:
    with left_for_this_user(ROUTER, TOKEN):
        (path,) = (tmp_path / "cache" / "tandem" / "tokens").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_a_killed_fleet_left_is_replaced_and_no_link_is_followed(tmp_path: Path) -> None:
    tokens = tmp_path / "cache" / "tandem" / "tokens"
    tokens.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("keep me")
    (tokens / "local_50051").symlink_to(elsewhere)
    with left_for_this_user(ROUTER, TOKEN):
        assert find_credentials(None, ROUTER).token == TOKEN
    assert elsewhere.read_text() == "keep me"


LEAVE = """
import sys
from cli.credentials import left_for_this_user
with left_for_this_user(sys.argv[1], "the-token-of-a-fleet"):
    print("left", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def fleet_at(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has left its token; killed at the end."""
    command = [sys.executable, "-c", LEAVE, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"left\n"
        yield process
        process.kill()


def test_what_killed_fleets_left_goes_with_the_next_start_and_what_others_left_stays(tmp_path: Path) -> None:
    tokens = tmp_path / "cache" / "tandem" / "tokens"

    def left() -> set[str]:
        return {path.name for path in tokens.iterdir()}

    with fleet_at("127.0.0.1:1001") as killed, fleet_at("127.0.0.1:1002") as alive, fleet_at("10.0.0.7:1003"):
        killed.kill()
        killed.wait()
        assert left() == {"local_1001", "local_1002", "10.0.0.7_1003"}, "it had no time to remove its own"
        with left_for_this_user("127.0.0.1:1004", TOKEN):
            assert left() == {"local_1002", "10.0.0.7_1003", "local_1004"}
            assert find_credentials(None, "127.0.0.1:1002").token == "the-token-of-a-fleet"
        alive.communicate()  # it ends by itself
        assert left() == {"10.0.0.7_1003"}


def test_a_cache_on_a_file_system_without_locks_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with left_for_this_user(ROUTER, TOKEN), left_for_this_user("127.0.0.1:50052", "another-token-of-ours"):
        assert find_credentials(None, ROUTER).token == TOKEN


def test_a_lasting_token_of_the_config_is_not_copied(tmp_path: Path) -> None:
    with left_for_this_user(ROUTER, ""):
        assert not (tmp_path / "cache").exists()


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write .*cluster_token_file"), left_for_this_user(ROUTER, TOKEN):
        raise AssertionError("unreachable")


def test_the_config_file_wins_over_what_was_left(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the-token-in-the-file")
    config = tmp_path / "tandem.toml"
    config.write_text(f'[security]\ncluster_token_file = "{tmp_path / "token"}"\n')
    with left_for_this_user(ROUTER, TOKEN):
        assert find_credentials(config, ROUTER).token == "the-token-in-the-file"


def test_files_of_the_security_table_become_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tandem.toml").write_text('[security]\ntls_cert = "c"\ntls_key = "k"\ntls_ca = "a"\n')
    security = load_config(Path("tandem.toml"), {}).security
    assert (security.tls_cert, security.tls_key) == (str(tmp_path / "c"), str(tmp_path / "k"))
    assert (security.tls_ca, security.cluster_token_file) == (str(tmp_path / "a"), "")
