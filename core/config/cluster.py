"""Options of the fleet as a whole: its size and placement, telemetry and credentials."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.options import HOST, check_options, live, option, require

MIN_TOKEN_CHARS = 16
MIN_GPU_SHARE = 0.01  # of a GPU; below it not even a context fits
TOKEN_RULE = f"{MIN_TOKEN_CHARS} or more printable ASCII characters without spaces"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    # host:port of a Ray cluster to join; empty = start Ray on this machine
    address: str = option("", pattern=rf"auto|{HOST}:\d{{1,5}}", form="host:port")
    num_prefill: int = 1  # prefill workers to start
    num_decode: int = 1  # decode workers to start
    num_routers: int = 1  # routers to start; those of one machine share its port
    prefill_resource: str = option("prefill", given=True)  # each prefill worker takes 1 of this Ray resource
    decode_resource: str = option("decode", given=True)  # each decode worker takes 1 of this Ray resource
    router_resource: str = ""  # each router takes 1 of this; empty = routers run on the machine of `tandem serve`
    prefill_gpus: float = 1.0  # GPUs of each prefill worker: 1, a fraction to share one GPU, 0 = run on the CPU
    decode_gpus: float = 1.0  # GPUs of each decode worker, likewise; both apply if engine.device is not cpu
    prefill_accelerator: str = ""  # Ray's name of the GPUs of prefill workers, such as H100; empty = any
    decode_accelerator: str = ""  # ... of decode workers, such as H200
    prefill_memory_mb: int = 0  # memory that Ray sets aside for each prefill worker; 0 = none. Ray does not enforce it
    decode_memory_mb: int = 0  # ... for each decode worker
    router_memory_mb: int = 0  # ... for each router
    max_workers: int = option(256, least=1)  # workers of each role, and routers; beyond: `Scale` refuses
    # Limit: time of a start on its machine; beyond: killed, and started again after a pause
    start_timeout_s: float = live(120.0, positive=True)
    # Limit: life of services of a joined cluster without `tandem serve`; 0 = none; beyond: they end
    adoption_timeout_s: float = 600.0
    # Pause after a failed start, doubled for each further one, up to 30 s
    restart_backoff_s: float = live(1.0, positive=True)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("num_prefill", "num_decode"):
            value = getattr(self, name)
            require(0 <= value <= self.max_workers, f"{name} must be in [0, {self.max_workers}], is {value}")
        require(
            1 <= self.num_routers <= self.max_workers,
            f"num_routers must be in [1, {self.max_workers}] (max_workers), is {self.num_routers}",
        )
        self._check_gpus()

    def _check_gpus(self) -> None:
        shares = {name: getattr(self, f"{name}_gpus") for name in ("prefill", "decode")}
        for name, share in shares.items():
            require(
                share == 0 or MIN_GPU_SHARE <= share <= 1,
                f"{name}_gpus must be 0 (run on the CPU) or in [{MIN_GPU_SHARE}, 1] (share of one GPU), is {share:g}",
            )
            accelerator = getattr(self, f"{name}_accelerator")
            require(share > 0 or not accelerator, f"{name}_accelerator = {accelerator!r} needs {name}_gpus above 0")
        total = sum(shares.values())
        require(
            total <= 1 or 0 in shares.values() or 1 in shares.values(),
            f"prefill_gpus + decode_gpus is {total:g}: two fractions share a GPU, so their sum must be at most 1",
        )


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    # Collector of spans, e.g. http://localhost:4317; empty = no export
    otlp_endpoint: str = option("", pattern=rf"(https?://)?{HOST}:\d+/?", form="http://host:port or https://host:port")
    trace_file: str = ""  # file that spans are appended to, as JSON lines; empty = none
    # Port of the Prometheus page of router-0, router-1 has the next one; 0 = no page
    metrics_port: int = option(0, most=65535)
    service_namespace: str = "tandem"  # attribute of every span that tells deployments apart
    # Share of the requests whose trace is exported, if the caller does not decide
    trace_sample_ratio: float = option(1.0, most=1)
    trace_slow_ms: float = 10_000.0  # a request that takes longer, or fails, is exported even if it is not sampled

    def __post_init__(self) -> None:
        check_options(self)


def is_token(text: str) -> bool:
    return len(text) >= MIN_TOKEN_CHARS and text.isascii() and text.isprintable() and " " not in text


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Credentials (docs/security.md). Each machine reads the files itself; the token travels with the config."""

    cluster_token: str = option("", secret=True)  # secret that workers require of routers, routers of operators
    cluster_token_file: str = ""  # file with this token; without either option, `tandem serve` makes a token
    tls_cert: str = ""  # PEM file: certificate of this machine; with it, every gRPC connection uses TLS
    tls_key: str = ""  # PEM file: private key of the certificate
    tls_ca: str = ""  # PEM file: certificate authority of this cluster
    tls_server_name: str = ""  # name in every certificate; empty = each certificate names the machine's address
    require_client_certs: bool = False  # require certificates of API clients; routers and workers always need them

    def __post_init__(self) -> None:
        token, given = self.cluster_token, [bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)]
        require(not (token and self.cluster_token_file), "set cluster_token or cluster_token_file, not both")
        require(not token or is_token(token), f"cluster_token is not {TOKEN_RULE}")
        require(all(given) or not any(given), "tls_cert, tls_key and tls_ca must be set together, or none of them")
        require(any(given) or not self.tls_server_name, "tls_server_name needs tls_cert, tls_key and tls_ca")
        require(any(given) or not self.require_client_certs, "require_client_certs needs tls_cert, tls_key and tls_ca")
