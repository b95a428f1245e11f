"""Options of routers and of the HTTP API: limits, keys, models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from core.config.live import live
from core.config.requirements import require, require_finite_floats, require_function, require_given, require_positive
from core.config.worker import SchedulerConfig

MAX_MIN_INTERVAL_MS = 60_000
MAX_KEY_NAME_CHARS = 128
MAX_PRIORITY = 100  # of a request, and -MAX_PRIORITY the least; lower goes first
MAX_REQUESTS_PER_MINUTE = 100_000  # a router remembers the time of each
MIN_MESSAGE_BYTES = 512 * 1024  # the requests of every client that is in use fit


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"  # address that the router listens on; 0.0.0.0 = every address of this machine
    port: int = 50051  # 0 = any free port
    # Limit: requests that wait for a worker or in validation (half for a tenant); beyond: RESOURCE_EXHAUSTED, retryable
    max_queued: int = live(1024)
    # Limit: open calls on a worker, of all routers; 0 = 64 on a CPU, 256 on a GPU; beyond: requests wait here
    max_in_flight_per_worker: int = live(0)
    # Limit: time limit of a call without a deadline; beyond: DEADLINE_EXCEEDED, with the stage
    default_timeout_s: float = live(600.0)
    # Limit: dispatches of one request in a row that deliver no token; beyond: the client gets the last error
    max_attempts: int = live(3)
    retry_pause_s: float = live(0.05)  # pause before the third of them, doubled for each later one; the second has none
    slo_ttft_ms: float = live(1000.0)  # wanted time to the first token; admission = "shed" refuses what misses it
    admission: str = live("queue")  # queue | shed; shed = refuse a request whose predicted first token is too late
    local_prefill: str = "auto"  # auto | never; may a decode worker compute prompts while a prefill worker serves?
    peer_prefixes: str = live("auto")  # auto | never; may workers read prefixes that peers have cached?
    policy: str = ""  # module:function that makes a Policy (docs/routing.md); empty = the built-in one
    report_stale_s: float = live(3.0)  # time without a report of a worker; beyond: it counts as saturated
    # Limit: time without a report of a worker; beyond: it is lost, and its requests are retried
    worker_lost_s: float = live(10.0)
    # Limit: time of queued requests without a decode worker, or 1.5 planned starts; beyond: UNAVAILABLE, retryable
    worker_wait_s: float = live(20.0)
    max_message_bytes: int = 4 * 1024 * 1024  # largest gRPC message, received or sent; beyond: RESOURCE_EXHAUSTED
    max_prompt_chars: int = live(1_000_000)  # characters of a prompt, before it is tokenized; beyond: INVALID_ARGUMENT
    drain_timeout_s: float = live(10.0)  # time limit for open requests after Ctrl-C; beyond: UNAVAILABLE, retryable

    def __post_init__(self) -> None:
        require_given(self, "host")
        require(0 <= self.port <= 65535, f"port must be in [0, 65535], is {self.port}")
        require_positive(
            self, "max_queued", "default_timeout_s", "max_attempts", "report_stale_s",
            "retry_pause_s", "worker_lost_s", "worker_wait_s", "max_message_bytes", "max_prompt_chars",
            "drain_timeout_s", "slo_ttft_ms",
        )  # fmt: skip
        require_finite_floats(self)
        require(
            self.max_in_flight_per_worker >= 0,
            f"max_in_flight_per_worker must be 0 (automatic) or more, is {self.max_in_flight_per_worker}",
        )
        require(
            self.max_message_bytes >= MIN_MESSAGE_BYTES,
            f"max_message_bytes must be at least {MIN_MESSAGE_BYTES}, is {self.max_message_bytes}",
        )
        require(self.admission in ("queue", "shed"), f"admission must be queue or shed: {self.admission}")
        require(self.local_prefill in ("auto", "never"), f"local_prefill must be auto or never: {self.local_prefill}")
        require(self.peer_prefixes in ("auto", "never"), f"peer_prefixes must be auto or never: {self.peer_prefixes}")
        require_function(self, "policy")

    def max_in_flight(self, on_gpu: bool) -> int:
        """Of one worker. Automatic, it is what a step of the worker holds: see `SchedulerConfig.on_device`."""
        return self.max_in_flight_per_worker or SchedulerConfig().on_device(on_gpu).max_running

    def pause_after(self, num_attempts: int) -> float:
        """Seconds to wait after `num_attempts` attempts in a row without a token.

        At most one second, or `retry_pause_s` if that is longer.
        """
        if num_attempts < 2:
            return 0.0
        return min(self.retry_pause_s * 2.0 ** min(num_attempts - 2, 30), max(1.0, self.retry_pause_s))


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The OpenAI-compatible HTTP server of every router, or of `tandem gateway`."""

    host: str = "127.0.0.1"  # address that the gateway listens on; 0.0.0.0 = every address of this machine
    port: int = 0  # shared by the routers of a machine; 0 = `tandem serve` serves no HTTP
    max_body_bytes: int = 8 * 1024 * 1024  # body of an HTTP request; beyond: status 413
    default_timeout_s: float = 600.0  # time limit of a request that names none; beyond: status 504, or an error event
    min_interval_ms: int = 0  # least time between two events of a choice: tokens of this time come as one event
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the gateway; "*" = all
    tls_cert: str = ""  # PEM file: certificate of this machine; with it, the gateway serves HTTPS
    tls_key: str = ""  # PEM file: private key of the certificate
    guardrail: str = ""  # module:function that makes a Guardrail (gateway/guardrails.py); empty = none

    def __post_init__(self) -> None:
        require_given(self, "host")
        require(0 <= self.port <= 65535, f"port must be in [0, 65535], is {self.port}")
        require_positive(self, "max_body_bytes", "default_timeout_s")
        require(
            0 <= self.min_interval_ms <= MAX_MIN_INTERVAL_MS,
            f"min_interval_ms must be in [0, {MAX_MIN_INTERVAL_MS}], is {self.min_interval_ms}",
        )
        require_finite_floats(self)
        require(bool(self.tls_cert) == bool(self.tls_key), "tls_cert and tls_key must be set together, or neither")
        require_function(self, "guardrail")


