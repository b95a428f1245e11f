"""The credentials of a process: the token of the cluster and, with TLS, a certificate.

    call                                    needs                                       certificate (with TLS)
    router -> worker, every method          the token                                   required
    client -> router, CONTROL_METHODS       the token                                   with require_client_certs
    client -> router, the other of Cluster  the token or a key of an operator, if there are keys     "
    client -> router, all other methods     an API key, if there are keys                            "
    client -> router, OPEN_METHODS          -                                                        "

Health and reflection need no credentials. A server compares tokens, and hashes of keys (runtime/rpc/api_keys.py), in
constant time. No log and no `repr` shows a token or a key.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from core.config import TOKEN_RULE, ApiKeyConfig, SecurityConfig, is_token
from core.errors import ConfigError, Unauthenticated

TOKEN_KEY = "tandem-cluster-token"

Metadata = Collection[Any]  # pairs of name and value; the stubs of gRPC declare other types


def has_token(metadata: Metadata, token: str) -> bool:
    """Whether a call has `token`, once, as its token of the cluster. No call has an empty token."""
    tokens = _tokens(metadata)
    return bool(token) and len(tokens) == 1 and hmac.compare_digest(tokens[0], token.encode())


def without_token(metadata: Metadata, needs: str = "the cluster's token") -> Unauthenticated:
    """The refusal of a call without the token of the cluster: it has none, or another one."""
    return Unauthenticated(
        "this call has another token than this cluster" if _tokens(metadata) else f"this call needs {needs}"
    )


def _tokens(metadata: Metadata) -> list[bytes]:
    values = [value for name, value in metadata if name == TOKEN_KEY]
    return [value.encode() if isinstance(value, str) else value for value in values]


@dataclass(frozen=True, slots=True)
class ServerRules:
    """The credentials that a server requires of its callers."""

    protected: tuple[str, ...]  # prefixes of the full names of methods that need the token
    require_client_certs: bool
    api_keys: tuple[ApiKeyConfig, ...] = ()  # with at least one, every method that is not open needs a key


@dataclass(frozen=True, slots=True)
class Credentials:
    """Token, certificate and key; the defaults mean no token and no TLS."""

    token: str = field(default="", repr=False)
    cert: bytes = field(default=b"", repr=False)  # PEM, as key and ca
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    server_name: str = ""

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """gRPC metadata for every protected call."""
        return [(TOKEN_KEY, self.token)] if self.token else []

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """None = no TLS."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert) if self.cert else None

    def for_server(self, rules: ServerRules) -> grpc.ServerCredentials | None:
        """None = no TLS."""
        if not self.cert:
            return None
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, rules.require_client_certs)


OPEN = Credentials()
WORKER_RULES = ServerRules(("/tandem.v1.PrefillWorker/", "/tandem.v1.DecodeWorker/", "/tandem.v1.Worker/"), True)
CONTROL_METHODS = tuple(
    f"/tandem.v1.Cluster/{name}" for name in ("Scale", "SwitchRole", "GetConfig", "Apply", "GetLedger")
)
OPERATOR_METHODS = ("/tandem.v1.Cluster/",)
OPEN_METHODS = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.",
    "/tandem.v1.Inference/GetModel",  # gateways read the name and the limits of the model, without a key of their own
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
    "/inference.GRPCInferenceService/ModelReady",
    "/inference.GRPCInferenceService/ServerMetadata",
    "/inference.GRPCInferenceService/ModelMetadata",
)


def router_rules(config: SecurityConfig, api_keys: tuple[ApiKeyConfig, ...] = ()) -> ServerRules:
    return ServerRules(CONTROL_METHODS, config.require_client_certs, api_keys)


def load_credentials(config: SecurityConfig) -> Credentials:
    """Read the files of `config`. Raises `ConfigError` naming the option of a missing or invalid file."""
    token = read_token(config)
    if not config.tls_cert:
        return Credentials(token)
    cert, key, ca = (_read(name, getattr(config, name)) for name in ("tls_cert", "tls_key", "tls_ca"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            "[security] tls_cert and tls_key must be a certificate and its unencrypted key, both PEM: "
            f"{config.tls_cert}, {config.tls_key}"
        ) from error
    try:
        context.load_verify_locations(config.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"[security] tls_ca: no PEM certificate in {config.tls_ca}") from error
    return Credentials(token, cert, key, ca, config.tls_server_name)


def read_token(config: SecurityConfig) -> str:
    """The configured token of the cluster; empty if none is configured. Raises `ConfigError`."""
    if not config.cluster_token_file:
        return config.cluster_token
    path = config.cluster_token_file
    token = _read("cluster_token_file", path).decode("utf-8", errors="replace").strip()
    if not is_token(token):
        raise ConfigError(f"[security] cluster_token_file: the content of {path} is not {TOKEN_RULE}")
    return token


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"[security] {option}: cannot read {path}: {error.strerror}") from error
