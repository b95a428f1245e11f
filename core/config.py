"""Every option of Tandem, as frozen dataclasses. Each part is given only its own.

Names end in their unit. Defaults suit a laptop; `tandem serve --config` reads the same names from TOML, one table per
class (`[scheduler]`, `[transfer]`, ...).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from core.errors import ConfigError

MIN_TOKEN_CHARS = 16
MAX_TRANSFERS = 16_384  # one heartbeat lists all of them, and is one message
MAX_THREADS = 4096  # a typing error shall not exhaust the machine's threads
TOKEN_RULE = f"{MIN_TOKEN_CHARS} or more printable ASCII characters without spaces"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_given(config: object, *names: str) -> None:
    for name in names:
        _require(bool(getattr(config, name).strip()), f"{name} must not be empty")


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0 < value < math.inf, f"{name} must be more than 0 and finite, is {value}")


def _require_finite_floats(config: Any) -> None:
    """Refuses NaN, infinity and negative values in float options: an infinite duration is a wait without a bound."""
    for option in fields(config):
        value = getattr(config, option.name)
        if isinstance(option.default, float):
            _require(0 <= value < math.inf, f"{option.name} must be 0 or more and finite, is {value}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batched_tokens: int = 512  # token budget of one step
    max_running: int = 64  # sequences in one step
    max_waiting: int = 256  # beyond it, RESOURCE_EXHAUSTED

    def __post_init__(self) -> None:
        _require_positive(self, "max_batched_tokens", "max_running", "max_waiting")
        _require(
            self.max_batched_tokens >= self.max_running,
            f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_running ({self.max_running}), "
            "or a step could not hold one token of each sequence",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = "smollm2-135m"  # a catalogue name, a GGUF file, a Hugging Face directory, or random:<config>
    dtype: str = "auto"  # auto | float32 | bfloat16; auto = bfloat16 where the CPU or GPU multiplies it natively
    quantization: str = "none"  # none | int8 | int4: bits of a weight; the same on every worker
    device: str = "auto"  # auto | cpu | cuda
    block_size: int = 16  # tokens per KV block
    prefill_block_size: int = 0  # ... on prefill workers; 0 = the same. One must be a multiple of the other
    kv_memory_mb: int = 512  # size of the KV pool
    num_threads: int = 0  # compute threads; 0 = the machine's cores divided among its workers
    pin_threads: bool = True  # keep them on the worker's share of the cores, if num_threads asks for no more
    max_context: int = 0  # 0 = what the model was trained for
    kernels: str = "auto"  # auto | torch; auto = the C kernels on a CPU where they can be compiled

    def __post_init__(self) -> None:
        _require_given(self, "model")
        _require_positive(self, "block_size", "kv_memory_mb")
        small, large = sorted((self.block_size, self.prefill_block_size or self.block_size))
        _require(
            small > 0 and large % small == 0,
            f"prefill_block_size must be 0 (as block_size) or a multiple or divisor of block_size ({self.block_size}), "
            f"is {self.prefill_block_size}",
        )
        dtypes = ("auto", "float32", "bfloat16")
        _require(self.dtype in dtypes, f"dtype must be auto, float32 or bfloat16: {self.dtype}")
        formats = ("none", "int8", "int4")
        _require(self.quantization in formats, f"quantization must be none, int8 or int4: {self.quantization}")
        _require(self.device in ("auto", "cpu", "cuda"), f"device must be auto, cpu or cuda: {self.device}")
        _require(self.kernels in ("auto", "torch"), f"kernels must be auto or torch: {self.kernels}")
        _require(
            0 <= self.num_threads <= MAX_THREADS,
            f"num_threads must be in [0, {MAX_THREADS}] (0 = share the cores), is {self.num_threads}",
        )
        _require(self.max_context >= 0, f"max_context must be 0 (the model's own) or more, is {self.max_context}")


def heartbeat_s(lease_s: float) -> float:
    """How often a reader gives a sign of life to an owner that keeps its blocks for `lease_s`."""
    return lease_s / 6


@dataclass(frozen=True, slots=True)
class TransferConfig:
    transport: str = "nixl"  # nixl | ucxx (the extra of that name) | memory (in one process, for tests)
    lease_s: float = 20.0  # an offered block is kept this long after the last sign of life of its reader
    connect_timeout_s: float = 5.0  # a peer that gives no sign of life for so long after we connect is unreachable
    min_bytes_per_s: float = 50e6  # a read slower than this (plus read_grace_s) has failed
    read_grace_s: float = 2.0
    max_reads_in_flight: int = 4  # per transfer
    max_blocks_per_read: int = 512  # a read costs time of its own, more than the copy of ten blocks; but it must end
    max_bytes_per_read: int = 134_217_728  # soon enough to cancel, and over shared memory the agent waits for its copy
    max_read_attempts: int = 2  # of the same blocks, when a digest does not match
    max_transfers: int = 1024  # offers and pulls alive at one time, each
    verify_digests: bool = True
    slow_path_share: float = 0.25  # a path below this share of what the hardware promises is slow: log, status, metric
    expected_path_bytes_per_s: float = 0.0  # what it promises; 0 = find out (docs/paths.md says how)
    idle_poll_interval_s: float = 0.02  # between polls of the transport while no transfer is alive
    active_poll_interval_s: float = 0.001  # between polls while transfers are alive and nothing moves

    def __post_init__(self) -> None:
        transports = ("nixl", "ucxx", "memory")
        _require(self.transport in transports, f"transport must be nixl, ucxx or memory: {self.transport}")
        _require_positive(
            self, "lease_s", "connect_timeout_s", "min_bytes_per_s", "max_reads_in_flight", "max_blocks_per_read",
            "max_bytes_per_read", "max_read_attempts", "max_transfers", "slow_path_share",
            "idle_poll_interval_s", "active_poll_interval_s",
        )  # fmt: skip
        _require_finite_floats(self)
        _require(
            self.max_transfers <= MAX_TRANSFERS,
            f"max_transfers must be at most {MAX_TRANSFERS}, is {self.max_transfers}",
        )
        _require(self.slow_path_share < 1, f"slow_path_share must be less than 1, is {self.slow_path_share}")

    def blocks_per_read(self, block_bytes: int) -> int:
        return max(1, min(self.max_blocks_per_read, self.max_bytes_per_read // block_bytes))

    @property
    def heartbeat_s(self) -> float:
        return heartbeat_s(self.lease_s)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a prefill or decode worker's shell needs beside its engine, scheduler and transfers."""

    host: str = "127.0.0.1"
    report_interval_s: float = 0.05  # how often changes of load and blocks go to the routers
    idle_report_interval_s: float = 1.0  # a sign of life when nothing changed
    drain_timeout_s: float = 30.0
    max_pulls_waiting: int = 256  # hand-offs that wait for blocks on a decode worker
    default_timeout_s: float = 600.0  # for a call that carries no deadline
    step_timeout_s: float = 300.0  # a step that runs longer never ends: the worker has failed

    def __post_init__(self) -> None:
        _require_positive(
            self, "report_interval_s", "idle_report_interval_s", "drain_timeout_s", "max_pulls_waiting",
            "default_timeout_s", "step_timeout_s",
        )  # fmt: skip
        _require_finite_floats(self)
        _require_given(self, "host")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: int = 50051  # 0 = any free port
    max_queued: int = 1024  # requests waiting for a worker; beyond it, RESOURCE_EXHAUSTED
    max_in_flight_per_worker: int = 64  # dispatched to one decode worker and not finished
    default_timeout_s: float = 600.0  # for a call that carries no deadline
    max_attempts: int = 3  # dispatches of one request in a row that deliver no token
    retry_pause_s: float = 0.05  # before the third of them, doubled before each later one; the second starts at once
    local_prefill_tokens: int = 48  # a prompt with at most this many uncached tokens is prefilled on the decode worker
    report_stale_s: float = 3.0  # a worker silent for longer counts as saturated
    worker_lost_s: float = 10.0  # ... and for longer than this as lost
    worker_wait_s: float = 20.0  # a queued request fails once no decode worker has served for this long
    max_message_bytes: int = 4 * 1024 * 1024
    max_prompt_chars: int = 1_000_000
    drain_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        _require_given(self, "host")
        _require(0 <= self.port <= 65535, f"port must be in [0, 65535], is {self.port}")
        _require_positive(
            self, "max_queued", "max_in_flight_per_worker", "default_timeout_s", "max_attempts", "report_stale_s",
            "retry_pause_s", "worker_lost_s", "worker_wait_s", "max_message_bytes", "max_prompt_chars",
            "drain_timeout_s",
        )  # fmt: skip
        _require_finite_floats(self)
        _require(
            self.local_prefill_tokens >= 0,
            f"local_prefill_tokens must be 0 (never) or more, is {self.local_prefill_tokens}",
        )

    def pause_after(self, num_attempts: int) -> float:
        """Seconds from the last of `num_attempts` in a row without a token to the next attempt.

        At most one second, or `retry_pause_s` where that is longer.
        """
        if num_attempts < 2:
            return 0.0
        return min(self.retry_pause_s * 2.0 ** min(num_attempts - 2, 30), max(1.0, self.retry_pause_s))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    address: str = ""  # of a Ray cluster to join; empty = start one on this machine
    num_prefill: int = 1
    num_decode: int = 1
    prefill_resource: str = "prefill"  # the Ray resource each prefill worker takes 1 of
    decode_resource: str = "decode"
    max_workers: int = 256  # of each role
    start_timeout_s: float = 120.0
    restart_backoff_s: float = 1.0  # doubled after each failed start, up to 30 s

    def __post_init__(self) -> None:
        _require_positive(self, "start_timeout_s", "restart_backoff_s", "max_workers")
        _require_finite_floats(self)
        _require_given(self, "prefill_resource", "decode_resource")
        for name in ("num_prefill", "num_decode"):
            value = getattr(self, name)
            _require(0 <= value <= self.max_workers, f"{name} must be in [0, {self.max_workers}], is {value}")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    otlp_endpoint: str = ""  # e.g. http://localhost:4317; empty = no export
    trace_file: str = ""  # append every span as one JSON line
    metrics_port: int = 0  # of the router's Prometheus page; 0 = none
    service_namespace: str = "tandem"

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(r"((https?://)?[^/\s]+:\d+/?)?", self.otlp_endpoint) is not None,
            f"otlp_endpoint must be http://host:port or https://host:port, is {self.otlp_endpoint!r}",
        )
        _require(0 <= self.metrics_port <= 65535, f"metrics_port must be in [0, 65535], is {self.metrics_port}")


