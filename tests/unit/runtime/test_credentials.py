"""Invalid credentials are refused at the start, with an error that names the option."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import SecurityConfig, from_mapping
from core.errors import ConfigError
from runtime.rpc.security import OPEN, load_credentials, router_rules
from tests.support.certificates import Authority

TOKEN = "0123456789abcdef-token"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "authority")


def test_an_empty_config_gives_no_token_and_no_tls() -> None:
    assert load_credentials(SecurityConfig()) == OPEN
    assert OPEN.metadata == []
    assert OPEN.for_channel() is None
    assert OPEN.for_server(router_rules(SecurityConfig())) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster_token": "short"}, "cluster_token is not 16 or more printable ASCII characters without spaces"),
        ({"cluster_token": "has a space in its middle"}, "cluster_token is not 16"),
        ({"cluster_token": "has-an-umlaut-ä-in-it"}, "cluster_token is not 16"),
        ({"cluster_token": "has-a-newline-in-it\n"}, "cluster_token is not 16"),
        ({"cluster_token": TOKEN, "cluster_token_file": "f"}, "set cluster_token or cluster_token_file, not both"),
        ({"tls_cert": "c"}, "tls_cert, tls_key and tls_ca must be set together"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_cert, tls_key and tls_ca must be set together"),
        ({"tls_server_name": "n"}, "tls_server_name needs tls_cert"),
        ({"require_client_certs": True}, "require_client_certs needs tls_cert"),
    ],
)
def test_the_error_for_invalid_options_names_them_and_no_token(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        from_mapping({"security": options})
    assert str(options.get("cluster_token", TOKEN)) not in str(refused.value)


def test_the_error_for_a_token_of_the_wrong_type_does_not_show_it() -> None:
    with pytest.raises(ConfigError, match=r"\[security\] cluster_token must be str, is something else"):
        from_mapping({"security": {"cluster_token": 1234567890123456}})


@pytest.mark.parametrize("content", [b"", b"short\n", b"with spaces in it, many\n", b"\xff\xfe" * 20])
def test_the_error_for_an_invalid_token_file_does_not_show_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cluster_token_file: the content of .*token is not 16 or more") as refused:
        load_credentials(SecurityConfig(cluster_token_file=str(path)))
    assert "short" not in str(refused.value)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    certificate, _ = authority.sign("one")
    _, other_key = authority.sign("other")
    security = SecurityConfig(tls_cert=str(certificate), tls_key=str(other_key), tls_ca=str(authority.certificate))
    with pytest.raises(ConfigError, match="tls_cert and tls_key must be a certificate and its unencrypted key"):
        load_credentials(security)


def test_an_authority_file_without_a_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.sign("b")
    (tmp_path / "ca.pem").write_text("not a certificate")
    security = SecurityConfig(tls_cert=str(certificate), tls_key=str(key), tls_ca=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="tls_ca: no PEM certificate in"):
        load_credentials(security)


def test_the_repr_of_credentials_shows_no_secret(authority: Authority) -> None:
    loaded = load_credentials(authority.config("host", cluster_token=TOKEN))
    assert loaded.metadata == [("tandem-cluster-token", TOKEN)]
    assert TOKEN not in repr(loaded)
    assert "PRIVATE" not in repr(loaded)
