"""Which calls an API key opens. Comparison takes the same time for every key, and nothing shows a key."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest

from core.config import ApiKeyConfig, SecurityConfig, from_mapping
from core.errors import ConfigError, PermissionDenied, Unauthenticated
from runtime.rpc.api_keys import ApiKeys, hash_of, new_key
from runtime.rpc.security import OPEN, TOKEN_KEY, load_credentials, router_rules
from tests.support.certificates import Authority

USER, OPERATOR = "tandem-user-key", "tandem-operator-key"
TOKEN = "the-token-of-this-cluster"
KEYS = (
    ApiKeyConfig(name="alice", sha256=hash_of(USER), tenant="research"),
    ApiKeyConfig(name="olga", sha256=hash_of(OPERATOR), operator=True),
)
GENERATE = "/tandem.v1.Inference/Generate"
GET_FLEET = "/tandem.v1.Cluster/GetFleet"
SCALE = "/tandem.v1.Cluster/Scale"
ANYBODY = [
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/tandem.v1.Inference/GetModel",
    "/inference.GRPCInferenceService/ServerReady",
]

Headers = list[tuple[str, str | bytes]]


def bearer(key: str) -> Headers:
    return [("authorization", f"Bearer {key}")]


def outcome(keys: ApiKeys, method: str, metadata: Headers) -> type[Exception] | None:
    try:
        keys.check(method, metadata)
    except (Unauthenticated, PermissionDenied) as error:
        return type(error)
    return None


TABLE = [
    # method, nothing, user's key, operator's key, token
    (GENERATE, Unauthenticated, None, None, Unauthenticated),
    ("/tandem.v1.Inference/Tokenize", Unauthenticated, None, None, Unauthenticated),
    ("/inference.GRPCInferenceService/ModelInfer", Unauthenticated, None, None, Unauthenticated),
    ("/a.service.of.tomorrow/Method", Unauthenticated, None, None, Unauthenticated),
    (GET_FLEET, Unauthenticated, PermissionDenied, None, None),
    ("/tandem.v1.Cluster/ListRequests", Unauthenticated, PermissionDenied, None, None),
    (SCALE, Unauthenticated, Unauthenticated, Unauthenticated, None),
    ("/tandem.v1.Cluster/GetLedger", Unauthenticated, Unauthenticated, Unauthenticated, None),
    *((method, None, None, None, None) for method in ANYBODY),
]


@pytest.mark.parametrize("row", TABLE, ids=[method for method, *_ in TABLE])
def test_what_each_caller_may_call(row: tuple[Any, ...]) -> None:
    method, *outcomes = row
    callers: list[Headers] = [[], bearer(USER), bearer(OPERATOR), [(TOKEN_KEY, TOKEN)]]
    assert [outcome(ApiKeys(KEYS, TOKEN), method, caller) for caller in callers] == outcomes


@pytest.mark.parametrize("method", [GET_FLEET, SCALE])
def test_the_refusal_of_a_token_tells_a_missing_from_a_wrong_one(method: str) -> None:
    for metadata, says in (([], "needs .*the cluster's token"), ([(TOKEN_KEY, "x" * 16)], "has another token")):
        with pytest.raises(Unauthenticated, match=says):
            ApiKeys(KEYS, TOKEN).check(method, metadata)


def test_without_keys_every_call_passes() -> None:
    assert all(outcome(ApiKeys((), TOKEN), method, []) is None for method, *_ in TABLE)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        bearer(""),
        bearer(USER + "x"),
        bearer(USER[:-1]),
        bearer(hash_of(USER)),
        [("authorization", USER)],
        [("authorization", f"Basic {USER}")],
        [*bearer(USER), *bearer(USER)],
        [("authorization", b"Bearer \xff\xfe")],
        [(TOKEN_KEY, "another-token-altogether")],
    ],
    ids=["none", "empty", "longer", "shorter", "the hash", "no scheme", "basic", "two", "no text", "wrong token"],
)
def test_a_call_without_exactly_one_valid_key_is_refused(metadata: Headers) -> None:
    with pytest.raises(Unauthenticated) as refused:
        ApiKeys(KEYS, TOKEN).check(GENERATE, metadata)
    assert USER not in str(refused.value)


def test_the_scheme_is_read_in_any_case_and_the_key_as_bytes_too() -> None:
    keys = ApiKeys(KEYS)
    assert keys.find([("authorization", f"bearer {USER}")]) is KEYS[0]
    assert keys.find([("authorization", f"Bearer {OPERATOR}".encode())]) is KEYS[1]


def test_without_a_token_an_operator_s_key_steers() -> None:
    assert outcome(ApiKeys(KEYS), SCALE, bearer(OPERATOR)) is None
    with pytest.raises(PermissionDenied, match="the API key 'alice' is not the key of an operator"):
        ApiKeys(KEYS).check(SCALE, bearer(USER))


def test_every_configured_hash_is_compared_also_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(configured: str, presented: str) -> bool:
        compared.append(configured)
        return configured == presented

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ApiKeys(KEYS).find(bearer(USER)) is KEYS[0]
    assert compared == [key.sha256 for key in KEYS]


def test_a_new_key_has_256_random_bits_and_only_its_hash_is_configured() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("tandem-") and len(key) == len("tandem-") + 43 for key in keys)
    assert hash_of(USER) not in repr(KEYS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sha256": "A" * 64}, "sha256 must be 64 lower-case hex digits"),
        ({"tenant": "a\x1fb"}, "tenant must have at most 128 printable characters"),
        ({"name": "n" * 129}, "name must have at most 128 printable characters"),
        ({"requests_per_minute": 100_001}, r"requests_per_minute must be in \[0, 100000\]"),
    ],
)
def test_a_key_that_cannot_work_is_refused_by_the_config(options: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ApiKeyConfig(**({"name": "alice", "sha256": "0" * 64} | options))  # type: ignore[arg-type]


# ---- Invalid credentials are refused at the start, with an error that names the option.

CLUSTER_TOKEN = "0123456789abcdef-token"


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
        ({"cluster_token": 1234567890123456}, r"\[security\] cluster_token must be str, is something else"),
        (
            {"cluster_token": CLUSTER_TOKEN, "cluster_token_file": "f"},
            "set cluster_token or cluster_token_file, not both",
        ),
        ({"tls_cert": "c"}, "tls_cert, tls_key and tls_ca must be set together"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_cert, tls_key and tls_ca must be set together"),
        ({"tls_server_name": "n"}, "tls_server_name needs tls_cert"),
        ({"require_client_certs": True}, "require_client_certs needs tls_cert"),
    ],
)
def test_the_error_for_invalid_options_names_them_and_no_token(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        from_mapping({"security": options})
    assert str(options.get("cluster_token", CLUSTER_TOKEN)) not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"short\n", b"with spaces in it, many\n", b"\xff\xfe" * 20])
def test_the_error_for_an_invalid_token_file_does_not_show_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cluster_token_file: the content of .*token is not 16 or more") as refused:
        load_credentials(SecurityConfig(cluster_token_file=str(path)))
    assert "short" not in str(refused.value)


def test_a_key_of_another_certificate_and_an_authority_file_without_a_certificate_are_refused(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.sign("one")
    _, other_key = authority.sign("other")
    (tmp_path / "ca.pem").write_text("not a certificate")
    for key_file, authority_file, message in (
        (other_key, authority.certificate, "tls_cert and tls_key must be a certificate and its unencrypted key"),
        (key, tmp_path / "ca.pem", "tls_ca: no PEM certificate in"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_credentials(
                SecurityConfig(tls_cert=str(certificate), tls_key=str(key_file), tls_ca=str(authority_file))
            )


def test_the_repr_of_credentials_shows_no_secret(authority: Authority) -> None:
    loaded = load_credentials(authority.config("host", cluster_token=CLUSTER_TOKEN))
    assert loaded.metadata == [("tandem-cluster-token", CLUSTER_TOKEN)]
    assert CLUSTER_TOKEN not in repr(loaded)
    assert "PRIVATE" not in repr(loaded)