def is_token(text: str) -> bool:
    return len(text) >= MIN_TOKEN_CHARS and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may talk to whom (docs/security.md). Paths are read on each machine; the token travels with the config."""

    cluster_token: str = field(default="", repr=False)  # what routers show to workers, and operators to routers
    cluster_token_file: str = ""  # ... or the file it is in; with neither, `tandem serve` makes one
    tls_cert: str = ""  # PEM file: this machine's certificate; with it, every gRPC connection is TLS
    tls_key: str = ""  # PEM file: its private key
    tls_ca: str = ""  # PEM file: who signs the certificates of this cluster
    tls_server_name: str = ""  # a name all certificates carry; empty = each carries the address it serves on
    require_client_certs: bool = False  # of clients of the public API; between router and workers they are required

    def __post_init__(self) -> None:
        token, given = self.cluster_token, [bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)]
        _require(not (token and self.cluster_token_file), "set cluster_token or cluster_token_file, not both")
        _require(not token or is_token(token), f"cluster_token is not {TOKEN_RULE}")
        _require(all(given) or not any(given), "tls_cert, tls_key and tls_ca must be set together, or none of them")
        _require(any(given) or not self.tls_server_name, "tls_server_name needs tls_cert, tls_key and tls_ca")
        _require(any(given) or not self.require_client_certs, "require_client_certs needs tls_cert, tls_key and tls_ca")


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """The whole file; only cli/ sees it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        port = self.telemetry.metrics_port
        _require(not port or port != self.router.port, f"[telemetry] metrics_port is {port}, the router's own port")


def from_mapping(tables: Mapping[str, object]) -> TandemConfig:
    """A `TandemConfig` from TOML tables. Raises `ConfigError` naming an unknown table or option, or a wrong type."""
    known_tables = {f.name: f for f in fields(TandemConfig)}
    parts: dict[str, object] = {}
    for table, options in tables.items():
        if table not in known_tables:
            raise ConfigError(f"[{table}] is not a table of the config; known: {', '.join(known_tables)}")
        if not isinstance(options, dict):
            raise ConfigError(f"{table} must be a table ([{table}] and its options below), is {options!r}")
        part = type(getattr(TandemConfig(), table))
        defaults = part()
        known = {f.name: f for f in fields(part)}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"[{table}] {name} is not an option; known: {', '.join(sorted(known))}")
            wanted = type(getattr(defaults, name))
            if not (isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)) and not (
                wanted is float and type(value) is int
            ):
                found = repr(value) if known[name].repr else "something else"  # a secret is not repeated
                raise ConfigError(f"[{table}] {name} must be {wanted.__name__}, is {found}")
        try:
            parts[table] = part(**options)
        except ConfigError as error:
            raise ConfigError(f"[{table}] {error}") from error
    return TandemConfig(**parts)  # type: ignore[arg-type]
