"""Every option of Tandem, as frozen dataclasses. Each part of the system gets only its own class.

Names end in their unit. Defaults suit a laptop. `tandem serve --config` reads the same names from TOML, one table for
each class (`[scheduler]`, `[transfer]`, ...); deploy/tandem.toml lists them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from core.errors import ConfigError

MIN_TOKEN_CHARS = 16
MAX_TRANSFERS = 16_384  # one heartbeat, a single message, lists every transfer
MAX_MIN_INTERVAL_MS = 60_000
MAX_THREADS = 4096  # a typing error must not exhaust the threads of the machine
MAX_KEY_NAME_CHARS = 128
MIN_GPU_SHARE = 0.01  # of a GPU; below it not even a context fits
HOST_KV_MEMORY_MB = 512  # an automatic KV pool of a CPU worker: a laptop has room for several
MAX_REQUESTS_PER_MINUTE = 100_000  # a router remembers the time of each
MIN_MESSAGE_BYTES = 512 * 1024  # the requests of every client that is in use fit
TOKEN_RULE = f"{MIN_TOKEN_CHARS} or more printable ASCII characters without spaces"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_given(config: object, *names: str) -> None:
    for name in names:
        _require(bool(getattr(config, name).strip()), f"{name} must not be empty")


def _require_function(config: object, name: str) -> None:
    value = getattr(config, name)
    _require(
        not value or re.fullmatch(r"[\w.]+:\w+", value) is not None, f"{name} must be module:function, is {value!r}"
    )


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0 < value < math.inf, f"{name} must be more than 0 and finite, is {value}")


def _require_finite_floats(config: Any) -> None:
    """Refuses NaN, infinity and negative values of float options: an infinite duration is an unbounded wait."""
    for option in fields(config):
        value = getattr(config, option.name)
        if isinstance(option.default, float):
            _require(0 <= value < math.inf, f"{option.name} must be 0 or more and finite, is {value}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batched_tokens: int = 512  # token budget of one step
    max_running: int = 64  # sequences in one step
    max_waiting: int = 256  # sequences waiting for a step; more are refused with RESOURCE_EXHAUSTED
    slo_itl_ms: float = 100.0  # wanted time between tokens: a step with sequences in decode takes no longer

    def __post_init__(self) -> None:
        _require_positive(self, "max_batched_tokens", "max_running", "max_waiting", "slo_itl_ms")
        _require_finite_floats(self)
        _require(
            self.max_batched_tokens >= self.max_running,
            f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_running ({self.max_running}), "
            "so that one step can hold a token of every sequence",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = "smollm2-135m"  # a catalogue name, a GGUF file, a Hugging Face directory, or random:<config>
    dtype: str = "auto"  # auto | float32 | bfloat16; auto = bfloat16 if the CPU or GPU multiplies it natively
    quantization: str = "none"  # of the weights: none | int8 | int4 | fp8; the same on every worker
    kv_dtype: str = (
        "auto"  # of the KV pool: auto | fp8; auto = dtype; fp8 has scales and needs the Triton kernels of a GPU
    )
    device: str = "auto"  # auto | cpu | cuda | cuda:N; cuda = cuda:0
    block_size: int = 16  # tokens per KV block
    prefill_block_size: int = 0  # ... on prefill workers; 0 = the same. One must be a multiple of the other
    kv_memory_mb: int = 0  # size of the KV pool; 0 = 512 on a CPU, all that is left on a GPU
    gpu_memory_margin_mb: int = 1024  # of each worker on a GPU: stays free beside weights, graphs, steps and KV pool
    num_threads: int = 0  # compute threads; 0 = the cores of the machine divided among its workers
    pin_threads: bool = True  # pin compute threads to the worker's share of the cores, if they fit
    max_context: int = 0  # tokens of a prompt and its output; 0 = the limit of the model
    kernels: str = "auto"  # auto | torch; auto = C kernels on a CPU for which they compile, Triton kernels on a GPU
    peak_tflops: float = (
        0.0  # of the cores or the GPU of one worker, in 10^12 FLOP per second, for metrics; 0 = unknown
    )
    peak_gb_per_s: float = 0.0  # memory bandwidth of one worker, in 10^9 bytes per second, for metrics; 0 = unknown

    def __post_init__(self) -> None:
        _require_given(self, "model")
        _require_positive(self, "block_size")
        _require(self.kv_memory_mb >= 0, f"kv_memory_mb must be 0 (automatic) or more, is {self.kv_memory_mb}")
        _require(
            self.gpu_memory_margin_mb >= 0, f"gpu_memory_margin_mb must be 0 or more, is {self.gpu_memory_margin_mb}"
        )
        small, large = sorted((self.block_size, self.prefill_block_size or self.block_size))
        _require(
            small > 0 and large % small == 0,
            f"prefill_block_size must be 0 (as block_size) or a multiple or divisor of block_size ({self.block_size}), "
            f"is {self.prefill_block_size}",
        )
        dtypes = ("auto", "float32", "bfloat16")
        _require(self.dtype in dtypes, f"dtype must be auto, float32 or bfloat16: {self.dtype}")
        formats = ("none", "int8", "int4", "fp8")
        _require(self.quantization in formats, f"quantization must be none, int8, int4 or fp8: {self.quantization}")
        _require(self.kv_dtype in ("auto", "fp8"), f"kv_dtype must be auto or fp8: {self.kv_dtype}")
        _require(
            re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is not None,
            f"device must be auto, cpu, cuda or cuda:N: {self.device}",
        )
        _require(self.kernels in ("auto", "torch"), f"kernels must be auto or torch: {self.kernels}")
        _require(
            0 <= self.num_threads <= MAX_THREADS,
            f"num_threads must be in [0, {MAX_THREADS}] (0 = share the cores), is {self.num_threads}",
        )
        _require_finite_floats(self)
        _require(self.max_context >= 0, f"max_context must be 0 (the model's own) or more, is {self.max_context}")

    @property
    def host_kv_memory_mb(self) -> int:
        """The size of a KV pool in the memory of the host."""
        return self.kv_memory_mb or HOST_KV_MEMORY_MB


def heartbeat_s(lease_s: float) -> float:
    """The interval between heartbeats of a reader to an owner with this lease."""
    return lease_s / 6


@dataclass(frozen=True, slots=True)
class TransferConfig:
    transport: str = "nixl"  # nixl | ucxx (install the extra ucxx) | memory (one process only, for tests)
    lease_s: float = 20.0  # an offered block is kept for this long after the last heartbeat of its reader
    connect_timeout_s: float = 5.0  # a peer is unreachable if it sends nothing for this long after connecting
    min_bytes_per_s: float = 50e6  # a read slower than this fails
    read_grace_s: float = 2.0  # added to the time limit of each read
    max_reads_in_flight: int = 4  # per transfer
    max_blocks_per_read: int = 512  # more blocks cost less per block; fewer let a cancelled read end sooner
    max_bytes_per_read: int = 134_217_728  # the same in bytes; a copy over shared memory blocks the transfer agent
    max_read_attempts: int = 2  # of the same blocks, when a digest does not match
    max_transfers: int = 1024  # open offers, and likewise open pulls
    verify_digests: bool = True  # check the bytes of every block after its read
    slow_path_share: float = 0.25  # a path is slow below this share of its expected bandwidth
    expected_path_bytes_per_s: float = 0.0  # expected bandwidth of each path; 0 = derived from the hardware
    device_path: str = "auto"  # auto | mapped | direct | staged; how bytes move between pools on GPUs
    staging_mb: int = 128  # pinned host memory of a worker on a GPU for staged bytes
    idle_poll_interval_s: float = 0.02  # interval between polls of the transport without an open transfer
    active_poll_interval_s: float = 0.001  # ... with open transfers, while no bytes move

    def __post_init__(self) -> None:
        transports = ("nixl", "ucxx", "memory")
        _require(self.transport in transports, f"transport must be nixl, ucxx or memory: {self.transport}")
        device_paths = ("auto", "mapped", "direct", "staged")
        _require(
            self.device_path in device_paths, f"device_path must be auto, mapped, direct or staged: {self.device_path}"
        )
        _require_positive(
            self, "lease_s", "connect_timeout_s", "min_bytes_per_s", "max_reads_in_flight", "max_blocks_per_read",
            "max_bytes_per_read", "max_read_attempts", "max_transfers", "slow_path_share", "staging_mb",
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
    """The process of a prefill or decode worker, apart from its engine, scheduler and transfers."""

    host: str = "127.0.0.1"  # address of a worker; 0.0.0.0 = every address; in a joined cluster, its machine's
    report_interval_s: float = 0.05  # interval between reports of changed load and blocks to the routers
    idle_report_interval_s: float = 1.0  # interval between reports without a change
    drain_timeout_s: float = 30.0  # time limit for the open requests of a removed worker
    max_pulls_waiting: int = 256  # hand-offs that wait for blocks on a decode worker
    default_timeout_s: float = 600.0  # time limit of a call without a deadline
    step_timeout_s: float = 300.0  # a step that takes longer has failed: the worker's process is killed and replaced

    def __post_init__(self) -> None:
        _require_positive(
            self, "report_interval_s", "idle_report_interval_s", "drain_timeout_s", "max_pulls_waiting",
            "default_timeout_s", "step_timeout_s",
        )  # fmt: skip
        _require_finite_floats(self)
        _require_given(self, "host")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"  # address that the router listens on; 0.0.0.0 = every address of this machine
    port: int = 50051  # 0 = any free port
    max_queued: int = 1024  # requests waiting for a worker; more are refused with RESOURCE_EXHAUSTED
    max_in_flight_per_worker: int = 64  # unfinished requests on one worker, of all routers together
    default_timeout_s: float = 600.0  # time limit of a call without a deadline
    max_attempts: int = 3  # dispatches of one request in a row that deliver no token
    retry_pause_s: float = 0.05  # pause before the third of them, doubled for each later one; the second has none
    slo_ttft_ms: float = 1000.0  # wanted time to the first token; admission = "shed" refuses requests that miss it
    admission: str = "queue"  # queue | shed; shed = refuse a request at once if its predicted first token is too late
    local_prefill: str = "auto"  # auto | never; may a decode worker compute prompts while a prefill worker serves?
    policy: str = ""  # module:function that makes a Policy (docs/routing.md); empty = the built-in one
    report_stale_s: float = 3.0  # after this long without a report, a worker counts as saturated
    worker_lost_s: float = 10.0  # ... and after this long as lost
    worker_wait_s: float = 20.0  # a queued request fails once no decode worker has served for this long
    max_message_bytes: int = 4 * 1024 * 1024  # largest gRPC message, received or sent
    max_prompt_chars: int = 1_000_000  # a longer prompt is refused before it is tokenized
    drain_timeout_s: float = 10.0  # time limit for open requests after Ctrl-C

    def __post_init__(self) -> None:
        _require_given(self, "host")
        _require(0 <= self.port <= 65535, f"port must be in [0, 65535], is {self.port}")
        _require_positive(
            self, "max_queued", "max_in_flight_per_worker", "default_timeout_s", "max_attempts", "report_stale_s",
            "retry_pause_s", "worker_lost_s", "worker_wait_s", "max_message_bytes", "max_prompt_chars",
            "drain_timeout_s", "slo_ttft_ms",
        )  # fmt: skip
        _require_finite_floats(self)
        _require(
            self.max_message_bytes >= MIN_MESSAGE_BYTES,
            f"max_message_bytes must be at least {MIN_MESSAGE_BYTES}, is {self.max_message_bytes}",
        )
        _require(self.admission in ("queue", "shed"), f"admission must be queue or shed: {self.admission}")
        _require(self.local_prefill in ("auto", "never"), f"local_prefill must be auto or never: {self.local_prefill}")
        _require_function(self, "policy")

    def pause_after(self, num_attempts: int) -> float:
        """Seconds to wait after `num_attempts` attempts in a row without a token.

        At most one second, or `retry_pause_s` if that is longer.
        """
        if num_attempts < 2:
            return 0.0
        return min(self.retry_pause_s * 2.0 ** min(num_attempts - 2, 30), max(1.0, self.retry_pause_s))


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    address: str = ""  # host:port of a Ray cluster to join; empty = start Ray on this machine
    num_prefill: int = 1  # prefill workers to start
    num_decode: int = 1  # decode workers to start
    num_routers: int = 1  # routers to start; those of one machine share its port
    prefill_resource: str = "prefill"  # each prefill worker takes 1 of this Ray resource
    decode_resource: str = "decode"  # each decode worker takes 1 of this Ray resource
    router_resource: str = ""  # each router takes 1 of this; empty = routers run on the machine of `tandem serve`
    prefill_gpus: float = 1.0  # GPUs of each prefill worker: 1, a fraction to share one GPU, 0 = run on the CPU
    decode_gpus: float = 1.0  # GPUs of each decode worker, likewise; both apply if engine.device is not cpu
    prefill_accelerator: str = ""  # Ray's name of the GPUs of prefill workers, such as H100; empty = any
    decode_accelerator: str = ""  # ... of decode workers, such as H200
    max_workers: int = 256  # of each role, and of routers
    start_timeout_s: float = 120.0  # a start that takes longer has failed
    restart_backoff_s: float = 1.0  # pause after a failed start, doubled for each further one, up to 30 s

    def __post_init__(self) -> None:
        _require_positive(self, "start_timeout_s", "restart_backoff_s", "max_workers")
        _require_finite_floats(self)
        _require_given(self, "prefill_resource", "decode_resource")
        for name in ("num_prefill", "num_decode"):
            value = getattr(self, name)
            _require(0 <= value <= self.max_workers, f"{name} must be in [0, {self.max_workers}], is {value}")
        _require(
            1 <= self.num_routers <= self.max_workers,
            f"num_routers must be in [1, {self.max_workers}] (max_workers), is {self.num_routers}",
        )
        self._check_gpus()

    def _check_gpus(self) -> None:
        shares = {name: getattr(self, f"{name}_gpus") for name in ("prefill", "decode")}
        for name, share in shares.items():
            _require(
                share == 0 or MIN_GPU_SHARE <= share <= 1,
                f"{name}_gpus must be 0 (run on the CPU) or in [{MIN_GPU_SHARE}, 1] (share of one GPU), is {share:g}",
            )
            accelerator = getattr(self, f"{name}_accelerator")
            _require(share > 0 or not accelerator, f"{name}_accelerator = {accelerator!r} needs {name}_gpus above 0")
        total = sum(shares.values())
        _require(
            total <= 1 or 0 in shares.values() or 1 in shares.values(),
            f"prefill_gpus + decode_gpus is {total:g}: two fractions share a GPU, so their sum must be at most 1",
        )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    otlp_endpoint: str = ""  # collector of spans, e.g. http://localhost:4317; empty = no export
    trace_file: str = ""  # file that spans are appended to, as JSON lines; empty = none
    metrics_port: int = 0  # port of the Prometheus page of router-0, router-1 has the next one; 0 = no page
    service_namespace: str = "tandem"  # attribute of every span that tells deployments apart
    trace_sample_ratio: float = 1.0  # share of the requests whose trace is exported, if the caller does not decide
    trace_slow_ms: float = 10_000.0  # a request that takes longer, or fails, is exported even if it is not sampled

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(r"((https?://)?[^/\s]+:\d+/?)?", self.otlp_endpoint) is not None,
            f"otlp_endpoint must be http://host:port or https://host:port, is {self.otlp_endpoint!r}",
        )
        _require(0 <= self.metrics_port <= 65535, f"metrics_port must be in [0, 65535], is {self.metrics_port}")
        _require_finite_floats(self)
        ratio = self.trace_sample_ratio
        _require(0.0 <= ratio <= 1.0, f"trace_sample_ratio must be in [0, 1], is {ratio:g}")
        _require(self.trace_slow_ms >= 0.0, f"trace_slow_ms must be 0 or more, is {self.trace_slow_ms:g}")


def is_token(text: str) -> bool:
    return len(text) >= MIN_TOKEN_CHARS and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Credentials (docs/security.md). Each machine reads the files itself; the token travels with the config."""

    cluster_token: str = field(default="", repr=False)  # secret that workers require of routers, routers of operators
    cluster_token_file: str = ""  # file with this token; without either option, `tandem serve` makes a token
    tls_cert: str = ""  # PEM file: certificate of this machine; with it, every gRPC connection uses TLS
    tls_key: str = ""  # PEM file: private key of the certificate
    tls_ca: str = ""  # PEM file: certificate authority of this cluster
    tls_server_name: str = ""  # name in every certificate; empty = each certificate names the machine's address
    require_client_certs: bool = False  # require certificates of API clients; routers and workers always need them

    def __post_init__(self) -> None:
        token, given = self.cluster_token, [bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)]
        _require(not (token and self.cluster_token_file), "set cluster_token or cluster_token_file, not both")
        _require(not token or is_token(token), f"cluster_token is not {TOKEN_RULE}")
        _require(all(given) or not any(given), "tls_cert, tls_key and tls_ca must be set together, or none of them")
        _require(any(given) or not self.tls_server_name, "tls_server_name needs tls_cert, tls_key and tls_ca")
        _require(any(given) or not self.require_client_certs, "require_client_certs needs tls_cert, tls_key and tls_ca")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The OpenAI-compatible HTTP server of every router, or of `tandem gateway`."""

    host: str = "127.0.0.1"  # address that the gateway listens on; 0.0.0.0 = every address of this machine
    port: int = 0  # shared by the routers of a machine; 0 = `tandem serve` serves no HTTP
    max_body_bytes: int = 8 * 1024 * 1024  # a larger body is refused with status 413
    default_timeout_s: float = 600.0  # time limit of a request that names none
    min_interval_ms: int = 0  # least time between two events of a choice: tokens of this time come as one event
    cors_origins: tuple[str, ...] = ()  # origins whose pages may call the gateway; "*" = all
    tls_cert: str = ""  # PEM file: certificate of this machine; with it, the gateway serves HTTPS
    tls_key: str = ""  # PEM file: private key of the certificate
    guardrail: str = ""  # module:function that makes a Guardrail (gateway/guardrails.py); empty = none

    def __post_init__(self) -> None:
        _require_given(self, "host")
        _require(0 <= self.port <= 65535, f"port must be in [0, 65535], is {self.port}")
        _require_positive(self, "max_body_bytes", "default_timeout_s")
        _require(
            0 <= self.min_interval_ms <= MAX_MIN_INTERVAL_MS,
            f"min_interval_ms must be in [0, {MAX_MIN_INTERVAL_MS}], is {self.min_interval_ms}",
        )
        _require_finite_floats(self)
        _require(bool(self.tls_cert) == bool(self.tls_key), "tls_cert and tls_key must be set together, or neither")
        _require_function(self, "guardrail")


@dataclass(frozen=True, slots=True)
class ApiKeyConfig:
    """One API key, `[[api_keys]]`. With at least one key, every call of a client needs a key."""

    name: str = ""  # in logs and metrics
    sha256: str = field(default="", repr=False)  # of the key, 64 hex digits
    tenant: str = ""  # tenant of every request with the key; empty = the name
    operator: bool = False  # may list the fleet, its requests and its metrics
    max_streams: int = 0  # open requests at the same time, for each router; 0 = no limit
    requests_per_minute: int = 0  # for each router; 0 = no limit

    def __post_init__(self) -> None:
        _require_given(self, "name")
        for option in ("name", "tenant"):
            value = getattr(self, option)
            _require(
                len(value) <= MAX_KEY_NAME_CHARS and value.isprintable(),
                f"{option} must have at most {MAX_KEY_NAME_CHARS} printable characters",
            )
        _require(re.fullmatch("[0-9a-f]{64}", self.sha256) is not None, "sha256 must be 64 lower-case hex digits")
        _require(self.max_streams >= 0, f"max_streams must be 0 (no limit) or more, is {self.max_streams}")
        _require(
            0 <= self.requests_per_minute <= MAX_REQUESTS_PER_MINUTE,
            f"requests_per_minute must be in [0, {MAX_REQUESTS_PER_MINUTE}] (0 = no limit), "
            f"is {self.requests_per_minute}",
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
        _require_given(self, "name")


@dataclass(frozen=True, slots=True)
class ModelRuleConfig:
    """A name that chooses one of several models, `[[model_rules]]`. The first that matches decides."""

    name: str = ""  # as clients name the model, e.g. "auto"
    model: str = ""  # ServedModelConfig.name
    max_prompt_chars: int = 0  # matches prompts of at most this length; 0 = of any length
    tag: str = ""  # matches requests with the header `x-tandem-tag: <tag>`; empty = all

    def __post_init__(self) -> None:
        _require_given(self, "name", "model")
        _require(self.max_prompt_chars >= 0, f"max_prompt_chars must be 0 or more, is {self.max_prompt_chars}")


@dataclass(frozen=True, slots=True)
class TandemConfig:
    """All options. Only cli/ reads the whole."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    api_keys: tuple[ApiKeyConfig, ...] = ()
    models: tuple[ServedModelConfig, ...] = ()
    model_rules: tuple[ModelRuleConfig, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        first, port, num_routers = self.telemetry.metrics_port, self.router.port, self.cluster.num_routers
        _require(not first or port != first, f"[telemetry] metrics_port is {first}, the router's own port")
        _require(
            not first or not first < port < first + num_routers,
            f"[telemetry] metrics_port is {first}: router-{port - first} would have port {port}, the routers' own port",
        )
        _require(
            not first or first + num_routers <= 65536,
            f"[telemetry] metrics_port must be at most {65536 - num_routers} for {num_routers} routers, is {first}",
        )
        _require(
            not self.cluster.router_resource or self.router.port != 0,
            "[cluster] router_resource needs a fixed [router] port, the same on every machine; port is 0",
        )
        for name in ("prefill_accelerator", "decode_accelerator"):
            accelerator = getattr(self.cluster, name)
            _require(
                self.engine.device != "cpu" or not accelerator,
                f"[cluster] {name} = {accelerator!r} needs [engine] device = cuda or auto, is cpu",
            )

    def _check_names(self) -> None:
        """Names of keys and models are unique, and each rule chooses a model."""
        keys = [key.name for key in self.api_keys] + [key.sha256 for key in self.api_keys]
        _require(len(set(keys)) == len(keys), "[[api_keys]] name and sha256 must be unique")
        models = [model.name for model in self.models]
        names = models + [alias for model in self.models for alias in model.aliases]
        _require(len(set(names)) == len(names), "[[models]] names and aliases must be unique")
        for rule in self.model_rules:
            _require(rule.model in models, f"[[model_rules]] model {rule.model!r} is not the name of one of [[models]]")
            _require(rule.name not in names, f"[[model_rules]] name {rule.name!r} is the name of one of [[models]]")


# Arrays of tables -> the class of their entries.
ARRAYS: dict[str, type] = {"api_keys": ApiKeyConfig, "models": ServedModelConfig, "model_rules": ModelRuleConfig}


def from_mapping(tables: Mapping[str, object]) -> TandemConfig:
    """A `TandemConfig` from TOML tables. Raises `ConfigError` naming an unknown table or option, or a wrong type."""
    known_tables = {f.name: f for f in fields(TandemConfig)}
    parts: dict[str, object] = {}
    for table, options in tables.items():
        if table not in known_tables:
            raise ConfigError(f"[{table}] is not a table of the config; known: {', '.join(known_tables)}")
        if table in ARRAYS:
            if not (isinstance(options, list) and all(isinstance(entry, dict) for entry in options)):
                raise ConfigError(f"{table} must be an array of tables ([[{table}]] and its options below)")
            parts[table] = tuple(_part(f"[[{table}]]", ARRAYS[table], entry) for entry in options)
            continue
        if not isinstance(options, dict):
            raise ConfigError(f"{table} must be a table ([{table}] and its options below), is {options!r}")
        parts[table] = _part(f"[{table}]", type(getattr(TandemConfig(), table)), options)
    return TandemConfig(**parts)  # type: ignore[arg-type]


def _part(where: str, part: Any, options: Mapping[str, object]) -> Any:
    """An instance of the dataclass `part`, whose fields all have defaults."""
    known = {f.name: f for f in fields(part)}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{where} {name} is not an option; known: {', '.join(sorted(known))}")
        wanted = type(known[name].default)
        if wanted is tuple:
            if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
                raise ConfigError(f"{where} {name} must be an array of strings, is {value!r}")
            continue
        if not (isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)) and not (
            wanted is float and type(value) is int
        ):
            found = repr(value) if known[name].repr else "something else"  # never print a secret
            raise ConfigError(f"{where} {name} must be {wanted.__name__}, is {found}")
    try:
        return part(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from error
