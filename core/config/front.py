"""Options of routers and of the HTTP API: limits, keys, models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.config.options import HOST, HOST_FORM, check_options, live, option, require
from core.config.worker import SchedulerConfig

MAX_MIN_INTERVAL_MS = 60_000
MAX_KEY_NAME_CHARS = 128
MAX_PRIORITY = 100  # of a request, and -MAX_PRIORITY the least; lower goes first
MAX_REQUESTS_PER_MINUTE = 100_000  # a router remembers the time of each
FUNCTION = r"[\w.]+:\w+"
MIN_MESSAGE_BYTES = 512 * 1024  # the requests of every client that is in use fit


@dataclass(frozen=True, slots=True)
class RouterConfig:
    # Address that the router listens on; 0.0.0.0 = every address of this machine
    host: str = option("127.0.0.1", pattern=HOST, form=HOST_FORM)
    port: int = option(50051, most=65535)  # 0 = any free port
    # Limit: requests that wait for a worker or in validation (half for a tenant); beyond: RESOURCE_EXHAUSTED, retryable
    max_queued: int = live(1024, least=1)
    # Limit: open calls on a worker, of all routers; 0 = 64 on a CPU, 256 on a GPU; beyond: requests wait here
    max_in_flight_per_worker: int = live(0)
    # Limit: time limit of a call without a deadline; beyond: DEADLINE_EXCEEDED, with the stage
    default_timeout_s: float = live(600.0, positive=True)
    # Limit: dispatches of one request in a row that deliver no token; beyond: the client gets the last error
    max_attempts: int = live(3, least=1)
    # Pause before the third of them, doubled for each later one; the second has none
    retry_pause_s: float = live(0.05, positive=True)
    # Wanted time to the first token; admission = "shed" refuses what misses it
    slo_ttft_ms: float = live(1000.0, positive=True)
    # shed = refuse a request whose predicted first token is too late
    admission: str = live("queue", choices=("queue", "shed"))
    # May a decode worker compute prompts while a prefill worker serves?
    local_prefill: str = option("auto", choices=("auto", "never"))
    # May workers read prefixes that peers have cached?
    peer_prefixes: str = live("auto", choices=("auto", "never"))
    # module:function that makes a Policy (docs/routing.md); empty = the built-in one
    policy: str = option("", pattern=FUNCTION, form="module:function")
    # Limit: time without a report of a worker; beyond: it counts as saturated
    report_stale_s: float = live(3.0, positive=True)
    # Limit: time without a report of a worker; beyond: it is lost, and its requests are retried
    worker_lost_s: float = live(10.0, positive=True)
    # Limit: time of queued requests without a decode worker, or 1.5 planned starts; beyond: UNAVAILABLE, retryable
    worker_wait_s: float = live(20.0, positive=True)
    # Limit: largest gRPC message, received or sent; beyond: RESOURCE_EXHAUSTED
    max_message_bytes: int = option(4 * 1024 * 1024, least=MIN_MESSAGE_BYTES)
    # Limit: characters of a prompt, before it is tokenized; beyond: INVALID_ARGUMENT
    max_prompt_chars: int = live(1_000_000, least=1)
    # Limit: time limit for open requests after Ctrl-C; beyond: UNAVAILABLE, retryable
    drain_timeout_s: float = live(10.0, positive=True)

    def __post_init__(self) -> None:
        check_options(self)

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

    # Address that the gateway listens on; 0.0.0.0 = every address of this machine
    host: str = option("127.0.0.1", pattern=HOST, form=HOST_FORM)
    port: int = option(0, most=65535)  # shared by the routers of a machine; 0 = `tandem serve` serves no HTTP
    max_body_bytes: int = option(8 * 1024 * 1024, least=1)  # body of an HTTP request; beyond: status 413
    # Limit: time limit of a request that names none; beyond: status 504, or an error event
    default_timeout_s: float = option(600.0, positive=True)
    # Least time between two events of a choice: tokens of this time come as one event
    min_interval_ms: int = option(0, most=MAX_MIN_INTERVAL_MS)
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the gateway; "*" = all
    tls_cert: str = ""  # PEM file: certificate of this machine; with it, the gateway serves HTTPS
    tls_key: str = ""  # PEM file: private key of the certificate
    # module:function that makes a Guardrail (gateway/guardrails.py); empty = none
    guardrail: str = option("", pattern=FUNCTION, form="module:function")

    def __post_init__(self) -> None:
        check_options(self)
        require(bool(self.tls_cert) == bool(self.tls_key), "tls_cert and tls_key must be set together, or neither")


@dataclass(frozen=True, slots=True)
class ApiKeyConfig:
    """One API key, `[[api_keys]]`. With at least one key, every call of a client needs a key."""

    name: str = option("", given=True)  # in logs and metrics
    sha256: str = option("", secret=True)  # of the key, 64 hex digits
    tenant: str = ""  # tenant of every request with the key; empty = the name
    operator: bool = False  # may list the fleet, its requests and its metrics
    # Limit: open requests of the key, for each router; 0 = no limit; beyond: `KeyLimitReached` with a retry hint
    max_streams: int = 0
    # Limit: requests of the key, for each router; 0 = no limit; beyond: `KeyLimitReached` with a retry hint
    requests_per_minute: int = option(0, most=MAX_REQUESTS_PER_MINUTE)
    # A request with a lower number, which would go first, gets this one
    min_priority: int = option(0, least=-MAX_PRIORITY, most=MAX_PRIORITY)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("name", "tenant"):
            value = getattr(self, name)
            require(
                len(value) <= MAX_KEY_NAME_CHARS and value.isprintable(),
                f"{name} must have at most {MAX_KEY_NAME_CHARS} printable characters",
            )
        require(re.fullmatch("[0-9a-f]{64}", self.sha256) is not None, "sha256 must be 64 lower-case hex digits")

    @property
    def effective_tenant(self) -> str:
        return self.tenant or self.name


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """A model behind the gateway, `[[models]]`. Without any, the gateway serves the model of its own fleet."""

    name: str = option("", given=True)  # as clients name the model
    # host:port of a router of the fleet that serves it; empty = this fleet
    router: str = option("", pattern=r"\S+:[1-9]\d{0,4}", form="host:port")
    aliases: tuple[str, ...] = ()  # further names

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class ModelRuleConfig:
    """A name that chooses one of several models, `[[model_rules]]`. The first that matches decides."""

    name: str = option("", given=True)  # as clients name the model, e.g. "auto"
    model: str = option("", given=True)  # ServedModelConfig.name
    max_prompt_chars: int = 0  # matches prompts of at most this length; 0 = of any length
    tag: str = ""  # matches requests with the header `x-tandem-tag: <tag>`; empty = all

    def __post_init__(self) -> None:
        check_options(self)