@dataclass(frozen=True, slots=True)
class ApiKeyConfig:
    """One API key, `[[api_keys]]`. With at least one key, every call of a client needs a key."""

    name: str = ""  # in logs and metrics
    sha256: str = field(default="", repr=False)  # of the key, 64 hex digits
    tenant: str = ""  # tenant of every request with the key; empty = the name
    operator: bool = False  # may list the fleet, its requests and its metrics
    # Limit: open requests of the key, for each router; 0 = no limit; beyond: `KeyLimitReached` with a retry hint
    max_streams: int = 0
    # Limit: requests of the key, for each router; 0 = no limit; beyond: `KeyLimitReached` with a retry hint
    requests_per_minute: int = 0
    min_priority: int = 0  # a request with a lower number, which would go first, gets this one

    def __post_init__(self) -> None:
        require_given(self, "name")
        for option in ("name", "tenant"):
            value = getattr(self, option)
            require(
                len(value) <= MAX_KEY_NAME_CHARS and value.isprintable(),
                f"{option} must have at most {MAX_KEY_NAME_CHARS} printable characters",
            )
        require(re.fullmatch("[0-9a-f]{64}", self.sha256) is not None, "sha256 must be 64 lower-case hex digits")
        require(self.max_streams >= 0, f"max_streams must be 0 (no limit) or more, is {self.max_streams}")
        require(
            0 <= self.requests_per_minute <= MAX_REQUESTS_PER_MINUTE,
            f"requests_per_minute must be in [0, {MAX_REQUESTS_PER_MINUTE}] (0 = no limit), "
            f"is {self.requests_per_minute}",
        )
        require(
            abs(self.min_priority) <= MAX_PRIORITY,
            f"min_priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], is {self.min_priority}",
        )

    @property
    def effective_tenant(self) -> str:
        return self.tenant or self.name


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """A model behind the gateway, `[[models]]`. Without any, the gateway serves the model of its own fleet."""

    name: str = ""  # as clients name the model
    router: str = ""  # host:port of a router of the fleet that serves it; empty = this fleet
    aliases: tuple[str, ...] = ()  # further names

    def __post_init__(self) -> None:
        require_given(self, "name")


@dataclass(frozen=True, slots=True)
class ModelRuleConfig:
    """A name that chooses one of several models, `[[model_rules]]`. The first that matches decides."""

    name: str = ""  # as clients name the model, e.g. "auto"
    model: str = ""  # ServedModelConfig.name
    max_prompt_chars: int = 0  # matches prompts of at most this length; 0 = of any length
    tag: str = ""  # matches requests with the header `x-tandem-tag: <tag>`; empty = all

    def __post_init__(self) -> None:
        require_given(self, "name", "model")
        require(self.max_prompt_chars >= 0, f"max_prompt_chars must be 0 or more, is {self.max_prompt_chars}")
